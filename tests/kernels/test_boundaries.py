"""Sizes and indices from outside are checked before they are used: an error or the right values, never memory of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.kernels import native
from surefoot.kernels.attention import paged_attention, paged_attention_reference
from surefoot.kernels.elementwise import gated_activation, rms_norm, rotary
from surefoot.kernels.linear import PackedLinear, linear_argmax
from surefoot.kernels.sequential import draft_block

if not native.available():
    pytest.skip("no compiler", allow_module_level=True)

CACHE = torch.randn(4 * 8, 2, 8, generator=torch.Generator().manual_seed(0))  # 8 blocks of 4 positions


def attend(**changed: Any) -> Tensor:
    """Three rows of two state slots with three blocks each."""
    arguments: dict[str, Any] = {
        "query": torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)),
        "key_cache": CACHE,
        "value_cache": CACHE + 1,
        "block_table": torch.tensor([[1, 2, 3], [4, 5, 7]], dtype=torch.int32),
        "row_slot": torch.tensor([0, 1, 1]),
        "kv_lens": torch.tensor([9, 12, 0]),
        "block_size": 4,
        "scaling": 0.3,
        **changed,
    }
    return paged_attention(**arguments)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"row_slot": torch.tensor([0, 2, 1])}, "slot 2; there are 2 slots"),
        ({"row_slot": torch.tensor([0, -1, 1])}, "slot -1"),
        ({"kv_lens": torch.tensor([9, 13, 0])}, "sees 13 positions"),
        ({"kv_lens": torch.tensor([-1, 12, 0])}, "sees -1 positions"),
        ({"kv_lens": torch.tensor([2**62, 12, 0])}, "positions"),
        ({"block_table": torch.tensor([[1, 2, 3], [4, 5, 8]], dtype=torch.int32)}, "slot 1 has block 8 of 8"),
        ({"block_table": torch.tensor([[1, -1, 3], [4, 5, 7]], dtype=torch.int32)}, "slot 0 has block -1 of 8"),
        ({"block_table": torch.tensor([[1, 2, 3], [4, 5, 7]])}, "int32"),
        ({"block_size": 0}, "positive"),
        ({"window": 0}, "positive"),
        ({"row_slot": torch.tensor([0, 1])}, r"\[T\]"),
        ({"key_cache": CACHE[:, :1]}, "does not fit"),
    ],
)
def test_attention_reads_only_what_is_there(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        attend(**changed)


def test_what_no_row_sees_may_be_anything() -> None:
    """Entries of the table beyond a row's length, and the slot of a padding row."""
    table = torch.tensor([[1, 2, 3], [4, -1, 99]], dtype=torch.int32)
    lens = torch.tensor([9, 3, 0])
    got = attend(block_table=table, kv_lens=lens, row_slot=torch.tensor([0, 1, -7]))
    assert torch.equal(got, attend(kv_lens=lens))
    assert torch.equal(got[2], torch.zeros(4, 8))
    windowed = attend(block_table=torch.tensor([[-1, 2, 3], [4, 5, 7]], dtype=torch.int32), window=5)
    assert torch.equal(windowed, attend(window=5))


def test_no_rows_give_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert attend(query=torch.empty(0, 4, 8), row_slot=none, kv_lens=none).shape == (0, 4, 8)
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert rotary(torch.empty(0, 2, 8), torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 2, 8)
    assert gated_activation(torch.empty(0, 8)).shape == (0, 4)
    index, value = linear_argmax(torch.empty(0, 8), PackedLinear(torch.randn(5, 8)))
    assert index.shape == value.shape == (0,)


