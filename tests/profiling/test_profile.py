"""The profiler over tiny engines: what it measures, what it leaves, and that its table predicts the engine's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.engine.device import ThreadDevice
from surefoot.engine.engine import Engine
from surefoot.engine.graphs import EagerRunner
from surefoot.engine.messages import StepInputs
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError
from surefoot.profiling.points import Point, buckets_up_to, points_of
from surefoot.profiling.profile import Profile, _measure, acceptance_for, profile, profile_and_save
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import Reason
from tests.engine.engines import build
from tests.tiny_models import tiny_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark", "dflash"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_profile_has_every_bucket_and_leaves_the_engine_as_it_was(drafter: str, architecture: str) -> None:
    target = tiny_target(architecture)
    engine = build(target, drafter, max_num_seqs=4)
    expected = [request.token_ids for request in build(target, drafter, max_num_seqs=4).run(PROMPTS, GREEDY)]
    policy, shares = engine.policy, list[float]()
    found = profile(engine, budget_s=0.2, progress=shares.append)
    table, gamma = found.table, engine.gamma
    assert table.token_buckets == tuple(buckets_up_to(4 * (gamma + 1)))
    assert len(table.context_lengths) == 2
    assert found.repeats[0] >= 1
    assert all(ms > 0 for curve in table.verify_ms for ms in curve)
    assert (max(table.draft_ms) > 0) == bool(gamma)
    assert table.fixed_overhead_ms > 0
    assert shares
    assert max(shares) <= 1.0
    engine.assert_clean()
    assert engine.policy is policy
    assert policy.learner.statistics.steps == 0  # nothing was learned from made-up texts
    assert engine.blocks.prefix_reuse
    assert [request.token_ids for request in engine.run(PROMPTS, GREEDY)] == expected


class Watched:
    """A device that keeps what every step was given, and can fail."""

    def __init__(self, engine: Engine, fails_at: int | None = None, failure: BaseException | None = None) -> None:
        self.engine, self.device = engine, engine.device
        self.overlaps, self.reads_are_free = self.device.overlaps, self.device.reads_are_free
        self.fails_at, self.failure = fails_at, failure
        self.seen: list[tuple[StepInputs, list[int], list[int]]] = []

    def submit(self, step: Any, inputs: StepInputs) -> Any:
        pending = self.device.submit(step, inputs)
        if len(self.seen) == self.fails_at:
            assert self.failure is not None
            raise self.failure  # after the step has changed the device's data
        slots = inputs.slots
        before = [slot.num_cached for slot in inputs.updates.slots] or self.lengths
        self.lengths = before
        self.seen.append((inputs, [before[slot] for slot in slots], pending.result().widths))
        return pending


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_point_is_measured_as_asked(drafter: str, architecture: str) -> None:
    engine = build(tiny_target(architecture), drafter, max_num_seqs=4)
    engine.device = watched = Watched(engine)
    table = profile(engine, budget_s=0.0, contexts=(16, 48)).table
    model_gamma = engine.drafter.model_gamma if engine.drafter else None
    points = points_of((16, 48), 4, engine.gamma, model_gamma=model_gamma)
    steps = Counter(
        Point(contexts[0], sum(widths) + len(contexts), len(contexts), inputs.plan.depth)
        for inputs, contexts, widths in watched.seen
        if len(set(contexts)) == 1 and max(widths, default=0) - min(widths, default=0) <= 1
    )
    assert steps.total() == len(watched.seen)  # one context per step, widths spread evenly
    assert steps.keys() == set(points)
    assert all(steps[point] >= 2 for point in points)
    assert table.token_buckets == tuple(buckets_up_to(4 * (engine.gamma + 1)))
    assert table.context_lengths == (16, 48)
    assert [len(curve) for curve in table.verify_ms] == [len(table.token_buckets)] * 2
    assert table.draft_requests == table.batch_sizes == tuple(sorted({p.requests for p in points}))
    assert table.draft_depths == (tuple(range(1, engine.gamma + 1)) if model_gamma else ())


@pytest.mark.parametrize(
    "failure", [RuntimeError("the device is gone"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("step", [0, 1, 7, 30])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark", "combined-dspark"])
def test_a_failure_while_measuring_leaves_the_engine_usable(drafter: str, step: int, failure: BaseException) -> None:
    expected = [request.token_ids for request in build(tiny_target(), drafter, max_num_seqs=4).run(PROMPTS, GREEDY)]
    engine = build(tiny_target(), drafter, max_num_seqs=4)
    engine.run(PROMPTS, GREEDY)  # its prefixes are cached now
    before = (engine.policy, engine.overlap, engine.scheduler, engine.decode_step, engine.statistics.steps)
    engine.device = Watched(engine, step, failure)
    with pytest.raises(type(failure)):
        profile(engine, budget_s=0.0)
    engine.device = engine.device.device
    engine.assert_clean()
    assert (engine.policy, engine.overlap, engine.scheduler, engine.decode_step, engine.statistics.steps) == before
    assert engine.decode_step.laps is None
    requests = engine.run(PROMPTS, GREEDY)
    assert [request.token_ids for request in requests] == expected
    assert [request.cached_tokens for request in requests] == [0, 0, 0]  # the noise is nobody's prefix
    assert [request.token_ids for request in engine.run(PROMPTS, GREEDY)] == expected
    assert engine.statistics.blocks.verified > 0


class VirtualTimer:
    """A step timer whose steps take made-up times on a made-up clock."""

    def __init__(self, clock: list[float], cost_ms: Callable[[Point], float]) -> None:
        self.clock, self.cost_ms, self.counts = clock, cost_ms, Counter[Point]()

    def enter(self, context: int) -> None:
        self.clock[0] += 0.02

    def time(self, point: Point, keep: bool = True) -> float:
        self.clock[0] += self.cost_ms(point) / 1e3
        self.counts[point] += keep
        return self.cost_ms(point)


@pytest.mark.parametrize("seconds", [2.0, 6.0, 14.0, 60.0])
@pytest.mark.parametrize("row_ms", [0.05, 2.0, 6.0])
def test_it_takes_the_time_it_was_given_and_the_bar_says_how_much_is_done(
    seconds: float, row_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6 ms per row, all points twice would take 20 s."""
    clock = [0.0]
    monkeypatch.setattr("surefoot.profiling.profile.time.perf_counter", lambda: clock[0])
    timer = VirtualTimer(clock, lambda point: 20 + row_ms * point.rows * (1 + point.context / 4096))
    shown: list[tuple[float, float]] = []
    told: list[float] = []
    points = points_of((64, 1024), 16, 7, model_gamma=7)
    _measure(timer, points, seconds, lambda share: shown.append((share, clock[0])), told.append)  # type: ignore[arg-type]
    total = clock[0]
    least = max(seconds, 2.0 if row_ms < 6 else 6.0)  # the fewest points at 6 ms per row take some seconds
    assert seconds * 0.9 <= total <= least * 1.2
    assert told == [pytest.approx(total, rel=0.15)]
    shares = [share for share, _ in shown]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert max(shares[:-1]) < 1.0  # it stands at the end only there
    for share, moment in shown:
        assert share == pytest.approx(moment / total, abs=0.12)


