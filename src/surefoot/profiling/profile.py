"""`surefoot profile`: V and D of a loaded engine, measured inside its own step.

Real requests run through the real loop at forced widths; the stages of the step time themselves (`engine.clock`). Only what
would take long and does not matter is left out: the prompts' own passes are skipped and their cache filled with noise, for
the time of a pass depends on how much is cached, not on what. After every step the requests are rewound, which is setting
a length, so that a curve belongs to one context length.

V(B) counts the pass over B rows with what else grows by the row: acceptance, and the drafter's context. The same B can be a
few deep windows or many shallow ones; both are measured and V is their mean. Points take turns, whichever has used the least
time going next: a machine that slows down for a while slows all of them, and cheap points are repeated more often.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.engine.engine import Engine
from surefoot.engine.fingerprint import fingerprint, table_path
from surefoot.engine.policy import WidthPolicy
from surefoot.engine.request import Request
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import ForcedWidths
from surefoot.targets.target import TargetOutput

CONTEXTS = (64, 1024)
"""Cached tokens per request of the two curves."""
BUDGET_S = 14.0
STEADY = 1.5
ROUNDS = 3
"""Every curve is visited this often: what happens to the machine meanwhile happens to all."""
PERIOD = 16
"""Of the synthetic prompts: a text that repeats itself gives a lookup drafter something to propose."""
DRAFT, VERIFY = ("draft",), ("target", "accept", "extend")


@dataclass(frozen=True, order=True)
class Point:
    """A step to measure: `rows` target rows by `requests` requests at `context` cached tokens each."""

    context: int
    rows: int
    requests: int
    depth: int | None = None  # tokens drafted of each block; where it is given, D alone is what counts


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

    def add(self, context: int, report: StepReport) -> None:
        stages, requests = report.outputs.laps, report.inputs.num_emitting
        assert stages is not None  # somebody watches
        draft, verify = (sum(stages[name] for name in names) for names in (DRAFT, VERIFY))
        if report.inputs.plan.depth is not None:
            self.depth[report.inputs.plan.depth].append(draft)
            return
        self.verify[context, sum(report.outputs.widths) + requests][requests].append(verify)
        self.draft[requests].append(draft)
        self.overhead[requests].append(report.measured_ms - draft - verify)

    def table(self, fingerprint: dict[str, Any], gamma: int, padded: bool = False) -> CostTable:
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
            fingerprint=fingerprint,
        )

    def unsteady(self) -> float:
        """Share of the repeated points whose repeats lie more than a factor of `STEADY` apart."""
        repeats = [times for mixes in self.verify.values() for times in mixes.values()]
        repeats = [times for times in (*repeats, *self.draft.values()) if len(times) > 1 and min(times) > 0]
        return sum(max(times) > STEADY * min(times) for times in repeats) / max(1, len(repeats))


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


@dataclass(frozen=True)
class Profile:
    """A measured table and how it was measured."""

    table: CostTable
    gamma: int
    seconds: float
    steps: int
    repeats: tuple[int, int] = field(default=(0, 0))  # fewest and most of a point
    unsteady: float = 0.0  # share of the points whose repeats differ widely: how far to trust all this

    def break_even(self, width: int, context: int | None = None) -> float:
        """Emitted tokens per step from which one request gains by verifying `width` drafts (design.md section 4)."""
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


def buckets_up_to(rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, then powers of two, and `rows` itself."""
    powers = [1 << k for k in range(rows.bit_length())]
    halfway = [power * 3 // 2 for power in powers if power <= 16]
    return sorted({size for size in (*powers, *halfway, rows) if size <= rows})


def points_of(
    contexts: tuple[int, ...], max_num_seqs: int, gamma: int, bucket: Callable[[int], int] = lambda rows: rows
) -> list[Point]:
    """Every bucket at every context, by as few requests as can bring so many rows and by as many.

    Where everybody has drafts to verify anyway, one mix is enough.
    """
    points = []
    limit = max_num_seqs * (gamma + 1)
    # Where passes are padded, only padded sizes have a time of their own.
    for rows in sorted({min(bucket(size), limit) for size in buckets_up_to(limit)}):
        most = min(rows, max_num_seqs)
        mixes = {most} if rows > max_num_seqs else {-(-rows // (gamma + 1)), most}
        points += [Point(context, rows, requests) for context in contexts for requests in sorted(mixes)]
    return points


class SpreadWidths(ForcedWidths):
    """Forced widths that add up to a budget, spread evenly."""

    def __init__(self, gamma: int) -> None:
        super().__init__([gamma])  # the most there can be
        self.budget = 0

    def widths(self, step: int, limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        count = max(len(limits), 1)
        return np.minimum(self.budget // count + (np.arange(len(limits)) < self.budget % count), limits)


def profile_and_save(
    engine: Engine,
    seconds: float = BUDGET_S,
    progress: Callable[[float], None] | None = None,
    path: str | Path | None = None,
) -> Profile:
    """Measure what a step costs, plan with that from now on, and save it for every later start of the same engine.

    Args:
        seconds: time for measured steps.
        progress: called with the share that is done.
        path: where to save the table (None: where every later start looks).

    Raises:
        ConfigurationError: requests are running.
        SurefootError: it cannot be saved; it is planned with all the same.
    """
    found = profile(engine, budget_s=seconds, progress=progress)
    engine.policy.costs.use(found.table)
    found.table.save(path or table_path(found.table.fingerprint))
    return found


def profile(
    engine: Engine,
    *,
    budget_s: float = BUDGET_S,
    contexts: tuple[int, ...] = CONTEXTS,
    progress: Callable[[float], None] | None = None,
) -> Profile:
    """Measure the cost table of an idle engine. Everything it had cached for later requests is forgotten.

    Args:
        budget_s: seconds of measured steps; every point is measured at least twice, whatever that takes.
        contexts: cached tokens per request; cut to what the engine can hold.
        progress: called with the share that is done.

    Raises:
        ConfigurationError: the engine has requests.
    """
    if engine.has_work:
        raise ConfigurationError("only an idle engine can be profiled: wait for its requests or cancel them")
    start = time.perf_counter()
    lengths = _contexts_that_fit(engine, contexts)
    points = points_of(lengths, engine.options.max_num_seqs, engine.gamma, engine.runner.bucket)
    model_gamma = engine.drafter.model_gamma if engine.drafter else None
    if model_gamma is not None:  # without a model, drafts cost next to nothing
        points += [Point(lengths[0], 1, 1, depth) for depth in buckets_up_to(model_gamma - 1)]
    with _Bench(engine) as bench:
        _measure(bench, points, lengths, budget_s, progress)
    config = engine.options
    measured = fingerprint(
        engine.target,
        engine.drafter,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        graphs=config.graphs,
    )
    counts = bench.counts.values()
    padded = any(engine.runner.bucket(size) > size for size in range(1, 33))
    return Profile(
        bench.samples.table(measured, model_gamma or engine.gamma, padded),
        engine.gamma,
        time.perf_counter() - start,
        sum(counts),
        (min(counts), max(counts)),
        bench.samples.unsteady(),
    )


def _measure(
    bench: _Bench,
    points: list[Point],
    contexts: tuple[int, ...],
    budget_s: float,
    progress: Callable[[float], None] | None,
) -> None:
    """Turn by turn: the curves in rounds, and within a curve the point that has used the least time so far."""
    spent = dict.fromkeys(points, 0.0)
    start = time.perf_counter()
    turns = [(visits, context) for visits in range(1, ROUNDS + 1) for context in contexts]
    for turn, (visits, context) in enumerate(turns, 1):
        curve = [point for point in points if point.context == context]
        warm = False
        while True:
            elapsed = time.perf_counter() - start
            # A step as long as this is a mean over much of what happens on the machine.
            unmet = [p for p in curve if bench.counts[p] < min(visits, 1 if spent[p] > 25 * budget_s else 2)]
            if not unmet and elapsed >= budget_s * turn / len(turns):
                break
            if not warm:
                bench.enter(context)
                bench.step(max(curve, key=lambda point: (point.requests, -point.rows)), keep=False)
                warm = True
            point = min(unmet or curve, key=spent.__getitem__)
            spent[point] += bench.step(point)
            if progress is not None:
                progress(
                    min(1.0, max(elapsed / budget_s if budget_s else 0.0, sum(bench.counts.values()) / 2 / len(points)))
                )
    if progress is not None:
        progress(1.0)


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


class _Bench:
    """The engine on the test bench: its loop is its own, its requests and widths are ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.samples = engine, Samples.empty()
        self.counts: dict[Point, int] = defaultdict(int)
        self._widths = SpreadWidths(engine.gamma)
        self._requests: list[Request] = []
        self._last: StepReport | None = None

    def __enter__(self) -> _Bench:
        engine = self.engine
        self._kept = engine.policy, engine.overlap, engine.blocks.prefix_reuse
        engine.policy = WidthPolicy(engine.gamma, num_slots=engine.options.max_num_seqs, forced=self._widths)
        engine.overlap, engine.blocks.prefix_reuse = False, False
        self._hidden = self._kept[1]  # an overlapped loop hides the host's time
        engine.add_observer(self._watch)
        self._draft_by_model(True)
        self._generator = np.random.default_rng(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self.engine.remove_observer(self._watch)
        self._draft_by_model(False)
        self.engine.policy, self.engine.overlap, self.engine.blocks.prefix_reuse = self._kept

    def _draft_by_model(self, always: bool) -> None:
        """D of two drafters in one is that of the trained one: these texts, which repeat, would all be looked up."""
        if self.engine.drafter is not None:
            self.engine.drafter.draft_always(always)

    def _watch(self, report: StepReport) -> None:
        self._last = report

    def _leave(self) -> None:
        self.engine.scheduler.running[:] = self._requests
        for request in self._requests:
            self.engine.cancel(request.request_id)
        self._requests = []

    def enter(self, context: int) -> None:
        """Every slot gets a request of `context` cached tokens."""
        self._leave()
        engine, vocab = self.engine, self.engine.target.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=engine.max_model_len - context, ignore_eos=True)
        with _without_target(engine):
            for _ in range(engine.options.max_num_seqs):
                text = np.resize(self._generator.integers(0, vocab, PERIOD), context)
                self._requests.append(engine.add_request(text.tolist(), params))
            engine.step()
            while reading := [request for request in self._requests if not request.num_output]:
                # Those that are through wait for the others; those without a slot yet are still in the queue.
                engine.scheduler.running[:] = [request for request in reading if request.is_running]
                engine.step()
        _fill_with_noise(engine.cache)
        for request in self._requests:
            row = engine.state.history[request.slot]
            row.copy_(torch.from_numpy(np.resize(request.prompt_token_ids[:PERIOD], len(row))))
        self._texts = engine.state.history.clone()
        self._rewind()

    def _rewind(self) -> None:
        """Forget what the last step emitted, on both sides."""
        state = self.engine.state
        for request in self._requests:
            length = len(request.prompt_token_ids)
            state.lengths[request.slot] = request.num_cached = length
            del request.token_ids[length + 1 :]
            del request.output.token_ids[1:]
        state.history.copy_(self._texts)

    def step(self, point: Point, keep: bool = True) -> float:
        """Measure one step; its milliseconds."""
        engine = self.engine
        engine.scheduler.running[:] = self._requests[: point.requests]
        self._widths.budget = point.rows - point.requests
        engine.policy.fixed_depth = point.depth
        engine.step()
        report = self._last
        assert report is not None
        if self._hidden:
            report = StepReport(**{**vars(report), "host_ms": 0.0})
        if keep:
            self.counts[point] += 1
            self.samples.add(point.context, report)
        self._rewind()
        return report.measured_ms


class _NoTarget:
    """Stands in for the target while prompts are read."""

    replayed: bool | None = None

    def __init__(self, engine: Engine) -> None:
        self._vocab, self._like = engine.target.vocab_size, torch.zeros(0, dtype=engine.target.dtype)

    def bucket(self, rows: int) -> int:
        return rows

    def prepare(self, cache: PagedCache, feature_layers: tuple[int, ...]) -> None: ...

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        logits = batch.token_ids.new_zeros(len(batch.logit_rows), self._vocab, dtype=self._like.dtype)
        return TargetOutput(logits, None)


@contextmanager
def _without_target(engine: Engine) -> Iterator[None]:
    step = engine.decode_step
    kept, step.runner = step.runner, _NoTarget(engine)
    try:
        yield
    finally:
        step.runner = kept


def _fill_with_noise(cache: PagedCache) -> None:
    """Give every block in use contents of its own pages: zeros that were never written all lie in the same one."""
    groups = [*cache.target_group, *[cache.drafter_group] * len(cache.drafter_kv)]
    for (key, value), group in zip((*cache.target_kv, *cache.drafter_kv), groups, strict=True):
        used = int(cache.block_tables[group].max()) + 1
        for storage in (key, value):
            blocks = storage.view(-1, cache.block_size, *storage.shape[1:])[1:used]
            blocks.copy_(torch.randn_like(storage[: cache.block_size]).expand_as(blocks))
