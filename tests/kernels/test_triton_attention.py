"""The CUDA attention kernel, run by Triton's interpreter on the CPU against the torch reference."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch

from surefoot.kernels.attention import paged_attention_reference

pytest.importorskip("triton", reason="triton is not installed: the CUDA attention kernel is NOT tested here")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "the CUDA attention kernel is NOT tested here: no GPU, and TRITON_INTERPRET=1 is not set",
        allow_module_level=True,
    )

from surefoot.kernels.triton_attention import paged_attention_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(heads: int, kv_heads: int, dim: int, value_dim: int, block_size: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads + dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    lens = torch.tensor([1, 37, 70, 0, 33, 64, 5, 31, 32], device=DEVICE)
    blocks = -(-72 // block_size)
    table = 1 + torch.randperm(3 * blocks, generator=generator).view(3, blocks)
    slots = (3 * blocks + 1) * block_size
    return {
        "query": random(len(lens), heads, dim),
        "key_cache": random(slots, kv_heads, dim),
        "value_cache": random(slots, kv_heads, value_dim),
        "block_table": table.to(DEVICE, torch.int32),
        "row_slot": torch.arange(len(lens), device=DEVICE) % 3,
        "kv_lens": lens,
        "block_size": block_size,
        "scaling": dim**-0.5,
    }


@pytest.mark.parametrize(("window", "softcap", "sinks"), product((None, 9), (None, 5.0), (False, True)))
@pytest.mark.parametrize("shape", [(4, 2, 16, 16, 16), (6, 1, 24, 8, 4), (2, 2, 64, 64, 1)])
def test_agrees_with_the_reference(shape: tuple[int, ...], window: Any, softcap: Any, sinks: bool) -> None:
    given = case(*shape, torch.float32)  # type: ignore[call-arg]
    options = {
        "window": window,
        "softcap": softcap,
        "sinks": torch.linspace(-1, 2, shape[0], device=DEVICE) if sinks else None,
    }
    expected = paged_attention_reference(**given, **options)
    torch.testing.assert_close(paged_attention_triton(**given, **options), expected, rtol=1e-5, atol=1e-5)


def test_a_row_is_the_same_bits_alone_and_in_a_batch_and_nothing_unseen_enters() -> None:
    given = case(4, 2, 16, 16, 4, torch.float32)
    whole = paged_attention_triton(**given, window=9)
    for row in range(len(whole)):
        one = {**given, **{name: given[name][row : row + 1] for name in ("query", "row_slot", "kv_lens")}}
        assert torch.equal(paged_attention_triton(**one, window=9)[0], whole[row])
    assert not whole[3].any(), "a padding row gives zeros"
    poisoned = {**given, "key_cache": given["key_cache"].clone(), "value_cache": given["value_cache"].clone()}
    for name in ("key_cache", "value_cache"):
        poisoned[name][:4] = float("nan")  # the scratch block
    assert torch.equal(paged_attention_triton(**poisoned, window=9), whole)
