"""Online drift of a cost table: predicted against measured step times."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from surefoot.speculation.cost import CostTable


@dataclass(frozen=True)
class Rescale:
    """A persistent difference between predicted and measured step time."""

    factor: float  # measured / predicted, applied to the table
    total: float  # all factors so far
    steps: int  # steps it was seen in

    def __str__(self) -> str:
        return (
            f"steps take {self.factor:.2f} times the predicted time over {self.steps} steps: "
            f"cost table rescaled to {self.total:.2f} of the profile"
        )


@dataclass(frozen=True)
class Correction:
    """Row counts at which steps take persistently longer or shorter than profiled, relative to the other steps."""

    factors: Mapping[int, float]  # tokens of the bucket -> V / profiled V, all corrections so far
    steps: int

    def __str__(self) -> str:
        found = ", ".join(f"{tokens} rows x {factor:.2f}" for tokens, factor in sorted(self.factors.items()))
        return f"cost table corrected by what {self.steps} steps took: {found}"


class DriftTracker:
    """Keeps a table true to measured step times: it rescales all of it, or corrects single row counts.

    Only the median of the ratio counts, over a window and over each of its halves: a step that stalls (a page fault,
    another process) is late by any amount but never early, and must not move the table.

    A planner goes where the table is too low: of many noisy measurements it believes the luckiest. Its own steps show
    this. A bucket whose steps differ from the whole window by more than `LEAST`, and by more than their noise explains,
    moves half of the way (half of the logarithm), at most by a factor of `MOST` in all. What all buckets have in common
    is left to rescaling; otherwise those without steps would look cheap.

    Args:
        table: the profiled table.
        window: steps a ratio must persist.
        tolerance: relative difference that is left alone.

    Attributes:
        table: the profiled table with all changes so far.
        total: product of all rescalings.
    """

    LEAST, MOST, LOOK_EVERY = 0.03, 1.5, 8

    def __init__(self, table: CostTable, window: int = 64, tolerance: float = 0.1) -> None:
        self.profiled, self.table = table, table
        self.window, self.tolerance = window, tolerance
        self.total = 1.0
        self._factors: dict[int, float] = {}  # bucket -> correction
        self._ratios: deque[float] = deque(maxlen=window)
        self._buckets: deque[int | None] = deque(maxlen=window)
        self._steps = 0  # since the table was changed or last looked at for corrections
        self._look_every = max(1, min(self.LOOK_EVERY, window // 4))

    def observe(
        self, predicted_ms: float, measured_ms: float, tokens: int | None = None
    ) -> Rescale | Correction | None:
        """Take one step that ran as predicted (no prompt chunk, no compilation).

        Args:
            tokens: rows of the target pass (None: unknown; no bucket is corrected by this step).

        Returns:
            The change that this step completed (`self.table` is the new table), or None.
        """
        if not (predicted_ms > 0 and measured_ms > 0 and math.isfinite(measured_ms / predicted_ms)):
            return None
        self._ratios.append(measured_ms / predicted_ms)
        self._buckets.append(None if tokens is None else self.profiled.bucket_of(tokens))
        self._steps += 1
        if len(self._ratios) < self.window or self._steps % self._look_every:
            return None
        ratios = list(self._ratios)
        early, late = statistics.median(ratios[: self.window // 2]), statistics.median(ratios[self.window // 2 :])
        slower, faster = 1 + self.tolerance, 1 / (1 + self.tolerance)
        if min(early, late) > slower or max(early, late) < faster:
            factor = statistics.median(ratios)
            self.total *= factor
            self.table = self.profiled.scaled(self.total).corrected(self._factors)
            self._forget()
            return Rescale(factor, self.total, self.window)
        return self._correct(ratios) if self._steps >= self.window else None

    def _correct(self, ratios: list[float]) -> Correction | None:
        """Correct the buckets that differ from the whole window, where that changes a prediction."""
        all_steps, before, self._steps = statistics.median(ratios), self.table, 0
        for bucket in {bucket for bucket in self._buckets if bucket is not None}:
            own = [ratio for ratio, at in zip(ratios, self._buckets, strict=True) if at == bucket]
            off = statistics.median(own) / all_steps
            spread = statistics.median(abs(ratio / off / all_steps - 1) for ratio in own)  # 2/3 of a standard deviation
            noise = 4 * spread / math.sqrt(len(own))  # two standard errors of a median
            if len(own) >= self.window // 4 and abs(math.log(off)) > max(self.LEAST, noise):
                self._move(bucket, self._factors.get(bucket, 1.0) * math.sqrt(off))
        if self.table is before:
            return None
        self._forget()
        return Correction({self.profiled.token_buckets[b]: f for b, f in self._factors.items()}, self.window)

    def _move(self, bucket: int, factor: float) -> None:
        """Give a bucket another factor, unless the running maximum of smaller buckets hides it."""
        factors = {**self._factors, bucket: min(max(factor, 1 / self.MOST), self.MOST)}
        table = self.profiled.scaled(self.total).corrected(factors)
        if not np.allclose(table.monotone_ms[:, bucket], self.table.monotone_ms[:, bucket], rtol=1e-3):
            self._factors, self.table = factors, table

    def _forget(self) -> None:
        """Drop the ratios: they are relative to the table before."""
        self._ratios.clear()
        self._buckets.clear()
        self._steps = 0
