"""The low-acceptance breaker, request by request."""

from __future__ import annotations

from surefoot.speculation import Breaker, BreakerState


def test_thirty_two_proposals_below_sixty_percent_open_it_for_sixty_four_steps() -> None:
    breaker = Breaker()
    for _ in range(7):
        breaker.observe(4, 2)
        assert breaker.allows  # 28 proposals are not enough to judge
    breaker.observe(4, 2)
    assert breaker.state is BreakerState.OPEN
    assert breaker.trips == 1
    for _ in range(64):
        assert not breaker.allows
        breaker.observe(0, 0)
    assert breaker.state is BreakerState.PROBING
    assert breaker.allows


def test_sixty_percent_is_enough() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.observe(5, 3)
        assert breaker.allows
    assert breaker.trips == 0


def test_a_probe_closes_it_or_opens_it_again() -> None:
    for accepted, state in ((4, BreakerState.CLOSED), (0, BreakerState.OPEN)):
        breaker = Breaker(pause_steps=1)
        breaker.observe(32, 0)
        breaker.observe(0, 0)
        for _ in range(8):
            assert breaker.state is BreakerState.PROBING
            breaker.observe(4, accepted)
        assert breaker.state is state


def test_a_good_past_does_not_hide_a_bad_window() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.observe(8, 8)
    for _ in range(4):
        breaker.observe(8, 1)
    assert not breaker.allows


def test_narrow_windows_are_judged_by_their_tokens_not_their_steps() -> None:
    breaker = Breaker()
    for _ in range(31):
        breaker.observe(1, 0)
        breaker.observe(0, 0)  # a step the planner gave no width
    assert breaker.allows
    breaker.observe(1, 0)
    assert not breaker.allows


def test_reset_at_the_request_boundary() -> None:
    breaker = Breaker()
    breaker.observe(32, 0)
    breaker.reset()
    assert breaker == Breaker()
