"""`surefoot profile`: V and D of a loaded engine, measured on its own decode step.

The stages of the step time themselves (`engine.clock`). The same number of rows can be a few deep windows or many shallow
ones; both are measured and V is their mean. Points take turns, whichever has used the least time going next: a machine that
slows down for a while slows all of them, and cheap points are repeated more often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from surefoot.engine.engine import Engine
from surefoot.engine.fingerprint import Fingerprint, fingerprint, saved_table, table_path
from surefoot.profiling.points import Point, points_of, visits_within
from surefoot.profiling.step_timer import StepTimer
from surefoot.speculation.cost import CostTable

CONTEXTS = (64, 1024)
"""Cached tokens per request of the two curves."""
BUDGET_S = 14.0
LEAST_S = 2.0
"""A profile takes so long if it has to, even if it is asked to take less."""
ROUNDS = 3
"""Every curve is visited this often: what happens to the machine meanwhile happens to all."""


@dataclass(frozen=True)
class Profile:
    """A measured table and how it was measured."""

    table: CostTable
    gamma: int
    seconds: float
    steps: int
    repeats: tuple[int, int] = (0, 0)  # fewest and most of a point
    kept: CostTable | None = None  # the saved table, where that is steadier: it stays, and is planned with

    @property
    def unsteady(self) -> float:
        """Share of the points whose repeats differ widely: how far to trust the table."""
        return self.table.unsteady or 0.0

    def break_even(self, width: int, context: int | None = None) -> float:
        """Emitted tokens per step from which one request gains by verifying `width` drafts."""
        table = self.table
        at = float(table.context_lengths[0] if context is None else context)
        alone = table.step_costs(1, 1, 1, at, draft_requests=0)[0]
        return float(table.step_costs(1, 1 + width, 1, at, depth=width)[0] / alone)

    @property
    def verdict(self) -> str:
        """What acceptance it takes for speculation to pay on this machine, one request at a time."""
        if not self.gamma:
            return "no drafter: there is nothing to verify"
        full = self.break_even(self.gamma)
        needed = acceptance_for(full - 1, self.gamma)
        if needed is None:
            return (
                f"verifying all {self.gamma} drafts costs {full:.2f} times a target-only step: more than it can ever emit; "
                "narrower windows are the planner's business"
            )
        return (
            f"verifying all {self.gamma} drafts costs {full:.2f} times a target-only step: it pays from "
            f"{full:.2f} emitted tokens per step on, i.e. when {100 * needed:.0f} % or more of the drafts that are reached "
            "are accepted"
        )


def acceptance_for(accepted: float, gamma: int) -> float | None:
    """The confidence c, equal at all positions, at which c + c² + ... + c^gamma is `accepted`; None if none is enough."""
    if accepted > gamma:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(1, gamma + 1)) < accepted else (low, middle)
    return high


def engine_fingerprint(engine: Engine) -> Fingerprint:
    """What a table of this engine is found by."""
    options = engine.options
    return fingerprint(
        engine.target,
        engine.drafter,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        graphs=options.graphs,
    )


def profile_and_save(
    engine: Engine,
    seconds: float = BUDGET_S,
    progress: Callable[[float], None] | None = None,
    path: str | Path | None = None,
    announce: Callable[[float], None] | None = None,
) -> Profile:
    """Measure what a step costs, plan with that from now on, and save it for every later start of the same engine.

    A table that was saved before stays, and is planned with, if this one is unsteady and more so: see `Profile.kept`.

    Args:
        seconds: time to take.
        progress: called with the share that is done.
        path: where to save the table (None: where every later start looks).
        announce: called with the seconds that it will really take, before most of it.

    Raises:
        ConfigurationError: requests are running.
        SurefootError: it cannot be saved; it is planned with all the same.
    """
    found = profile(engine, budget_s=seconds, progress=progress, announce=announce)
    place = Path(path or table_path(found.table.fingerprint))
    saved = saved_table(place, found.table.fingerprint)
    if saved is not None and not found.table.replaces(saved):
        engine.policy.costs.use(saved)
        return replace(found, kept=saved)
    engine.policy.costs.use(found.table)
    found.table.save(place)
    return found


def profile(
    engine: Engine,
    *,
    budget_s: float = BUDGET_S,
    contexts: tuple[int, ...] = CONTEXTS,
    progress: Callable[[float], None] | None = None,
    announce: Callable[[float], None] | None = None,
) -> Profile:
    """Measure the cost table of an idle engine. Everything it had cached for later requests is forgotten.

    Args:
        budget_s: seconds to take. Where that is not enough for all points twice, fewer points are measured; the least that
            makes a table is measured whatever it takes.
        contexts: cached tokens per request; cut to what the engine can hold.
        progress: called after every step with the share that is done.
        announce: called once, with the seconds that it will take, as soon as they can be told.

    Raises:
        ConfigurationError: the engine has requests.
    """
    start = time.perf_counter()
    options = engine.options
    model_gamma = engine.drafter.model_gamma if engine.drafter else None
    lengths = _contexts_that_fit(engine, contexts)
    points = points_of(lengths, options.max_num_seqs, engine.gamma, engine.runner.bucket, model_gamma)
    with StepTimer(engine) as timer:
        _measure(timer, points, budget_s, progress, announce)
    counts = timer.counts.values()
    padded = any(engine.runner.bucket(size) > size for size in range(1, 33))
    return Profile(
        timer.samples.table(engine_fingerprint(engine), model_gamma or engine.gamma, padded),
        engine.gamma,
        time.perf_counter() - start,
        sum(counts),
        (min(counts), max(counts)),
    )


def _measure(
    timer: StepTimer,
    points: list[Point],
    seconds: float,
    progress: Callable[[float], None] | None,
    announce: Callable[[float], None] | None,
) -> None:
    """Turn by turn: the curves in rounds, and within a curve the point that has used the least time so far."""
    start = time.perf_counter()
    contexts = sorted({point.context for point in points})
    cost_ms = _estimate(timer, points)
    required = visits_within(points, cost_ms.__getitem__, max(seconds, LEAST_S) - (time.perf_counter() - start))
    spent = dict.fromkeys(required, 0.0)
    shown = 0.0

    def still_needed() -> float:
        """Seconds of the measurements that are to be made in any case."""
        return sum(max(0, visits - timer.counts[point]) * cost_ms[point] for point, visits in required.items()) / 1e3

    if announce is not None:
        announce(max(seconds, time.perf_counter() - start + still_needed()))
    turns = [(visits, context) for visits in range(1, ROUNDS + 1) for context in contexts]
    for turn, (visits, context) in enumerate(turns, 1):
        curve = [point for point in required if point.context == context]
        entered = False
        while True:
            elapsed = time.perf_counter() - start
            left = seconds * turn / len(turns) - elapsed
            unmet = [point for point in curve if timer.counts[point] < min(visits, required[point])]
            fitting = unmet or [point for point in curve if cost_ms[point] <= left * 1e3]
            if not fitting:
                break
            if not entered:
                timer.enter(context)
                timer.time(max(curve, key=lambda point: (point.requests, -point.rows)), keep=False)
                entered = True
            point = min(fitting, key=spent.__getitem__)
            cost_ms[point] = timer.time(point)
            spent[point] += cost_ms[point]
            if progress is not None:
                shown = max(shown, elapsed / (elapsed + max(seconds - elapsed, still_needed(), 1e-9)))
                progress(shown)
    if progress is not None:
        progress(1.0)


def _estimate(timer: StepTimer, points: list[Point]) -> dict[Point, float]:
    """What a measurement of every point will take, in ms: on the line through the smallest and the largest pass.

    The curve of a pass bends upwards, so the line lies above it, if anything.
    """
    found: dict[Point, float] = {}
    for context in sorted({point.context for point in points}):
        curve = [point for point in points if point.context == context]
        whole = sorted(
            (point for point in curve if point.depth is None), key=lambda point: (point.rows, point.requests)
        )
        ends = whole[0], whole[-1]
        timer.enter(context)
        for point in ends:
            timer.time(point, keep=False)  # the first pass of a size may compile, capture or page in
        rows, times = [point.rows for point in ends], [timer.time(point) for point in ends]
        found |= {point: float(np.interp(point.rows, rows, times)) for point in curve}
    return found


def _contexts_that_fit(engine: Engine, contexts: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths, cut so that every state slot can hold them at once; at least one token, and no length twice."""
    room = engine.scheduler.frontier + 2
    size, seqs = engine.options.block_size, engine.options.max_num_seqs
    # A sliding group gives blocks back as a request grows; the others must hold all of it.
    pools = zip(engine.blocks.pools, engine.cache.groups, strict=True)
    blocks = min(
        ((pool.num_blocks - 1) * group.stride for pool, group in pools if group.window is None),
        default=engine.max_model_len * seqs,
    )
    longest = min(engine.max_model_len - room, blocks // seqs * size - 2 * room)
    fitting = {max(1, min(length, longest)) for length in contexts}
    if len(fitting) == 1 and longest >= 8:
        fitting = {longest // 4, longest}
    return tuple(sorted(fitting))
