"""The block manager: nothing leaks, nothing is shared that differs, windows free what nobody sees."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surefoot.cache.blocks import BlockManager, BlockPool
from surefoot.cache.layers import Group
from surefoot.errors import ConfigurationError


def test_a_prefix_is_shared_by_content_and_the_last_token_always_runs() -> None:
    blocks = BlockManager((None,), (20,), 4)
    tokens = list(range(12))
    assert blocks.admit(0, tokens) == 0
    assert blocks.reserve(0, 14) is not None
    blocks.commit(0, tokens, 12)
    assert blocks.admit(1, tokens) == 8  # three full blocks match, but the last token must run
    assert blocks.admit(2, [*tokens, 99]) == 12
    assert blocks.admit(3, [*tokens[:5], 77, *tokens[6:]]) == 4
    assert blocks.sequences[2].blocks[0][:3] == blocks.sequences[0].blocks[0][:3]
    for slot in range(4):
        blocks.release(slot)
    assert blocks.pools[0].num_used == 0


def test_the_same_tokens_after_another_prefix_are_not_shared() -> None:
    blocks = BlockManager((None,), (20,), 4)
    blocks.admit(0, [1] * 9)
    blocks.reserve(0, 9)
    blocks.commit(0, [1] * 9, 8)
    assert blocks.admit(1, [2, 2, 2, 2, 1, 1, 1, 1, 1]) == 0


def test_uncommitted_positions_are_never_shared() -> None:
    blocks = BlockManager((None,), (20,), 4)
    blocks.admit(0, list(range(9)))
    blocks.reserve(0, 12)
    blocks.commit(0, list(range(9)), 7)
    assert blocks.admit(1, list(range(9))) == 4


def test_a_released_prefix_survives_until_its_blocks_are_needed() -> None:
    blocks = BlockManager((None,), (4,), 4)
    blocks.admit(0, list(range(9)))
    blocks.reserve(0, 9)
    blocks.commit(0, list(range(9)), 8)
    blocks.release(0)
    assert blocks.admit(1, list(range(9))) == 8
    blocks.release(1)
    blocks.admit(2, [50] * 9)
    assert blocks.reserve(2, 12) is not None  # takes all three blocks, so both cached ones are forgotten
    blocks.release(2)
    assert blocks.admit(3, list(range(9))) == 0


def test_a_sliding_group_frees_blocks_before_its_window_and_still_serves_a_hit() -> None:
    blocks = BlockManager((None, 8), (40, 40), 4)
    tokens = list(range(40))
    blocks.admit(0, tokens)
    blocks.reserve(0, 41)
    blocks.commit(0, tokens, 40)
    held = [sum(1 for b in group if b) for group in blocks.sequences[0].blocks]
    assert held == [11, 3]  # positions 33 ... 40 are visible from position 40
    assert blocks.admit(1, [*tokens, 7]) == 40
    assert [i for i, b in enumerate(blocks.sequences[1].blocks[1]) if b] == [8, 9]
    blocks.release(0)
    blocks.release(1)
    assert [pool.num_used for pool in blocks.pools] == [0, 0]


def test_reserve_takes_nothing_when_one_group_is_full() -> None:
    blocks = BlockManager((None, 8), (10, 3), 4)
    blocks.admit(0, [1])
    assert blocks.reserve(0, 16) is None
    assert [pool.num_used for pool in blocks.pools] == [0, 0]


def test_a_compressed_group_holds_fewer_blocks_and_bounds_what_is_shared() -> None:
    blocks = BlockManager((None, Group(stride=3)), (40, 40), 4)
    tokens = list(range(40))
    blocks.admit(0, tokens)
    grown = blocks.reserve(0, 41)
    assert grown is not None
    assert [(group, first, len(new)) for group, first, new in grown] == [(0, 0, 11), (1, 0, 4)]
    assert blocks.reserve(0, 44) == []  # eleven blocks of 4 positions, four of 12
    assert [(group, first, len(new)) for group, first, new in blocks.reserve(0, 49) or []] == [(0, 11, 2), (1, 4, 1)]
    blocks.commit(0, tokens, 39)
    assert blocks.admit(1, [*tokens, 7]) == 36  # 36 positions end a block in both groups: 9 of one, 3 of the other
    assert [len(group) for group in blocks.sequences[1].blocks] == [9, 3]
    assert blocks.sequences[1].blocks[1] == blocks.sequences[0].blocks[1][:3]
    assert blocks.admit(2, tokens[:25]) == 24
    assert (
        blocks.admit(3, [*tokens[:20], 99, *tokens[21:]]) == 12
    )  # five blocks of one group match, but one of the other
    for slot in range(4):
        blocks.release(slot)
    assert [pool.num_used for pool in blocks.pools] == [0, 0]


def test_what_is_shared_ends_a_block_in_every_group() -> None:
    blocks = BlockManager((Group(stride=2), Group(stride=3)), (40, 40), 4)
    tokens = list(range(80))
    blocks.admit(0, tokens)
    blocks.reserve(0, 80)
    blocks.commit(0, tokens, 80)
    assert blocks.admit(1, [*tokens[:41], 99]) == 24  # 40 would do for one group, 36 for the other
    assert [len(group) for group in blocks.sequences[1].blocks] == [3, 2]


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    blocks = BlockManager((None,), (20,), 4)
    tokens = list(range(9))
    for slot in range(3):
        blocks.admit(slot, tokens)
        blocks.reserve(slot, 9)
        blocks.commit(slot, tokens, 9)
    shared = blocks.sequences[0].blocks[0][:2]
    for slot, used in ((0, 4), (1, 3), (2, 0)):
        blocks.release(slot)
        assert blocks.pools[0].num_used == used
        blocks.admit(9, [50])
        grown = blocks.reserve(9, 4)
        assert grown is not None
        assert not {block for _, _, new in grown for block in new} & set(shared), "a block in use was handed out"
        blocks.release(9)


def test_a_group_without_blocks_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="at least 2 blocks"):
        BlockPool(1)


class BlockMachine(RuleBasedStateMachine):
    """Random requests over a full, a sliding and a compressed group; a model keeps what every sequence may rely on."""

    @initialize(size=st.sampled_from([1, 2, 4]), prefix_reuse=st.booleans())
    def build(self, size: int, prefix_reuse: bool) -> None:
        self.manager = BlockManager((None, 5, Group(stride=2)), (30, 24, 15), size, prefix_reuse=prefix_reuse)
        self.sizes = (size, size, 2 * size)  # positions per block of each group
        self.live: dict[int, tuple[list[int], int]] = {}  # slot -> tokens, committed
        self.content: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (group, block) -> tokens up to its end when committed

    @rule(slot=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, slot: int, tokens: list[int]) -> None:
        if slot in self.live:
            return
        cached = self.manager.admit(slot, tokens)
        assert cached < len(tokens)
        for group, blocks in enumerate(self.manager.sequences[slot].blocks):
            for index, block in enumerate(blocks):
                if block:
                    assert self.content[group, block] == tuple(tokens[: (index + 1) * self.sizes[group]])
        assert cached % self.sizes[2] == 0
        self.live[slot] = (tokens, cached)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), grow=st.integers(1, 6))
    def advance(self, data: st.DataObject, grow: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        tokens, committed = self.live[slot]
        tokens = tokens + data.draw(st.lists(st.integers(0, 1), min_size=grow, max_size=grow))
        held = [list(blocks) for blocks in self.manager.sequences[slot].blocks]
        grown = self.manager.reserve(slot, len(tokens) + 2)
        if grown is None:
            assert [list(blocks) for blocks in self.manager.sequences[slot].blocks] == held
            return
        for group, first, new in grown:
            assert first == len(held[group])
            for block in new:
                self.content.pop((group, block), None)
        committed = data.draw(st.integers(committed, len(tokens) - 1))
        before = [list(blocks) for blocks in self.manager.sequences[slot].blocks]
        self.manager.commit(slot, tokens, committed)
        for group, blocks in enumerate(before):
            for index, block in enumerate(blocks[: committed // self.sizes[group]]):
                if block:
                    self.content[group, block] = tuple(tokens[: (index + 1) * self.sizes[group]])
        window_start = max(0, committed - 5 + 1)
        assert all(self.manager.sequences[slot].blocks[0])
        assert all(self.manager.sequences[slot].blocks[1][window_start // self.sizes[1] :])
        assert all(self.manager.sequences[slot].blocks[2])
        for held, positions in zip(self.manager.sequences[slot].blocks, self.sizes, strict=True):
            assert len(held) >= -(-(len(tokens) + 2) // positions)
        self.live[slot] = (tokens, committed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.manager.release(slot)
        del self.live[slot]

    @invariant()
    def nothing_leaks_and_nothing_is_written_twice(self) -> None:
        if not hasattr(self, "manager"):
            return
        for group, pool in enumerate(self.manager.pools):
            owners: dict[int, int] = {}
            for sequence in self.manager.sequences.values():
                for block in sequence.blocks[group]:
                    if block:
                        owners[block] = owners.get(block, 0) + 1
            assert pool.num_used == len(owners)
            for block, count in owners.items():
                assert count == 1 or (group, block) in self.content  # only committed blocks are shared


BlockMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestBlockMachine = BlockMachine.TestCase
