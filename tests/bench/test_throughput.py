"""The benchmark's own arithmetic: constant work, interleaved arms, and the host's time apart from the passes."""

from __future__ import annotations

import pytest

from surefoot.bench.prompts import BUILT_IN
from surefoot.bench.throughput import Row, Throughput, build_arms, measure_throughput, run_arm
from surefoot.sampling import SamplingParams
from tests.engine.engines import tiny_drafter
from tests.tiny_models import tiny_target

PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


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
    run = run_arm(arm.engine, PROMPTS, PARAMS, concurrency=2)
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
    order: list[str] = []
    for arm in arms:
        add = arm.engine.add_request
        arm.engine.add_request = (  # type: ignore[method-assign]
            lambda *given, name=arm.name, add=add: (order.append(name), add(*given))[1]
        )
    shares: list[float] = []
    found = measure_throughput(
        arms, PROMPTS[:1], PARAMS, concurrency=[1, 2], repeats=2, requests=1, progress=shares.append
    )
    names = [arm.name for arm in arms]
    turned = [*names[1:], names[0]]
    assert order == names + 2 * names + 2 * turned
    assert shares[-1] == 1.0
    assert all(row.identical for row in found.rows)


def row(arm: str, speed: float) -> Row:
    return Row(4, arm, speed, None, 0.0, 1.0, 1.0, 0.0, None, {}, {}, None, [speed])


def test_the_summary_names_the_best_arm() -> None:
    assert Throughput([row("none", 10.0), row("fixed:2", 20.0), row("adaptive", 19.0)]).summary() == [
        {"concurrency": 4, "best": "fixed:2", "adaptive_share": pytest.approx(0.95)}
    ]
    assert Throughput([row("none", 10.0)]).summary()[0]["adaptive_share"] is None


def test_built_in_prompts_are_mixed() -> None:
    assert {prompt.kind for prompt in BUILT_IN} == {"code", "edit", "maths", "chat"}
