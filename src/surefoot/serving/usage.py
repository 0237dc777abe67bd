"""What a request used, as the APIs count it: one figure, read off the engine's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.drafters.prompt_lookup import PREDICTION
from surefoot.engine.results import RequestOutput


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole request: every prompt once, every answer."""

    prompt: int
    completion: int
    cached: int = 0  # prompt tokens that were in the cache
    reasoning: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], reasoning: int = 0) -> Usage:
        answers = [answer for output in outputs for answer in output.completions]
        accepted = sum(answer.statistics.accepted_by_source[PREDICTION] for answer in answers)
        verified = sum(answer.statistics.verified_by_source[PREDICTION] for answer in answers)
        return cls(
            prompt=sum(len(output.prompt_token_ids) for output in outputs),
            completion=sum(len(answer.token_ids) for answer in answers),
            cached=sum(output.cached_tokens for output in outputs),
            reasoning=reasoning,
            accepted_prediction=accepted,
            rejected_prediction=verified - accepted,
        )

    def openai(self) -> dict[str, Any]:
        """As `/v1/completions` and `/v1/chat/completions` say it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted_prediction,
                "rejected_prediction_tokens": self.rejected_prediction,
            },
        }
