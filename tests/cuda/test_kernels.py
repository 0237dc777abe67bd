"""The Triton kernels on a GPU: as exact as they claim, and a row is the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("the CUDA kernels are NOT tested here: there is no GPU", allow_module_level=True)

from surefoot.kernels import triton_support
from surefoot.kernels.attention import paged_attention, paged_attention_reference
from surefoot.kernels.elementwise import (
    gated_activation,
    gated_activation_reference,
    rms_norm,
    rms_norm_reference,
    rotary,
    rotary_reference,
)
from surefoot.kernels.row_linear import RowLinear

BLOCK_SIZE, SLOTS, LONGEST = 16, 5, 400
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_fell_back() -> Iterator[None]:
    yield
    assert triton_support.works(), triton_support._problems


def random(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to("cuda", dtype)


def case(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows + dim)
    blocks = -(-LONGEST // BLOCK_SIZE)
    table = 1 + torch.randperm(SLOTS * blocks, generator=generator).view(SLOTS, blocks)
    lens = torch.randint(0, LONGEST + 1, (rows,), generator=generator)
    lens[:6] = torch.tensor([0, 1, 64, 65, LONGEST, 33])[:rows]
    places = (SLOTS * blocks + 1) * BLOCK_SIZE
    return {
        "query": random(rows, heads, dim, dtype=dtype),
        "key_cache": random(places, kv_heads, dim, seed=1, dtype=dtype),
        "value_cache": random(places, kv_heads, dim, seed=2, dtype=dtype),
        "block_table": table.to("cuda", torch.int32),
        "row_slot": torch.arange(rows, device="cuda") % SLOTS,
        "kv_lens": lens.cuda(),
        "block_size": BLOCK_SIZE,
        "scaling": dim**-0.5,
    }


def widened(given: dict[str, Any]) -> dict[str, Any]:
    return {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "window", "softcap", "sinks"),
    [
        (14, 2, 64, HALF, None, None, False),  # Qwen2.5-Coder 0.5B
        (4, 1, 256, HALF, 50, None, False),  # Gemma 3
        (4, 1, 256, HALF, None, 5.0, True),
        (16, 2, 64, HALF, 64, None, True),  # gpt-oss
        (6, 2, 80, HALF, 9, 20.0, True),
        (4, 2, 8, torch.float32, 9, None, False),  # the tiny models of other tests
        (14, 2, 64, torch.float32, None, 5.0, True),
        (4, 4, 128, torch.float16, 1, None, False),
    ],
)
def test_attention_agrees_with_the_reference_in_float64(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: Any, softcap: Any, sinks: bool
) -> None:
    given = case(37, heads, kv_heads, dim, dtype)
    given |= {"window": window, "softcap": softcap, "sinks": random(heads, dtype=dtype) if sinks else None}
    out = paged_attention(**given)
    exact = paged_attention_reference(**widened(given))
    assert out.dtype == dtype
    assert not out[given["kv_lens"] == 0].any(), "a padding row gives zeros"
    error = float((out.double() - exact).norm() / exact.norm())
    assert error < (1e-5 if dtype == torch.float32 else 6e-3), error


@pytest.mark.parametrize(("dim", "window"), [(64, None), (256, 50)])
def test_an_attention_row_is_the_same_bits_alone_and_in_any_batch(dim: int, window: Any) -> None:
    given = {**case(300, 14, 2, dim, HALF), "window": window}
    whole = paged_attention(**given)

    def some(rows: torch.Tensor) -> torch.Tensor:
        return paged_attention(**{**given, **{n: given[n][rows] for n in ("query", "row_slot", "kv_lens")}})

    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(some(order), whole[order])
    for row in range(0, 300, 23):
        assert torch.equal(some(torch.tensor([row], device="cuda"))[0], whole[row])
    for name in ("key_cache", "value_cache"):
        given[name] = given[name].clone()
        given[name][:BLOCK_SIZE] = float("nan")  # the scratch block
    assert torch.equal(paged_attention(**given), whole), "what no row sees has entered"


@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(1152, 896, True), (9728, 896, False), (896, 4864, False), (40001, 200, False)]
)
def test_a_product_row_is_the_same_bits_in_every_batch(outputs: int, inputs: int, bias: bool) -> None:
    layer = RowLinear(random(outputs, inputs) / inputs**0.5, random(outputs) if bias else None)
    x = random(700, inputs)
    whole = layer(x)
    exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    assert float((whole.double() - exact).norm() / exact.norm()) < 3e-3
    for first, count in ((0, 1), (17, 3), (5, 8), (3, 64), (100, 65), (1, 256), (7, 257), (0, 512)):
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count]), (first, count)
    assert torch.equal(layer(x.view(7, 100, inputs)).flatten(0, 1), whole)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_a_norm_is_the_same_bits_in_every_batch(unit_offset: bool) -> None:
    x, weight = random(300, 896), random(896, seed=5)
    whole = rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
    torch.testing.assert_close(
        whole, rms_norm_reference(x, weight, 1e-6, unit_offset=unit_offset), rtol=1.6e-2, atol=1e-6
    )
    for first, count in ((0, 1), (7, 8), (3, 100)):
        rows = slice(first, first + count)
        assert torch.equal(rms_norm(x[rows], weight, 1e-6, unit_offset=unit_offset), whole[rows])
    heads = x.view(300, 14, 64)[:, 2:9]  # as a slice of a fused product
    each = rms_norm(heads, weight[:64], 1e-6, unit_offset=unit_offset)
    assert torch.equal(each[:, 3], rms_norm(heads[:, 3].contiguous(), weight[:64], 1e-6, unit_offset=unit_offset))


@pytest.mark.parametrize("turned", [64, 32])
def test_rotary_embedding_is_torchs_but_for_one_rounding(turned: int) -> None:
    x, cos, sin = random(300, 18, 64)[:, 2:9], random(300, turned), random(300, turned, seed=1)
    whole = rotary(x, cos, sin)
    torch.testing.assert_close(whole, rotary_reference(x, cos, sin), rtol=1.6e-2, atol=2e-2)
    assert torch.equal(rotary(x[5:6], cos[5:6], sin[5:6]), whole[5:6])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation_agrees_with_torch(activation: Any) -> None:
    gate_up = random(70, 2 * 1200)
    whole = gated_activation(gate_up, activation)
    torch.testing.assert_close(whole, gated_activation_reference(gate_up, activation), rtol=1.6e-2, atol=1e-5)
    assert torch.equal(gated_activation(gate_up[9:10], activation), whole[9:10])
