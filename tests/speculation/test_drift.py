"""Predicted against measured step times: rescaling of the whole table, correction of single row counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from surefoot.speculation import Correction, CostTable, DriftTracker


def table(**changes: Any) -> CostTable:
    return CostTable(**{"token_buckets": (1, 4, 8), "verify_ms": ((1.0, 2.0, 4.0),), **changes})


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
