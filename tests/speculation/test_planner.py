"""The three rules: exhaustive search, its special cases with their reasons, and what each rule may not be given."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from surefoot.errors import ConfigurationError
from surefoot.speculation import (
    CausalPlanner,
    ConfidenceBoard,
    ContinuationModel,
    Correction,
    CostTable,
    ForcedWidths,
    LiveCost,
    PublishedSurvival,
    Reason,
    Rescale,
    StalePlanner,
    StepLoad,
    StoppingPlanner,
)

STEEP = CostTable(tuple(range(1, 65)), (tuple(10.0 + size for size in range(1, 65)),))


def published(survival: np.ndarray) -> PublishedSurvival:
    board = ConfidenceBoard(len(survival), survival.shape[1])
    seats = [board.open(slot) for slot in range(len(survival))]
    board.publish(0, seats, survival.astype(np.float32))
    return board.read(1, seats)


@st.composite
def survivals(draw: st.DrawFn, max_requests: int = 4, max_gamma: int = 4) -> np.ndarray:
    requests, gamma = draw(st.integers(1, max_requests)), draw(st.integers(1, max_gamma))
    level = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1, width=32)
    confidence = np.array([[draw(level) for _ in range(gamma)] for _ in range(requests)], dtype=np.float32)
    return confidence.cumprod(1, dtype=np.float32)


@st.composite
def staircases(draw: st.DrawFn) -> CostTable:
    """Jagged, noisy, with prices of any slope, and with values that tie exactly."""
    buckets = sorted(draw(st.sets(st.integers(1, 24), min_size=2, max_size=8)))
    times = st.sampled_from([1.0, 2.0, 4.0]) | st.floats(0.5, 40.0)
    rising = np.cumsum([draw(times) for _ in buckets])
    return CostTable(
        tuple(buckets),
        (tuple(rising.tolist()),),
        draft_ms=(draw(st.floats(0, 10)),),
        fixed_overhead_ms=draw(st.floats(0, 4)),
    )


def exhaustive(survival: np.ndarray, limits: list[int], table: CostTable, requests: int, prefill: int = 0) -> int:
    """Argmax over K in exact rational arithmetic; the smallest K of those that tie after rounding the quotient once."""
    grid = 1 << 24
    inside = sorted((row[k] for row, limit in zip(survival, limits, strict=True) for k in range(limit)), reverse=True)
    gains = [Fraction(round(float(value) * grid), grid) for value in inside]
    costs = table.step_costs(requests, requests + prefill, len(gains) + 1, draft_requests=len(limits))
    rates = [float(Fraction(requests) + sum(gains[:k])) / float(costs[k]) for k in range(len(gains) + 1)]
    return rates.index(max(rates))


@settings(max_examples=200, deadline=None)
@given(survivals(), staircases(), st.data())
def test_stale_search_is_the_global_maximum_on_jagged_curves(
    survival: np.ndarray, table: CostTable, data: st.DataObject
) -> None:
    assume(not table.is_flat)
    gamma = survival.shape[1]
    limits = [data.draw(st.integers(0, gamma)) for _ in survival]
    extra, prefill = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 5))
    load = StepLoad(len(survival) + extra, limits, prefill_tokens=prefill)
    planner = StalePlanner(gamma, LiveCost(table), forecast=False, trim_beside_prefill=True)
    decision = planner.decide(published(survival), load)
    assert decision.budget == exhaustive(survival, limits, table, load.requests, prefill)
    if sum(limits):
        assert decision.reason in (Reason.PLANNED, Reason.FULL)
        ms = table.step_costs(load.requests, load.requests + prefill + decision.budget, 1, draft_requests=len(limits))[
            0
        ]
        assert decision.predicted_ms == pytest.approx(ms)


@settings(max_examples=100, deadline=None)
@given(survivals(), staircases(), st.permutations(range(4)))
def test_the_budget_does_not_depend_on_the_order_of_requests(
    survival: np.ndarray, table: CostTable, permutation: list[int]
) -> None:
    order = [request for request in permutation if request < len(survival)]
    load = StepLoad(len(survival), [survival.shape[1]] * len(survival))
    planner = StalePlanner(survival.shape[1], LiveCost(table))
    one, other = planner.decide(published(survival), load), planner.decide(published(survival[order]), load)
    assert one.budget == other.budget
    assert one.expected_tokens == other.expected_tokens  # to the last bit


@settings(max_examples=100, deadline=None)
@given(survivals(max_requests=1, max_gamma=7), staircases())
def test_one_request_is_the_closed_form(survival: np.ndarray, table: CostTable) -> None:
    assume(not table.is_flat)
    gamma = survival.shape[1]
    costs = table.step_costs(1, 1, gamma + 1)
    rates = [(1 + float(survival[0, :k].astype(np.float64).sum())) / costs[k] for k in range(gamma + 1)]
    decision = StalePlanner(gamma, LiveCost(table)).decide(published(survival), StepLoad(1, [gamma]))
    assert rates[decision.budget] == pytest.approx(max(rates), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(survivals(), st.floats(0.1, 20), st.floats(0.01, 5), st.floats(0.0, 0.5))
def test_early_stopping_equals_the_global_search_on_convex_costs(
    survival: np.ndarray, base: float, slope: float, bend: float
) -> None:
    """Concave gains over convex costs make the rate unimodal: both forms of Algorithm 1 find the maximum."""
    requests, gamma = survival.shape
    sizes = range(1, requests * (gamma + 1) + 1)
    table = CostTable(tuple(sizes), (tuple(base + slope * size + bend * size * size for size in sizes),))
    load = StepLoad(requests, [gamma] * requests)
    rates = {}
    for planner in (
        CausalPlanner(gamma, LiveCost(table), smooth=False),
        CausalPlanner(gamma, LiveCost(table), smooth=True),
    ):
        decision = planner.decide(survival, load)
        rates[planner.smooth] = decision.expected_tokens_per_ms
    best = StalePlanner(gamma, LiveCost(table), forecast=False).decide(published(survival), load).expected_tokens_per_ms
    assert rates[False] == pytest.approx(best, rel=1e-6)
    assert rates[True] == pytest.approx(best, rel=1e-6)


def test_algorithm_1_stops_at_the_foot_of_a_cliff_that_the_others_cross() -> None:
    cliff = CostTable((1, 8), ((10.0, 14.0),))
    survival = np.full((1, 7), 0.9, np.float32)
    load = StepLoad(1, [7])
    slow_start = np.array([[0.3] + [0.29] * 6], np.float32)
    assert CausalPlanner(7, LiveCost(cliff), smooth=False).decide(slow_start, load).budget == 0
    assert StalePlanner(7, LiveCost(cliff)).decide(published(slow_start), load).budget == 7
    assert StoppingPlanner(7, LiveCost(cliff)).decide(survival, load).budget == 7


def test_the_stale_rule_refuses_current_survivals() -> None:
    planner = StalePlanner(2, LiveCost(STEEP))
    for current in (torch.ones(1, 2), np.ones((1, 2)), [[1.0, 1.0]]):
        with pytest.raises(TypeError, match="PublishedSurvival"):
            planner.decide(current, StepLoad(1, [2]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "load", "budget", "reason"),
    [
        ({"costs": LiveCost()}, StepLoad(2, [3, 2]), 5, Reason.NO_TABLE),
        ({"costs": LiveCost(CostTable((1, 9), ((3.0, 3.0),)))}, StepLoad(2, [3, 2]), 5, Reason.FLAT_TABLE),
        ({}, StepLoad(2, [0, 0]), 0, Reason.NOTHING_DRAFTED),
        ({}, StepLoad(2, []), 0, Reason.NOTHING_DRAFTED),
        ({}, StepLoad(2, [3, 2], prefill_tokens=16), 5, Reason.PREFILL),
        ({"forced": ForcedWidths.parse("2,1")}, StepLoad(2, [3, 3]), 3, Reason.FORCED),
        ({"costs": LiveCost(), "forced": ForcedWidths.parse(3)}, StepLoad(2, [3, 1]), 4, Reason.FORCED),
        ({}, StepLoad(2, [3, 3]), 0, Reason.PLANNED),
    ],
)
@pytest.mark.parametrize("rule", [StalePlanner, CausalPlanner, StoppingPlanner])
def test_every_decision_carries_its_reason(
    rule: type, changes: dict, load: StepLoad, budget: int, reason: Reason
) -> None:
    hopeless = np.full((len(load.limits), 3), 1e-3, np.float32)
    planner = rule(**{"gamma": 3, "costs": LiveCost(STEEP), **changes})
    decision = planner.decide(published(hopeless) if rule is StalePlanner else hopeless, load)
    assert (decision.budget, decision.reason) == (budget, reason)
    assert (decision.predicted_ms is None) == (planner.table is None)
    assert decision.full_budget == int(planner.limits_of(load).sum())


def test_cold_requests_count_as_certain_and_an_all_cold_batch_says_so() -> None:
    board = ConfidenceBoard(2, 3)
    warm, cold = board.open(0), board.open(1)
    planner, load = StalePlanner(3, LiveCost(STEEP)), StepLoad(2, [3, 3])
    assert planner.decide(board.read(1, [warm, cold]), load).reason is Reason.COLD
    board.publish(1, [warm], np.full((1, 3), 1e-3, np.float32))
    decision = planner.decide(board.read(2, [warm, cold]), load)
    assert (decision.budget, decision.reason) == (3, Reason.PLANNED)
    assert decision.stale_lag == 1.0


def test_all_ones_still_stop_where_even_certain_tokens_do_not_pay() -> None:
    steep = CostTable((1, 2, 8), ((1.0, 1.5, 100.0),))
    decision = StalePlanner(7, LiveCost(steep)).decide(published(np.ones((1, 7))), StepLoad(1, [7]))
    assert (decision.budget, decision.reason) == (1, Reason.PLANNED)


def test_prefill_rows_count_as_load() -> None:
    cliff = CostTable((1, 8, 16), ((1.0, 1.01, 50.0),))
    survival = published(np.full((1, 7), 0.99, np.float32))
    free = StalePlanner(7, LiveCost(cliff), trim_beside_prefill=True).decide(survival, StepLoad(1, [7]))
    loaded = StalePlanner(7, LiveCost(cliff), trim_beside_prefill=True).decide(
        survival, StepLoad(1, [7], prefill_tokens=3)
    )
    assert (free.budget, loaded.budget) == (7, 4)


def test_minimum_gain_keeps_the_whole_window() -> None:
    survival = published(np.array([[0.9, 0.05]], np.float32))
    table = CostTable((1, 2, 3), ((10.0, 11.0, 12.0),))
    eager = StalePlanner(2, LiveCost(table)).decide(survival, StepLoad(1, [2]))
    assert (eager.budget, eager.reason) == (1, Reason.PLANNED)
    assert 0.0 < eager.predicted_gain < 0.1
    shy = StalePlanner(2, LiveCost(table), min_gain=0.1).decide(survival, StepLoad(1, [2]))
    assert (shy.budget, shy.reason) == (2, Reason.SMALL_GAIN)


@settings(max_examples=100, deadline=None)
@given(survivals(), staircases(), st.data())
def test_widths_stay_between_minimum_and_maximum(survival: np.ndarray, table: CostTable, data: st.DataObject) -> None:
    gamma = survival.shape[1]
    low = data.draw(st.integers(0, gamma))
    high = data.draw(st.integers(low, gamma))
    limits = [data.draw(st.integers(0, gamma)) for _ in survival]
    load = StepLoad(len(survival), limits)
    least, most = (sum(min(limit, bound) for limit in limits) for bound in (low, high))
    settings = {"gamma": gamma, "costs": LiveCost(table), "min_width": low, "max_width": high}
    assert least <= StalePlanner(**settings).decide(published(survival), load).budget <= most
    assert least <= CausalPlanner(**settings).decide(survival, load).budget <= most
    assert least <= StoppingPlanner(**settings).decide(survival, load).budget <= most


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_width=3, max_width=2, gamma=4"):
        StalePlanner(4, min_width=3, max_width=2)
    with pytest.raises(ConfigurationError, match="max_width=9"):
        StoppingPlanner(4, max_width=9)


def test_forced_patterns_rotate_over_requests_and_steps() -> None:
    forced = ForcedWidths.parse("0,3,1,7")
    limits = np.array([7, 7, 7, 2])
    assert forced.widths(0, limits).tolist() == [0, 3, 1, 2]
    assert forced.widths(1, limits).tolist() == [3, 1, 7, 0]
    assert ForcedWidths.parse([2]).widths(5, limits).tolist() == [2, 2, 2, 2]
    for text in ("", "a", "1,-2", []):
        with pytest.raises(ConfigurationError, match="forced width"):
            ForcedWidths.parse(text)


# --- optimal stopping ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(survivals(), staircases(), st.booleans())
def test_stopping_never_looks_after_where_it_stops(survival: np.ndarray, table: CostTable, priced: bool) -> None:
    """Changing what comes after the heads of the final allocation must not change the decision."""
    requests, gamma = survival.shape
    load = StepLoad(requests, [gamma] * requests)

    def decide(values: np.ndarray) -> int:
        planner = StoppingPlanner(gamma, LiveCost(table))
        if priced:
            for _ in range(planner.prices.settle):
                planner.prices.observe(requests, 2.0 * requests, 20.0)
        return planner.decide(values, load).budget

    budget = decide(survival)
    order = np.argsort(-survival.T.ravel(), kind="stable")[:budget]
    widths = np.bincount(order % requests, minlength=requests)
    hidden = np.arange(gamma) > widths[:, None]  # the head itself is known
    for replacement in (np.zeros_like(survival), np.minimum.accumulate(np.where(hidden, 1.0, survival), axis=1)):
        assert decide(np.where(hidden, replacement, survival).astype(np.float32)) == budget


def test_stopping_equals_the_global_search_when_every_token_has_its_own_price() -> None:
    """On convex costs nothing after a head can pay if the head does not: no model is needed, the maximum is found."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        survival = rng.random((3, 4)).cumprod(1).astype(np.float32)
        load = StepLoad(3, [4] * 3)
        best = StalePlanner(4, LiveCost(STEEP), forecast=False).decide(published(survival), load)
        assert StoppingPlanner(4, LiveCost(STEEP)).decide(survival, load).budget == best.budget


