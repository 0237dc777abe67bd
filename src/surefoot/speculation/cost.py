"""The measured cost of a step: V over tokens, D over requests, and the overheads that do not cancel in a ratio.

A table says what one step of one engine on one machine costs; nothing in it is guessed. It is immutable: measured
drift makes a new, rescaled one.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.errors import CostTableError
from surefoot.speculation.json_files import read_object, write_object

Floats = npt.NDArray[np.float64]
FORMAT = "surefoot-cost-table"
FAR = 1 << 24  # a token or request count no step reaches; holds a clamped curve flat


@dataclass(frozen=True)
class CostTable:
    """Measured milliseconds of draft and target passes.

    V(B) is a staircase over the captured buckets (a pass over B tokens replays the smallest bucket >= B) and piecewise
    linear beyond `captured_tokens`, where steps run eagerly at their own size. A running maximum over tokens and over
    context lengths keeps noise from making a larger pass look cheaper. D(R) is piecewise linear in the number of
    drafted requests; where fewer tokens than gamma are drafted of each, it is D of as many rows (`draft_depths`).

    Raises:
        CostTableError: empty, non-finite, non-positive, unordered, or of lengths that do not match.
    """

    token_buckets: tuple[int, ...]  # [N] strictly increasing token counts
    verify_ms: tuple[tuple[float, ...], ...]  # [C][N] as measured, one curve per context length
    draft_requests: tuple[int, ...] = (1,)  # [M] strictly increasing
    draft_ms: tuple[float, ...] = (0.0,)  # [M]
    draft_depths: tuple[int, ...] = ()  # [Q] strictly increasing draft tokens of one request, gamma the last
    draft_depth_ms: tuple[float, ...] = ()  # [Q] D of one request at these depths
    context_lengths: tuple[int, ...] = (0,)  # [C] strictly increasing mean cached lengths
    captured_tokens: int | None = None  # up to here V is a staircase (None: all buckets are captured)
    fixed_overhead_ms: float = 0.0  # every step
    batch_sizes: tuple[int, ...] = ()  # [P] strictly increasing; entry i applies from batch_sizes[i] requests on
    batch_overhead_ms: tuple[float, ...] = ()  # [P]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_axis("token_buckets", self.token_buckets, least=1)
        _check_axis("context_lengths", self.context_lengths)
        _check_axis("draft_requests", self.draft_requests)
        if len(self.verify_ms) != len(self.context_lengths):
            raise CostTableError(
                f"cost table has {len(self.context_lengths)} context lengths but {len(self.verify_ms)} verify_ms curves"
            )
        for curve in self.verify_ms:
            _check_times("verify_ms", curve, len(self.token_buckets), "token_buckets", positive=True)
        _check_times("draft_ms", self.draft_ms, len(self.draft_requests), "draft_requests")
        if self.draft_depths or self.draft_depth_ms:
            _check_axis("draft_depths", self.draft_depths, least=1)
            _check_times("draft_depth_ms", self.draft_depth_ms, len(self.draft_depths), "draft_depths")
        _check_times("fixed_overhead_ms", (self.fixed_overhead_ms,), 1, "one number")
        if self.batch_sizes or self.batch_overhead_ms:
            _check_axis("batch_sizes", self.batch_sizes)
            _check_times("batch_overhead_ms", self.batch_overhead_ms, len(self.batch_sizes), "batch_sizes")

    # --- what a step costs ------------------------------------------------------------------------------------------

    def verify_costs(self, first: int, count: int, context: float = 0.0) -> Floats:
        """V(first), V(first + 1), ... in ms, [count] float64, at a mean cached length of `context` tokens."""
        dense = self._dense(first + count)
        lengths = self.context_lengths
        if len(lengths) == 1 or context <= lengths[0]:
            return dense[0][first : first + count]
        # Between two profiled lengths, or beyond the longest, on the line through the two nearest: attention is linear.
        upper = min(bisect_left(lengths, context), len(lengths) - 1)
        share = (context - lengths[upper - 1]) / (lengths[upper] - lengths[upper - 1])
        below, above = (dense[i][first : first + count] for i in (upper - 1, upper))
        return below + share * (above - below)

    def verify_ms_at(self, tokens: int, context: float = 0.0) -> float:
        """V(tokens) in ms."""
        return float(self.verify_costs(tokens, 1, context)[0])

    def draft_ms_at(self, requests: int, depth: int | None = None) -> float:
        """D(requests) in ms; 0 for no request. Piecewise linear, beyond the last point with the slope of the upper half.

        Args:
            depth: tokens drafted of each (None: gamma). What counts is the number of rows of the pass; without measured
                `draft_depths` it is D at gamma.
        """
        if requests <= 0:
            return 0.0
        if (requests, depth) not in self._draft_cache:
            points, values, at = self.draft_requests, self.draft_ms, requests
            if depth is not None and self.draft_depths:
                points, values = self._draft_rows
                at = requests * min(depth, self.draft_depths[-1])
            self._draft_cache[requests, depth] = float(_interpolate(points, values, np.array([at]))[0])
        return self._draft_cache[requests, depth]

    @cached_property
    def _draft_rows(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """D by rows of the pass: one request at rising depth, then rising numbers of requests at gamma."""
        gamma = self.draft_depths[-1]
        rows = (*self.draft_depths[:-1], *(requests * gamma for requests in self.draft_requests))
        return rows, tuple(np.maximum.accumulate((*self.draft_depth_ms[:-1], *self.draft_ms)).tolist())

    def overhead_ms_at(self, requests: int) -> float:
        """Fixed overhead plus the overhead of this batch size, in ms."""
        if not self.batch_sizes:
            return self.fixed_overhead_ms
        index = max(bisect_right(self.batch_sizes, requests) - 1, 0)
        return self.fixed_overhead_ms + self.batch_overhead_ms[index]

    def step_costs(
        self,
        requests: int,
        first: int,
        count: int,
        context: float = 0.0,
        drafted: int | None = None,
        depth: int | None = None,
    ) -> Floats:
        """Cost in ms of a whole step over `first`, `first` + 1, ... target tokens, [count] float64.

        Args:
            requests: R, requests in the step.
            first: smallest token count asked for (anchors and any prompt chunk, no draft token).
            count: how many consecutive token counts.
            context: mean cached length of the requests, in tokens.
            drafted: requests that are drafted for (None: all).
            depth: tokens drafted of each (None: gamma).
        """
        drafting = self.draft_ms_at(requests if drafted is None else drafted, depth)
        constant = drafting + self.overhead_ms_at(requests)
        return self.verify_costs(first, count, context) + constant

    @cached_property
    def is_flat(self) -> bool:
        """No curve ever rises: more tokens look free, so there is nothing to plan with."""
        return bool((self._monotone[:, 0] == self._monotone[:, -1]).all())

    @cached_property
    def _monotone(self) -> Floats:
        return np.maximum.accumulate(np.maximum.accumulate(np.array(self.verify_ms), axis=1), axis=0)

    @cached_property
    def _draft_cache(self) -> dict[tuple[int, int | None], float]:
        return {}

    @cached_property
    def _dense_cache(self) -> list[Floats]:
        return []

    def _dense(self, size: int) -> Floats:
        """V at every token count 0 ... size - 1 or beyond, [C, >= size]; grown by doubling and kept."""
        if not self._dense_cache or self._dense_cache[0].shape[1] < size:
            tokens = np.arange(1 << max(size, 64).bit_length())
            buckets = np.array(self.token_buckets)
            captured = buckets[-1] if self.captured_tokens is None else self.captured_tokens
            bucket = np.searchsorted(buckets, tokens).clip(max=len(buckets) - 1)
            linear = np.stack([_interpolate(self.token_buckets, curve, tokens) for curve in self._monotone])
            self._dense_cache[:] = [np.where(tokens <= captured, self._monotone[:, bucket], linear)]
        return self._dense_cache[0]

    # --- provenance -------------------------------------------------------------------------------------------------

    def scaled(self, factor: float) -> CostTable:
        """The same table with every time multiplied by `factor` > 0."""
        if not (math.isfinite(factor) and factor > 0):
            raise CostTableError(f"cost table cannot be scaled by {factor}")
        return replace(
            self,
            verify_ms=tuple(tuple(value * factor for value in curve) for curve in self.verify_ms),
            draft_ms=tuple(value * factor for value in self.draft_ms),
            draft_depth_ms=tuple(value * factor for value in self.draft_depth_ms),
            fixed_overhead_ms=self.fixed_overhead_ms * factor,
            batch_overhead_ms=tuple(value * factor for value in self.batch_overhead_ms),
        )

    def corrected(self, factors: Mapping[int, float]) -> CostTable:
        """The same table with V of single buckets (by index) multiplied, at every context length."""
        times = [[value * factors.get(i, 1.0) for i, value in enumerate(curve)] for curve in self._monotone.tolist()]
        return replace(self, verify_ms=tuple(map(tuple, times)))

    def bucket_of(self, tokens: int) -> int:
        """Index of the bucket whose measurement says most about a pass of so many tokens."""
        buckets = self.token_buckets
        above = min(bisect_left(buckets, tokens), len(buckets) - 1)
        staircase = self.captured_tokens is None or tokens <= self.captured_tokens
        if staircase or above == 0 or tokens >= buckets[above]:
            return above
        return above if tokens * tokens > buckets[above - 1] * buckets[above] else above - 1

    def require(self, fingerprint: Mapping[str, Any]) -> None:
        """Raise `CostTableError` naming every field in which this engine differs from the one that was measured."""
        ours, theirs = dict(self.fingerprint), dict(fingerprint)
        different = [
            f"{name}: table {ours.get(name, 'unset')!r}, engine {theirs.get(name, 'unset')!r}"
            for name in sorted(ours.keys() | theirs.keys())
            if _plain(ours.get(name)) != _plain(theirs.get(name))
        ]
        if different:
            raise CostTableError(
                "cost table was measured on another engine (" + "; ".join(different) + "): run 'surefoot profile' again"
            )

    def to_dict(self) -> dict[str, Any]:
        """Our JSON form: the fields by name, with "format" and "version"."""
        return {"format": FORMAT, "version": 1, **_plain(asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostTable:
        """Read our JSON form. Raises `CostTableError` naming what is missing or malformed."""
        if data.get("format") != FORMAT:
            raise CostTableError(f"not a cost table: format is {data.get('format')!r}, expected {FORMAT!r}")
        if data.get("version") != 1:
            raise CostTableError(f"cost table has version {data.get('version')!r}, this surefoot reads version 1")
        known = {entry.name for entry in fields(cls)}
        for name in ("token_buckets", "verify_ms", "draft_requests", "draft_ms"):
            if name not in data:
                raise CostTableError(f"cost table lacks {name!r}: run 'surefoot profile' again")
        values = {name: _tuples(value) for name, value in data.items() if name in known and name != "fingerprint"}
        fingerprint = data.get("fingerprint", {})
        if not isinstance(fingerprint, Mapping):
            raise CostTableError(f"cost table's fingerprint must be an object, got {type(fingerprint).__name__}")
        return _built(cls, **values, fingerprint=dict(fingerprint))

    def save(self, path: str | Path) -> None:
        """Write our form, whole or not at all."""
        write_object(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, Any] | None = None) -> CostTable:
        """Read a file in our form; with `fingerprint`, refuse a table of another engine. Raises `CostTableError`."""
        table = cls.from_dict(read_object(path, CostTableError))
        if fingerprint is not None:
            table.require(fingerprint)
        return table

    # --- the forms of other engines (formats.md) ----------------------------------------------------------------------

    @classmethod
    def from_sglang(cls, data: Mapping[str, Any]) -> CostTable:
        """Read SGLang's simple form (steps/s over tokens, floor lookup) or its additive form (b + alpha(R) + theta(M))."""
        if "theta_seconds" in data:
            return cls._from_sglang_additive(data)
        tokens = _numbers(data, "sample_batch_tokens")
        rates = _numbers(data, "sample_steps_per_sec")
        if len(rates) != len(tokens):
            raise CostTableError(f"{len(tokens)} sample_batch_tokens but {len(rates)} sample_steps_per_sec")
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise CostTableError(f"sample_steps_per_sec must be finite and positive, got {rates}")
        last = data.get("max_batch_tokens", tokens[-1] if tokens else 0)
        if not isinstance(last, int) or (tokens and last < tokens[-1]):
            raise CostTableError(f"max_batch_tokens must be an integer >= the last sample, got {last!r}")
        _check_axis("sample_batch_tokens", tokens)
        # Sample i holds from its own token count up to the next sample's: a bucket that ends just before it.
        ends = (*(int(token) - 1 for token in tokens[1:]), int(last))
        times = tuple(1000.0 / rate for rate in rates)
        kept = [i for i, end in enumerate(ends) if end >= 1]
        return _built(
            cls,
            token_buckets=(*(ends[i] for i in kept), FAR),
            verify_ms=((*(times[i] for i in kept), times[-1]),),
        )

    @classmethod
    def _from_sglang_additive(cls, data: Mapping[str, Any]) -> CostTable:
        bias = data.get("bias_seconds")
        if not isinstance(bias, (int, float)):
            raise CostTableError(f"bias_seconds must be a number, got {bias!r}")
        sizes, alpha = _clamped(data, "bs_probes", "alpha_seconds")
        tokens, theta = _clamped(data, "m_probes", "theta_seconds")
        return _built(
            cls,
            token_buckets=tokens,
            verify_ms=(theta,),
            captured_tokens=0,
            draft_requests=sizes,
            draft_ms=alpha,
            fixed_overhead_ms=bias * 1000.0,
        )

    def to_sglang_simple(self, requests: int, max_batch_tokens: int, context: float = 0.0) -> dict[str, Any]:
        """SGLang's simple form at one batch size: it knows no D and no context, so theirs are folded into the rate."""
        shelves = _shelves(self.step_costs(requests, 1, max_batch_tokens, context))
        return {
            "sample_batch_tokens": [low + 1 for low, _, _ in shelves],
            "sample_steps_per_sec": [1000.0 / ms for _, _, ms in shelves],
            "max_batch_tokens": max_batch_tokens,
        }

    def to_sglang_additive(self, max_requests: int, max_batch_tokens: int, context: float = 0.0) -> dict[str, Any]:
        """SGLang's additive form at one context length; alpha is D plus the overhead of the batch size."""
        sizes = range(1, max_requests + 1)
        alpha = [self.draft_ms_at(size) + self.overhead_ms_at(size) - self.fixed_overhead_ms for size in sizes]
        tokens, theta = _shelf_points(self.verify_costs(1, max_batch_tokens, context))
        return {
            "bias_seconds": self.fixed_overhead_ms / 1000.0,
            "bs_probes": list(sizes),
            "alpha_seconds": [ms / 1000.0 for ms in alpha],
            "m_probes": tokens,
            "theta_seconds": [ms / 1000.0 for ms in theta],
        }

    @classmethod
    def from_tensorrt_llm(cls, data: Mapping[str, Any]) -> CostTable:
        """Read TensorRT-LLM's form: times interpolated over token counts that include the bonus token, clamped outside."""
        tokens, times = _clamped(data, "token_counts", "step_time_ms", scale=1.0)
        sizes, overhead = data.get("batch_sizes") or (), data.get("batch_overhead_ms") or ()
        return _built(
            cls,
            token_buckets=tokens,
            verify_ms=(times,),
            captured_tokens=0,
            fixed_overhead_ms=data.get("fixed_overhead_ms", 0.0),
            batch_sizes=_tuples(sizes),
            batch_overhead_ms=_tuples(overhead),
        )

    def to_tensorrt_llm(self, max_requests: int, max_batch_tokens: int, context: float = 0.0) -> dict[str, Any]:
        """TensorRT-LLM's form at one context length; D goes into the overhead of each batch size.

        A shelf is written as its two ends, which reads the same whether the reader interpolates or looks up by floor.
        """
        sizes = list(range(1, max_requests + 1))
        tokens, times = _shelf_points(self.verify_costs(1, max_batch_tokens, context))
        return {
            "token_counts": tokens,
            "step_time_ms": times,
            "fixed_overhead_ms": self.fixed_overhead_ms,
            "batch_sizes": sizes,
            "batch_overhead_ms": [
                self.draft_ms_at(size) + self.overhead_ms_at(size) - self.fixed_overhead_ms for size in sizes
            ],
        }


