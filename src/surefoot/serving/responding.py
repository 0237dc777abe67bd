"""What endpoints take from the application, and what they tell the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from surefoot.engine.results import Completion
from surefoot.serving.logprobs import TokenTexts
from surefoot.serving.state import ServerState
from surefoot.serving.usage import Usage


def state_of(http: Request) -> ServerState:
    """The server's state."""
    state: ServerState = http.app.state.server
    return state


def texts_of(state: ServerState) -> TokenTexts:
    """How tokens are shown; one cache for the whole server."""
    if state.token_texts is None:
        state.token_texts = TokenTexts(state.llm.llm.tokenizer)
    return state.token_texts


def facts(http: Request, usage: Usage, answers: Sequence[Completion]) -> None:
    """Add to the log line of a request what it used."""
    steps = sum(answer.statistics.steps for answer in answers)
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
        "tokens_per_step": round(usage.completion / steps, 2) if steps else 0,
        "finish": ",".join(sorted({str(answer.finish_reason) for answer in answers})),
    }
    http.scope.setdefault("surefoot.facts", {}).update(told)