def test_only_an_idle_engine_can_be_profiled() -> None:
    engine = build(tiny_target(), "prompt-lookup")
    engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(ConfigurationError, match="idle"):
        profile(engine, budget_s=0.0)


def test_an_overlapped_engine_can_be_profiled() -> None:
    engine = build(tiny_target(), "prompt-lookup", max_num_seqs=2, device=ThreadDevice(latency_ms=1.0))
    table = profile(engine, budget_s=0.0).table
    assert engine.overlap
    assert table.fixed_overhead_ms >= 1.0  # the device's latency belongs to every step; the host's time is hidden


def test_the_planner_predicts_what_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps as the policy measures them, by the planner and at forced widths, from one profile, on a made-up clock."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    monkeypatch.setattr("time.perf_counter", now)

    def made(width: Any = None, table: CostTable | None = None) -> Any:
        """An engine whose target pass takes 10 ms and half of one per row, whose draft takes 2 ms."""
        engine = build(tiny_target(), "dspark", width=width, max_num_seqs=4, check_layout=False, table=table)
        run, propose = engine.runner.run, engine.drafter.propose

        def slow_run(batch: Any, *rest: Any) -> Any:
            clock[0] += 0.010 + 0.0005 * batch.num_rows
            return run(batch, *rest)

        def slow_propose(*arguments: Any) -> Any:
            clock[0] += 0.002
            return propose(*arguments)

        engine.runner.run, engine.drafter.propose = slow_run, slow_propose
        return engine

    table = profile(made(), budget_s=4.0).table
    for width in (None, "0,3,1", 4):
        engine = made(width, table)
        reports: list[StepReport] = []
        engine.add_observer(reports.append)
        engine.run([prompt[:8] for prompt in PROMPTS], SamplingParams(temperature=0.0, max_tokens=60))
        steps = [report for report in reports if not report.plan.load.prefill_tokens]
        ratios = [report.measured_ms / report.plan.predicted_ms for report in steps if report.plan.predicted_ms]
        assert len(ratios) == len(steps) > 10
        assert 0.97 < min(ratios) <= max(ratios) < 1.03
        assert Reason.NO_TABLE.value not in engine.statistics.reasons
        for report in steps:  # stages add up to the step, but for the copy of the outputs
            assert report.outputs.laps is not None
            assert sum(report.outputs.laps.values()) <= report.outputs.device_ms


