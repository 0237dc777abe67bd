"""Positions of all blocks in the order in which they are verified, and exact sums of their survivals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
GRID = float(1 << 24)
"""Survivals are rounded to multiples of 1 / GRID before they are summed, so that sums do not depend on the order."""


def ranked(
    survival: npt.NDArray[np.floating], limits: npt.NDArray[np.int64], min_width: int
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Rank the positions of all blocks as `allocate` does.

    Args:
        survival: [D, gamma].
        limits: [D] largest widths; positions beyond a limit are left out.
        min_width: positions 1 ... min_width are mandatory and come first.

    Returns:
        [limits.sum()] survivals in descending order, and the request of each.
    """
    requests, gamma = survival.shape
    full = int(limits.sum())
    values = key = survival.T.ravel()
    if full < len(key) or min_width:
        position = np.arange(gamma)[:, None]
        inside = np.where(position < limits, survival.T, -1.0)
        key = np.where(position < np.minimum(limits, min_width), 2.0, inside).ravel()
    order = np.argsort(-key, kind="stable")[:full]
    return on_grid(values[order]), order % requests


def mandatory(limits: npt.NDArray[np.int64], min_width: int) -> int:
    """Number of mandatory positions: every budget covers them."""
    return int(np.minimum(limits, min_width).sum()) if min_width else 0


def widths_of(owner: npt.NDArray[np.int64], budget: int, requests: int) -> tuple[int, ...]:
    """[D] widths of the requests when the first `budget` ranked positions are verified."""
    return tuple(np.bincount(owner[:budget], minlength=requests).tolist())


def sums(gains: Floats) -> Floats:
    """Sums of the first 0, 1, ... gains."""
    sums = np.empty(len(gains) + 1)
    sums[0] = 0.0
    np.cumsum(gains, out=sums[1:])
    return sums


def on_grid(survival: npt.NDArray[np.floating]) -> Floats:
    """The values rounded to multiples of 1 / GRID."""
    return np.rint(np.asarray(survival, dtype=np.float64) * GRID) / GRID