def test_continuation_model_learns_what_follows() -> None:
    """Blocks either go on certainly or stop dead after position 2, whatever their first confidence says."""
    rng = np.random.default_rng(0)
    model = ContinuationModel(4)
    for _ in range(200):
        good = rng.random((16, 1)) < 0.25
        model.observe(np.where(good, [[0.8, 0.8, 0.8, 0.8]], [[0.8, 0.8, 0.0, 0.0]]).astype(np.float32))
    expected = model.expect(np.array([0]), np.array([0.8], np.float32))[0]
    np.testing.assert_allclose(expected, [0.8, 0.8, 0.2, 0.2], atol=0.03)


def test_continuation_model_ignores_positions_that_were_not_drafted() -> None:
    model = ContinuationModel(3)
    for _ in range(50):
        model.observe(np.tile(np.float32([0.8, 0.8, 0.0]), (16, 1)), np.full(16, 2))
    expected = model.expect(np.array([0]), np.array([0.8], np.float32))[0]
    assert expected[1] == pytest.approx(0.8, abs=0.02)
    assert expected[2] > 0.4  # nothing but the prior is known here


def test_stopping_crosses_a_cliff_only_when_the_model_has_seen_it_pay() -> None:
    cliff = CostTable((1, 8), ((10.0, 30.0),))
    load = StepLoad(1, [7])
    head = 0.8
    for continues in (True, False):
        planner = StoppingPlanner(7, LiveCost(cliff))
        past = np.tile(np.float32([head] * 7 if continues else [head] + [0.01] * 6), (64, 1))
        for _ in range(4):
            planner.model.observe(past)
        assert planner.decide(past[:1], load).budget == (7 if continues else 0)


