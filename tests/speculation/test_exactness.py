"""The law of the output by exact enumeration: no legal rule changes it, and illegal ones do (paper, Appendix A)."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot.speculation.planner as planner_module
import surefoot.speculation.stopping as stopping_module
from surefoot.speculation import CausalPlanner, CostTable, StepLoad, StoppingPlanner, allocate
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.ranking import ranked

Law = dict[tuple[int, ...], float]
Model = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> distribution over the next token
Rule = Callable[[np.ndarray], Sequence[int]]  # survival [R, gamma] of the step -> [R] widths


def drafts(q: Model, p: Model, gamma: int) -> list[tuple[tuple[int, ...], float, np.ndarray]]:
    """All blocks with their probability and survivals; c_k is the exact acceptance probability given x_<k."""
    blocks = []
    for tokens in itertools.product(range(len(q(()))), repeat=gamma):
        prefixes = [tokens[:k] for k in range(gamma)]
        probability = float(np.prod([q(prefix)[tokens[len(prefix)]] for prefix in prefixes]))
        confidence = [np.minimum(p(prefix), q(prefix)).sum() for prefix in prefixes]
        if probability > 0:
            blocks.append((tokens, probability, np.cumprod(confidence, dtype=np.float32)))
    return blocks


def complete(p: Model, prefix: tuple[int, ...], length: int) -> Law:
    """The target's law of the first `length` tokens, given a prefix."""
    if len(prefix) >= length:
        return {prefix[:length]: 1.0}
    law: Law = defaultdict(float)
    for token, probability in enumerate(p(prefix)):
        if probability > 0:
            for tokens, rest in complete(p, (*prefix, token), length).items():
                law[tokens] += probability * rest
    return law


def verified(p: Model, q: Model, block: tuple[int, ...], width: int, length: int) -> Law:
    """Law of the first `length` tokens when `width` tokens of the block are verified and the target goes on."""
    law: Law = defaultdict(float)
    reach = 1.0
    for k in range(width):
        prefix, token = block[:k], block[k]
        ratio = min(1.0, p(prefix)[token] / q(prefix)[token])
        if ratio < 1.0:
            residual = np.maximum(p(prefix) - q(prefix), 0.0)
            for recovered, probability in enumerate(residual / residual.sum()):
                for tokens, rest in complete(p, (*prefix, recovered), length).items():
                    law[tokens] += reach * (1.0 - ratio) * probability * rest
        reach *= ratio
    for tokens, rest in complete(p, block[:width], length).items():
        law[tokens] += reach * rest
    return law


def joint_law(models: list[tuple[Model, Model]], gamma: int, rule: Rule, length: int) -> dict[tuple, float]:
    """Joint law of all requests' outputs under a rule that sees all survivals of the step."""
    law: dict[tuple, float] = defaultdict(float)
    for combination in itertools.product(*(drafts(q, p, gamma) for p, q in models)):
        widths = rule(np.stack([block[2] for block in combination]))
        weight = float(np.prod([block[1] for block in combination]))
        laws = [
            verified(p, q, block[0], width, length)
            for (p, q), block, width in zip(models, combination, widths, strict=True)
        ]
        for outputs in itertools.product(*(one.items() for one in laws)):
            law[tuple(tokens for tokens, _ in outputs)] += weight * float(np.prod([share for _, share in outputs]))
    return law


def allocated(budget: int, survival: np.ndarray, min_width: int = 0) -> list[int]:
    """Widths that the step gives out for a budget."""
    requests, gamma = survival.shape
    widths: list[int] = allocate(torch.from_numpy(survival), budget, torch.full((requests,), gamma), min_width).tolist()
    return widths


def stale(budget: int) -> Rule:
    """A budget of before, ranked by this step's survivals."""
    return lambda survival: allocated(budget, survival)


def target_law(models: list[tuple[Model, Model]], length: int) -> dict[tuple, float]:
    laws = [complete(p, (), length) for p, _ in models]
    return {
        tuple(tokens for tokens, _ in outputs): float(np.prod([share for _, share in outputs]))
        for outputs in itertools.product(*(law.items() for law in laws))
    }


# --- the counterexample ----------------------------------------------------------------------------------------------------

APPENDIX_A = CostTable((1, 2, 3), ((1.0, 1 / 0.5, 1 / 0.45),))  # SPS = (1.0, 0.5, 0.45)


def p_appendix(prefix: tuple[int, ...]) -> np.ndarray:
    """(0.7, 0.3) for the first token; after x_1 = 0 the drafter agrees with the target, after 1 it never does."""
    if not prefix:
        return np.array([0.7, 0.3])
    return np.array([0.5, 0.5]) if prefix[0] == 0 else np.array([0.0, 1.0])


def q_appendix(prefix: tuple[int, ...]) -> np.ndarray:
    if not prefix or prefix[0] == 0:
        return np.array([0.5, 0.5])
    return np.array([1.0, 0.0])


