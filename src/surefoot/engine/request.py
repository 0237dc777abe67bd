"""A request and what the host knows about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from surefoot.engine.distribution import SamplingFlags
from surefoot.engine.masks import TokenMask
from surefoot.engine.output import OutputProcessor
from surefoot.errors import EngineError
from surefoot.sampling import SamplingParams
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.statistics import RequestStatistics
from surefoot.speculation.survival import Seat


class Status(Enum):
    HELD = "held"  # not queued yet: another request computes the same prompt first
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt on its way to its last token.

    `token_ids` holds prompt and emitted tokens; the last one is the anchor. `num_cached` counts the positions the host knows to
    be cached; a step in flight may already have cached up to `in_flight` more.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # the user's, or one of its own
    output: OutputProcessor
    gamma: int  # most drafts a step may verify for this request; 0 turns speculation off
    arrival: int
    prompt: str | None = None
    status: Status = Status.WAITING
    stream: int = 0  # of uniforms; no other unfinished request reads it
    slot: int = -1
    seat: Seat | None = None  # under which the confidence board knows it
    num_cached: int = 0
    in_flight: int = 0
    num_launched: int = 0  # decode steps launched; addresses the uniforms
    cached_tokens: int = 0  # prompt tokens that a prefix hit saved
    preemptions: int = 0
    breaker: Breaker | None = None
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    arrived_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when it first got a slot
    first_token_at: float | None = None
    first_block: int = 0  # tokens of the first step, which decode speed leaves out
    finished_at: float | None = None
    failures: int = 0  # failed steps it took part in, since somebody was last found to blame for one
    failure: BaseException | None = None  # what a step raised that ended this request
    token_ids: list[int] = field(default_factory=list)
    mask: TokenMask | None = None  # which tokens may come next, beyond what the parameters say

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self._flags = [
            SamplingFlags.of(self.params, min_tokens=early, masked=self.mask is not None) for early in (False, True)
        ]

    @property
    def flags(self) -> SamplingFlags:
        """The stages of processing that the next step needs."""
        return self._flags[self.num_output < self.params.min_tokens]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def precedence(self) -> tuple[int, int]:
        """Lower runs first: priority as the user gave it, then age."""
        return self.params.priority, self.arrival

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    def raise_error(self) -> None:
        """Raise `EngineError` if the request has ended with an error."""
        if self.output.error is not None:
            raise EngineError(self.output.error) from self.failure
