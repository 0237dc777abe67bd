"""States per frontier slot: candidates of a window, the committed one chosen by index."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.cache.layers import LayerSpec, StateSpec
from surefoot.cache.paged import PagedCache
from surefoot.cache.states import StateRing


def run(ring: StateRing, slot: int, at: int, values: list[float], context: int = 0) -> None:
    """Rows from position `at` on, `context` of them before the window; the state after a row is the sum of all values."""
    slots = torch.tensor([slot])
    ring.begin(slots, torch.tensor([at + context]))
    sums = ring.committed(0, slots) + torch.tensor(values).cumsum(0).unsqueeze(1)
    rows = len(values)
    # One row of padding, which claims to be the request's own.
    ring.write(
        0,
        torch.full((rows + 1,), slot),
        torch.arange(at, at + rows + 1),
        torch.arange(rows + 1) < rows,
        torch.cat([sums, torch.full_like(sums[:1], torch.nan)]),
    )


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3)),
        max_size=12,
    )
)
def test_a_state_is_rewound_by_choosing_it(steps: list[tuple[list[int], int, int]]) -> None:
    ring = StateRing((StateSpec((2,)),), max_num_seqs=3, frontier=4)
    ring.enter(1)
    expected, at = 0.0, 0
    for window, kept, context in steps:
        kept = min(kept, len(window))
        values = [5.0] * context + [float(value) for value in window]
        run(ring, 1, at, values, context)
        assert ring.committed(0, torch.tensor([1])).tolist() == [[expected] * 2], "a window changed the committed state"
        run(ring, 1, at, values, context)  # a step that failed runs again and finds the same state
        ring.commit(torch.tensor([1]), torch.tensor([at + context + kept]))
        expected += sum(values[: context + kept])
        at += context + kept
        assert ring.committed(0, torch.tensor([1])).tolist() == [[expected] * 2]
    assert ring.committed(0, torch.tensor([0, 2])).abs().sum() == 0, "another request's state changed"


def test_the_longest_window_leaves_the_committed_state_alone() -> None:
    ring = StateRing((StateSpec((1,)),), max_num_seqs=1, frontier=5)
    ring.enter(0)
    for step in range(7):
        before = ring.committed(0, torch.tensor([0])).clone()
        run(ring, 0, 5 * step, [1.0] * 5)
        assert torch.equal(ring.committed(0, torch.tensor([0])), before)
        ring.commit(torch.tensor([0]), torch.tensor([5 * step + 5]))


def test_who_enters_a_slot_starts_from_zero() -> None:
    ring = StateRing((StateSpec((1,)),), max_num_seqs=1, frontier=2)
    for at in range(3):  # around the ring: every place has been written
        run(ring, 0, at, [3.0, 4.0])
        ring.commit(torch.tensor([0]), torch.tensor([at + 1]))
    assert ring.committed(0, torch.tensor([0])).item() == 9
    ring.enter(0)
    assert ring.committed(0, torch.tensor([0])).item() == 0


def test_a_cache_holds_layers_of_any_shape_and_stride() -> None:
    latent = LayerSpec(((6,), (2,)))
    compressed = LayerSpec(((3,),), stride=4)
    cache = PagedCache(
        (LayerSpec.attention(2, 8, 4), latent, compressed),
        num_blocks=9,
        block_size=4,
        max_num_seqs=2,
        max_model_len=64,
        dtype=torch.float32,
        states=(StateSpec((5,), torch.float64),),
        frontier=3,
    )
    assert [tuple(t.shape) for t in cache.target_kv[0]] == [(36, 2, 8), (36, 2, 4)]
    assert [tuple(t.shape) for t in cache.target_kv[1]] == [(36, 6), (36, 2)]
    assert [tuple(t.shape) for t in cache.target_kv[2]] == [(12, 3)]  # two blocks of entries and the scratch block
    assert cache.target_group == (0, 0, 1)
    assert [table.shape[1] for table in cache.block_tables] == [16, 4]
    cache.block_tables[1][1] = torch.tensor([2, 1, 0, 0])
    slots = cache.cache_slots(1, torch.tensor([1, 1, 1]), torch.tensor([0, 15, 16]))
    assert slots.tolist() == [8, 11, 4]
    stored = sum(t.numel() for layer in cache.target_kv for t in layer) * 4
    assert cache.num_bytes == stored + (2 + 1) * 4 * 5 * 8