def test_prices_are_forgotten_when_the_table_is_rescaled() -> None:
    planner = StoppingPlanner(2, costs := LiveCost(STEEP))
    survival, load = np.full((1, 2), 0.9, np.float32), StepLoad(1, [2])
    for _ in range(planner.prices.settle):
        planner.decide(survival, load)
    assert planner.prices.price(1) == pytest.approx(2.8 / 13.0, rel=1e-6)
    changes = [costs.observe(1.0, 1.15 if i % 2 else 1.0, 1 + i % 2) for i in range(200)]
    assert any(isinstance(change, Correction) for change in changes)
    assert not any(isinstance(change, Rescale) for change in changes)
    planner.decide(survival, load)
    assert planner.prices.price(1) is not None
    assert any(isinstance(costs.observe(1.0, 3.0, 1), Rescale) for _ in range(200))
    planner.decide(survival, load)
    assert planner.prices.price(1) is None


def test_a_prompt_chunk_does_not_make_rows_look_cheap() -> None:
    """Against the ratio of a step whose time a chunk has spent already, any row would pay; its price is that of decoding."""
    linear = CostTable((1, 256), ((10.0, 265.0),), captured_tokens=0)  # 10 ms, and 1 ms a row
    dear, cheap = np.full((4, 1), 0.3, np.float32), np.full((4, 1), 0.9, np.float32)  # 4 tokens in 13 ms: 0.31 a row

    def budgets(planner: StoppingPlanner, prefill: int) -> list[int]:
        load = StepLoad(4, [1] * 4, prefill_tokens=prefill)
        return [planner.decide(survival, load).budget for survival in (dear, cheap)]

    fresh = StoppingPlanner(1, LiveCost(linear), trim_beside_prefill=True)
    assert budgets(fresh, prefill=200) == [0, 4]
    assert fresh.prices.price(4) is None
    for _ in range(fresh.prices.settle):
        assert fresh.decide(dear, StepLoad(4, [1] * 4)).budget == 0
    price = fresh.prices.price(4)
    assert price == pytest.approx(4 / 13)
    for _ in range(64):
        assert budgets(fresh, prefill=200) == [0, 4]
    assert fresh.prices.price(4) == price


def test_costs_that_are_kept_are_those_of_the_table_in_use() -> None:
    planner, load = StoppingPlanner(1, LiveCost(STEEP)), StepLoad(1, [1], context=100.0)
    survival = np.full((1, 1), 0.9, np.float32)
    before = [planner.decide(survival, load).predicted_ms for _ in range(2)]
    planner.costs.use(STEEP.scaled(2.0))
    after = planner.decide(survival, load).predicted_ms
    assert before == [12.0, 12.0]
    assert after == 24.0
    assert planner.decide(survival, load._replace(requests=2)).predicted_ms == 26.0