def _interpolate(points: Sequence[int], values: Sequence[float] | Floats, at: npt.NDArray[np.int64]) -> Floats:
    """Piecewise linear through the points, constant below the first; beyond the last with the mean slope of the upper
    half,
    because the last two points alone may share a shelf."""
    x, y = np.asarray(points, dtype=np.float64), np.asarray(values, dtype=np.float64)
    inside = np.interp(at, x, y)
    if len(x) == 1:
        return inside
    middle = max(int(np.searchsorted(x, x[-1] / 2, side="right")) - 1, 0)
    slope = max((y[-1] - y[middle]) / (x[-1] - x[middle]), 0.0)
    return inside + slope * np.maximum(at - x[-1], 0.0)


def _shelves(costs: Floats) -> list[tuple[int, int, float]]:
    """Maximal runs of equal cost: (first index, last index, ms)."""
    edges = np.flatnonzero(np.diff(costs)) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(costs)]]) - 1
    return [(int(low), int(high), float(costs[low])) for low, high in zip(starts, ends, strict=True)]


def _shelf_points(costs: Floats) -> tuple[list[int], list[float]]:
    """Both ends of every shelf of costs at 1, 2, ... tokens."""
    points = [(end + 1, ms) for low, high, ms in _shelves(costs) for end in sorted({low, high})]
    return [token for token, _ in points], [ms for _, ms in points]


