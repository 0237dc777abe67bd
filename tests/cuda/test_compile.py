"""The Triton kernels compile for Hopper, without a GPU: with the very arguments their callers launch them with."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it is NOT tested here that the CUDA kernels compile")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surefoot.kernels import triton_attention, triton_rows

SHARED_BYTES = 99 << 10  # what a program may use on the smallest GPUs with bfloat16 matrix units
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


class Compiler:
    """Stands in for a kernel: a launch compiles it for compute capability 9.0."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, list[Any]()

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        signature, attributes, values = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            if parameter.name in constants:
                signature[parameter.name] = "constexpr"
                values[(index,)] = constants[parameter.name]
                continue
            value = args[index]
            divisible = True
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
                divisible = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if divisible:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=values, attrs=attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.compiled.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "options"),
    [
        (14, 2, 64, torch.bfloat16, {}),
        (4, 1, 256, torch.bfloat16, {"window": 50, "softcap": 5.0}),
        (16, 2, 64, torch.bfloat16, {"window": 64, "sinks": torch.zeros(16, dtype=torch.bfloat16)}),
        (6, 2, 80, torch.float16, {}),
        (4, 2, 8, torch.float32, {"window": 9}),
    ],
)
def test_attention(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(triton_attention._rows)
    monkeypatch.setattr(triton_attention, "_rows", compiler)
    cache, rows = torch.zeros(64, kv_heads, dim, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    triton_attention.paged_attention_triton(
        torch.zeros(3, heads, dim, dtype=dtype),
        cache,
        cache,
        torch.zeros(2, 4, dtype=torch.int32),
        rows,
        rows,
        block_size=16,
        scaling=0.1,
        **options,
    )
    (compiled,) = compiler.compiled
    assert compiled.metadata.shared <= SHARED_BYTES
    assert ("mma.sync" in compiled.asm["ptx"]) == (dtype != torch.float32)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 896, 4864), (300, 896, 896), (8, 9728, 896), (64, 40000, 896), (2, 64, 24)]
)
def test_products(rows: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(triton_rows._product)
    monkeypatch.setattr(triton_rows, "_product", compiler)
    x, weight = (torch.zeros(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
    triton_rows.linear_rows(x, weight, torch.zeros(outputs, dtype=torch.bfloat16))
    (compiled,) = compiler.compiled
    assert compiled.metadata.shared <= SHARED_BYTES
    # Whatever the tile, the matrix units add sixteen inputs at a time: that is why a row's bits do not depend on it.
    words = compiled.asm["ptx"].replace(".", " ").split()
    assert {word for word in words if word.startswith("m64n")} <= {f"m64n{n}k16" for n in (32, 64, 128)}
    assert any(word.startswith("m64n") for word in words)


def test_small_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_norm", "_rotary", "_gated"):
        monkeypatch.setattr(triton_rows, name, Compiler(getattr(triton_rows, name)))
    x = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    triton_rows.rms_norm_rows(x, x[0, 0], 1e-6)
    triton_rows.rotary_rows(x, x[:, 0], x[:, 0])
    triton_rows.gated_activation_rows(x, gelu=True)
    assert all(getattr(triton_rows, name).compiled for name in ("_norm", "_rotary", "_gated"))
