"""Which block belongs to whom: reference counts, reuse of shared prefixes by content, eviction of the least recently used.

Host bookkeeping only; the tensors are in `paged.py`. A block is *registered* under the hash of all tokens up to its end once
every position in it is committed, and from then on nobody writes to it. A freed block keeps its content and its registration
until it is handed out again, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import lcm

import numpy as np

from surefoot.cache.layers import Group
from surefoot.errors import ConfigurationError


class BlockPool:
    """The blocks of one cache group. Block 0 is scratch and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigurationError(f"a cache group needs at least 2 blocks (one is scratch), not {num_blocks}")
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Take every block back, and forget what is in it."""
        num_blocks = self.num_blocks
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # oldest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def allocate(self) -> int:
        """Hand out the block that was freed longest ago; whatever was cached in it is forgotten."""
        block, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        self._references[block] = 1
        return block

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def forget(self) -> None:
        """No block holds known content any more."""
        self._key_of.clear()
        self._block_of.clear()

    def share(self, block: int) -> None:
        """Add a reference to a registered block, in use or free."""
        self._references[block] += 1
        self._free.pop(block, None)

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if block not in self._key_of:  # nothing worth keeping: hand it out first
                self._free.move_to_end(block, last=False)

    def register(self, block: int, key: bytes) -> None:
        """Index a full, committed block by its content. The first block with a content keeps the name."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key


@dataclass
class HeldBlocks:
    """Blocks held for one state slot."""

    blocks: list[list[int]]  # per group, by block index; 0 where freed before the window
    keys: list[bytes] = field(default_factory=list)  # content hash of every `block_size` committed positions
    freed: list[int] = field(default_factory=list)  # per group: block indices below this are freed


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """Content hash of a block: its tokens and, through `parent`, everything before it."""
    return blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), key=parent, digest_size=16).digest()


