"""Measured steps, and the cost table they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.speculation.cost import CostTable

STEADY = 1.5
"""Repeats of a point that lie further apart than this factor are unsteady."""
DRAFT, VERIFY = ("draft",), ("target", "accept", "extend")
"""Stages of a step that count as D and as V. V counts the pass with what else grows by the row."""


@dataclass
class Samples:
    """Milliseconds of all measured steps."""

    verify: dict[tuple[int, int], dict[int, list[float]]]  # (context, rows) -> requests -> V
    draft: dict[int, list[float]]  # requests -> D
    overhead: dict[int, list[float]]  # requests -> the rest of the step
    depth: dict[int, list[float]]  # tokens drafted of one block -> D

    @classmethod
    def empty(cls) -> Samples:
        return cls(defaultdict(lambda: defaultdict(list)), defaultdict(list), defaultdict(list), defaultdict(list))

    def add(
        self, context: int, rows: int, requests: int, depth: int | None, stages: Mapping[str, float], step_ms: float
    ) -> None:
        """Add one step.

        Args:
            rows: that the target verified for `requests` requests, their anchors included.
            depth: tokens drafted of the block where that is what the step measures, and nothing else then.
            stages: ms of every stage.
            step_ms: of the whole step, the host's part included.
        """
        draft, verify = (sum(stages[name] for name in names) for names in (DRAFT, VERIFY))
        if depth is not None:
            self.depth[depth].append(draft)
            return
        self.verify[context, rows][requests].append(verify)
        self.draft[requests].append(draft)
        self.overhead[requests].append(step_ms - draft - verify)

    def table(self, fingerprint: Mapping[str, Any], gamma: int, padded: bool = False) -> CostTable:
        """Lower quartiles of repeats, since a disturbance only ever adds; V is the mean over the mixes of widths measured.

        `gamma` is what a whole draft has. Where passes are padded V is a staircase, elsewhere linear between the buckets.
        """
        contexts = sorted({context for context, _ in self.verify})
        buckets = sorted(set.intersection(*({rows for c, rows in self.verify if c == context} for context in contexts)))
        curves = [
            [float(np.mean([_typical(times) for times in self.verify[context, rows].values()])) for rows in buckets]
            for context in contexts
        ]
        sizes, depths = sorted(self.overhead), sorted(self.depth)
        overhead = _rising([_typical(self.overhead[size]) for size in sizes])
        draft = _rising([_typical(self.draft[size]) for size in sizes]) * bool(gamma)
        shallow = np.minimum(_rising([_typical(self.depth[depth]) for depth in depths]), draft[0])
        return CostTable(
            token_buckets=tuple(buckets),
            verify_ms=tuple(map(tuple, _rising(curves).tolist())),
            captured_tokens=None if padded else 0,
            draft_requests=tuple(sizes),
            draft_ms=tuple(draft.tolist()),
            draft_depths=(*depths, gamma) if depths else (),
            draft_depth_ms=(*shallow.tolist(), float(draft[0])) if depths else (),
            context_lengths=tuple(contexts),
            fixed_overhead_ms=float(overhead[0]),
            batch_sizes=tuple(sizes),
            batch_overhead_ms=tuple((overhead - overhead[0]).tolist()),
            unsteady=self.unsteady(),
            fingerprint=fingerprint,
        )

    def unsteady(self) -> float | None:
        """Share of the repeated points whose repeats lie more than a factor of `STEADY` apart; None without repeats."""
        repeats = [times for mixes in self.verify.values() for times in mixes.values()]
        repeats = [times for times in (*repeats, *self.draft.values()) if len(times) > 1 and min(times) > 0]
        return sum(max(times) > STEADY * min(times) for times in repeats) / len(repeats) if repeats else None


def _typical(times: list[float]) -> float:
    return float(np.quantile(times, 0.25))


def _rising(times: Sequence[Any]) -> npt.NDArray[np.float64]:
    """The largest curve, rising along every axis, that is nowhere above `times`.

    A smaller pass never takes longer than a larger one, and what disturbs a measurement only ever makes it longer: of two
    that contradict each other the shorter one is right.
    """
    found = np.asarray(times, dtype=np.float64)
    for axis in range(found.ndim):
        found = np.flip(np.minimum.accumulate(np.flip(found, axis), axis), axis)
    return found
