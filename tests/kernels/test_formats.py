"""A weight format is one thing: one from outside of the package (this file and `nibbles.cpp`) serves a target and a drafter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import build, formats, native
from surefoot.kernels.formats import INT8, StoredWeight, WeightFormat
from surefoot.kernels.linear import PackedLinear, linear_argmax
from surefoot.targets import fused
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from tests.targets.flat import FlatRunner, random_model

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")


class Nibbles(WeightFormat):
    """Symmetric 4 bits with one scale a row; stored with two inputs in a byte, packed with two outputs in a byte."""

    name, suffixes, dtype, traceable = "nibbles", ("", "_scale"), torch.uint8, False

    def quantize(self, weight: Tensor) -> StoredWeight:
        exact = F.pad(weight.float(), (0, weight.shape[1] % 2))
        scale = (exact.abs().amax(1) / 7).clamp_min(torch.finfo(torch.float32).tiny)
        values = ((exact / scale[:, None]).round() + 8).to(torch.uint8)
        return StoredWeight(self, {"": values[:, ::2] | values[:, 1::2] << 4, "_scale": scale})

    def values(self, stored: StoredWeight) -> Tensor:
        both = stored.tensors[""]
        return torch.stack([both & 15, both >> 4], 2).flatten(1).to(torch.int8) - 8

    def dequantize(self, stored: StoredWeight) -> Tensor:
        return self.values(stored) * stored.tensors["_scale"][:, None]

    def pack(self, parts: Sequence[StoredWeight], kernel: native.Kernel) -> tuple[Tensor, Tensor | None]:
        values = torch.cat([self.values(part) for part in parts])
        return torch.ops.surefoot.pack_nibbles(values), torch.cat([part.tensors["_scale"] for part in parts])

    def product(self, kernel: Any, packed: Any, inputs: int, outputs: int, bias: Tensor | None) -> Any:
        return torch.ops.surefoot.nibble_product(packed[0], inputs, outputs, packed[1], bias)

    def multiply(self, x: Tensor, stored: StoredWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), self.dequantize(stored), bias).to(x.dtype)

    def shape(self, shapes: Any) -> tuple[int, ...]:
        return shapes[""][0], 2 * shapes[""][1]


@pytest.fixture(scope="module")
def nibbles() -> Iterator[Nibbles]:
    if not hasattr(torch.ops.surefoot, "pack_nibbles"):
        source = Path(__file__).parent / "nibbles.cpp"
        build.load((str(source),), native.level_flags(native.production_level()))
    format = Nibbles()
    formats.register(format)
    yield format
    formats._REGISTERED.pop("nibbles")


@needs_native
@pytest.mark.parametrize("shape", [(1, 2), (40, 24), (70, 300), (33, 896)])
@torch.no_grad()
def test_a_format_from_outside_serves_a_layer(nibbles: Nibbles, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight, bias = torch.randn(*shape, generator=generator), torch.randn(shape[0], generator=generator)
    exact = nibbles.quantize(weight).dequantize()
    assert (exact - weight).abs().max() <= weight.abs().max() / 13.9
    packed = PackedLinear(weight, bias, quantize="nibbles")
    assert packed.quantize == "nibbles"
    assert packed.num_bytes < weight.numel() + 4096  # half a byte a weight, whole panels, scales and biases
    x = torch.randn(19, shape[1], generator=generator)
    torch.testing.assert_close(packed(x), (x.double() @ exact.double().T + bias).float(), rtol=1e-5, atol=1e-4)
    rows = packed(x.bfloat16())
    assert torch.equal(torch.cat([packed(row[None]) for row in x.bfloat16()]), rows)
    assert torch.equal(linear_argmax(x.bfloat16(), packed)[0], rows.float().argmax(-1))
    assert torch.equal(copy.deepcopy(packed)(x), packed(x))


@needs_native
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_format_from_outside_goes_through_the_native_layers(
    nibbles: Nibbles, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits as a model whose weights are what the format made of them; no layer outside of the native call."""
    model = random_model(kind)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for module in rounded.model.layers.modules():
            if type(module) is nn.Linear:
                module.weight.copy_(nibbles.quantize(module.weight).dequantize())
    natively: list[int] = []
    call = fused.in_one_call
    monkeypatch.setattr(fused, "in_one_call", lambda some, *rest: (natively.append(len(some)), call(some, *rest))[1])

    def logits(model: Any, **options: Any) -> Tensor:
        optimise(model, **options)
        target = Target(model)
        runner = FlatRunner(target)
        with torch.no_grad():
            return target.forward(runner.batch([(0, 0, list(range(5, 25)))]), runner.cache).logits

    steps = ("fused-norms", "fused-attention", "fused-feed-forward", "fused-layers", "fused-decoder")
    expected, plain = logits(rounded, steps=steps), logits(copy.deepcopy(model), steps=steps)
    natively.clear()
    actual = logits(model, steps=steps, quantize="nibbles")
    assert sum(natively) == model.config.num_hidden_layers
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, plain, rtol=1e-2, atol=1e-2)


@needs_native
def test_a_layer_without_a_traceable_product_compiles_around_it(nibbles: Nibbles) -> None:
    packed = PackedLinear(torch.randn(8, 4), quantize="nibbles")
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: packed(x + 1) * 2, backend="aot_eager")
    assert torch.equal(compiled(x), packed(x + 1) * 2)


@torch.no_grad()
def test_stored_values_are_served_as_they_are() -> None:
    """The very scales and values, of a matrix whose rows do not use the whole range: quantising it again would change both."""
    values, scale = torch.randint(-100, 101, (200, 16), dtype=torch.int8), torch.rand(200) + 0.01
    stored = StoredWeight(INT8, {"": values, "_scale": scale})
    again = INT8.quantize(stored.dequantize())
    assert not torch.equal(again.dequantize(), stored.dequantize())
    packed = PackedLinear(stored)
    assert packed.quantize == "int8"
    assert torch.equal(packed.scale, stored.tensors["_scale"])
    assert torch.equal(packed(torch.eye(16)).T, stored.dequantize())


@torch.no_grad()
def test_a_mixture_of_formats_is_widened() -> None:
    stored, dense = INT8.quantize(torch.randn(6, 16)), torch.randn(4, 16).bfloat16()
    packed = PackedLinear([stored, dense])
    assert packed.quantize is None
    wanted = torch.cat([stored.dequantize(), dense.float()])
    assert torch.equal(packed(torch.eye(16)).T, wanted)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"quantize='int3' is not supported: use 'int8'.*, or None"):
        formats.find("int3")


def test_stored_matrices_are_known_by_dtype_and_suffixes() -> None:
    dtypes = {"a": torch.int8, "a_scale": torch.float32, "b": torch.int8, "c": torch.float32, "c_scale": torch.float32}
    assert {name: formats.stored_as(name, dtypes).name for name in "abc"} == {"a": "int8", "b": "native", "c": "native"}


@pytest.mark.parametrize("rows", [1, 5])
def test_without_native_kernels_a_format_multiplies_itself(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    format = Nibbles()
    monkeypatch.setitem(formats._REGISTERED, "nibbles", format)
    weights, x = [torch.randn(5, 8), torch.randn(3, 8)], torch.randn(rows, 8)
    for name in (None, "int8", "nibbles"):
        packed = PackedLinear(weights, quantize=name)
        assert packed.product is None
        exact = torch.cat([formats.find(name).quantize(w).dequantize() for w in weights])
        torch.testing.assert_close(packed(x), x @ exact.T, rtol=1e-4, atol=1e-4)
        assert [y.shape[1] for y in packed.split(packed(x))] == [5, 3]
