"""The guard in charge of an engine: target-only steps where it says so, the same tokens, and a slow drafter put to rest."""

from __future__ import annotations

import time
from typing import Any

import pytest

from surefoot import LLM
from surefoot.drafters.base import Draft, DraftContext, DraftSampler
from surefoot.engine.trace import StepReport
from surefoot.sampling import SamplingParams
from surefoot.speculation import guard as guard_module
from surefoot.speculation.guard import Arm, Guard
from tests.drafters.test_protocol import Repeater
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPTS = [[3, 1, 4, 1, 5], [5, 6] * 8, [7]]


class Scripted(Guard):
    """Every third step is target-only; remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[tuple[int, Arm]] = []
        self.seen: list[tuple[int, Arm, int, float]] = []

    def choose(self, requests: int, context: float, *, alone: bool) -> Arm:
        arm = Arm.SPECULATIVE if len(self.chosen) % 3 else Arm.TARGET_ONLY
        self.chosen.append((requests, arm))
        return arm

    def observe(self, requests: int, context: float, arm: Arm, tokens: int, ms: float) -> None:
        self.seen.append((requests, arm, tokens, ms))


@pytest.mark.parametrize(("device", "planner"), [(None, "stale"), (None, "stopping"), (QueueDevice, "stale")])
def test_its_choice_decides_whether_a_step_drafts(device: Any, planner: str) -> None:
    engine = build(
        CheapTarget(), "prompt-lookup", device=device and device(), policy={"planner": planner, "guard": True}
    )
    guard = engine.policy.guard = engine.policy.learner._guard = Scripted()
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    requests = engine.run(PROMPTS, GREEDY)
    plain = build(CheapTarget(), "none").run(PROMPTS, GREEDY)
    assert [r.output.token_ids for r in requests] == [r.output.token_ids for r in plain]
    asked = [report for report in reports if report.plan.arm is not None]
    assert [report.plan.arm for report in asked] == [arm for _, arm in guard.chosen][: len(asked)]
    assert {arm for _, arm in guard.chosen} == set(Arm)
    for report in asked:
        assert not (report.plan.arm is Arm.TARGET_ONLY and report.plan.drafting)
        if report.plan.arm is Arm.TARGET_ONLY:
            assert report.plan.decision is not None
            assert report.plan.decision.reason.value == "guard_window"
    told = [report for report in asked if not report.plan.load.prefill_tokens]
    assert [(requests, arm, tokens) for requests, arm, tokens, _ in guard.seen] == [
        (report.plan.load.requests, report.plan.arm, sum(report.kept)) for report in told
    ]
    assert all(ms > 0 for *_, ms in guard.seen)
    assert engine.statistics.reasons["guard_window"] > 3


class Slow(Repeater):
    """Sleeps, as a drafter does that was fast when it was measured."""

    seconds = 0.0

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        time.sleep(self.seconds)
        return super().propose(context, sampler)


def test_a_drafter_that_sleeps_is_put_to_rest_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of this target takes about 2 ms, one of this drafter 40."""
    monkeypatch.setattr(guard_module, "FIRST_AFTER", 16)
    monkeypatch.setattr(guard_module, "SOONEST", 24)
    monkeypatch.setattr(guard_module, "RATE", 0.2)  # trials soon
    drafter = Slow()
    drafter.seconds = 0.04
    # Everything it proposes is accepted: without the sleep a step brings four tokens.
    target = CheapTarget(vocab_size=2)
    target.lm_head.weight.data.zero_()
    engine = build(target, drafter, max_model_len=4000, max_num_seqs=1, guard=True, check_layout=False)
    params = SamplingParams(temperature=0, max_tokens=3500)
    request = engine.add_request([0, 0], params)
    steps = 0
    assert engine.policy.guard is not None
    while engine.policy.guard.on:
        engine.step()
        steps += 1
        assert steps < 200
    assert engine.stats()["guard"]["switched_off"] == 1
    drafter.seconds = 0.0
    while not engine.policy.guard.on:
        engine.step()
        assert engine.has_work, "it has not come back"
    engine.cancel(request.request_id)
    assert engine.stats()["guard"]["switched_on"] == 1
    assert engine.statistics.reasons["guard_off"] > 10


def test_only_an_engine_with_drafts_and_free_widths_has_one() -> None:
    def guard(drafter: str, **options: Any) -> Guard | None:
        return build(CheapTarget(), drafter, **{"guard": True, **options}).policy.guard

    assert guard("prompt-lookup") is not None
    assert guard("none") is None
    assert guard("prompt-lookup", width=2) is None
    assert guard("prompt-lookup", guard=False) is None
    overlapped = guard("prompt-lookup", device=QueueDevice())
    assert overlapped is not None
    assert overlapped.settle == 1


def test_an_llm_has_one_unless_told_otherwise() -> None:
    from tests.tiny_models import tiny_target

    with LLM(tiny_target("llama"), drafter="prompt-lookup", cost_table="none") as llm:
        assert llm.stats()["guard"] == {
            **{"on": True, "switched_off": 0, "switched_on": 0, "window_steps": 0, "trial_steps": 0, "loads": []}
        }
    with LLM(tiny_target("llama"), drafter="prompt-lookup", cost_table="none", guard=False) as llm:
        assert llm.stats()["guard"] is None
