"""One cost table for everybody who plans: a change reaches all holders, and old values are known to be old."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.speculation import (
    ConfidenceBoard,
    Correction,
    CostTable,
    LiveCost,
    Reason,
    Rescale,
    SourceChoice,
    StalePlanner,
    StepLoad,
    StoppingPlanner,
)

CHEAP = CostTable((1, 64), ((10.0, 10.1),), captured_tokens=0)
DEAR = CostTable((1, 64), ((1.0, 640.0),), captured_tokens=0)


def test_without_a_table_nothing_is_predicted_and_nothing_drifts() -> None:
    costs = LiveCost()
    assert costs.table is None
    assert [costs.observe(1.0, 5.0, 1) for _ in range(500)] == [None] * 500
    assert (costs.version, costs.time_scale) == (0, 0)


def test_a_persistent_difference_rescales_the_table_and_raises_both_counters() -> None:
    costs = LiveCost(DEAR)
    changes = [change for _ in range(64) if (change := costs.observe(1.0, 2.0, 1))]
    assert [type(change) for change in changes] == [Rescale]
    assert costs.table is not None
    assert costs.table.verify_ms_at(1) == pytest.approx(2.0)
    assert (costs.version, costs.time_scale) == (1, 1)


def test_a_correction_of_single_row_counts_keeps_the_unit_of_time() -> None:
    costs = LiveCost(DEAR)
    changes = [change for i in range(64) if (change := costs.observe(1.0, 1.15 if i % 2 else 1.0, 64 if i % 2 else 1))]
    assert [type(change) for change in changes] == [Correction]
    assert costs.table is not None
    assert costs.table.verify_ms_at(64) > 640.0
    assert (costs.version, costs.time_scale) == (1, 0)


def test_drift_is_relative_to_the_table_in_use() -> None:
    """What was seen of the table before says nothing about the next one."""
    costs = LiveCost(CHEAP)
    for _ in range(63):
        assert costs.observe(1.0, 2.0, 1) is None
    costs.use(DEAR)
    assert [costs.observe(1.0, 2.0, 1) for _ in range(63)] == [None] * 63
    assert costs.observe(1.0, 2.0, 1) is not None
    assert costs.table is not None
    assert costs.table.verify_ms_at(1) == pytest.approx(2.0 * DEAR.verify_ms_at(1))


def test_a_new_table_reaches_every_holder() -> None:
    """Planners and the choice of a source decide by the new table at once, without being told."""
    costs = LiveCost(CHEAP)
    stale, stopping, choice = StalePlanner(4, costs), StoppingPlanner(4, costs), SourceChoice(4, 4, 16, costs=costs)
    survival, load = np.full((1, 4), 0.5, np.float32), StepLoad(1, [4])
    board = ConfidenceBoard(1, 4)
    seats = [board.open(0)]
    board.publish(0, seats, survival)

    def decide() -> list[int]:
        budgets = [stale.decide(board.read(1, seats), load).budget, stopping.decide(survival, load).budget]
        return [*budgets, int(choice.takes_lookup(1, 0.0)[0])]

    assert decide() == [4, 4, 0]  # rows are free: verify everything, and the model drafts
    costs.use(DEAR)
    assert decide() == [0, 0, 1]  # rows cost: nothing is worth verifying, and the model rests
    costs.use(None)
    assert stale.decide(board.read(1, seats), load).reason is Reason.NO_TABLE
