"""Published survivals are never of this step, never of another request, and never of nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation import ConfidenceBoard, PublishedSurvival, Seat, prefix_survival


def rows(*values: float, gamma: int = 3) -> torch.Tensor:
    return torch.tensor([[value] * gamma for value in values], dtype=torch.float32)


def test_prefix_survival_is_the_running_product_and_never_rises() -> None:
    confidence = torch.tensor([[0.5, 0.8, 1.0], [1.0, 0.0, 0.9]])
    survival = prefix_survival(confidence)
    torch.testing.assert_close(survival, torch.tensor([[0.5, 0.4, 0.4], [1.0, 0.0, 0.0]]))
    assert (survival.diff(dim=-1) <= 0).all()


def test_current_data_cannot_be_made_into_published_survival() -> None:
    values = np.ones((1, 3), np.float32)
    with pytest.raises(TypeError, match="ConfidenceBoard"):
        PublishedSurvival(values, values, np.array([False]), np.array([0]), 0.0)


def test_a_step_never_reads_what_it_published_itself_in_whichever_order() -> None:
    board = ConfidenceBoard(2, 3)
    seat = board.open(0)
    board.publish(1, [seat], rows(0.25))
    assert board.read(1, [seat]).cold.all()  # published before the read of the same step
    later = board.read(2, [seat])
    np.testing.assert_array_equal(later.values, rows(0.25).numpy())
    assert later.age.tolist() == [1]
    assert later.lag == 1.0


def test_cold_start_is_neutral() -> None:
    published = ConfidenceBoard(1, 4).read(0, [Seat(0, 0)])
    assert published.cold.all()
    assert (published.values == 1).all()
    assert (published.forecast == 1).all()
    assert published.lag == 0.0


def test_a_reused_slot_never_shows_its_previous_owner() -> None:
    board = ConfidenceBoard(1, 3)
    old = board.open(0)
    board.publish(1, [old], rows(0.25))
    new = board.open(0)
    assert board.read(2, [new]).cold.all()
    assert (board.read(2, [new]).values == 1).all()


def test_a_publication_of_a_request_that_has_left_does_not_reach_its_successor() -> None:
    board = ConfidenceBoard(1, 3)
    old = board.open(0)
    new = board.open(0)  # the old request left before its last step was published
    board.publish(5, [old], rows(0.25))
    assert (board.read(6, [new]).values == 1).all()


def test_requests_that_join_or_leave_between_publish_and_use_are_found_by_slot() -> None:
    board = ConfidenceBoard(4, 3)
    a, b, c = board.open(3), board.open(0), board.open(2)
    board.publish(1, [a, b, c], rows(0.1, 0.2, 0.3))
    d = board.open(1)
    published = board.read(2, [d, c, a])  # b has left, d has joined, the order has changed
    np.testing.assert_allclose(published.values[:, 0], [1.0, 0.3, 0.1], rtol=1e-6)
    assert published.cold.tolist() == [True, False, False]


def test_a_request_that_sat_out_a_step_keeps_its_last_publication_with_its_age() -> None:
    board = ConfidenceBoard(2, 3)
    a, b = board.open(0), board.open(1)
    board.publish(1, [a, b], rows(0.4, 0.6))
    board.publish(2, [b], rows(0.7))
    published = board.read(4, [a, b])
    np.testing.assert_allclose(published.values[:, 0], [0.4, 0.7], rtol=1e-6)
    assert published.age.tolist() == [3, 2]


def test_published_arrays_are_read_only_copies() -> None:
    board = ConfidenceBoard(1, 3)
    seat = board.open(0)
    current = rows(0.5)
    board.publish(1, [seat], current)
    current.fill_(0.0)  # the device buffer is reused by the next step
    published = board.read(2, [seat])
    assert (published.values == 0.5).all()
    with pytest.raises(ValueError, match="read-only"):
        published.values[0, 0] = 0.0


def test_shapes_and_step_order_are_checked() -> None:
    board = ConfidenceBoard(1, 3)
    seat = board.open(0)
    with pytest.raises(ValueError, match="shape"):
        board.publish(1, [seat], rows(0.5, gamma=2))
    board.publish(3, [seat], rows(0.5))
    with pytest.raises(ValueError, match="step 2"):
        board.publish(2, [seat], rows(0.5))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "publish", "read"]), st.integers(0, 2)), max_size=40))
def test_board_against_a_dictionary(actions: list[tuple[str, int]]) -> None:
    """Whatever happens in whichever order, a seat reads the last value published for it in an earlier step."""
    board = ConfidenceBoard(3, 1)
    seats = [board.open(slot) for slot in range(3)]
    truth: dict[Seat, list[tuple[int, float]]] = {}
    for step, (action, slot) in enumerate(actions):
        if action == "open":
            seats[slot] = board.open(slot)
        elif action == "publish":
            value = float(np.float32(1.0 / (step + 2)))
            board.publish(step, [seats[slot]], rows(value, gamma=1))
            truth.setdefault(seats[slot], []).append((step, value))
        else:
            expected = [value for when, value in truth.get(seats[slot], []) if when < step]
            published = board.read(step, [seats[slot]])
            assert published.values[0, 0] == (expected[-1] if expected else 1.0)


def test_forecast_regresses_to_the_mean_when_blocks_do_not_resemble_each_other() -> None:
    rng = np.random.default_rng(0)
    board = ConfidenceBoard(1, 1)
    seat = board.open(0)
    for step in range(300):
        board.publish(step, [seat], rng.random((1, 1)).astype(np.float32))
    board.publish(300, [seat], np.ones((1, 1), np.float32))
    published = board.read(301, [seat])
    assert published.values[0, 0] == 1.0
    assert abs(published.forecast[0, 0] - 0.5) < 0.15


def test_forecast_follows_the_values_when_blocks_persist() -> None:
    rng = np.random.default_rng(0)
    board = ConfidenceBoard(64, 1)
    seats = [board.open(slot) for slot in range(64)]
    level = rng.random((64, 1)).astype(np.float32)
    for step in range(5):
        board.publish(step, seats, level)
    np.testing.assert_allclose(board.read(9, seats).forecast, level, atol=0.02)
