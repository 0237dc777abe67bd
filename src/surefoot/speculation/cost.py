"""The measured cost of a decode step: V over tokens, D over requests, and the overheads that do not cancel in a ratio.

A table holds what one engine measured on one machine; nothing in it is a guess. It is immutable: drift (`drift.py`) makes
a new one. The file formats of other engines are in `cost_formats.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from surefoot.errors import CostTableError
from surefoot.speculation.json_files import read_object, write_object

Floats = npt.NDArray[np.float64]
FORMAT, VERSION = "surefoot-cost-table", 1
MOST_MS = 1e12
MOST_COUNT = 1 << 40
"""Bounds of what a file may hold: sums of times stay finite, counts fit an int64."""
UNSTEADY = 0.25
"""Share of unsteady points above which a table is not trusted over a saved one."""


@dataclass(frozen=True)
class CostTable:
    """Measured milliseconds of draft and target passes.

    V(B) is a staircase over the captured buckets (a pass over B tokens replays the smallest bucket >= B) and piecewise
    linear beyond `captured_tokens`, where steps run eagerly at their own size. A running maximum over tokens and over
    context lengths keeps noise from making a larger pass look cheaper. D(R) is piecewise linear in the number of
    requests with a draft; for drafts shorter than gamma it is D at the same number of rows (`draft_depths`).

    Raises:
        CostTableError: a field is empty, of the wrong type, not finite, not positive, not in order, or of a length that
            does not match its axis. The message names the field.
    """

    token_buckets: tuple[int, ...]  # [N] strictly increasing token counts
    verify_ms: tuple[tuple[float, ...], ...]  # [C][N] as measured, one curve per context length
    draft_requests: tuple[int, ...] = (1,)  # [M] strictly increasing request counts
    draft_ms: tuple[float, ...] = (0.0,)  # [M]
    draft_depths: tuple[int, ...] = ()  # [Q] strictly increasing draft tokens of one request, gamma the last
    draft_depth_ms: tuple[float, ...] = ()  # [Q] D of one request at these depths
    context_lengths: tuple[int, ...] = (0,)  # [C] strictly increasing mean cached lengths
    captured_tokens: int | None = None  # up to here V is a staircase (None: all buckets are captured)
    fixed_overhead_ms: float = 0.0  # every step
    batch_sizes: tuple[int, ...] = ()  # [P] strictly increasing; entry i applies from batch_sizes[i] requests on
    batch_overhead_ms: tuple[float, ...] = ()  # [P]
    unsteady: float | None = None  # share of measured points whose repeats lie far apart (None: not known)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_axis("token_buckets", self.token_buckets, least=1)
        check_axis("context_lengths", self.context_lengths)
        check_axis("draft_requests", self.draft_requests)
        _check_list("verify_ms", self.verify_ms)
        if len(self.verify_ms) != len(self.context_lengths):
            raise CostTableError(
                f"cost table has {len(self.context_lengths)} context lengths but {len(self.verify_ms)} verify_ms curves"
            )
        for curve in self.verify_ms:
            _check_times("verify_ms", curve, len(self.token_buckets), "token_buckets", positive=True)
        _check_times("draft_ms", self.draft_ms, len(self.draft_requests), "draft_requests")
        if self.draft_depths or self.draft_depth_ms:
            check_axis("draft_depths", self.draft_depths, least=1)
            _check_times("draft_depth_ms", self.draft_depth_ms, len(self.draft_depths), "draft_depths")
        if self.captured_tokens is not None and not _is_integer(self.captured_tokens):
            raise CostTableError(f"captured_tokens must be an integer or null, got {self.captured_tokens!r}")
        _check_times("fixed_overhead_ms", (self.fixed_overhead_ms,), 1, "one number")
        if self.batch_sizes or self.batch_overhead_ms:
            check_axis("batch_sizes", self.batch_sizes)
            _check_times("batch_overhead_ms", self.batch_overhead_ms, len(self.batch_sizes), "batch_sizes")
        if self.unsteady is not None and not (is_number(self.unsteady) and 0 <= self.unsteady <= 1):
            raise CostTableError(f"unsteady must be a share of 0 ... 1 or null, got {self.unsteady!r}")

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
        """D(requests) in ms; 0 for no request. Piecewise linear; beyond the last point with the slope of the upper half.

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
            self._draft_cache[requests, depth] = float(interpolate(points, values, np.array([at]))[0])
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
        draft_requests: int | None = None,
        depth: int | None = None,
    ) -> Floats:
        """Cost in ms of a whole step over `first`, `first` + 1, ... target tokens, [count] float64.

        Args:
            requests: R, requests in the step.
            first: smallest token count asked for (anchors and any prompt chunk, no draft token).
            count: how many consecutive token counts.
            context: mean cached length of the requests, in tokens.
            draft_requests: requests that get a draft (None: all).
            depth: tokens drafted of each (None: gamma).
        """
        drafting = self.draft_ms_at(requests if draft_requests is None else draft_requests, depth)
        constant = drafting + self.overhead_ms_at(requests)
        return self.verify_costs(first, count, context) + constant

    @cached_property
    def is_flat(self) -> bool:
        """No curve ever rises: more tokens look free, so there is nothing to plan with."""
        return bool((self.monotone_ms[:, 0] == self.monotone_ms[:, -1]).all())

    @cached_property
    def monotone_ms(self) -> Floats:
        """[C, N] running maxima of `verify_ms` over tokens and context lengths: V at the buckets."""
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
            linear = np.stack([interpolate(self.token_buckets, curve, tokens) for curve in self.monotone_ms])
            self._dense_cache[:] = [np.where(tokens <= captured, self.monotone_ms[:, bucket], linear)]
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
        times = [[value * factors.get(i, 1.0) for i, value in enumerate(curve)] for curve in self.monotone_ms.tolist()]
        return replace(self, verify_ms=tuple(map(tuple, times)))

    def bucket_of(self, tokens: int) -> int:
        """Index of the bucket whose measurement says most about a pass of so many tokens."""
        buckets = self.token_buckets
        above = min(bisect_left(buckets, tokens), len(buckets) - 1)
        staircase = self.captured_tokens is None or tokens <= self.captured_tokens
        if staircase or above == 0 or tokens >= buckets[above]:
            return above
        return above if tokens * tokens > buckets[above - 1] * buckets[above] else above - 1

    @property
    def steadiness(self) -> str:
        """How far to trust the measurement, in words."""
        if self.unsteady is None:
            return "steadiness not known"
        return f"{self.unsteady:.0%} of the points unsteady"

    def replaces(self, saved: CostTable | None) -> bool:
        """Whether this newly measured table should replace `saved`: not if it is unsteady, and more so than that one.

        The steadiness of a table of an older version is not known; it counts as steady.
        """
        if saved is None or self.unsteady is None or self.unsteady <= UNSTEADY:
            return True
        return saved.unsteady is not None and saved.unsteady >= self.unsteady

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
        """The JSON form: the fields by name, with "format" and "version"."""
        return {"format": FORMAT, "version": VERSION, **_plain(asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostTable:
        """Read the JSON form. Raises `CostTableError` naming what is missing or malformed."""
        if data.get("format") != FORMAT:
            raise CostTableError(f"not a cost table: format is {data.get('format')!r}, expected {FORMAT!r}")
        if data.get("version") != VERSION:
            raise CostTableError(
                f"cost table has version {data.get('version')!r}, this surefoot reads version {VERSION}"
            )
        known = {entry.name for entry in fields(cls)}
        for name in ("token_buckets", "verify_ms", "draft_requests", "draft_ms"):
            if name not in data:
                raise CostTableError(f"cost table lacks {name!r}: run 'surefoot profile' again")
        values = {name: _tuples(value) for name, value in data.items() if name in known and name != "fingerprint"}
        fingerprint = data.get("fingerprint", {})
        if not isinstance(fingerprint, Mapping):
            raise CostTableError(f"cost table's fingerprint must be an object, got {type(fingerprint).__name__}")
        return cls(**values, fingerprint=dict(fingerprint))

    def save(self, path: str | Path) -> None:
        """Write the JSON form to a file, whole or not at all."""
        write_object(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, Any] | None = None) -> CostTable:
        """Read a file of `save`; with `fingerprint`, refuse a table of another engine. Raises `CostTableError`."""
        table = cls.from_dict(read_object(path, CostTableError))
        if fingerprint is not None:
            table.require(fingerprint)
        return table


def interpolate(points: Sequence[int], values: Sequence[float] | Floats, at: npt.NDArray[np.int64]) -> Floats:
    """Piecewise linear through the points and constant below the first.

    Beyond the last point the slope is the mean of the upper half: the last two points alone may lie on one shelf.
    """
    x, y = np.asarray(points, dtype=np.float64), np.asarray(values, dtype=np.float64)
    inside = np.interp(at, x, y)
    if len(x) == 1:
        return inside
    middle = max(int(np.searchsorted(x, x[-1] / 2, side="right")) - 1, 0)
    slope = max((y[-1] - y[middle]) / (x[-1] - x[middle]), 0.0)
    return inside + slope * np.maximum(at - x[-1], 0.0)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_list(name: str, values: object) -> None:
    if not isinstance(values, (list, tuple)):
        raise CostTableError(f"{name} must be a list, got {values!r}")


def check_axis(name: str, values: Sequence[int], least: int = 0) -> None:
    _check_list(name, values)
    if not values:
        raise CostTableError(f"cost table is empty: {name} has no entry")
    if not all(map(_is_integer, values)):
        raise CostTableError(f"{name} must be integers, got {list(values)}")
    if values[0] < least or values[-1] > MOST_COUNT or any(b <= a for a, b in pairwise(values)):
        raise CostTableError(f"{name} must be strictly increasing and at least {least}, got {list(values)}")


def _check_times(name: str, values: Sequence[float], count: int, axis: str, positive: bool = False) -> None:
    _check_list(name, values)
    if len(values) != count:
        raise CostTableError(f"{name} has {len(values)} entries, {axis} has {count}")
    for value in values:
        if not is_number(value):
            raise CostTableError(f"{name} must be numbers, got {value!r}")
        if not value <= MOST_MS:  # NaN as well; an integer may be too large for a float
            raise CostTableError(f"{name} must be finite and at most {MOST_MS:g} ms, got {value}")
        if value < 0 or (positive and value == 0):
            raise CostTableError(f"{name} must be {'positive' if positive else 'at least 0'}, got {value}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """The value as a JSON round trip returns it, so that fingerprints compare equal."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
