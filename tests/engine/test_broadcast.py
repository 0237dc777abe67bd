"""What rank 0 plans reaches other ranks as plain data, and they run the same steps from it alone."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.engine.broadcast import from_plain, receive_step, send_step, to_plain
from surefoot.engine.messages import StepInputs, WidthPlan
from surefoot.engine.trace import StepReport
from surefoot.parallel.group import Plain
from surefoot.sampling import SamplingParams
from surefoot.speculation import CostTable, Decision, Reason
from tests.engine.engines import QueueDevice, build
from tests.tiny_models import tiny_target

STAIRS = CostTable((4, 8, 12, 40), ((10.0, 14.0, 15.0, 60.0),))
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 7, 6], [5] * 20, [11, 12]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=11, seed=3, logit_bias={4: 2.0, 7: -1.5}),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=9, seed=-4, gamma=2, stop_token_ids=[63]),
    SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, max_tokens=12, logprobs=2, seed=2**63 + 5),
]


class RecordingGroup:
    """Rank 0 of two: keeps every message as the text that would travel."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.messages: list[str] = []

    def broadcast(self, data: Plain) -> Plain:
        self.messages.append(json.dumps(data, allow_nan=False))
        return data

    def all_gather(self, data: Plain) -> list[Plain]:
        return [data, data]

    def barrier(self) -> None: ...

    def leave(self) -> None: ...


class ReceivingGroup(RecordingGroup):
    """Rank 1: hears what was recorded, in order."""

    rank = 1

    def __init__(self, messages: Sequence[str]) -> None:
        self.left = deque(messages)

    def broadcast(self, data: Plain) -> Plain:
        received: Plain = json.loads(self.left.popleft())
        return received


def run(
    group: RecordingGroup | None, drafter: str, **settings: Any
) -> tuple[list[StepInputs], list[StepReport], list[list[int]]]:
    """Serve the prompts, some later than others and in chunks; the inputs of every step, its report, all texts."""
    engine = build(tiny_target("llama"), drafter, max_num_seqs=3, max_num_batched_tokens=18, **settings)
    if group is not None:
        engine.group = group
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    ran: list[StepInputs] = []
    submit = engine.device.submit

    def submit_and_keep(step: Any, inputs: StepInputs) -> Any:
        ran.append(replace(inputs, updates=copy.deepcopy(inputs.updates)))  # the lists of a request grow later
        return submit(step, inputs)

    engine.device.submit = submit_and_keep  # type: ignore[method-assign]
    requests = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS[:2], PARAMS[:2], strict=True)]
    for _ in range(2):
        engine.step()
    requests += [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS[2:], PARAMS[2:], strict=True)]
    while engine.has_work:
        engine.step()
    return ran, reports, [request.output.token_ids for request in requests]


SETTINGS: dict[str, dict[str, Any]] = {
    "stopping": {"table": STAIRS, "policy": {"planner": "stopping"}},
    "bounded": {"table": STAIRS, "policy": {"planner": "stopping", "min_width": 1, "max_width": 3}},
    "causal": {"table": STAIRS, "policy": {"planner": "causal"}},
    "stale": {"table": STAIRS, "policy": {"planner": "stale"}},
    "overlapped": {"table": STAIRS, "policy": {"planner": "stale"}, "device": QueueDevice},
    "forced": {"width": "0,3,1"},
    "no table": {},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("drafter", ["dspark", "prompt-lookup"])
def test_every_step_can_be_rebuilt_and_run_from_what_was_sent(drafter: str, settings: dict[str, Any]) -> None:
    """A second rank that has the same models, and is told nothing else, drafts, verifies and emits the same."""
    settings = {**settings, **({"device": settings["device"]()} if "device" in settings else {})}
    group = RecordingGroup()
    ran, reports, texts = run(group, drafter, **settings)
    if "table" not in settings:  # nothing depends on measured times: sending has changed nothing
        assert texts == run(None, drafter, **settings)[2]

    settings.pop("device", None)
    receiving = ReceivingGroup(group.messages)
    # What a confidence source has learned is not sent: every rank learns it from the same outcomes.
    twin = build(tiny_target("llama"), drafter, max_num_seqs=3, max_num_batched_tokens=18, **settings)
    decided = 0
    for sent, report in zip(ran, reports, strict=True):
        inputs = receive_step(receiving)
        if sent.plan.decide is not None:
            decided += 1
            sent = replace(sent, plan=replace(sent.plan, decide=inputs.plan.decide))
        assert inputs == sent
        outputs = twin.decode_step(inputs)
        assert outputs.verdict.accepted.tolist() == report.outputs.accepted
        assert outputs.verdict.next_token.tolist() == report.outputs.next_token
        assert outputs.widths.tolist() == report.outputs.widths
        assert outputs.draft.tokens.tolist() == report.outputs.drafts
        if twin.policy.confidence is not None and report.inputs.num_drafting:
            twin.policy.learner.observe(report.plan, report.outputs, report.kept, 0.0)
    assert not receiving.left
    planner = settings.get("policy", {}).get("planner")
    assert (decided > 5) == (planner in ("stopping", "causal"))
    assert sum(sum(report.outputs.widths) for report in reports) >= 3


def test_a_group_of_one_sends_nothing() -> None:
    class Silent(RecordingGroup):
        size = 1

    inputs = StepInputs([0], [0], [1], 1, 1, WidthPlan([4], decide=lambda survival, limits: DECISION))
    assert send_step(group := Silent(), inputs) is inputs
    assert not group.messages


DECISION = Decision(3, Reason.PLANNED, 8, 2.5, 11.0, 0.25, 1.5, (2, 1))
COUNTS = st.integers(0, 2**40)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
DECISIONS = st.builds(
    Decision, COUNTS, st.sampled_from(Reason), COUNTS, NUMBERS, NUMBERS, st.floats(-1, 9), st.floats(0, 9),
    st.none() | st.lists(COUNTS).map(tuple),
)  # fmt: skip
WIDTH_PLANS = st.builds(
    WidthPlan, st.lists(COUNTS), COUNTS, COUNTS, st.none() | st.lists(COUNTS), COUNTS, st.none() | COUNTS
)


@given(DECISIONS, WIDTH_PLANS)
def test_any_decision_and_any_plan_survive_the_trip(decision: Decision, plan: WidthPlan) -> None:
    assert from_plain(Decision, json.loads(json.dumps(to_plain(decision)))) == decision
    assert from_plain(WidthPlan, json.loads(json.dumps(to_plain(plan)))) == plan


def test_the_decision_of_rank_0_is_sent_in_the_middle_of_the_step() -> None:
    plan = WidthPlan([4, 4], 8, decide=lambda survival, limits: DECISION)
    inputs = StepInputs([0, 1], [0, 0], [1, 1], 2, 2, plan)
    first = send_step(group := RecordingGroup(), inputs)
    assert len(group.messages) == 1
    assert first.plan.decide is not None
    assert first.plan.decide(torch.ones(2, 4), torch.full((2,), 4)) == DECISION
    assert len(group.messages) == 2
    other = receive_step(ReceivingGroup(group.messages))
    assert other.plan.decide is not None
    assert other.plan.decide(torch.zeros(2, 4), torch.zeros(2)) == DECISION  # whatever this rank believes


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match="function cannot be sent to another rank"):
        to_plain([lambda: 0])
