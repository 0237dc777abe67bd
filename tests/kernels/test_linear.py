"""Packed products: float64 parity, and rows whose bits do not depend on the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.kernels.formats import INT8
from surefoot.kernels.linear import PackedLinear, linear_argmax

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")
SHAPES = [(1, 1), (16, 256), (17, 257), (51, 37), (33, 2), (640, 1024), (5, 4865)]
kinds = pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int8"), (torch.float32, "int8")],
)


def layer(outputs, inputs, dtype, quantize, bias=True):
    """A packed layer and the float64 weight and bias that it stands for."""
    torch.manual_seed(outputs * 7919 + inputs)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    weight = linear.weight.detach().double()
    if quantize:
        values, scale = INT8.quantize(linear.weight.detach()).tensors.values()
        weight = values.double() * scale.double()[:, None]
    exact_bias = linear.bias.detach().double() if bias else torch.zeros(outputs).double()
    return PackedLinear.from_linear(linear, quantize), weight, exact_bias


@kinds
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_equals_float64(shape, dtype, quantize, bias):
    packed, weight, exact_bias = layer(*shape, dtype, quantize, bias)
    for m in (1, 3, 7, 100):
        x = torch.randn(m, shape[1]).to(dtype)
        wanted = x.double() @ weight.T + exact_bias
        ours = packed(x)
        assert ours.dtype == dtype
        size = x.double().abs() @ weight.abs().T + exact_bias.abs()  # error is relative to the sum of magnitudes
        bound = 2**-8 * wanted.abs() + 1e-6 * size if dtype == torch.bfloat16 else 2e-6 * size
        assert bool(((ours.double() - wanted).abs() <= bound).all())


@needs_native
@kinds
@pytest.mark.parametrize("shape", [(17, 257), (80, 600)])
@torch.no_grad()
def test_rows_are_bit_identical_for_every_batch(shape, dtype, quantize):
    packed, _, _ = layer(*shape, dtype, quantize)
    x = torch.randn(130, shape[1]).to(dtype)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for m in [*range(1, 41), 47, 48, 49, 95, 96, 97, 130]:
        assert torch.equal(packed(x[:m]), alone[:m]), m
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: 7 + 11 * seed]
        assert torch.equal(packed(x[order]), alone[order])


@needs_native
@kinds
@settings(max_examples=20, deadline=None)
@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 600),
    rows=st.integers(1, 60),
    place=st.integers(0, 59),
    threads=st.integers(1, 3),
)
def test_a_row_does_not_notice_its_place_or_the_threads(dtype, quantize, outputs, inputs, rows, place, threads):
    with torch.no_grad():
        packed, _, _ = layer(outputs, inputs, dtype, quantize)
        row = torch.randn(inputs).to(dtype)
        alone = packed(row[None])[0]
        batch = torch.full((rows, inputs), torch.nan, dtype=dtype)  # neighbours may hold anything
        batch[place % rows] = row
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            assert torch.equal(packed(batch)[place % rows], alone)
        finally:
            torch.set_num_threads(before)


@kinds
@torch.no_grad()
def test_argmax_equals_argmax_of_the_outputs(dtype, quantize):
    packed, _, _ = layer(301, 40, dtype, quantize)
    for m in (1, 5, 20):
        x = torch.randn(m, 40).to(dtype)
        index, value = linear_argmax(x, packed)
        y = packed(x).float()
        assert torch.equal(value, y.amax(-1))
        first = torch.where(y == y.amax(-1, keepdim=True), torch.arange(301), 301).amin(-1)
        assert torch.equal(index, first)


@torch.no_grad()
def test_argmax_ties_go_to_the_smallest_index():
    weight = torch.ones(100, 4)
    weight[:37] = 0
    index, value = linear_argmax(torch.ones(3, 4), PackedLinear(weight))
    assert index.tolist() == [37] * 3
    assert value.tolist() == [4.0] * 3


@torch.no_grad()
def test_fused_layers_equal_separate_ones():
    linears = [nn.Linear(24, n, bias=b).bfloat16() for n, b in ((32, True), (7, False), (9, True))]
    copies = [PackedLinear(linear.weight, linear.bias) for linear in linears]
    fused = PackedLinear.from_linears(linears)
    x = torch.randn(2, 5, 24).bfloat16()
    for y, packed in zip(fused.split(fused(x)), copies, strict=True):
        assert torch.equal(y, packed(x))
    assert all(linear.weight is None for linear in linears)
    assert not list(fused.parameters())


def test_packing_leaves_a_tied_embedding_alone():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    PackedLinear.from_linear(head)
    assert embedding.weight.shape == (10, 4)


def test_num_bytes_and_moves():
    packed = PackedLinear(torch.randn(64, 32).bfloat16())
    assert packed.num_bytes == 64 * 32 * 2
    assert PackedLinear(torch.randn(64, 32), quantize="int8").num_bytes == 64 * 32 + 64 * 4
    x = torch.randn(1, 32).bfloat16()
    assert torch.equal(packed.to(torch.float32)(x), packed(x))


def test_unsupported_quantization_is_refused():
    with pytest.raises(ConfigurationError, match="int8"):
        PackedLinear(torch.randn(2, 2), quantize="int3")


def test_float16_is_widened():
    weight, x = torch.randn(5, 9).half(), torch.randn(2, 9).half()
    y = PackedLinear(weight)(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, (x.double() @ weight.double().T).half(), rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_int8_error_is_half_a_step():
    weight = torch.randn(20, 50)
    weight[3] = 0
    values, scale = INT8.quantize(weight).tensors.values()
    assert bool(((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all())
    assert values[3].abs().max() == 0


@needs_native
@torch.no_grad()
def test_wrong_width_is_an_error():
    with pytest.raises(RuntimeError, match="features"):
        PackedLinear(torch.randn(4, 4))(torch.randn(1, 5))


@torch.no_grad()
def test_no_rows():
    assert PackedLinear(torch.randn(4, 4))(torch.randn(0, 4)).shape == (0, 4)
