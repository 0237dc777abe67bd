"""Paged attention: parity with the reference, and rows that do not notice their surroundings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.kernels import native
from surefoot.kernels.attention import paged_attention, paged_attention_reference

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")


def case(
    lens_per_slot, rows, *, heads=4, kv_heads=2, dim=16, value_dim=None, block_size=4, dtype=torch.float32, seed=0
):
    """Random caches with shuffled blocks; rows = [(slot, kv_len)]."""
    g = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim
    blocks = [-(-n // block_size) for n in lens_per_slot]
    order = (torch.randperm(sum(blocks), generator=g) + 1).tolist()  # block 0 is scratch
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for slot, n in enumerate(blocks):
        for i in range(n):
            table[slot, i] = order.pop()
    size = (sum(blocks) + 1) * block_size
    key = torch.randn(size, kv_heads, dim, generator=g).to(dtype)
    value = torch.randn(size, kv_heads, value_dim, generator=g).to(dtype)
    query = torch.randn(len(rows), heads, dim, generator=g).to(dtype)
    slots = torch.tensor([r[0] for r in rows])
    lens = torch.tensor([r[1] for r in rows])
    return (query, key, value, table, slots, lens), {"block_size": block_size, "scaling": dim**-0.5}


def mixed_rows(n=140):
    """A prefill chunk, drafts of two other requests, and padding."""
    return [(0, i + 1) for i in range(n - 20, n)] + [(1, 70 + i) for i in range(8)] + [(2, 9)] + [(0, 0)] * 3


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "block_size"),
    [
        (4, 2, 16, 16, 4),
        (14, 2, 64, 64, 16),
        (4, 1, 256, 256, 32),
        (3, 3, 20, 12, 1),
        (8, 1, 72, 40, 7),
        (2, 2, 8, 300, 5),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"window": 33}, {"window": 1}, {"softcap": 2.0, "window": 70}, {"sinks": True}])
def test_native_equals_reference(dtype, heads, kv_heads, dim, value_dim, block_size, extra):
    args, options = case(
        [140, 78, 9], mixed_rows(), heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip
    if extra.get("sinks"):
        extra = {"sinks": torch.randn(heads)}
    ours = paged_attention(*args, **options, **extra)
    exact = [a.double() if a.is_floating_point() else a for a in args]
    wanted = paged_attention_reference(*exact, **options, **extra)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(ours[-3:], torch.zeros_like(ours[-3:]))


@needs_native
@pytest.mark.parametrize("extra", [{}, {"window": 200}, {"sinks": True}])
def test_long_contexts_cross_spans(extra):
    rows = [(0, 1024), (0, 1025), (0, 1026), (0, 2500), (1, 3000), (1, 3001)]
    if extra.get("sinks"):
        extra = {"sinks": torch.randn(4)}
    args, options = case([2500, 3001], rows, block_size=16)
    ours = paged_attention(*args, **options, **extra)
    torch.testing.assert_close(ours, paged_attention_reference(*args, **options, **extra), rtol=0, atol=2e-6)
    for t in range(len(rows)):
        query, key, value, table, slots, lens = args
        alone = paged_attention(
            query[t : t + 1], key, value, table, slots[t : t + 1], lens[t : t + 1], **options, **extra
        )
        assert torch.equal(alone[0], ours[t])


@needs_native
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, 1, 17, 64, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    grouped=st.sampled_from([(4, 4), (4, 2), (7, 1)]),
)
def test_rows_do_not_notice_their_surroundings(seed, window, dtype, grouped):
    """Neighbours, place in the batch, physical blocks, block size and thread count leave every bit as it is."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 200, (3,), generator=g).tolist()
    rows = [(s, n) for s, n in enumerate(lens) for n in range(max(1, n - 12), n + 1)]
    (query, key, value, table, slots, kv_lens), options = case(
        lens, rows, heads=grouped[0], kv_heads=grouped[1], dtype=dtype, seed=seed
    )
    together = paged_attention(query, key, value, table, slots, kv_lens, **options, window=window)
    order = torch.randperm(len(rows), generator=g)
    shuffled = paged_attention(query[order], key, value, table, slots[order], kv_lens[order], **options, window=window)
    assert torch.equal(shuffled, together[order])
    # The same contents laid out in blocks of 3 positions, everything else NaN.
    blocks = -(-max(lens) // 3)
    table_3 = (torch.randperm(3 * blocks, generator=g) + 1).int().view(3, blocks)
    key_3, value_3 = (c.new_full((3 * (3 * blocks + 1), *c.shape[1:]), torch.nan) for c in (key, value))
    for s, n in enumerate(lens):
        p = torch.arange(n)
        old, new = table[s, p // 4] * 4 + p % 4, table_3[s, p // 3] * 3 + p % 3
        key_3[new], value_3[new] = key[old], value[old]
    options_3 = {**options, "block_size": 3, "window": window}
    assert torch.equal(paged_attention(query, key_3, value_3, table_3, slots, kv_lens, **options_3), together)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(
            paged_attention(query, key, value, table, slots, kv_lens, **options, window=window), together
        )
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_a_poisoned_position_reaches_only_rows_that_see_it():
    rows = [(0, n) for n in range(60, 70)]
    (query, key, value, table, slots, lens), options = case([70], rows)
    clean = paged_attention(query, key, value, table, slots, lens, **options, window=20)
    for position in (64, 40):
        slot = table[0, position // 4] * 4 + position % 4
        key_bad, value_bad = key.clone(), value.clone()
        key_bad[slot] = torch.nan
        value_bad[slot] = torch.inf
        ours = paged_attention(query, key_bad, value_bad, table, slots, lens, **options, window=20)
        sees = (lens > position) & (lens - 20 <= position)
        assert torch.equal(ours[~sees], clean[~sees])
        assert not ours[sees].isfinite().all(-1).any()


def test_reference_against_plain_softmax():
    rows = [(0, 5), (0, 6)]
    (query, key, value, table, slots, lens), options = case([6], rows, heads=2, kv_heads=1, dim=4)
    sinks = torch.tensor([0.5, -1.0])
    ours = paged_attention_reference(
        query, key, value, table, slots, lens, **options, window=4, softcap=3.0, sinks=sinks
    )
    for t, n in enumerate([5, 6]):
        where = [int(table[0, p // 4]) * 4 + p % 4 for p in range(n - 4, n)]
        for h in range(2):
            scores = 3.0 * torch.tanh(key[where, 0] @ query[t, h] * 0.5 / 3.0)
            probs = torch.cat([scores, sinks[h : h + 1]]).softmax(0)[:-1]
            torch.testing.assert_close(ours[t, h], probs @ value[where, 0])


def test_no_rows():
    (query, key, value, table, slots, lens), options = case([6], [(0, 5)])
    out = paged_attention(query[:0], key, value, table, slots[:0], lens[:0], **options)
    assert out.shape == (0, 4, 16)