def _check_axis(name: str, values: Sequence[float], least: int = 0) -> None:
    if not values:
        raise CostTableError(f"cost table is empty: {name} has no entry")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise CostTableError(f"{name} must be integers, got {list(values)}")
    if values[0] < least or any(b <= a for a, b in pairwise(values)):
        raise CostTableError(f"{name} must be strictly increasing and at least {least}, got {list(values)}")


def _check_times(name: str, values: Sequence[float], count: int, axis: str, positive: bool = False) -> None:
    if len(values) != count:
        raise CostTableError(f"{name} has {len(values)} entries, {axis} has {count}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CostTableError(f"{name} must be numbers, got {value!r}")
        if not math.isfinite(value):
            raise CostTableError(f"{name} must be finite, got {value}")
        if value < 0 or (positive and value == 0):
            raise CostTableError(f"{name} must be {'positive' if positive else 'at least 0'}, got {value}")


def _numbers(data: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    values = data.get(name)
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    ):
        raise CostTableError(f"{name} must be a list of numbers, got {values!r}")
    return tuple(values)


def _clamped(
    data: Mapping[str, Any], axis: str, values: str, scale: float = 1000.0
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A curve in ms that stays at its last value for ever; an axis entry of 0 tokens is the point at 1 and below."""
    x, y = _numbers(data, axis), tuple(value * scale for value in _numbers(data, values))
    if len(x) != len(y):
        raise CostTableError(f"{axis} has {len(x)} entries, {values} has {len(y)}")
    _check_axis(axis, x)
    if x[0] == 0:
        at_one = float(np.interp(1.0, x, y))
        x, y = (1, *x[1:]) if len(x) == 1 or x[1] > 1 else x[1:], (at_one, *y[1:]) if len(x) == 1 or x[1] > 1 else y[1:]
    return (*x, FAR), (*y, y[-1])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """The value as JSON would give it back, so that a fingerprint compares equal after a round trip."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _built(cls: type[CostTable], **values: Any) -> CostTable:
    """Construct; a value of the wrong shape is the file's fault, not the caller's."""
    try:
        return cls(**values)
    except TypeError as problem:
        raise CostTableError(f"malformed cost table: {problem}") from problem


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
    """Row counts at which steps take persistently longer or shorter than the profile says, relative to all of a window."""

    factors: Mapping[int, float]  # tokens of the bucket -> V by what was profiled, all corrections so far
    steps: int

    def __str__(self) -> str:
        found = ", ".join(f"{tokens} rows x {factor:.2f}" for tokens, factor in sorted(self.factors.items()))
        return f"cost table corrected by what {self.steps} steps took: {found}"


class DriftTracker:
    """Keeps a table true to measured step times: rescales all of it, or corrects single row counts.

    Only the median of the ratio counts, over a window and over both its halves alike: a step that stalls (a page fault,
    another process) is late by any amount but never early, and must not move the table.

    A planner goes where the table is too low: of many noisy measurements it believes the luckiest. Its own steps tell
    better. A bucket whose steps differ from all of the window by more than `LEAST`, and by more than their noise explains,
    moves half of the way (the logarithm is halved), `MOST` times at most. What all buckets have in common is left to
    rescaling, or those that nobody visits would look cheap.

    Args:
        table: what was profiled.
        window: steps a ratio must persist.
        tolerance: relative difference that is left alone.
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
        """Take one step that ran as predicted (no prefill the plan did not know of, no compilation).

        Args:
            tokens: rows of the target pass (None: unknown, no bucket is corrected by it).

        Returns:
            What this step brought about (`self.table` is the new table), or None.
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
        """Move the buckets of a full window that differ from it, where that changes a prediction."""
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
        """Give a bucket another factor; not where a smaller pass, which cannot take longer, holds its V up anyway."""
        factors = {**self._factors, bucket: min(max(factor, 1 / self.MOST), self.MOST)}
        table = self.profiled.scaled(self.total).corrected(factors)
        if not np.allclose(table._monotone[:, bucket], self.table._monotone[:, bucket], rtol=1e-3):
            self._factors, self.table = factors, table

    def _forget(self) -> None:
        """Old ratios are to another table."""
        self._ratios.clear()
        self._buckets.clear()
        self._steps = 0
