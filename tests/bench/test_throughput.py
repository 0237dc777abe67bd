"""The benchmark's own arithmetic: constant work, interleaved arms, and the host's time apart from the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from surefoot.bench.prompts import BUILT_IN
from surefoot.bench.throughput import (
    TURN_STEPS,
    TURNS,
    ArmFigures,
    BenchJob,
    Throughput,
    build_arms,
    jobs_of,
    measure_throughput,
    run_arm,
)
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.engine.device import InlineDevice
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.sources import SourceChoice
from tests.engine.engines import tiny_drafter
from tests.tiny_models import tiny_target

PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


class SlowlyRead(InlineDevice):
    """A device whose results the host has to wait for, as CUDA's."""

    reads_are_free = False


def test_a_run_answers_every_prompt_and_never_exceeds_its_concurrency() -> None:
    target = tiny_target()
    (arm,) = build_arms(["fixed:2"], target, tiny_drafter(target, "dspark", 3), max_num_seqs=4, max_model_len=64)
    most = 0
    step = arm.engine.step

    def watched() -> object:
        nonlocal most
        most = max(most, len(arm.engine.requests))
        return step()

    arm.engine.step = watched  # type: ignore[method-assign, assignment]
    run = run_arm(arm.engine, [BenchJob(prompt, PARAMS) for prompt in PROMPTS], concurrency=2)
    assert most == 2
    assert run.tokens == 30
    assert [len(text) for text in run.texts] == [10, 10, 10]
    assert sum(run.widths.values()) == run.request_steps
    assert run.accepted + run.request_steps >= run.tokens
    assert len(run.host_ms) < run.steps  # steps that read a prompt are not counted
    assert all(0 < host < 1000 for host in run.host_ms)
    assert not arm.engine.requests
    assert arm.engine.decode_step.laps is None


def test_arms_take_turns_and_share_the_target() -> None:
    target = tiny_target()
    arms = build_arms(
        ["none", "fixed:1", "adaptive"], target, tiny_drafter(target, "dspark", 3), max_num_seqs=2, max_model_len=64
    )
    assert all(arm.engine.target is target for arm in arms)
    assert arms[0].engine.drafter is None
    steps: list[tuple[str, int]] = []
    for arm in arms:
        step = arm.engine.step
        arm.engine.step = (  # type: ignore[method-assign]
            lambda name=arm.name, step=step, engine=arm.engine: (steps.append((name, len(engine.requests))), step())[1]
        )
    shares: list[float] = []
    found = measure_throughput(
        arms, PROMPTS[:1], PARAMS, concurrency=[1, 2], repeats=2, requests=2, progress=shares.append
    )
    names = [arm.name for arm in arms]
    turns = [(name, len(list(group))) for name, group in groupby(name for name, _ in steps)]
    assert [name for name, _ in turns[:3]] == names
    assert max(count for _, count in turns) == TURN_STEPS  # then the others have theirs
    assert len(turns) > 5 * len(names)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(row.identical for row in found.rows)
    assert {(row.concurrency, row.arm): len(row.repeats) for row in found.rows} == {
        (count, name): 2 for count in (1, 2) for name in names
    }


def test_a_clock_runs_during_the_steps_of_its_own_arm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    arms = build_arms(["none", "fixed:1"], target, tiny_drafter(target, "dspark", 3), max_num_seqs=2, max_model_len=64)
    now = [0.0]
    monkeypatch.setattr("surefoot.bench.throughput.time.perf_counter", lambda: now[0])
    for arm, seconds in zip(arms, (1.0, 100.0), strict=True):
        step = arm.engine.step

        def timed(step: Callable[[], Any] = step, seconds: float = seconds) -> Any:
            now[0] += seconds
            return step()

        arm.engine.step = timed  # type: ignore[method-assign]
    found = measure_throughput(arms, PROMPTS[:1], PARAMS, concurrency=[1], repeats=1)
    none, fixed = found.rows
    assert none.tokens_per_s == pytest.approx(1.0)  # a token a step: the first comes with the prompt
    assert fixed.tokens_per_s <= 2 / 100


def test_where_steps_overlap_arms_run_one_after_another() -> None:
    target = tiny_target()
    arms = build_arms(["none", "fixed:1"], target, tiny_drafter(target, "dspark", 3), max_num_seqs=2, max_model_len=64)
    order: list[str] = []
    for arm in arms:
        arm.engine.device = SlowlyRead()
        step = arm.engine.step
        arm.engine.step = (  # type: ignore[method-assign]
            lambda name=arm.name, step=step: (order.append(name), step())[1]
        )
    measure_throughput(arms, PROMPTS[:1], PARAMS, concurrency=[1], repeats=1)
    assert [name for name, before in zip(order, [None, *order], strict=False) if name != before] == [
        "none",
        "fixed:1",
    ] * 2


def test_lengths_of_answers_differ_and_have_the_mean_asked_for() -> None:
    jobs = jobs_of(PROMPTS, PARAMS, 60)
    lengths = [job.params.max_tokens or 0 for job in jobs]
    assert (min(lengths), max(lengths)) == (5, 15)
    assert sum(lengths) / 60 == pytest.approx(10, abs=0.2)
    assert len(set(lengths[:6])) == 6
    assert jobs[4].prompt is PROMPTS[1]
    assert [job.params.max_tokens for job in jobs_of(PROMPTS, replace(PARAMS, max_tokens=1), 3)] == [1, 1, 1]


def test_the_batch_is_kept_full_for_several_turns() -> None:
    target = tiny_target()
    arms = build_arms(["none"], target, None, max_num_seqs=4, max_model_len=64)
    seen: list[str] = []
    add = arms[0].engine.add_request
    arms[0].engine.add_request = lambda *given: (seen.append("job"), add(*given))[1]  # type: ignore[method-assign]
    measure_throughput(arms, PROMPTS, PARAMS, concurrency=[4], repeats=1)
    assert len(seen) == 2 * TURNS * 4  # once to warm up


def test_what_an_arm_learns_about_its_sources_stays_with_it() -> None:
    target = tiny_target()
    trained = tiny_drafter(target, "dspark", 3)
    shared = CombinedDrafter(PromptLookupDrafter(3), trained, SourceChoice(3, 3, 16))
    names = ["none", "fixed:2", "adaptive"]
    table = CostTable((1, 8), ((1.0, 2.0),))
    arms = build_arms(names, target, shared, max_num_seqs=2, max_model_len=64)
    drafters = [arm.engine.drafter for arm in arms[1:]]
    assert all(isinstance(drafter, CombinedDrafter) and drafter.trained is trained for drafter in drafters)
    choices = [drafter.choice for drafter in drafters if isinstance(drafter, CombinedDrafter)]
    assert len({id(choice) for choice in (*choices, shared.choice)}) == 3
    arms[2].engine.policy.costs.use(table)  # as drift does
    assert [choice.costs.table for choice in choices] == [None, table]


def row(arm: str, speed: float) -> ArmFigures:
    return ArmFigures(4, arm, speed, None, 0.0, 1.0, 1.0, 0.0, None, {}, {}, None, [speed])


def test_the_summary_names_the_best_arm() -> None:
    assert Throughput([row("none", 10.0), row("fixed:2", 20.0), row("adaptive", 19.0)]).summary() == [
        {"concurrency": 4, "best": "fixed:2", "adaptive_share": pytest.approx(0.95)}
    ]
    assert Throughput([row("none", 10.0)]).summary()[0]["adaptive_share"] is None


def test_built_in_prompts_are_mixed() -> None:
    assert {prompt.kind for prompt in BUILT_IN} == {"code", "edit", "maths", "chat"}
