"""Blocks drafted to less than gamma: chosen by the cost table, exact at any depth, and never verified beyond it."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from surefoot.engine.policy import WidthPolicy
from surefoot.engine.trace import StepReport
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.engines import QueueDevice, build, combine_at, greedy_oracle, tiny_dspark
from tests.engine.test_exactness import LEVEL, PLAIN, PROCESSED, chi_square, prompts
from tests.tiny_models import tiny_target

GAMMA = 4
SHALLOW = CostTable(  # a row of the target costs little, one of the drafter half of it: one or two tokens are worth it
    (1, 256),
    ((10.0, 265.0),),
    (1, 8),
    (6.0, 48.0),
    captured_tokens=0,
    draft_depths=(1, 2, 4),
    draft_depth_ms=(1.5, 3.0, 6.0),
)
"""Cost of a step in which whole blocks are drafted is nearly twice that of one of depth 1."""


def drafter_named(name: str, target: Any, gamma: int = GAMMA) -> Any:
    trained = tiny_dspark(target, gamma, shorter_blocks="whole" not in name)
    return combine_at(trained, gamma, threshold=3) if name.startswith("combined") else trained


@pytest.mark.parametrize("planner", ["stopping", "causal", "stale"])
@pytest.mark.parametrize("name", ["dspark", "dspark-whole", "combined"])
def test_a_table_with_depths_makes_blocks_shorter_and_changes_no_token(name: str, planner: str) -> None:
    target = tiny_target("llama")
    texts = prompts(12, target.vocab_size)
    engine = build(
        target,
        drafter_named(name, target),
        max_num_seqs=3,
        max_model_len=128,
        block_size=4,
        table=SHALLOW,
        policy={"planner": planner, "suspends": False},
    )
    seen: list[StepReport] = []
    engine.add_observer(seen.append)
    got = engine.run(texts, SamplingParams(temperature=0, max_tokens=60))
    assert [request.output.token_ids for request in got] == greedy_oracle(target, texts, 60)
    depths = {report.inputs.plan.depth for report in seen if report.plan.drafting}
    assert None in depths, "whole blocks must be drafted now and then, or nothing is learned of what comes later"
    assert depths - {None}, "the depth was never chosen"
    assert {report.to_dict()["depth"] for report in seen if report.plan.drafting} == depths
    short = [report for report in seen if report.plan.drafting and report.inputs.plan.depth]
    for report in short:
        proposed, sources = report.outputs.proposed, report.outputs.sources
        assert proposed is not None
        for index, (width, length) in enumerate(zip(report.outputs.widths, proposed, strict=False)):
            assert width <= length
            if sources is None or sources[index] == "dspark":
                assert length == report.inputs.plan.depth
    assert sum(sum(report.outputs.accepted) for report in short) > 0
    engine.assert_clean()


def test_predicted_cost_is_that_of_the_depth() -> None:
    target = tiny_target("llama")
    engine = build(target, drafter_named("dspark", target), max_num_seqs=1, table=SHALLOW, policy={"suspends": False})
    engine.policy.costs._drift = None  # which would rescale the table by what a busy machine takes
    seen: list[StepReport] = []
    engine.add_observer(seen.append)
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60))
    for depth in (1, None):
        report = next(
            r for r in seen if r.plan.drafting and r.inputs.plan.depth == depth and not r.plan.load.prefill_tokens
        )
        rows = 1 + sum(report.outputs.widths)
        expected = SHALLOW.step_costs(1, rows, 1, report.plan.load.context, depth=depth)[0]
        assert report.plan.predicted_ms == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "depth"), [({"width": 2}, 2), ({"width": "0,1"}, 1), ({"max_width": 3}, 3)])
def test_no_deeper_than_the_widest_window_allowed(settings: dict[str, Any], depth: int) -> None:
    target = tiny_target("llama")
    policy = {key: value for key, value in settings.items() if key == "max_width"}
    engine = build(target, drafter_named("dspark", target), width=settings.get("width"), policy=policy)
    seen: list[StepReport] = []
    engine.add_observer(seen.append)
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20))
    assert {report.inputs.plan.depth for report in seen if report.plan.drafting} == {depth}


@pytest.mark.statistical
@pytest.mark.parametrize("params", [PLAIN, PROCESSED])
@pytest.mark.parametrize("name", ["dspark", "combined"])
def test_sampled_law_is_the_targets_at_any_depth(name: str, params: SamplingParams, monkeypatch: Any) -> None:
    depths = cycle([1, 2, None])
    monkeypatch.setattr(WidthPolicy, "_depth_of", lambda self, load: next(depths))
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    prompt = [1, 2, 1, 2, 1]
    engine = build(
        target, drafter_named(name, target, 3), gamma=3, max_num_seqs=512, max_model_len=24, check_layout=False
    )
    p_value, freedom, distance = chi_square(engine, target, prompt, params, 20_000)
    assert distance < 0.08
    assert p_value > LEVEL, f"{freedom} degrees of freedom"
    assert engine.statistics.blocks.accepted > 0


def test_overlapped_loop_drafts_short_blocks_too() -> None:
    target = tiny_target("llama")
    texts = prompts(6, target.vocab_size)
    engine = build(
        target,
        drafter_named("dspark", target),
        max_num_seqs=3,
        max_model_len=128,
        table=SHALLOW,
        device=QueueDevice(),
        policy={"suspends": False},
    )
    seen: list[StepReport] = []
    engine.add_observer(seen.append)
    got = engine.run(texts, SamplingParams(temperature=0, max_tokens=60))
    assert [request.output.token_ids for request in got] == greedy_oracle(target, texts, 60)
    assert {report.inputs.plan.depth for report in seen if report.plan.drafting} > {None}