def looks_ahead(survival: np.ndarray) -> list[int]:
    """The illegal rule: a global search on the survivals of the block it decides about."""
    costs = APPENDIX_A.step_costs(1, 1, 3)
    rates = [(1 + float(survival[0, :k].sum())) / costs[k] for k in range(3)]
    return [int(np.argmax(rates))]


def first_token(rule: Rule) -> list[float]:
    law = joint_law([(p_appendix, q_appendix)], 2, rule, 1)
    return [sum(share for (tokens,), share in law.items() if tokens[0] == token) for token in (0, 1)]


def test_a_planner_that_looks_ahead_turns_seventy_into_eighty_five_percent() -> None:
    np.testing.assert_allclose(first_token(looks_ahead), [0.85, 0.15], atol=1e-6)


@pytest.mark.parametrize("rule", ["causal", "causal to the letter", "stopping", "stopping, taught", "stopping, priced"])
def test_our_planners_leave_it_at_seventy(rule: str) -> None:
    planner = (
        StoppingPlanner(2, LiveCost(APPENDIX_A))
        if rule.startswith("stopping")
        else CausalPlanner(2, LiveCost(APPENDIX_A), smooth=rule == "causal")
    )
    if isinstance(planner, StoppingPlanner) and rule != "stopping":
        for _ in range(64):  # past steps of this very text
            planner.model.observe(np.array([[0.8, 0.8], [0.8, 0.0]], np.float32))
        if rule.endswith("priced"):
            for _ in range(planner.prices.settle):
                planner.prices.observe(1, 1.0, 1.0)

    np.testing.assert_allclose(first_token(rule_of(planner, StepLoad(1, [2]))), [0.70, 0.30], atol=1e-9)


def test_any_stale_budget_leaves_it_at_seventy() -> None:
    for budget in (0, 1, 2):
        np.testing.assert_allclose(first_token(stale(budget)), [0.70, 0.30], atol=1e-9)


# --- a position ahead ------------------------------------------------------------------------------------------------------

TWO = [(p_appendix, q_appendix)] * 2


def a_position_ahead(survival: np.ndarray) -> np.ndarray:
    """Position k judged by the survival of k + 1, whose confidence has seen x_k."""
    return np.concatenate([survival[:, 1:], survival[:, -1:]], axis=1)


def bias(rule: Rule) -> float:
    """Largest difference of the joint law of two requests' outputs from that of the target."""
    expected, law = target_law(TWO, 3), joint_law(TWO, 2, rule, 3)
    return max(abs(law.get(output, 0.0) - expected.get(output, 0.0)) for output in expected.keys() | law.keys())


def test_ranking_a_position_ahead_changes_the_law() -> None:
    """The negative control: the budget is fixed, and only who gets the slots is decided with knowledge of x_k."""
    assert bias(stale(1)) < 1e-9
    assert bias(lambda survival: allocated(1, a_position_ahead(survival))) > 0.02


