"""Counter-based uniform random numbers: u = hash(seed, step, purpose, position).

Every uniform a request consumes is addressed, not drawn from a shared stream, so what a request samples cannot depend on who
else is in the batch, and no generator state has to travel between host and device. The step counter is part of the address:
a position that is drafted again after a rejection must not meet the uniform of its first draft, because confidences scored
behind that first draft may already have chosen this step's budget.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    DRAFT = 1  # draws x_k from q_k
    ACCEPT = 2  # compares with p(x_k) / q(x_k)
    EMIT = 3  # draws the recovered or the bonus token


def _mix(z: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 (wrapping multiplication, logical shifts)."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def uniforms(seeds: Tensor, steps: Tensor, purpose: Purpose, positions: Tensor) -> Tensor:
    """Uniforms in [0, 1), float64; the three int64 tensors broadcast against each other.

    Args:
        seeds: one seed per request.
        steps: decode steps the request has taken.
        purpose: what the uniform decides.
        positions: position in the block.
    """
    golden = -0x61C8864680B583EB
    z = _mix(_mix(seeds * golden + 1) + steps * golden)
    z = _mix(z + (positions * 8 + int(purpose)) * golden)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(torch.float64) * 2.0**-53