def test_attention_at_the_very_end_of_the_cache_equals_the_reference() -> None:
    table = torch.tensor([[7, 6, 5], [0, 1, 7]], dtype=torch.int32)
    rest = {"block_size": 4, "scaling": 0.3}
    arguments = (torch.randn(3, 4, 8), CACHE, CACHE + 1, table, torch.tensor([0, 1, 1]), torch.tensor([12, 12, 11]))
    torch.testing.assert_close(paged_attention(*arguments, **rest), paged_attention_reference(*arguments, **rest))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: PackedLinear(torch.randn(5, 8))(torch.randn(2, 9)), "8 features"),
        (lambda: PackedLinear(torch.randn(5, 8))(torch.tensor(1.0)), "8 features"),
        (lambda: linear_argmax(torch.randn(2, 9), PackedLinear(torch.randn(5, 8))), "8 features"),
        (lambda: linear_argmax(torch.randn(8), PackedLinear(torch.randn(5, 8))), r"\[M, K\]"),
        (lambda: torch.ops.surefoot.pack([], "panels"), "nothing to pack|no tensor arguments"),
        (lambda: torch.ops.surefoot.pack([torch.randn(2, 3), torch.randn(2, 4)], "panels"), "of one dtype"),
        (lambda: torch.ops.surefoot.pack([torch.randn(2, 3)], "rows"), "no layout"),
        (lambda: product(outputs=500), "no product"),
        (lambda: product(inputs=9), "no product"),
        (lambda: product(outputs=0), "no product|has inputs and outputs"),
        (lambda: product(outputs=-5), "no product|has inputs and outputs"),
        (lambda: product(scale=torch.ones(4)), "scale and bias"),
        (lambda: product(bias=torch.ones(5, dtype=torch.float64)), "scale and bias"),
        (lambda: rms_norm(torch.randn(2, 8), torch.ones(7), 1e-6), "weight"),
        (lambda: rotary(torch.randn(2, 2, 8), torch.ones(2, 10), torch.ones(2, 10)), "cos and sin"),
        (lambda: rotary(torch.randn(2, 2, 8), torch.ones(1, 8), torch.ones(1, 8)), "cos and sin"),
        (lambda: gated_activation(torch.randn(2, 7)), "same width"),
    ],
)
@torch.no_grad()
def test_sizes_that_do_not_fit_are_errors(call: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        call()


def product(**changed: Any) -> Any:
    arguments: dict[str, Any] = {"inputs": 8, "outputs": 5, "scale": None, "bias": None, **changed}
    return torch.ops.surefoot.product(torch.ops.surefoot.pack([torch.randn(5, 8)], "panels"), **arguments)


def layer() -> Any:
    """Hidden size 8, two query heads and one key head of 4."""
    products = [PackedLinear(torch.randn(n, k)).product for n, k in [(16, 8), (8, 8), (12, 8), (8, 6)]]
    norms = [torch.ones(8), None, None, None, torch.ones(8), None]
    return torch.ops.surefoot.decoder_layer(norms, products, 2, 0.5, 1e-6, False, False)


def run_layer(slot: int = 5, caches: int = 1, heads: int = 1) -> Tensor:
    cache = torch.zeros(8, heads, 4)
    return torch.ops.surefoot.decoder_layers(
        torch.randn(1, 8), [layer()], [torch.ones(1, 4)], [torch.zeros(1, 4)], [cache] * caches, [cache.clone()],
        [torch.tensor([slot])], [torch.tensor([[1]], dtype=torch.int32)], torch.tensor([0]), torch.tensor([2]), 4, [0],
    )  # fmt: skip


def test_a_layer_writes_into_the_cache_or_not_at_all() -> None:
    assert run_layer().shape == (1, 8)
    for slot in (-1, 8, 2**40):
        with pytest.raises(RuntimeError, match=f"cache slot {slot} of 8"):
            run_layer(slot)
    with pytest.raises(RuntimeError, match="every list is of 1 layers, one is of 2"):
        run_layer(caches=2)
    with pytest.raises(RuntimeError, match="the layer gives 16 features"):
        run_layer(heads=2)


def test_a_layer_of_parts_that_do_not_fit_is_refused() -> None:
    good = [PackedLinear(torch.randn(n, k)).product for n, k in [(16, 8), (8, 8), (12, 8), (8, 6)]]
    norms = [torch.ones(8), None, None, None, torch.ones(8), None]
    for products, given in [(good[:3], norms), (good[::-1], norms), (good, norms[:5]), (good, [None, *norms[1:]])]:
        with pytest.raises(RuntimeError):
            torch.ops.surefoot.decoder_layer(given, products, 2, 0.5, 1e-6, False, False)


def draw(**changed: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    arguments: dict[str, Any] = {"base": torch.randn(2, 3, 10), "anchors": torch.tensor([1, 2]), **changed}
    return draft_block(**arguments)


@pytest.mark.parametrize("token", [-1, 20, 2**40])
def test_a_token_outside_the_table_is_an_error(token: int) -> None:
    correction = (torch.randn(20, 4), PackedLinear(torch.randn(10, 4)))
    assert draw(correction=correction)[0].shape == (2, 3)
    with pytest.raises(RuntimeError, match=f"token {token} is outside the table"):
        draw(correction=correction, anchors=torch.tensor([1, token]))
    with pytest.raises(RuntimeError, match="corrects 10 logits"):
        draw(correction=(torch.randn(20, 4), PackedLinear(torch.randn(11, 4))))


@pytest.mark.parametrize(("slot", "length"), [(2, 3), (-1, 3), (0, -1), (0, 8)])
def test_a_request_outside_the_history_is_an_error(slot: int, length: int) -> None:
    history, shares = torch.zeros(2, 8, dtype=torch.int64), torch.tensor([0.0, 0.5])
    with pytest.raises(RuntimeError, match="outside the history"):
        draw(copying=(history, torch.tensor([0, slot]), torch.tensor([3, length]), shares, None))


def test_nan_logits_of_a_drafter_are_drawn_from_without_leaving_its_vocabulary() -> None:
    base = torch.randn(2, 3, 10)
    base[1] = torch.nan
    vocabulary = torch.arange(5, 15)
    ids, _, probs = draw(
        base=base, vocabulary=vocabulary, temperature=torch.ones(2), uniforms=torch.full((2, 3), 0.5),
        correction=(torch.randn(20, 4), PackedLinear(torch.randn(10, 4))),
    )  # fmt: skip
    assert probs is not None
    assert bool(((ids[0] >= 0) & (ids[0] < 10)).all())
    assert bool(((ids[1] >= -1) & (ids[1] < 10)).all())