@pytest.mark.parametrize("name", ["causal", "causal to the letter", "stopping"])
def test_a_planner_that_ranks_a_position_ahead_changes_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same planner is exact as it is, and is not once its ranking peeks: the enumeration notices."""
    costs = LiveCost(CostTable((1, 2, 3, 4, 5, 6), ((0.7, 1.0, 1.3, 2.5, 3.7, 4.9),)))
    planner: CausalPlanner | StoppingPlanner
    planner = StoppingPlanner(2, costs) if name == "stopping" else CausalPlanner(2, costs, smooth=name == "causal")
    rule = rule_of(planner, StepLoad(2, [2, 2]))
    assert bias(rule) < 1e-9

    def peeking(survival: np.ndarray, limits: np.ndarray, min_width: int) -> Any:
        return ranked(a_position_ahead(survival), limits, min_width)

    monkeypatch.setattr(planner_module, "ranked", peeking)
    monkeypatch.setattr(stopping_module, "ranked", peeking)
    assert bias(rule) > 0.01


def test_what_a_step_shows_does_not_decide_about_the_same_step() -> None:
    """The model of the continuation learns from a step after it has decided: x_k must not enter through the model."""
    rng = np.random.default_rng(0)
    changed = 0
    for _ in range(40):
        survival = rng.random((1, 3)).cumprod(1).astype(np.float32)
        curve = tuple((1.0 + np.cumsum(rng.choice([0.0, 0.1, 1.5], 4))).tolist())
        planner = StoppingPlanner(3, LiveCost(CostTable((1, 2, 3, 4), (curve,))))
        planner.model.batch = 1  # every step is learned at once
        planner.model.prior_weight = 0.1
        taught = copy.deepcopy(planner)
        taught.model.observe(survival)
        load = StepLoad(1, [3])
        budget = planner.decide(survival, load).budget
        untaught = StoppingPlanner(3, planner.costs)
        untaught.model.prior_weight = 0.1
        assert budget == untaught.decide(survival, load).budget
        changed += budget != taught.decide(survival, load).budget
        assert (planner.model.ratio != untaught.model.ratio).any()  # it has learned afterwards
    assert changed > 0, "no example in which learning first would have mattered"


# --- any text, any table ---------------------------------------------------------------------------------------------------


@st.composite
def texts(draw: st.DrawFn, gamma: int) -> tuple[Model, Model]:
    """A random target and drafter over two tokens that depend on everything before."""
    share = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.02, 0.98)
    prefixes = [prefix for k in range(gamma + 1) for prefix in itertools.product((0, 1), repeat=k)]
    p = {prefix: draw(share) for prefix in prefixes}
    q = {prefix: draw(share) for prefix in prefixes}
    return (
        lambda prefix: np.array([p[prefix], 1 - p[prefix]]),
        lambda prefix: np.array([q[prefix], 1 - q[prefix]]),
    )


@st.composite
def jagged(draw: st.DrawFn, tokens: int) -> CostTable:
    times = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0.0, 3.0)
    curve = 1.0 + np.cumsum([draw(times) for _ in range(tokens)])
    return CostTable(tuple(range(1, tokens + 1)), (tuple(curve.tolist()),))


def rules(gamma: int, table: CostTable, requests: int, past: np.ndarray) -> list[Rule]:
    taught = StoppingPlanner(gamma, LiveCost(table))
    for _ in range(40):
        taught.model.observe(past)
    priced = copy.deepcopy(taught)
    for _ in range(priced.prices.settle):
        priced.prices.observe(requests, 1.7 * requests, float(table.step_costs(requests, 2 * requests, 1)[0]))
    load = StepLoad(requests, [gamma] * requests)
    planners = [
        CausalPlanner(gamma, LiveCost(table), smooth=False),
        CausalPlanner(gamma, LiveCost(table)),
        StoppingPlanner(gamma, LiveCost(table)),
        taught,
        priced,
    ]
    return [rule_of(planner, load) for planner in planners]


def rule_of(planner: CausalPlanner | StoppingPlanner, load: StepLoad) -> Rule:
    """As the step does it: the widths of the decision, which are those that allocation would give out."""

    def rule(survival: np.ndarray) -> Sequence[int]:
        decision = copy.deepcopy(planner).decide(survival, load)
        widths = allocated(decision.budget, survival, planner.min_width)
        return widths if decision.widths is None else decision.widths

    return rule


@settings(max_examples=25, deadline=None)
@given(texts(3), jagged(4), st.integers(0, 2**32 - 1))
def test_one_request_keeps_the_law_of_its_whole_output(text: tuple[Model, Model], table: CostTable, seed: int) -> None:
    past = np.random.default_rng(seed).random((4, 3)).cumprod(1).astype(np.float32)
    expected = target_law([text], 4)
    for rule in rules(3, table, 1, past):
        law = joint_law([text], 3, rule, 4)
        for output in expected.keys() | law.keys():
            assert law.get(output, 0.0) == pytest.approx(expected.get(output, 0.0), abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(texts(2), texts(2), jagged(6), st.integers(0, 2**32 - 1))
def test_two_requests_keep_their_joint_law(
    one: tuple[Model, Model], other: tuple[Model, Model], table: CostTable, seed: int
) -> None:
    """Independence included: a rule that lets one request's tokens steer the other's must not couple them."""
    past = np.random.default_rng(seed).random((4, 2)).cumprod(1).astype(np.float32)
    expected = target_law([one, other], 3)
    for rule in [*rules(2, table, 2, past), *map(stale, range(5))]:
        law = joint_law([one, other], 2, rule, 3)
        for output in expected.keys() | law.keys():
            assert law.get(output, 0.0) == pytest.approx(expected.get(output, 0.0), abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(texts(2), texts(2), jagged(6))
def test_a_minimum_width_keeps_the_joint_law(
    one: tuple[Model, Model], other: tuple[Model, Model], table: CostTable
) -> None:
    """The planner ranks the mandatory positions first; allocation must be told to do the same."""
    expected = target_law([one, other], 3)
    load = StepLoad(2, [2, 2])
    for planner in (CausalPlanner(2, LiveCost(table), min_width=1), StoppingPlanner(2, LiveCost(table), min_width=1)):
        law = joint_law([one, other], 2, rule_of(planner, load), 3)
        for output in expected.keys() | law.keys():
            assert law.get(output, 0.0) == pytest.approx(expected.get(output, 0.0), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(jagged(9), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_the_widths_of_a_decision_are_those_of_allocation(table: CostTable, min_width: int, seed: int) -> None:
    """A planner that ranks by itself gives every request what `allocate` would, mandatory positions first."""
    survival = np.random.default_rng(seed).random((3, 2)).cumprod(1).astype(np.float32)
    costs = LiveCost(table)
    for planner in (CausalPlanner(2, costs, min_width=min_width), StoppingPlanner(2, costs, min_width=min_width)):
        decision = planner.decide(survival, StepLoad(3, [2, 2, 2]))
        if decision.widths is not None:
            assert list(decision.widths) == allocated(decision.budget, survival, min_width)
            assert min(decision.widths) >= min_width
