"""What speculation did: per request, and in total over requests, steps and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.errors import SurefootError
from surefoot.speculation.breaker import BreakerState
from surefoot.speculation.planner import Reason

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]


_BY_SOURCE = ("sources", "verified_by_source", "accepted_by_source")


class InactiveError(SurefootError, AssertionError):
    """A run in which a part of speculation did nothing, although it was asked to."""


@dataclass
class RequestStatistics:
    """Counts of one request, or of several merged."""

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    verified_by_position: list[int] = field(default_factory=list)  # [gamma] times position k was sent to the target
    accepted_by_position: list[int] = field(default_factory=list)  # [gamma] times it was reached and accepted
    widths: Counter[int] = field(default_factory=Counter)  # width -> steps
    trimmed: int = 0  # blocks verified narrower than drafted, at least one token wide
    regretted: int = 0  # of these, accepted to their end: the trim certainly cost tokens
    sources: Counter[str] = field(default_factory=Counter)  # who drafted -> steps, of a drafter with several sources
    verified_by_source: Counter[str] = field(default_factory=Counter)  # who drafted -> tokens verified
    accepted_by_source: Counter[str] = field(default_factory=Counter)  # who drafted -> of these, accepted and emitted

    def record(
        self,
        drafted: int,
        width: int,
        accepted: int,
        emitted: int | None = None,
        source: str | None = None,
        times: int = 1,
    ) -> None:
        """Take one step of one request, or `times` steps that were alike.

        Args:
            drafted: tokens proposed.
            width: of these, verified.
            accepted: of these, accepted.
            emitted: tokens delivered (None: accepted + 1; fewer where a stop fell inside the block).
            source: who proposed them, of a drafter with several sources.
        """
        self.steps += times
        if source is not None:
            self.sources[source] += times
            self.verified_by_source[source] += width * times
            self.accepted_by_source[source] += (accepted if emitted is None else min(accepted, emitted)) * times
        self.drafted += drafted * times
        self.verified += width * times
        self.accepted += accepted * times
        self.emitted += (accepted + 1 if emitted is None else emitted) * times
        self.widths[width] += times
        _count_prefix(self.verified_by_position, width, times)
        _count_prefix(self.accepted_by_position, accepted, times)
        if 0 < width < drafted:  # an empty window proves nothing about the trim
            self.trimmed += times
            self.regretted += times * (accepted == width)

    def merge(self, other: RequestStatistics) -> None:
        """Add the counts of another request or process."""
        for name in ("steps", "drafted", "verified", "accepted", "emitted", "trimmed", "regretted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("verified_by_position", "accepted_by_position"):
            setattr(self, name, _sum_lists(getattr(self, name), getattr(other, name)))
        self.widths.update(other.widths)
        for name in _BY_SOURCE:
            getattr(self, name).update(getattr(other, name))

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified tokens; 0 if none."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """[gamma] accepted share of the blocks verified at least that far."""
        pairs = zip(self.accepted_by_position, self.verified_by_position, strict=False)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs]

    @property
    def trim_regret_rate(self) -> float:
        """Share of trimmed blocks that were accepted to their end."""
        return self.regretted / self.trimmed if self.trimmed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` reads it back."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        widths = {str(width): steps for width, steps in sorted(self.widths.items())}
        return {**data, "widths": widths, **{name: dict(sorted(getattr(self, name).items())) for name in _BY_SOURCE}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RequestStatistics:
        widths = Counter({int(width): steps for width, steps in data["widths"].items()})
        return cls(**{**data, "widths": widths, **{name: Counter(data.get(name, {})) for name in _BY_SOURCE}})


class BlockRecord(NamedTuple):
    """One request in one step."""

    drafted: int
    width: int
    accepted: int
    emitted: int | None = None
    source: str | None = None


@dataclass
class StepRecord:
    """One step of the engine, as the statistics take it."""

    blocks: Sequence[BlockRecord]
    reason: Reason
    stale_lag: float = 0.0
    predicted_ms: float | None = None
    measured_ms: float | None = None
    graph_hit: bool | None = None  # None: the step had no decode rows for a graph to hit
    prefill: bool = False  # a prompt chunk shared the pass
    breakers: Mapping[BreakerState, int] = field(default_factory=dict)  # requests per breaker state


@dataclass
class Statistics:
    """Totals over steps. Mergeable: every field is a sum."""

    blocks: RequestStatistics = field(default_factory=RequestStatistics)
    steps: int = 0
    requests: int = 0  # finished
    reasons: Counter[str] = field(default_factory=Counter)  # planner reason -> steps
    stale_lag: float = 0.0  # sum over planned steps
    planned_steps: int = 0
    predicted_ms: float = 0.0  # sums over steps that were predicted and measured
    measured_ms: float = 0.0
    absolute_error_ms: float = 0.0
    timed_steps: int = 0
    graph_hits: int = 0
    eager_steps: int = 0
    breaker_states: Counter[str] = field(default_factory=Counter)  # state -> request-steps
    breaker_trips: int = 0
    confidence_sum: list[float] = field(default_factory=list)  # [gamma] sums of predicted survival ...
    survived_sum: list[float] = field(default_factory=list)  # ... and of what came true, where it is known
    labelled: list[int] = field(default_factory=list)  # [gamma] blocks in the two sums above
    rescales: int = 0  # times measured steps changed the cost table
    # Of a drafter with several sources: blocks and confidences of each, kept apart from the others'.
    by_source: dict[str, Statistics] = field(default_factory=dict)

    def record(self, *steps: StepRecord) -> None:
        """Take steps. Many at once cost little more than one: their blocks are counted before they are added up."""
        for block, times in Counter(block for step in steps for block in step.blocks).items():
            self.blocks.record(*block, times=times)
        for step in steps:
            self._record(step)

    def _record(self, step: StepRecord) -> None:
        self.steps += 1
        self.reasons[step.reason.value] += 1
        for source in {block.source for block in step.blocks} - {None}:
            blocks = [block._replace(source=None) for block in step.blocks if block.source == source]
            self._of(source).record(StepRecord(blocks, step.reason))
        if step.reason in (Reason.PLANNED, Reason.FULL, Reason.SMALL_GAIN):
            self.stale_lag += step.stale_lag
            self.planned_steps += 1
        if step.predicted_ms is not None and step.measured_ms is not None:
            self.timed_steps += 1
            self.predicted_ms += step.predicted_ms
            self.measured_ms += step.measured_ms
            self.absolute_error_ms += abs(step.predicted_ms - step.measured_ms)
        if step.graph_hit is not None:
            self.graph_hits += step.graph_hit
            self.eager_steps += not step.graph_hit
        for state, count in step.breakers.items():
            self.breaker_states[state.value] += count

    def _of(self, source: str | None) -> Statistics:
        assert source is not None
        return self.by_source.setdefault(source, Statistics())

    def record_confidence(
        self, survival: Floats, widths: Ints, accepted: Ints, sources: Sequence[str | None] | None = None
    ) -> None:
        """Take the predicted survivals of N blocks ([N, gamma]), and their [N] widths and accepted lengths.

        A position counts where its fate is known: inside the window, or after a rejection.
        """
        for source in {*(sources or ())} - {None}:
            own = np.array([name == source for name in sources or ()])
            self._of(source).record_confidence(survival[own], widths[own], accepted[own])
        position = np.arange(survival.shape[1])
        known = (position < widths[:, None]) | (accepted < widths)[:, None]
        survived = known & (position < accepted[:, None])
        self.confidence_sum = _sum_lists(self.confidence_sum, (survival * known).sum(0, dtype=np.float64).tolist())
        self.survived_sum = _sum_lists(self.survived_sum, survived.sum(0).tolist())
        self.labelled = _sum_lists(self.labelled, known.sum(0).tolist())

    def merge(self, other: Statistics) -> None:
        """Add the totals of another process."""
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, RequestStatistics):
                mine.merge(theirs)
            elif isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                for source, statistics in theirs.items():
                    self._of(source).merge(statistics)
            elif isinstance(mine, list):
                setattr(self, entry.name, _sum_lists(mine, theirs))
            else:
                setattr(self, entry.name, mine + theirs)

    @property
    def mean_stale_lag(self) -> float:
        """Steps between publication and use of the survivals, over planned steps."""
        return self.stale_lag / self.planned_steps if self.planned_steps else 0.0

    @property
    def calibration_error(self) -> list[float]:
        """[gamma] mean predicted survival minus observed; 0 is calibrated on average, positive is over-confident."""
        rows = zip(self.confidence_sum, self.survived_sum, self.labelled, strict=True)
        return [(predicted - observed) / count if count else 0.0 for predicted, observed, count in rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data with the derived figures beside the sums; `from_dict` reads it back."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data.update(
            blocks=self.blocks.to_dict(),
            reasons=dict(sorted(self.reasons.items())),
            breaker_states=dict(sorted(self.breaker_states.items())),
            by_source={source: statistics.to_dict() for source, statistics in sorted(self.by_source.items())},
        )
        data["derived"] = {
            "acceptance_rate": self.blocks.acceptance_rate,
            "acceptance_by_position": self.blocks.acceptance_by_position,
            "tokens_per_step": self.blocks.tokens_per_step,
            "trim_regret_rate": self.blocks.trim_regret_rate,
            "mean_stale_lag": self.mean_stale_lag,
            "calibration_error": self.calibration_error,
        }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Statistics:
        values = {name: value for name, value in data.items() if name != "derived"}
        values["blocks"] = RequestStatistics.from_dict(values["blocks"])
        for name in ("reasons", "breaker_states"):
            values[name] = Counter(values[name])
        by_source = values.pop("by_source", {})
        return cls(**values, by_source={source: cls.from_dict(part) for source, part in by_source.items()})

    def assert_active(self, *, trimming: bool = False, graphs: bool = False, min_steps: int = 1) -> None:
        """Fail a run in which speculation did nothing.

        Args:
            trimming: also demand that windows were cut to differing widths.
            graphs: also demand that no decode step ran outside a captured graph.
            min_steps: fewer steps prove nothing, and fail too.

        Raises:
            InactiveError: says which part did nothing, and what the planner gave as its reasons.
        """
        blocks, reasons = self.blocks, ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        problems = []
        if self.steps < min_steps:
            problems.append(f"only {self.steps} of at least {min_steps} decode steps ran")
        if not blocks.drafted:
            problems.append("the drafter proposed nothing")
        elif not blocks.verified:
            problems.append(f"of {blocks.drafted} drafted tokens none was verified (planner: {reasons})")
        elif not blocks.accepted:
            problems.append(f"of {blocks.verified} verified tokens none was accepted")
        if trimming and len(blocks.widths) < 2:
            problems.append(f"every window had the same width {sorted(blocks.widths)} (planner: {reasons})")
        if trimming and blocks.verified >= blocks.drafted > 0:
            problems.append(f"no window was ever trimmed (planner: {reasons})")
        if graphs and not self.graph_hits:
            problems.append("no step replayed a captured graph")
        if graphs and self.eager_steps:
            problems.append(f"{self.eager_steps} decode steps fell out of graph replay")
        if problems:
            raise InactiveError("speculation was not active: " + "; ".join(problems))


def _count_prefix(counts: list[int], length: int, times: int) -> None:
    if length > len(counts):
        counts.extend([0] * (length - len(counts)))
    for k in range(length):
        counts[k] += times


def _sum_lists(mine: list[Any], theirs: list[Any]) -> list[Any]:
    longest = max(len(mine), len(theirs))
    return [a + b for a, b in zip(_padded(mine, longest), _padded(theirs, longest), strict=True)]


def _padded(values: list[Any], length: int) -> list[Any]:
    return values + [0] * (length - len(values))
