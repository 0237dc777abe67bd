"""The cost table: staircase, running maximum, provenance, the forms of other engines, and drift."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import CostTableError, SurefootError
from surefoot.speculation import ConfidenceBoard, Correction, CostTable, DriftTracker, StalePlanner, StepLoad
from surefoot.speculation.live_cost import LiveCost

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"token_buckets": ()}, "empty"),
    ({"token_buckets": (1, 1, 2)}, "strictly increasing"),
    ({"token_buckets": (0, 1, 2)}, "at least 1"),
    ({"token_buckets": (1, 2.5, 3)}, "integers"),
    ({"verify_ms": ((1.0, 2.0),)}, "2 entries, token_buckets has 3"),
    ({"verify_ms": ((1.0, math.nan, 2.0),)}, "finite"),
    ({"verify_ms": ((1.0, math.inf, 2.0),)}, "finite"),
    ({"verify_ms": ((0.0, 1.0, 2.0),)}, "positive"),
    ({"verify_ms": (("a", 1.0, 2.0),)}, "numbers"),
    ({"verify_ms": ((1.0, 2.0, 3.0),) * 2}, "1 context lengths but 2"),
    ({"draft_ms": (-1.0,)}, "at least 0"),
    ({"draft_ms": (1.0, 2.0)}, "2 entries, draft_requests has 1"),
    ({"draft_requests": ()}, "empty"),
    ({"fixed_overhead_ms": math.nan}, "finite"),
    ({"draft_depths": (1, 2), "draft_depth_ms": (1.0,)}, "1 entries, draft_depths has 2"),
    ({"draft_depths": (0, 2), "draft_depth_ms": (1.0, 2.0)}, "at least 1"),
    ({"batch_sizes": (1, 2), "batch_overhead_ms": (1.0,)}, "1 entries, batch_sizes has 2"),
    ({"batch_overhead_ms": (1.0,)}, "empty"),
]


def table(**changes: Any) -> CostTable:
    return CostTable(**{"token_buckets": (1, 4, 8), "verify_ms": ((1.0, 2.0, 4.0),), **changes})


@pytest.mark.parametrize(("changes", "message"), MALFORMED)
def test_each_malformed_table_has_its_own_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        table(**changes)


def test_staircase_inside_the_buckets_and_linear_beyond() -> None:
    costs = table().verify_costs(0, 13)
    assert costs[:9].tolist() == [1, 1, 2, 2, 2, 4, 4, 4, 4]
    np.testing.assert_allclose(costs[9:], 4 + 0.5 * np.arange(1, 5))  # the slope of the upper half, 4 to 8 tokens


def test_points_beyond_the_captured_range_are_interpolated() -> None:
    costs = table(captured_tokens=4).verify_costs(1, 8)
    np.testing.assert_allclose(costs, [1, 2, 2, 2, 2.5, 3, 3.5, 4])


def test_running_maximum_over_tokens_and_context_lengths() -> None:
    noisy = CostTable((1, 2, 4), ((3.0, 2.0, 5.0), (2.5, 4.0, 4.5)), context_lengths=(0, 100))
    assert noisy.verify_costs(1, 4).tolist() == [3, 3, 5, 5]
    assert noisy.verify_costs(1, 4, 100).tolist() == [3, 4, 5, 5]
    assert noisy.verify_ms == ((3.0, 2.0, 5.0), (2.5, 4.0, 4.5))  # the file keeps what was measured


def test_context_is_interpolated_between_lengths_and_extended_beyond() -> None:
    grown = CostTable((1, 2), ((1.0, 2.0), (3.0, 6.0)), context_lengths=(0, 100))
    assert [grown.verify_ms_at(2, context) for context in (0, 50, 100, 150)] == [2, 4, 6, 8]


def test_draft_and_overheads_do_not_cancel() -> None:
    full = table(
        draft_requests=(1, 4),
        draft_ms=(1.0, 4.0),
        fixed_overhead_ms=0.5,
        batch_sizes=(1, 4),
        batch_overhead_ms=(0.25, 1.0),
    )
    assert full.draft_ms_at(0) == 0.0
    assert [full.draft_ms_at(requests) for requests in (1, 2, 4, 6)] == [1, 2, 4, 6]
    assert [full.overhead_ms_at(requests) for requests in (1, 3, 4, 9)] == [0.75, 0.75, 1.5, 1.5]
    assert full.step_costs(2, 4, 1)[0] == 2.0 + 2.0 + 0.75
    assert full.step_costs(2, 4, 1, drafted=0)[0] == 2.0 + 0.75


def test_json_round_trip_and_fingerprint(tmp_path: Path) -> None:
    fingerprint = {"model": "m", "gamma": 7, "threads": 2, "buckets": (1, 4, 8), "versions": {"torch": "2.13"}}
    measured = table(fingerprint=fingerprint, captured_tokens=4, batch_sizes=(1,), batch_overhead_ms=(0.1,))
    measured.save(tmp_path / "cost.json")
    loaded = CostTable.load(tmp_path / "cost.json", fingerprint)
    assert loaded.to_dict() == measured.to_dict()
    with pytest.raises(CostTableError, match=r"gamma: table 7, engine 5; threads: table 2, engine 8.*surefoot profile"):
        CostTable.load(tmp_path / "cost.json", {**fingerprint, "gamma": 5, "threads": 8})
    with pytest.raises(CostTableError, match="dtype: table 'unset', engine 'bf16'"):
        loaded.require({**fingerprint, "dtype": "bf16"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "expected an object"),
        ("{}", "not a cost table"),
        ('{"format": "surefoot-cost-table", "version": 2}', "version 2"),
        ('{"format": "surefoot-cost-table", "version": 1}', "lacks 'token_buckets'"),
        (json.dumps({**table().to_dict(), "token_buckets": 3}), "malformed"),
        (json.dumps({**table().to_dict(), "fingerprint": 3}), "fingerprint"),
    ],
)
def test_each_malformed_file_has_its_own_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostTableError, match=message):
        CostTable.load(tmp_path / "cost.json")


def test_flat_tables_know_it() -> None:
    assert table(verify_ms=((2.0, 2.0, 2.0),)).is_flat
    assert table(verify_ms=((2.0, 1.0, 1.5),)).is_flat  # noise only: the running maximum never rises
    assert not table().is_flat


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    buckets = sorted(draw(st.sets(st.integers(1, 40), min_size=2, max_size=8)))
    times = st.floats(0.5, 50.0)
    requests = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
    return CostTable(
        tuple(buckets),
        (tuple(draw(times) for _ in buckets),),
        draft_requests=tuple(requests),
        draft_ms=tuple(draw(times) for _ in requests),
        captured_tokens=draw(st.sampled_from([None, buckets[0], buckets[-1]])),
        fixed_overhead_ms=draw(st.floats(0.0, 5.0)),
        batch_sizes=(1, 3),
        batch_overhead_ms=(draw(times), draw(times)),
    )


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_every_foreign_form_decides_like_the_original(ours: CostTable, requests: int, gamma: int, seed: int) -> None:
    tokens = requests * (gamma + 1)
    # Through text, as another process would read them.
    forms = [
        CostTable.from_sglang(json.loads(json.dumps(ours.to_sglang_simple(requests, tokens)))),
        CostTable.from_sglang(json.loads(json.dumps(ours.to_sglang_additive(requests, tokens)))),
        CostTable.from_tensorrt_llm(json.loads(json.dumps(ours.to_tensorrt_llm(requests, tokens)))),
    ]
    rng = np.random.default_rng(seed)
    board = ConfidenceBoard(requests, gamma)
    seats = [board.open(slot) for slot in range(requests)]
    expected = ours.step_costs(requests, requests, requests * gamma + 1)
    for step in range(5):
        board.publish(step, seats, rng.random((requests, gamma)).astype(np.float32).cumprod(1))
        published = board.read(step + 1, seats)
        load = StepLoad(requests, [gamma] * requests)
        decision = StalePlanner(gamma, LiveCost(ours)).decide(published, load)
        for form in forms:
            np.testing.assert_allclose(form.step_costs(requests, requests, requests * gamma + 1), expected, rtol=1e-9)
            theirs = StalePlanner(gamma, LiveCost(form)).decide(published, load)
            if form.is_flat == ours.is_flat:
                assert theirs.budget == decision.budget


def test_sglang_simple_is_a_floor_lookup() -> None:
    form = {"sample_batch_tokens": [2, 5], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 8}
    assert CostTable.from_sglang(form).verify_costs(1, 9).tolist() == [10, 10, 10, 10, 20, 20, 20, 20, 20]


def test_sglang_additive_interpolates_and_clamps() -> None:
    form = {
        "bias_seconds": 0.001,
        "bs_probes": [1, 3],
        "alpha_seconds": [0.002, 0.004],
        "m_probes": [2, 6],
        "theta_seconds": [0.01, 0.03],
    }
    imported = CostTable.from_sglang(form)
    np.testing.assert_allclose(imported.step_costs(2, 1, 8), 1 + 3 + np.array([10, 10, 15, 20, 25, 30, 30, 30]))
    np.testing.assert_allclose(imported.step_costs(9, 4, 1), [1 + 4 + 20])


def test_tensorrt_llm_counts_the_bonus_token_and_keeps_its_overheads() -> None:
    form = {"token_counts": [0, 4, 8], "step_time_ms": [2.0, 2.0, 4.0], "fixed_overhead_ms": 1.0}
    form |= {"batch_sizes": [1, 4], "batch_overhead_ms": [0.5, 2.0]}
    imported = CostTable.from_tensorrt_llm(form)
    np.testing.assert_allclose(imported.step_costs(1, 1, 9), 1.5 + np.array([2, 2, 2, 2, 2.5, 3, 3.5, 4, 4]))
    assert imported.step_costs(5, 8, 1)[0] == 1 + 2 + 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]}, "2 sample_batch_tokens but 1"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "empty"),
        (
            {"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1.0, 1.0], "max_batch_tokens": 4},
            "strictly increasing",
        ),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]}, "positive"),
        ({"sample_batch_tokens": [4], "sample_steps_per_sec": [1.0], "max_batch_tokens": 2}, "max_batch_tokens"),
        ({"sample_batch_tokens": "x"}, "list of numbers"),
        ({"theta_seconds": [1.0], "m_probes": [1], "bias_seconds": None}, "bias_seconds"),
        (
            {"theta_seconds": [1.0], "m_probes": [1, 2], "bias_seconds": 0, "bs_probes": [1], "alpha_seconds": [0]},
            "2 entries",
        ),
    ],
)
def test_malformed_sglang_forms(form: dict[str, Any], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        CostTable.from_sglang(form)


def test_malformed_tensorrt_llm_form() -> None:
    with pytest.raises(CostTableError, match="step_time_ms"):
        CostTable.from_tensorrt_llm({"token_counts": [1]})


# --- drift ---------------------------------------------------------------------------------------------------------------


def test_a_persistent_ratio_rescales_and_is_reported() -> None:
    tracker = DriftTracker(table(), window=32)
    reports = [report for _ in range(100) if (report := tracker.observe(10.0, 15.0 / tracker.total))]
    assert len(reports) == 1
    assert tracker.total == pytest.approx(1.5)
    assert tracker.table.verify_ms_at(1) == pytest.approx(1.5)
    assert "1.50 times" in str(reports[0])


def test_rescaling_follows_back_without_compounding_rounding() -> None:
    tracker = DriftTracker(table(), window=16)
    for true_speed in (2.0, 1.0):
        for _ in range(64):
            tracker.observe(10.0 * tracker.total, 10.0 * true_speed)
    assert tracker.total == pytest.approx(1.0)


def test_asymmetric_noise_does_not_rescale() -> None:
    rng = np.random.default_rng(0)
    tracker = DriftTracker(table())
    for _ in range(3000):
        stall = rng.exponential(30.0) if rng.random() < 0.3 else 0.0  # late by any amount, never early
        assert tracker.observe(10.0, 10.0 * rng.normal(1.0, 0.03) + stall) is None
    assert tracker.total == 1.0


def test_a_burst_shorter_than_half_a_window_does_not_rescale() -> None:
    tracker = DriftTracker(table(), window=64)
    for step in range(640):
        assert tracker.observe(10.0, 20.0 if step % 64 < 28 else 10.0) is None


@pytest.mark.parametrize("machine", [0.97, 1.0, 1.03])
def test_single_row_counts_are_corrected_by_what_their_steps_take(machine: float) -> None:
    """V(4) was measured a fifth too low. Whatever all steps have in common is no reason to correct any of them."""
    rng = np.random.default_rng(0)
    tracker = DriftTracker(table(captured_tokens=0), window=64)
    changes = []
    for step in range(2000):
        rows = (1, 4, 1)[step % 3]
        predicted = tracker.table.verify_ms_at(rows)
        true = {1: 1.0, 4: 2.5}[rows] * machine
        if change := tracker.observe(predicted, true * rng.normal(1.0, 0.05), rows):
            changes.append(change)
    assert {type(change) for change in changes} == {Correction}
    assert len(changes) < 10  # then it is content
    one, four, eight = tracker.table.verify_ms[0]
    assert (one, eight) == pytest.approx((1.0, 4.0), rel=0.04)
    assert four == pytest.approx(2.5, rel=0.04)
    assert "4 rows x 1.2" in str(changes[-1])


def test_noise_alone_corrects_little() -> None:
    rng = np.random.default_rng(1)
    tracker = DriftTracker(table())
    for step in range(5000):
        rows = (1, 4, 8)[step % 3]
        true = table().verify_ms_at(rows)
        tracker.observe(
            tracker.table.verify_ms_at(rows), true * (rng.normal(1.0, 0.08) + 3.0 * (rng.random() < 0.05)), rows
        )
    assert np.array(tracker.table.verify_ms) == pytest.approx(np.array(table().verify_ms), rel=0.06)


def test_a_correction_has_a_limit() -> None:
    tracker = DriftTracker(table(), window=16)
    changes = [tracker.observe(10.0, 10.0 if step % 3 else 100.0, (4, 1, 1)[step % 3]) for step in range(4000)]
    assert 0 < sum(change is not None for change in changes) < 4  # then there is nothing left to change
    assert tracker.table.verify_ms[0] == pytest.approx((1.0, 2.0 * DriftTracker.MOST, 4.0))


def test_a_bucket_below_a_smaller_pass_is_not_wound_up() -> None:
    """V(4) was measured below V(1), which holds it up: no factor changes the prediction, so none is gathered."""
    tracker = DriftTracker(CostTable((1, 4, 8), ((2.0, 1.5, 4.0),), captured_tokens=0), window=16)
    for step in range(2000):
        rows = (1, 4, 8)[step % 3]
        true = {1: 2.0, 4: 1.8, 8: 4.0}[rows]
        assert tracker.observe(tracker.table.verify_ms_at(rows), true, rows) is None
    assert tracker.table.verify_costs(1, 8).tolist() == tracker.profiled.verify_costs(1, 8).tolist()


def test_the_bucket_that_says_most() -> None:
    linear, stairs = table(captured_tokens=0), table()
    assert [linear.bucket_of(rows) for rows in (1, 2, 3, 4, 5, 6, 8, 100)] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [stairs.bucket_of(rows) for rows in (1, 2, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 2]


def test_meaningless_measurements_are_ignored() -> None:
    tracker = DriftTracker(table(), window=2)
    for measured in (0.0, -1.0, math.inf, math.nan):
        assert tracker.observe(1.0, measured) is None
    with pytest.raises(CostTableError, match="scaled"):
        table().scaled(0.0)


def test_shallow_drafts_cost_what_as_many_rows_cost() -> None:
    """D of n requests at depth g is D of n * g rows: below gamma rows from one request's depths, above from requests."""
    costs = table(draft_requests=(1, 3), draft_ms=(10.0, 22.0), draft_depths=(1, 2, 4), draft_depth_ms=(4.0, 6.0, 10.0))
    assert [costs.draft_ms_at(1, depth) for depth in (1, 2, 3, 4, 9, None)] == [4.0, 6.0, 8.0, 10.0, 10.0, 10.0]
    assert [costs.draft_ms_at(2, depth) for depth in (1, 2, 3, 4)] == [6.0, 10.0, 13.0, 16.0]
    assert costs.draft_ms_at(0, 2) == 0.0
    assert costs.step_costs(2, 2, 1, depth=1)[0] == costs.step_costs(2, 2, 1)[0] - 10.0
    assert costs.scaled(2.0).draft_ms_at(1, 2) == 12.0
    assert CostTable.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert table(draft_ms=(5.0,)).draft_ms_at(1, 1) == 5.0  # never measured


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurefootError, match=r"cannot write .*file/table.json: .*must be a directory"):
        table().save(tmp_path / "file" / "table.json")
