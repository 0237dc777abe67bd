"""Learning costs at most its share of the time, and goes on where it costs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation.exploration import Exploration


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 400), st.floats(-1, 1)), min_size=1, max_size=200), st.floats(0.0, 0.2))
def test_the_loss_is_bounded_whatever_comes_of_the_drafts(steps: list[tuple[float, float]], share: float) -> None:
    exploration, time, lost, worst = Exploration(share=share), 0.0, 0.0, 0.0
    for step_ms, gain in steps:
        gain_ms = gain * step_ms if exploration.affordable else 0.0
        exploration.observe(step_ms, gain_ms)
        time, lost, worst = time + step_ms, lost - gain_ms, max(worst, -gain_ms)
        assert lost <= share * time + worst + 1e-6


def test_a_loss_is_paid_off_before_the_next_block_is_explored() -> None:
    exploration = Exploration(blocks=2, share=0.05)
    assert exploration.affordable == 2
    exploration.observe(100.0, -20.0)
    waited = 0
    while not exploration.affordable:
        exploration.observe(100.0)
        waited += 1
    assert waited == pytest.approx(3, abs=1)  # 15 ms are left, 5 come with every step


def test_drafts_that_pay_are_explored_in_every_step() -> None:
    exploration = Exploration()
    for _ in range(20):
        assert exploration.affordable
        exploration.observe(100.0, 30.0)
    exploration.observe(100.0, -30.0)  # gains are not saved up
    assert not exploration.affordable
