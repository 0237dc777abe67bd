"""The planner in charge of the step loop: exact, active, and out of the way where drafting does not pay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.drift import Correction, Rescale
from surefoot.speculation.planner import Decision
from surefoot.speculation.statistics import InactiveError
from surefoot.speculation.stopping import StoppingPlanner
from tests.engine.engines import EngineUnderTest, build
from tests.tiny_models import tiny_target

STEEP = CostTable((1, 2, 3, 4, 5, 8, 16, 64), ((1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 16.0, 64.0),), (1,), (0.5,))


class ScriptedDrafter(Drafter):
    """Draws every token from fixed logits and scores it by a rule that may look at the tokens before it, never at it."""

    name = "scripted"
    has_confidence_head = True

    def __init__(self, gamma: int, logits: list[float], confidence: Callable[[Tensor, int], Tensor]) -> None:
        self.gamma, self.logits, self.score = gamma, torch.tensor(logits), confidence
        self.blocks = 0

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        self.blocks += context.slots.shape[0]
        tokens = context.slots.new_zeros(context.slots.shape[0], self.gamma)
        confidence = torch.zeros(tokens.shape)
        for k in range(1, self.gamma + 1):
            confidence[:, k - 1] = self.score(tokens, k)
            tokens[:, k - 1] = sampler.draw(k, self.logits.expand(tokens.shape[0], -1))
        return Draft(tokens, confidence_logits=torch.logit(confidence, eps=1e-6))


class TestAppendixA:
    """The paper's counterexample through the engine: p = (0.7, 0.3), q = (0.5, 0.5), throughput (1.0, 0.5, 0.45)."""

    TABLE = CostTable((1, 2, 3), ((1.0, 2.0, 1 / 0.45),))
    BIAS = math.log(0.7 / 0.3)
    REQUESTS = 700  # 0.85 against 0.70 is 8.7 standard deviations

    def first_token_share(self, planner: str, cheat: bool = False) -> float:
        target = tiny_target("llama", vocab_size=2, sharpness=0.0)  # all logits 0: the bias alone makes p
        # After the same bias q is (0.5, 0.5). The second position looks certain after token 0 and hopeless after token 1.
        drafter = ScriptedDrafter(
            2,
            [-self.BIAS, 0.0],
            lambda tokens, k: torch.where((k == 2) & (tokens[:, 0] == 1), 0.0, 0.8 if k == 1 else 1.0),
        )
        engine = build(
            target,
            drafter,
            max_num_seqs=1,
            max_model_len=16,
            check_layout=False,
            table=self.TABLE,
            policy={"planner": planner},
        )
        if cheat:
            plan = engine.policy.plan

            def look_ahead(scheduled: Any) -> Any:
                made = plan(scheduled)
                if made.drafting:
                    made.decision, made.decide = None, lambda survival, limits: best_budget(survival, made)
                return made

            def best_budget(survival: Tensor, made: Any) -> Decision:
                expected = 1 + torch.cat([torch.zeros(1), survival[0].cumsum(0)])
                rates = expected / torch.tensor([1.0, 2.0, 1 / 0.45])
                honest = engine.policy.stale.decide(
                    engine.policy.learner.board.read(made.load.step, made.seats), made.load
                )
                made.decision = honest
                return replace(honest, budget=int(rates.argmax()))

            engine.policy.plan = look_ahead  # type: ignore[method-assign]
        params = SamplingParams(temperature=1, max_tokens=3, logit_bias={0: self.BIAS})
        zeros = 0
        for _ in range(self.REQUESTS):
            request = engine.add_request([0], params)
            while not request.output.token_ids:
                engine.step()
            zeros += request.output.token_ids[0] == 0
            engine.cancel(request.request_id)
        return zeros / self.REQUESTS

    @pytest.mark.statistical
    @pytest.mark.parametrize("planner", ["stale", "causal", "stopping"])
    def test_our_planners_keep_the_law(self, planner: str) -> None:
        assert abs(self.first_token_share(planner) - 0.70) < 0.075

    @pytest.mark.statistical
    def test_a_planner_that_looks_ahead_breaks_it(self) -> None:
        assert abs(self.first_token_share("stale", cheat=True) - 0.85) < 0.06


def greedy(engine: EngineUnderTest, count: int = 6, tokens: int = 24) -> list[list[int]]:
    texts = [[i, i + 1, i, i + 1, i] for i in range(1, count + 1)]
    return [r.output.token_ids for r in engine.run(texts, SamplingParams(temperature=0, max_tokens=tokens))]


@pytest.mark.parametrize("planner", ["stale", "causal", "stopping"])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
def test_the_planner_trims_from_the_table_and_the_text_stays(planner: str, drafter: str) -> None:
    target = tiny_target("qwen3", vocab_size=12)  # few words, so that a random drafter is right now and then
    plain = greedy(build(target, "none"))
    engine = build(target, drafter, table=STEEP, policy={"planner": planner})
    for _ in range(6):
        assert greedy(engine) == plain
    engine.statistics.assert_active(trimming=True)
    assert "no_table" not in engine.statistics.reasons
    assert sum(engine.statistics.reasons.values()) == engine.statistics.steps


def test_without_a_table_everything_is_verified_and_said() -> None:
    engine = build(tiny_target("qwen3"), "dspark")
    greedy(engine)
    assert engine.statistics.reasons["no_table"] > 0
    assert set(engine.statistics.reasons) <= {"no_table", "nothing_drafted"}
    assert "verifies everything" in engine.describe()["planner"]


def test_a_run_in_which_speculation_did_nothing_is_noticed() -> None:
    engine = build(tiny_target("qwen3"), "dspark", width=0)
    greedy(engine)
    with pytest.raises(InactiveError, match="none was verified"):
        engine.statistics.assert_active()


