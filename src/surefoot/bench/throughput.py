"""Aggregate tokens per second of several arms over the same prompts, at several concurrencies.

All arms share one loaded target; each has an engine of its own, so that an arm without a drafter pays nothing for one. Where
a step is over when it returns (a CPU), the arms take turns every few steps and every arm's clock runs during its own steps only:
a machine that is slow for a second is slow for all of them. Elsewhere they take turns run by run. Every repeat begins with
another arm.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from surefoot.drafters.base import Drafter
from surefoot.engine.assembly import assemble
from surefoot.engine.engine import Engine
from surefoot.engine.options import EngineOptions
from surefoot.engine.request import Request
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target

PASSES = ("draft", "target", "accept", "extend")
"""Stages of a step that are work on rows of the models: draft pass, target pass, what is drawn from its logits, and the
drafter's context. All else is the host's."""

TURNS = 3
"""Requests of a run by those that run at once. With fewer, most of a run would be its end, when nobody refills the batch."""
TURN_STEPS = 8
"""Steps of one arm before the next has its turn: about a second, short against most of what happens to a machine."""
GOLDEN = 0.618034  # multiples of it modulo 1 lie evenly spread


@dataclass(frozen=True)
class Arm:
    """One way to decode: an engine and its name."""

    name: str  # "none", "fixed:K", "adaptive"
    engine: Engine


def build_arms(
    names: Sequence[str],
    target: Target,
    drafter: Drafter | None,
    *,
    max_num_seqs: int,
    max_model_len: int,
    cost_table: str = "auto",
    seed: int = 0,
) -> list[Arm]:
    """An engine per arm over one target.

    Raises:
        ConfigurationError: an arm that does not exist, or one that needs a drafter where there is none.
    """
    arms = []
    for name in names:
        kind, _, width = name.partition(":")
        if kind not in ("none", "fixed", "adaptive") or (kind == "fixed") != width.isdecimal():
            raise ConfigurationError(f"arm is {name!r}; allowed: none, fixed:K (a width), adaptive")
        if kind != "none" and drafter is None:
            raise ConfigurationError(f"arm {name!r} needs a drafter: choose one, or bench the arm none alone")
        chosen = None if kind == "none" or drafter is None else drafter.separate()
        frontier = max(chosen.gamma + 1, chosen.block_slots) if chosen else 1
        options = EngineOptions(
            width=int(width) if width else None,
            # Fixed widths need none, but a drafter may choose its sources by it.
            cost_table="none" if chosen is None else cost_table,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(512, max_num_seqs * frontier),
            max_model_len=min(max_model_len, target.max_model_len),
            prefix_reuse=False,  # or every repeat would find its prompts in the cache
            seed=seed,
        )
        arms.append(Arm(name, assemble(target, chosen, options)))
    return arms


@dataclass
class ArmRun:
    """One arm over all jobs once."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    host_ms: list[float] = field(default_factory=list)  # of pure decode steps
    target_ms: list[float] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  # predicted / measured ms
    request_steps: int = 0
    accepted: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class BenchJob(NamedTuple):
    """One prompt to answer."""

    prompt: list[int]  # token ids
    params: SamplingParams


def jobs_of(prompts: Sequence[list[int]], params: SamplingParams, count: int) -> list[BenchJob]:
    """`count` jobs, the prompts round and round; lengths of answers are spread over half to one and a half of `max_tokens`.

    Equal lengths would be a gift to arms that advance in step: their answers all end at once, and the prompts after them
    are read in one large batch. No served workload is like that.
    """
    assert params.max_tokens is not None
    lengths = (max(1, round(params.max_tokens * (0.5 + index * GOLDEN % 1))) for index in range(count))
    return [
        BenchJob(prompts[index % len(prompts)], replace(params, max_tokens=length))
        for index, length in enumerate(lengths)
    ]


def run_arm(engine: Engine, jobs: Sequence[BenchJob], concurrency: int) -> ArmRun:
    """Do all jobs, `concurrency` at a time: the next one enters when one has ended."""
    run = ArmRun()
    for _ in _steps(run, engine, jobs, concurrency):
        pass
    return run


def _steps(run: ArmRun, engine: Engine, jobs: Sequence[BenchJob], concurrency: int) -> Iterator[None]:
    """The steps of one run, which it fills in; its clock stands still between them."""
    waiting, requests = deque(jobs), list[Request]()
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    try:
        while waiting or engine.has_work:
            start = time.perf_counter()
            while waiting and len(engine.requests) < concurrency:
                requests.append(engine.add_request(*waiting.popleft()))
            began = time.perf_counter()
            events = engine.step()
            ended = time.perf_counter()
            run.steps += 1
            run.seconds += ended - start
            for request, event in events:
                request.raise_error()
                run.tokens += len(event.token_ids)
            if reports:
                _take(run, reports.pop(), (ended - began) * 1e3)
            yield
    finally:
        engine.remove_observer(reports.append)
    for request in requests:
        run.request_steps += request.statistics.steps
        run.accepted += request.statistics.accepted
        run.widths.update(request.statistics.widths)
        run.texts.append(request.token_ids[len(request.prompt_token_ids) :])