def made_up(gamma: int, verify: list[float], draft: float = 0.0) -> Profile:
    rows = tuple(range(1, len(verify) + 1))
    return Profile(CostTable(rows, (tuple(verify),), draft_ms=(draft,)), gamma, 1.0, 10)


def test_depths_are_measured_for_a_drafter_with_a_model() -> None:
    for drafter, depths in (("dspark", (1, 2, 3, 4)), ("combined-dspark", (1, 2, 3, 4)), ("prompt-lookup", ())):
        engine = build(tiny_target("llama"), drafter, max_num_seqs=2, gamma=4)
        table = profile(engine, budget_s=0.1).table
        assert table.draft_depths == depths
        assert len(table.draft_depth_ms) == len(depths)
        if depths:
            assert table.draft_depth_ms[-1] == table.draft_ms[0]
            assert list(table.draft_depth_ms) == sorted(table.draft_depth_ms)


def test_the_verdict_is_the_break_even_of_the_full_width() -> None:
    found = made_up(2, [10.0, 12.0, 15.0], draft=1.0)
    assert found.break_even(1) == pytest.approx(1.3)
    assert found.break_even(2) == pytest.approx(1.6)
    needed = acceptance_for(0.6, 2)
    assert needed is not None
    assert needed + needed**2 == pytest.approx(0.6)
    assert "1.60 emitted tokens" in found.verdict
    assert f"{100 * needed:.0f} %" in found.verdict
    assert acceptance_for(2.5, 2) is None
    assert "more than it can ever emit" in made_up(2, [10.0, 30.0, 45.0]).verdict
    assert "no drafter" in made_up(0, [10.0]).verdict


def test_padded_passes_make_a_staircase() -> None:
    target = tiny_target()
    engine = build(target, "prompt-lookup", max_num_seqs=2, runner=EagerRunner(target, (2, 4, 8, 16)))
    table = profile(engine, budget_s=0.0).table
    assert table.token_buckets == (2, 4, 8, 10)
    assert table.captured_tokens is None
    assert table.verify_ms_at(5) == table.verify_ms_at(8)


def test_a_steadier_table_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(tiny_target(), "prompt-lookup", max_num_seqs=2)
    path = tmp_path / "table.json"

    def measured(unsteady: float | None) -> Profile:
        found = profile(engine, budget_s=0.0)
        found = replace(found, table=replace(found.table, unsteady=unsteady))
        with monkeypatch.context() as patch:
            patch.setattr("surefoot.profiling.profile.profile", lambda *_, **__: found)
            return profile_and_save(engine, path=path)

    def saved() -> CostTable:
        return CostTable.load(path)

    first = measured(0.6)  # better than none
    assert first.kept is None
    assert saved().unsteady == 0.6
    second = measured(0.4)
    assert second.kept is None
    assert saved() == second.table
    assert engine.policy.costs.table == second.table
    third = measured(0.7)
    assert third.kept == second.table == saved()  # the unsteady one has not replaced it
    assert third.unsteady == 0.7
    assert engine.policy.costs.table == second.table
    assert measured(0.2).kept is None  # steady enough
    assert saved().unsteady == 0.2
    path.write_text("{}")
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert measured(0.9).kept is None
    assert saved().unsteady == 0.9


def test_a_table_says_how_steady_it_was() -> None:
    found = profile(build(tiny_target(), "none", max_num_seqs=1), budget_s=0.1)
    assert found.table.unsteady is not None
    assert found.unsteady == found.table.unsteady


def test_a_prediction_is_for_the_rows_that_ran() -> None:
    """A lookup drafter that finds nothing verifies nothing; counting its windows would mislead the drift tracker."""
    table = CostTable((1, 2, 4, 8, 40), ((1.0, 2.0, 4.0, 8.0, 40.0),), captured_tokens=0)
    engine = build(tiny_target(), "prompt-lookup", max_num_seqs=4, table=table)
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    engine.run([[1, 2, 3, 5, 8, 13, 21]], SamplingParams(temperature=0.0, max_tokens=12))
    decodes = [report for report in reports if not report.plan.load.prefill_tokens]
    assert any(report.outputs.proposed == [0] for report in decodes)
    for report in decodes:
        assert report.plan.predicted_ms == pytest.approx(1.0 + sum(report.outputs.widths))