def test_drafting_is_left_out_where_it_loses_and_probed_again() -> None:
    """Costs rise with every row and almost nothing is accepted: after the first steps only the probes draft."""
    target = tiny_target("qwen3")
    drafter = ScriptedDrafter(4, [0.0] * 64, lambda tokens, k: torch.full((tokens.shape[0],), 0.02))
    engine = build(target, drafter, max_num_seqs=1, table=STEEP, policy={"planner": "stale"})
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=80))
    assert 2 <= drafter.blocks <= 12
    assert engine.statistics.reasons["nothing_drafted"] > 60


class Guesser(ScriptedDrafter):
    """Without a confidence head; every draft is a token that the target is told never to choose."""

    has_confidence_head = False
    WRONG = 63

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma, [0.0] * self.WRONG + [1e4], lambda tokens, k: torch.zeros(tokens.shape[0]))

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        draft = super().propose(context, sampler)
        return Draft(draft.tokens, signal=torch.full(draft.tokens.shape, 0.1))


def test_learning_that_drafts_are_worthless_costs_many_requests_next_to_nothing() -> None:
    """16 requests, and every row costs: nobody knows yet that the drafts are wrong, and few are asked to find out."""
    table = CostTable(tuple(range(1, 129)), (tuple(10 + 0.5 * rows for rows in range(1, 129)),))
    engine = build(tiny_target("llama"), Guesser(4), max_num_seqs=16, table=table, policy={"suspends": False})
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={Guesser.WRONG: -100.0})
    engine.run([[i, i + 1, i] for i in range(1, 17)], params)
    steps = [report for report in reports if not report.plan.load.prefill_tokens]
    assert engine.statistics.blocks.accepted == 0
    assert max(sum(width == 4 for width in report.outputs.widths) for report in steps) == 2
    spent = sum(report.plan.predicted_ms or 0.0 for report in steps)
    plain = sum(table.step_costs(n, n, 1)[0] for n in (len(report.request_ids) for report in steps))
    assert spent < 1.06 * plain  # every window whole until 64 outcomes are known: 1.13
    assert any(report.plan.explored == 0 for report in steps[:4])  # a loss is paid off first


def test_a_single_request_learns_from_whole_windows() -> None:
    table = CostTable(tuple(range(1, 129)), (tuple(10 + 0.5 * rows for rows in range(1, 129)),))
    engine = build(tiny_target("llama"), Guesser(4), max_num_seqs=1, table=table, policy={"suspends": False})
    request = engine.add_request([1, 2, 1], SamplingParams(temperature=0, max_tokens=8))
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    while not request.output.finished:
        engine.step()
    assert [report.outputs.widths for report in reports][1] == [4]


def test_a_breaker_pauses_a_request_whose_drafts_are_rejected() -> None:
    target = tiny_target("qwen3")
    drafter = ScriptedDrafter(4, [0.0] * 64, lambda tokens, k: torch.full((tokens.shape[0],), 0.9))
    engine = build(target, drafter, max_num_seqs=1, policy={"breaker": 0.6})
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=80))
    assert drafter.blocks < 20  # 32 proposals, then 64 steps of rest
    assert engine.statistics.breaker_states["open"] > 40


def test_a_persistent_difference_between_predicted_and_measured_time_rescales_the_table() -> None:
    target = tiny_target("qwen3")
    tiny = CostTable((1, 64), ((1e-4, 2e-4),), (1,), (1e-5,))
    engine = build(target, "prompt-lookup", table=tiny, policy={"planner": "stale"})
    for _ in range(4):
        greedy(engine)
    assert engine.statistics.rescales > 0
    assert engine.policy.costs.table is not tiny


@pytest.mark.parametrize(
    ("change", "forgets"), [(Correction({4: 1.2}, 64), False), (Rescale(1.2, 1.2, 64), True), (None, False)]
)
def test_a_changed_table_reaches_the_planners(
    change: Correction | Rescale | None, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correction leaves the unit of time, and what past steps have taught about its price."""
    engine = build(tiny_target("qwen3"), "prompt-lookup", table=CostTable((1, 64), ((10.0, 20.0),)))
    policy, rows = engine.policy, list[int | None]()
    drift = policy.costs._drift
    assert drift is not None
    assert isinstance(policy.current, StoppingPlanner)
    before, prices = drift.table, policy.current.prices

    def observe(predicted_ms: float, measured_ms: float, tokens: int | None = None) -> Correction | Rescale | None:
        rows.append(tokens)
        return change

    monkeypatch.setattr(drift, "observe", observe)
    drift.table = before.corrected({0: 1.5})
    greedy(engine)
    assert rows
    assert all(count is not None and count >= 1 for count in rows)
    wanted = before if change is None else drift.table
    assert policy.stale.table is policy.current.table is policy.costs.table is wanted
    assert (policy.current.prices is not prices) == forgets
    assert engine.statistics.rescales == (0 if change is None else len(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 9}, "width 9 is more than gamma"),
        ({"width": "1,x"}, "width is '1,x'; allowed: auto, a number of 0 or more, or a rotating pattern"),
        ({"policy": {"planner": "psychic"}}, "planner is 'psychic'; allowed: stale, causal, stopping"),
        ({"policy": {"breaker": 3.0}}, "breaker is 3.0; allowed"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 cannot hold"),
        ({"num_blocks": 3}, "num_blocks=3 cannot hold one request"),
        ({"max_model_len": 10_000}, "max_model_len=10000 is outside"),
    ],
)
def test_an_impossible_engine_is_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("'", ".")):
        build(tiny_target("llama"), "dspark", **options)