def _run_together(
    engines: Sequence[Engine], jobs: Sequence[BenchJob], concurrency: int, progress: Callable[[float], None]
) -> list[ArmRun]:
    """One run of every engine, in the order given.

    Turn by turn, the next is that of the run with the fewest tokens so far: all are under way until the end, whatever their
    speeds.
    """
    runs = [ArmRun() for _ in engines]
    courses = {
        index: _steps(run, engine, jobs, concurrency)
        for index, (run, engine) in enumerate(zip(runs, engines, strict=True))
    }
    together = all(engine.device.reads_are_free for engine in engines)
    expected = len(engines) * sum(job.params.max_tokens or 1 for job in jobs)
    while courses:
        turn = min(courses, key=lambda index: runs[index].tokens) if together else next(iter(courses))
        for _ in range(TURN_STEPS):
            if next(courses[turn], True):  # a step yields None: it has ended
                del courses[turn]
                break
        progress(min(1.0, sum(run.tokens for run in runs) / expected))
    return runs


def _take(run: ArmRun, report: StepReport, wall_ms: float) -> None:
    stages, decision = report.outputs.laps, report.plan.decision
    assert stages is not None  # it is being watched
    assert decision is not None
    run.reasons[decision.reason.value] += 1
    if report.plan.load.prefill_tokens:
        return
    run.host_ms.append(wall_ms - sum(stages[name] for name in PASSES))
    run.target_ms.append(stages["target"])
    run.draft_ms.append(stages["draft"])
    if report.plan.predicted_ms:
        run.predicted.append(report.plan.predicted_ms / report.measured_ms)


@dataclass(frozen=True)
class ArmFigures:
    """One arm at one concurrency: medians over the repeats."""

    concurrency: int
    arm: str
    tokens_per_s: float
    ratio: float | None  # to the arm "none"
    accepted_length: float  # accepted draft tokens per request and step
    host_ms_per_step: float  # everything but the passes, median of pure decode steps
    target_ms: float
    draft_ms: float
    predicted_ratio: float | None  # predicted / measured step time, median
    width_histogram: dict[int, int]  # width -> steps of requests
    reasons: dict[str, int]  # the planner's, over steps
    identical: bool | None  # to the arm "none", token for token, at temperature 0
    repeats: list[float]  # tokens per second of each


@dataclass(frozen=True)
class Throughput:
    """All arms at all concurrencies."""

    rows: list[ArmFigures]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows], "summary": self.summary()}

    def summary(self) -> list[dict[str, Any]]:
        """Per concurrency: the best arm, and the share of it that adaptive reaches."""
        found = []
        for count in dict.fromkeys(row.concurrency for row in self.rows):
            rows = {row.arm: row.tokens_per_s for row in self.rows if row.concurrency == count}
            best = max(rows, key=rows.__getitem__)
            share = rows["adaptive"] / rows[best] if "adaptive" in rows else None
            found.append({"concurrency": count, "best": best, "adaptive_share": share})
        return found


def measure_throughput(
    arms: Sequence[Arm],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    concurrency: Sequence[int],
    repeats: int = 3,
    requests: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Throughput:
    """ArmRun every arm at every concurrency `repeats` times.

    Args:
        prompts: token ids; taken round and round until there are enough.
        params: of all requests; `max_tokens` is the mean length of answers (see `jobs_of`).
        requests: per run; None takes every prompt once, and at least `TURNS` times as many as run at once.
    """
    runs: dict[tuple[int, str], list[ArmRun]] = {(count, arm.name): [] for count in concurrency for arm in arms}
    rounds = [(0, max(concurrency)), *((repeat, count) for repeat in range(repeats) for count in concurrency)]

    def show(share: float) -> None:
        if progress is not None:
            progress((done + share) / len(rounds))

    for done, (repeat, count) in enumerate(rounds):
        order = [arms[(index + repeat) % len(arms)] for index in range(len(arms))]
        jobs = jobs_of(prompts, params, requests or max(len(prompts), TURNS * count))
        found = _run_together([arm.engine for arm in order], jobs, count, show)
        if done:  # the first round wakes kernels and caches, and lets the estimator learn
            for arm, run in zip(order, found, strict=True):
                runs[count, arm.name].append(run)
    rows = []
    for count in concurrency:
        plain = runs.get((count, "none"))
        rows += [_row(count, arm.name, runs[count, arm.name], plain, params.greedy) for arm in arms]
    return Throughput(rows)


def _row(count: int, arm: str, runs: list[ArmRun], plain: list[ArmRun] | None, greedy: bool) -> ArmFigures:
    speed = median(run.tokens_per_s for run in runs)
    widths: Counter[int] = sum((run.widths for run in runs), Counter())
    reasons: Counter[str] = sum((run.reasons for run in runs), Counter())

    def pooled(name: str) -> float:
        return _median([value for run in runs for value in getattr(run, name)])

    return ArmFigures(
        concurrency=count,
        arm=arm,
        tokens_per_s=speed,
        ratio=speed / median(run.tokens_per_s for run in plain) if plain else None,
        accepted_length=sum(run.accepted for run in runs) / max(1, sum(run.request_steps for run in runs)),
        host_ms_per_step=pooled("host_ms"),
        target_ms=pooled("target_ms"),
        draft_ms=pooled("draft_ms"),
        predicted_ratio=pooled("predicted") if any(run.predicted for run in runs) else None,
        width_histogram=dict(sorted(widths.items())),
        reasons=dict(reasons.most_common()),
        identical=all(run.texts == plain[0].texts for run in runs) if plain and greedy else None,
        repeats=[run.tokens_per_s for run in runs],
    )


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
