"""Statistics: what they count, that they merge, and that a run in which nothing happened fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation import (
    BlockRecord,
    BreakerState,
    InactiveError,
    Reason,
    RequestStatistics,
    Statistics,
    StepRecord,
)

GAMMA = 4


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    blocks = []
    for _ in range(draw(st.integers(0, 3))):
        drafted = draw(st.integers(0, GAMMA))
        width = draw(st.integers(0, drafted))
        blocks.append(BlockRecord(drafted, width, draw(st.integers(0, width))))
    whole_ms = st.integers(0, 50).map(float)  # exactly summable, so that merging can be compared bit for bit
    return StepRecord(
        blocks,
        draw(st.sampled_from(list(Reason))),
        stale_lag=draw(st.integers(0, 3)),
        predicted_ms=draw(st.none() | whole_ms),
        measured_ms=draw(st.none() | whole_ms),
        graph_hit=draw(st.none() | st.booleans()),
        breakers={draw(st.sampled_from(list(BreakerState))): draw(st.integers(0, 2))},
    )


def total(records: list[StepRecord]) -> Statistics:
    statistics = Statistics()
    for record in records:
        statistics.record(record)
        if record.blocks:
            _, widths, accepted, _, _ = map(np.array, zip(*record.blocks, strict=True))
            statistics.record_confidence(np.full((len(widths), GAMMA), 0.5), widths, accepted)
    return statistics


@settings(max_examples=60, deadline=None)
@given(st.lists(steps(), max_size=8), st.lists(steps(), max_size=8))
def test_merging_processes_equals_counting_in_one(here: list[StepRecord], there: list[StepRecord]) -> None:
    merged = Statistics()
    for part in (total(here), total(there)):
        merged.merge(Statistics.from_dict(json.loads(json.dumps(part.to_dict()))))  # as another process sends it
    assert merged.to_dict() == total(here + there).to_dict()


@settings(max_examples=60, deadline=None)
@given(st.lists(steps(), max_size=8))
def test_counts_are_consistent(records: list[StepRecord]) -> None:
    statistics = total(records)
    blocks = statistics.blocks
    assert blocks.emitted == blocks.accepted + blocks.steps
    assert blocks.accepted == sum(blocks.accepted_by_position)
    assert blocks.verified == sum(blocks.verified_by_position) == sum(w * n for w, n in blocks.widths.items())
    assert blocks.accepted <= blocks.verified <= blocks.drafted
    assert blocks.regretted <= blocks.trimmed
    assert sum(statistics.reasons.values()) == statistics.steps == len(records)


def test_one_request_by_hand() -> None:
    request = RequestStatistics()
    request.record(drafted=4, width=4, accepted=2)
    request.record(drafted=4, width=2, accepted=2)  # trimmed and accepted to its end: regretted
    request.record(drafted=4, width=3, accepted=1)  # trimmed, but it would have died anyway
    request.record(drafted=4, width=0, accepted=0)  # no token was tested
    request.record(drafted=1, width=1, accepted=1, emitted=1)  # a stop inside the block
    assert (request.drafted, request.verified, request.accepted, request.emitted) == (17, 10, 6, 10)
    assert request.verified_by_position == [4, 3, 2, 1]
    assert request.accepted_by_position == [4, 2]
    assert request.acceptance_by_position == [1.0, 2 / 3]
    assert dict(request.widths) == {4: 1, 2: 1, 3: 1, 0: 1, 1: 1}
    assert (request.trimmed, request.regretted, request.trim_regret_rate) == (2, 1, 0.5)
    assert RequestStatistics.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_calibration_error_counts_only_what_is_known() -> None:
    statistics = Statistics()
    statistics.record_confidence(
        np.array([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]]),
        widths=np.array([3, 1]),
        accepted=np.array([1, 1]),  # known everywhere: rejected at 2; nothing is known after position 1
    )
    np.testing.assert_allclose(statistics.calibration_error, [(1.4 - 2) / 2, 0.8, 0.7])


def test_times_and_lag_are_averaged_over_the_steps_that_have_them() -> None:
    statistics = total(
        [
            StepRecord([], Reason.PLANNED, stale_lag=1.0, predicted_ms=10.0, measured_ms=12.0),
            StepRecord([], Reason.FULL, stale_lag=3.0, predicted_ms=10.0, measured_ms=9.0),
            StepRecord([], Reason.NO_TABLE, measured_ms=99.0),
        ]
    )
    assert statistics.mean_stale_lag == 2.0
    assert (statistics.timed_steps, statistics.predicted_ms, statistics.measured_ms) == (2, 20.0, 21.0)
    assert statistics.absolute_error_ms == 3.0


def active() -> list[StepRecord]:
    return [StepRecord([BlockRecord(4, width, width)], Reason.PLANNED, graph_hit=True) for width in (1, 4)]


def test_an_active_run_passes() -> None:
    total(active()).assert_active(trimming=True, graphs=True, min_steps=2)


@pytest.mark.parametrize(
    ("records", "demands", "message"),
    [
        ([], {}, "only 0 of at least 1"),
        (active(), {"min_steps": 9}, "only 2 of at least 9"),
        ([StepRecord([BlockRecord(0, 0, 0)], Reason.NOTHING_DRAFTED)], {}, "proposed nothing"),
        ([StepRecord([BlockRecord(4, 0, 0)], Reason.PLANNED)], {}, r"none was verified \(planner: planned 1\)"),
        ([StepRecord([BlockRecord(4, 4, 0)], Reason.FULL)], {}, "none was accepted"),
        ([StepRecord([BlockRecord(4, 4, 4)], Reason.NO_TABLE)] * 3, {"trimming": True}, "same width .*no_table 3"),
        (
            [StepRecord([BlockRecord(w, w, w)], Reason.FLAT_TABLE) for w in (3, 4)],
            {"trimming": True},
            "was ever trimmed",
        ),
        ([StepRecord([BlockRecord(4, 4, 4)], Reason.FULL)], {"graphs": True}, "no step replayed"),
        ([*active(), StepRecord([], Reason.FULL, graph_hit=False)], {"graphs": True}, "1 decode steps fell out"),
    ],
)
def test_an_inactive_run_fails_and_says_which_part(records: list[StepRecord], demands: dict, message: str) -> None:
    with pytest.raises(InactiveError, match=message):
        total(records).assert_active(**demands)
