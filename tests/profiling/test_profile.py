"""The profiler over tiny engines: what it measures, what it leaves behind, and that its table predicts the engine's steps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from surefoot.engine.assembly import make_policy
from surefoot.engine.device import ThreadDevice
from surefoot.engine.engine import Engine
from surefoot.engine.fingerprint import find_table, fingerprint, load_table, table_path
from surefoot.engine.graphs import EagerRunner
from surefoot.engine.options import EngineOptions
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError, CostTableError
from surefoot.profiling.profile import Profile, Samples, acceptance_for, buckets_up_to, points_of, profile
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import Reason
from tests.engine.engines import EngineUnderTest, build, tiny_drafter
from tests.tiny_models import tiny_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]


def test_buckets_and_mixes() -> None:
    assert buckets_up_to(8) == [1, 2, 3, 4, 6, 8]
    assert buckets_up_to(128) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]
    assert buckets_up_to(10)[-1] == 10
    mixes = {(point.rows, point.requests) for point in points_of((64,), max_num_seqs=4, gamma=3)}
    assert mixes == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 4), (6, 4), (8, 4), (12, 4), (16, 4)}
    assert all(requests <= rows <= requests * 4 for rows, requests in mixes)


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


def test_the_planner_predicts_what_its_steps_take() -> None:
    """Whole steps as the policy measures them, by the planner and at forced widths, from one profile."""
    table = profile(build(tiny_target(), "dspark", max_num_seqs=4, check_layout=False), budget_s=1.0).table
    for width in (None, "0,3,1", 4):
        engine = build(tiny_target(), "dspark", width=width, max_num_seqs=4, check_layout=False, table=table)
        reports: list[StepReport] = []
        engine.add_observer(reports.append)
        engine.run([prompt[:8] for prompt in PROMPTS], SamplingParams(temperature=0.0, max_tokens=60))
        steps = [report for report in reports if not report.plan.load.prefill_tokens]
        ratios = [report.measured_ms / report.plan.predicted_ms for report in steps if report.plan.predicted_ms]
        assert len(ratios) == len(steps) > 10
        assert 1 / 3 < median(ratios) < 3  # generous: tests share their machine
        assert Reason.NO_TABLE.value not in engine.statistics.reasons
        for report in steps:  # stages add up to the step, but for the copy of the outputs
            assert report.outputs.laps is not None
            assert sum(report.outputs.laps.values()) <= report.outputs.device_ms


def made_up(gamma: int, verify: list[float], draft: float = 0.0) -> Profile:
    rows = tuple(range(1, len(verify) + 1))
    return Profile(CostTable(rows, (tuple(verify),), draft_ms=(draft,)), gamma, 1.0, 10)


def test_disturbed_points_do_not_make_their_neighbours_dear() -> None:
    """Times of 10 + rows, three of them disturbed: a pass is never dearer than a larger one, or than one with more cached."""
    samples, rows = Samples.empty(), (1, 2, 3, 4, 8)
    for context, more in ((64, 0.0), (1024, 1.0)):
        for count in rows:
            slow = {(64, 3): 40.0, (1024, 8): 9.0}.get((context, count), 0.0)
            samples.verify[context, count][1] += [10.0 + count + more + slow] * 2
    for requests, slow in ((1, 7.0), (2, 0.0), (4, 0.0)):
        samples.draft[requests] += [2.0 + requests + slow, 2.0 + requests]
        samples.overhead[requests] += [1.0]
    for depth, slow in ((1, 0.0), (2, 30.0), (3, 0.0)):
        samples.depth[depth] += [1.0 + depth / 2 + slow]
    table = samples.table({}, 4)
    assert table.verify_ms[0] == (11.0, 12.0, 14.0, 14.0, 18.0)
    assert table.verify_ms[1][:4] == (12.0, 13.0, 14.0, 15.0)
    assert table.draft_ms == (4.0, 4.0, 6.0)
    assert table.draft_depth_ms == (1.5, 2.5, 2.5, 4.0)
    assert samples.unsteady() == pytest.approx(1 / 13)


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


# --- found by fingerprint -----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The native kernels live in the real cache and are loaded by now.
    tiny_target()
    from surefoot.kernels import native

    native.available()
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    return tmp_path


def saved(max_num_seqs: int = 8, gamma: int = 4) -> Path:
    target = tiny_target()
    drafter = tiny_drafter(target, "prompt-lookup", gamma)
    measured = fingerprint(target, drafter, max_num_seqs=max_num_seqs, block_size=16)
    path = table_path(measured)
    CostTable((1, 2, 4), ((1.0, 1.5, 2.5),), fingerprint=measured).save(path)
    return path


def policy_for(max_num_seqs: int, gamma: int = 4, cost_table: str | Path = "auto", **config: int) -> CostTable | None:
    target = tiny_target()
    settings = EngineOptions(max_num_seqs=max_num_seqs, cost_table=cost_table, **config)
    drafter = tiny_drafter(target, "prompt-lookup", gamma)
    return make_policy(target, drafter, settings).costs.table


def test_a_table_is_found_by_fingerprint_and_serves_fewer_requests(cache: Path) -> None:
    assert policy_for(8) is None
    saved(8)
    found = policy_for(8)
    assert found is not None
    assert found.fingerprint["max_num_seqs"] == 8
    assert policy_for(2) == found
    saved(4)
    narrower = policy_for(2)
    assert narrower is not None
    assert narrower.fingerprint["max_num_seqs"] == 4
    assert policy_for(8) == found
    assert policy_for(16) is None
    assert policy_for(8, gamma=3) is None
    assert policy_for(8, block_size=4) is None
    assert policy_for(8, cost_table="none") is None


def test_another_engine_is_refused_by_name_of_the_field(cache: Path) -> None:
    path = saved(8)
    assert policy_for(4, cost_table=path) is not None
    with pytest.raises(CostTableError, match=r"gamma: table 4, engine 3.*surefoot profile"):
        policy_for(8, gamma=3, cost_table=path)
    with pytest.raises(CostTableError, match=r"max_num_seqs: table 8, engine 16"):
        policy_for(16, cost_table=path)
    with pytest.raises(CostTableError, match="cannot read"):
        policy_for(8, cost_table=cache / "nothing.json")


def test_a_broken_table_in_the_cache_is_left_out_with_a_warning(cache: Path) -> None:
    path = saved(8)
    path.write_text("{}")
    wanted = fingerprint(tiny_target(), None, max_num_seqs=8, block_size=16)
    with pytest.warns(RuntimeWarning, match="left out"):
        assert find_table(wanted) is None
    with pytest.raises(CostTableError):
        load_table(path, wanted)


def test_the_fingerprint_survives_json_and_knows_drafters_apart(cache: Path) -> None:
    target = tiny_target()
    marks = [
        fingerprint(target, tiny_drafter(target, name, 3), max_num_seqs=4, block_size=16)
        for name in ("none", "prompt-lookup", "dspark", "dspark-gated")
    ]
    assert len({table_path(mark) for mark in marks}) == 4
    CostTable((1,), ((1.0,),), fingerprint=marks[2]).save(table_path(marks[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_table(marks[2]) is not None
        assert find_table(marks[3]) is None


def test_an_engine_with_a_found_table_plans(cache: Path) -> None:
    target = tiny_target()
    options = EngineOptions(max_num_seqs=4, max_model_len=200)
    drafter = tiny_drafter(target, "prompt-lookup", 4)
    found = profile(Engine(target, drafter, make_policy(target, drafter, options), options), budget_s=0.0)
    # Of a tiny target on a busy machine every pass may look alike, and a flat table has nothing to plan with.
    rising = tuple(
        tuple(ms + rows for ms, rows in zip(curve, found.table.token_buckets, strict=True))
        for curve in found.table.verify_ms
    )
    replace(found.table, verify_ms=rising).save(table_path(found.table.fingerprint))
    policy = make_policy(target, drafter, options)
    assert "measured cost table" in policy.describe()
    engine = EngineUnderTest(target, drafter, policy, options)
    engine.run(PROMPTS, SamplingParams(temperature=0.0, max_tokens=80))
    assert Reason.NO_TABLE.value not in engine.statistics.reasons
    assert engine.statistics.timed_steps > 0


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


def test_padded_passes_make_a_staircase() -> None:
    target = tiny_target()
    engine = build(target, "prompt-lookup", max_num_seqs=2, runner=EagerRunner(target, (2, 4, 8, 16)))
    table = profile(engine, budget_s=0.0).table
    assert table.token_buckets == (2, 4, 8, 10)
    assert table.captured_tokens is None
    assert table.verify_ms_at(5) == table.verify_ms_at(8)