class BlockManager:
    """Blocks of all running requests over all cache groups.

    A block holds `block_size` entries. Groups differ in how many positions an entry stands for, so the same request holds more
    blocks in one group than in another; a prefix is reused in units of positions that end a block in every group.

    Args:
        groups: what the layers of each group see and store; None or a window stands for a group with an entry per position.
        group_blocks: blocks of each group.
        block_size: entries a block holds.
        prefix_reuse: whether committed blocks are indexed and matched.
    """

    def __init__(
        self,
        groups: Sequence[Group | int | None],
        group_blocks: Sequence[int],
        block_size: int,
        prefix_reuse: bool = True,
    ) -> None:
        self.groups = tuple(group if isinstance(group, Group) else Group(group) for group in groups)
        self.block_size, self.prefix_reuse = block_size, prefix_reuse
        self.pools = [BlockPool(count) for count in group_blocks]
        self._sliding = [index for index, group in enumerate(self.groups) if group.window is not None]
        self._unit = lcm(*(group.stride for group in self.groups))  # keys that end a block in every group
        self.sequences: dict[int, HeldBlocks] = {}

    def admit(self, slot: int, token_ids: list[int], *, reuse: bool = True) -> int:
        """Open a sequence in `slot` and share every cached block of its prefix.

        The last token is never taken from the cache: it must run to give logits. Without `reuse` nothing is.

        Returns:
            Positions that are cached already, in every group that still needs them.
        """
        keys = self._keys(token_ids[:-1]) if self.prefix_reuse and reuse else []
        count = self._match(keys)
        sequence = HeldBlocks([[] for _ in self.groups], keys[:count], [0] * len(self.groups))
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = self._first_visible(group, count * self.block_size)
            for index, key in enumerate(keys[spec.stride - 1 : count : spec.stride]):
                block = pool.lookup(key) if index >= first else None
                if block is not None:
                    pool.share(block)
                sequence.blocks[group].append(block or 0)
            sequence.freed[group] = first
        self.sequences[slot] = sequence
        return count * self.block_size

    def _keys(self, token_ids: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        parent = b""
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            parent = block_key(parent, token_ids[end - self.block_size : end])
            keys.append(parent)
        return keys

    def _match(self, keys: list[bytes]) -> int:
        """Largest number of leading keys that every group can serve, a multiple of what ends a block in all of them."""
        count = len(keys)
        for spec, pool in zip(self.groups, self.pools, strict=True):
            if spec.window is None:
                ends = keys[spec.stride - 1 : count : spec.stride]
                held = next((index for index, key in enumerate(ends) if pool.lookup(key) is None), len(ends))
                count = min(count, held * spec.stride)
        count -= count % self._unit
        while count and not all(self._serves(group, keys, count) for group in self._sliding):
            count -= self._unit
        return count

    def _serves(self, group: int, keys: list[bytes], count: int) -> bool:
        """Whether `group` holds every block that a row after `count` keys can see."""
        stride, pool = self.groups[group].stride, self.pools[group]
        first = self._first_visible(group, count * self.block_size)
        return all(pool.lookup(key) is not None for key in keys[stride - 1 : count : stride][first:])

    def _first_visible(self, group: int, length: int) -> int:
        return self.groups[group].first_visible(length, self.block_size)

    def reserve(self, slot: int, length: int) -> list[tuple[int, int, list[int]]] | None:
        """Hold blocks for `length` positions of `slot`.

        What a rejection leaves empty after the committed length is kept: the next step's frontier reaches at least as far.

        Returns:
            (group, first block index, new block ids) of every group that grew; None, with nothing taken, when a pool is empty.
        """
        held = self.sequences[slot].blocks
        missing = [
            max(0, -(-length // group.positions_per_block(self.block_size)) - len(blocks))
            for group, blocks in zip(self.groups, held, strict=True)
        ]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return None
        grown = []
        for group, (count, blocks, pool) in enumerate(zip(missing, held, self.pools, strict=True)):
            if count:
                new = [pool.allocate() for _ in range(count)]
                grown.append((group, len(blocks), new))
                blocks.extend(new)
        return grown

    def table(self, slot: int) -> list[tuple[int, int, list[int]]]:
        """Everything `slot` holds, in the form `reserve` returns."""
        return [(group, 0, list(blocks)) for group, blocks in enumerate(self.sequences[slot].blocks) if blocks]

    def commit(self, slot: int, token_ids: list[int], length: int) -> None:
        """Positions below `length` are final: index full blocks, free what no later row can see.

        Args:
            token_ids: the request's tokens; those below `length` are cached.
        """
        sequence = self.sequences[slot]
        size = self.block_size
        while self.prefix_reuse and (len(sequence.keys) + 1) * size <= length:
            index = len(sequence.keys)
            parent = sequence.keys[-1] if sequence.keys else b""
            key = block_key(parent, token_ids[index * size : (index + 1) * size])
            sequence.keys.append(key)
            for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
                number, rest = divmod(index + 1, spec.stride)
                if not rest and (block := sequence.blocks[group][number - 1]):
                    pool.register(block, key)
        for group in self._sliding:
            blocks = sequence.blocks[group]
            first = min(self._first_visible(group, length), len(blocks))
            for index in range(sequence.freed[group], first):
                if blocks[index]:
                    self.pools[group].release(blocks[index])
                    blocks[index] = 0
            sequence.freed[group] = max(sequence.freed[group], first)

    def forget(self) -> None:
        """Match no prefix with what is cached now: its content is about to be overwritten."""
        for pool in self.pools:
            pool.forget()

    def release(self, slot: int) -> None:
        """Give back everything; the last blocks first, so that a prefix outlives its continuation."""
        for pool, blocks in zip(self.pools, self.sequences.pop(slot).blocks, strict=True):
            for block in reversed(blocks):
                if block:
                    pool.release(block)

    def clear(self, forget: bool) -> None:
        """Take all blocks back.

        Args:
            forget: forget what is cached in them as well; correct even where an exception has left counts half changed.
        """
        if forget:
            self.sequences.clear()
            for pool in self.pools:
                pool.clear()
        for slot in list(self.sequences):
            self.release(slot)
