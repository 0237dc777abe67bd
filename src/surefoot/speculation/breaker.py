"""The low-acceptance breaker: stop drafting for a request whose drafts keep being rejected, and try again later."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from surefoot.errors import ConfigurationError
from surefoot.validation import LARGEST_INT32, integer, number


class BreakerState(str, Enum):
    """`closed`: speculating. `open`: target only. `probing`: speculating again after a pause, on trial."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"

    def __str__(self) -> str:
        return self.value


@dataclass
class Breaker:
    """Per request: a window of at least `min_proposals` verified drafts of which less than
    `min_acceptance` were accepted opens it for `pause_steps` steps; then it probes with a fresh window.

    The drafter's context is kept current meanwhile: an open breaker limits the width to 0 and does not skip the request.
    """

    min_acceptance: float = 0.6
    min_proposals: int = 32
    pause_steps: int = 64
    state: BreakerState = BreakerState.CLOSED
    trips: int = 0
    _proposed: int = 0
    _accepted: int = 0
    _paused: int = 0

    def __post_init__(self) -> None:
        self.min_acceptance = number(
            "min_acceptance", self.min_acceptance, ConfigurationError, low=0.0, high=1.0, remedy="0.6 is the default"
        )
        for name in ("min_proposals", "pause_steps"):
            value = integer(
                name, getattr(self, name), ConfigurationError, low=1, high=LARGEST_INT32, remedy="see Breaker"
            )
            setattr(self, name, value)

    @property
    def allows(self) -> bool:
        """Whether the request may have drafts verified in the coming step."""
        return self.state is not BreakerState.OPEN

    def observe(self, verified: int, accepted: int) -> None:
        """Take one step of the request: its width and how much of it was accepted (0, 0 for a target-only step)."""
        if self.state is BreakerState.OPEN:
            self._paused += 1
            if self._paused >= self.pause_steps:
                self._begin(BreakerState.PROBING)
            return
        self._proposed += verified
        self._accepted += accepted
        if self._proposed < self.min_proposals:
            return
        if self._accepted < self.min_acceptance * self._proposed:
            self.trips += 1
            self._begin(BreakerState.OPEN)
        else:
            self._begin(BreakerState.CLOSED)

    def reset(self) -> None:
        """Request boundary: forget everything."""
        self.trips = 0
        self._begin(BreakerState.CLOSED)

    def _begin(self, state: BreakerState) -> None:
        self.state = state
        self._proposed = self._accepted = self._paused = 0
