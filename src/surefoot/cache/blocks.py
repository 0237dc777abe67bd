"""Which block belongs to whom: reference counts, reuse of shared prefixes by content, eviction of the least recently used.

Host bookkeeping only; the tensors are in `paged.py`. A block is *registered* under the hash of all tokens up to its end once
every position in it is committed, and from then on nobody writes to it. A freed block keeps its content and its registration
until it is handed out again, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from surefoot.errors import ConfigurationError


class BlockPool:
    """The blocks of one cache group. Block 0 is scratch and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigurationError(f"a cache group needs at least 2 blocks (one is scratch), not {num_blocks}")
        self.num_blocks = num_blocks
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
class Sequence:
    """Blocks held for one state slot."""

    blocks: list[list[int]]  # per group, by block index; 0 where freed behind the window
    keys: list[bytes] = field(default_factory=list)  # content hash of every full committed block
    freed: list[int] = field(default_factory=list)  # per group: block indices below this are freed


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """Content hash of a block: its tokens and, through `parent`, everything in front of it."""
    return blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), key=parent, digest_size=16).digest()


class BlockManager:
    """Blocks of all running requests over all cache groups.

    Args:
        windows: attention window of each group; None sees everything.
        group_blocks: blocks of each group.
        block_size: positions a block holds.
        prefix_reuse: whether committed blocks are indexed and matched.
    """

    def __init__(
        self, windows: tuple[int | None, ...], group_blocks: tuple[int, ...], block_size: int, prefix_reuse: bool = True
    ) -> None:
        self.windows, self.block_size, self.prefix_reuse = windows, block_size, prefix_reuse
        self.pools = [BlockPool(count) for count in group_blocks]
        self._sliding = [group for group, window in enumerate(windows) if window is not None]
        self.sequences: dict[int, Sequence] = {}

    def admit(self, slot: int, token_ids: list[int]) -> int:
        """Open a sequence in `slot` and share every cached block of its prefix.

        The last token is never taken from the cache: it must run to give logits.

        Returns:
            Positions that are cached already, in every group that still needs them.
        """
        keys = self._keys(token_ids[:-1]) if self.prefix_reuse else []
        count = self._match(keys)
        sequence = Sequence([[] for _ in self.windows], keys[:count], [0] * len(self.windows))
        for group, pool in enumerate(self.pools):
            first = self._first_visible(group, count * self.block_size)
            for index, key in enumerate(keys[:count]):
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
        """Largest number of leading blocks that every group can serve."""
        count = len(keys)
        for group, pool in enumerate(self.pools):
            if self.windows[group] is None:
                count = next((i for i in range(count) if pool.lookup(keys[i]) is None), count)
        while count and not all(
            pool.lookup(keys[i]) is not None
            for group, pool in enumerate(self.pools)
            if self.windows[group] is not None
            for i in range(self._first_visible(group, count * self.block_size), count)
        ):
            count -= 1
        return count

    def _first_visible(self, group: int, length: int) -> int:
        """Index of the first block that a row at position `length` can see."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def reserve(self, slot: int, length: int) -> list[tuple[int, int, list[int]]] | None:
        """Hold blocks for `length` positions of `slot`.

        What a rejection leaves empty behind the committed length is kept: the next step's frontier reaches at least as far.

        Returns:
            (group, first block index, new block ids) of every group that grew; None, with nothing taken, when a pool is empty.
        """
        held = self.sequences[slot].blocks
        first = len(held[0])  # as long in every group
        count = -(-length // self.block_size) - first
        if count <= 0:
            return []
        if any(count > pool.num_free for pool in self.pools):
            return None
        grown = []
        for group, (blocks, pool) in enumerate(zip(held, self.pools, strict=True)):
            new = [pool.allocate() for _ in range(count)]
            grown.append((group, first, new))
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
            for group, pool in enumerate(self.pools):
                block = sequence.blocks[group][index]
                if block:
                    pool.register(block, key)
        for group in self._sliding:
            blocks = sequence.blocks[group]
            first = min(self._first_visible(group, length), len(blocks))
            for index in range(sequence.freed[group], first):
                if blocks[index]:
                    self.pools[group].release(blocks[index])
                    blocks[index] = 0
            sequence.freed[group] = max(sequence.freed[group], first)

    def release(self, slot: int) -> None:
        """Give back everything; the last blocks first, so that a prefix outlives its continuation."""
        for pool, blocks in zip(self.pools, self.sequences.pop(slot).blocks, strict=True):
            for block in reversed(blocks):
                if block:
                    pool.release(block)
