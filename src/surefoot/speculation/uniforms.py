"""Counter-based uniform random numbers: u = hash(stream, step, purpose, position).

Every uniform a request consumes is addressed, not drawn from a shared generator, so what a request samples cannot depend on who
else is in the batch, and no generator state has to travel between host and device. The step counter is part of the address:
a position that is drafted again after a rejection must not meet the uniform of its first draft, because confidences scored
after that first draft may already have chosen this step's budget.

For the same reason no two requests that are unfinished at the same time may read the same stream, whatever their seeds: the
survivals of one would tell about the drafts of the other, and they decide how much of them is verified. `SeedStreams` sees
to that.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    DRAFT = 1  # draws x_k from q_k
    ACCEPT = 2  # compares with p(x_k) / q(x_k)
    EMIT = 3  # draws the recovered or the bonus token


class SeedStreams:
    """Gives every unfinished request a stream of its own.

    Unfinished requests with the same seed are numbered in order of arrival; each takes the lowest number that is free. Number
    0 reads the stream of the seed itself, so a request whose seed nobody else holds repeats whatever runs beside it; number n
    reads the stream of a hash of seed and n. Streams and seeds are 64 bits wide; a derived stream that happens to be in use
    is passed over.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, int]] = {}  # stream -> seed and number
        self._freed: dict[int, list[int]] = {}  # seed -> heap of numbers below the next one that are free
        self._next: dict[int, int] = {}  # seed -> the lowest number that was never taken

    def open(self, seed: int) -> int:
        """The stream of a new request, as the int64 that `uniforms` takes.

        Args:
            seed: any integer; the lowest 64 bits count.
        """
        seed &= _MASK
        passed_over = []
        while True:
            freed = self._freed.get(seed)
            number = heappop(freed) if freed else self._next.get(seed, 0)
            self._next[seed] = max(self._next.get(seed, 0), number + 1)
            stream = _signed(seed if number == 0 else _mixed(_mixed(seed) + number * _GOLDEN))
            if stream not in self._open:
                break
            passed_over.append(number)
        for other in passed_over:
            heappush(self._freed.setdefault(seed, []), other)
        self._open[stream] = seed, number
        return stream

    def close(self, stream: int) -> None:
        """The request that reads `stream` has ended."""
        seed, number = self._open.pop(stream)
        freed = self._freed.setdefault(seed, [])
        heappush(freed, number)
        if len(freed) == self._next[seed]:  # nobody holds this seed any more
            del self._freed[seed], self._next[seed]


def _signed(value: int) -> int:
    """64 bits as the int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _mixed(z: int) -> int:
    """The splitmix64 finaliser."""
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 (wrapping multiplication, logical shifts)."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def uniforms(streams: Tensor, steps: Tensor, purpose: Purpose, positions: Tensor) -> Tensor:
    """Uniforms in [0, 1), float64; the three int64 tensors broadcast against each other.

    Args:
        streams: one stream per request, see `SeedStreams`.
        steps: decode steps the request has taken.
        purpose: what the uniform decides.
        positions: position in the block.
    """
    golden = -0x61C8864680B583EB
    z = _mix(_mix(streams * golden + 1) + steps * golden)
    z = _mix(z + (positions * 8 + int(purpose)) * golden)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(torch.float64) * 2.0**-53
