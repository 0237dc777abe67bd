"""What `LLM.generate` returns: one `RequestOutput` per prompt, with one `Completion` per answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.engine.output import TokenLogprobs
from surefoot.engine.request import Request
from surefoot.speculation.statistics import RequestStatistics


@dataclass(frozen=True)
class Timing:
    """Wall-clock times of one answer, in seconds."""

    queued_s: float
    prefill_s: float  # from arrival to the first token
    decode_s: float  # from the first to the last token
    tokens_per_s: float  # decode speed: tokens after the first step, per second


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt."""

    index: int  # which of the `n` answers
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort", "error"; None: not ended yet
    stop_reason: int | str | None
    error: str | None  # why the answer could not go on; only with the finish reason "error"
    statistics: RequestStatistics
    timing: Timing

    @classmethod
    def of(cls, request: Request) -> Completion:
        """An answer as far as it has come."""
        end = request.finished_at or time.monotonic()
        first = request.first_token_at or end
        decode = end - first
        after_first = max(0, request.num_output - request.first_block)
        return cls(
            index=request.output.index,
            text=request.output.text,
            token_ids=list(request.output.token_ids),
            logprobs=request.output.logprobs,
            finish_reason=request.output.finish_reason,
            stop_reason=request.output.stop_reason,
            error=request.output.error,
            statistics=request.statistics,
            timing=Timing(
                queued_s=(request.started_at or end) - request.arrived_at,
                prefill_s=first - (request.started_at or request.arrived_at),
                decode_s=decode,
                tokens_per_s=after_first / decode if decode > 0 else 0.0,
            ),
        )


@dataclass(frozen=True)
class RequestOutput:
    """Everything one prompt produced.

    `completions` holds the `n` answers by index. `text`, `token_ids` and the other fields of a `Completion` can also be
    read here; they are those of answer 0, the only one unless `SamplingParams.n` says otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    cached_tokens: int  # prompt tokens of answer 0 that a prefix hit saved
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one entry per prompt token, None for the first

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RequestOutput:
        """The answers to one prompt as far as they have come."""
        first = requests[0]
        return cls(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            cached_tokens=first.cached_tokens,
            completions=[Completion.of(request) for request in requests],
            prompt_logprobs=first.output.prompt_logprobs,
        )

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.completions[0].stop_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    @property
    def statistics(self) -> RequestStatistics:
        return self.completions[0].statistics

    @property
    def timing(self) -> Timing:
        return self.completions[0].timing
