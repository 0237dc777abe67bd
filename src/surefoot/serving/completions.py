"""`/v1/completions`: texts continued as they stand."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from surefoot.engine.output import OutputEvent, TokenLogprobs
from surefoot.engine.results import Completion, RequestOutput
from surefoot.serving import sse
from surefoot.serving.errors import ApiError, invalid
from surefoot.serving.fields import SamplingFields
from surefoot.serving.generation import Generation, Job, start, unless_gone
from surefoot.serving.logprobs import CompletionLogprobs
from surefoot.serving.responding import facts, state_of, texts_of
from surefoot.serving.state import ServerState
from surefoot.serving.usage import Usage

router = APIRouter(tags=["OpenAI"])

ENDPOINT = "completions"
DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI API."""


class CompletionRequest(SamplingFields):
    """The body of a completion."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A text, token ids, or a list of either; every one is answered."
    )
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, description="Log-probabilities of so many likeliest tokens, too.")
    echo: bool | None = Field(default=None, description="The prompt comes before its answer.")

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise invalid("prompt is empty: give a text, or token ids", "prompt")
        return list(given)


class _Answers:
    """Makes the choices of one request, streamed or whole."""

    def __init__(self, state: ServerState, body: CompletionRequest, generation: Generation, silent: bool) -> None:
        self._state, self._body, self._generation, self._silent = state, body, generation, silent
        self.n = body.n or 1
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}
        self.frame = {
            "id": f"cmpl-{generation.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model,
        }

    def echoed(self, job: int, index: int) -> tuple[str, dict[str, Any] | None]:
        """The text of a prompt, and its log-probabilities where they were asked for."""
        output = self._generation.results[job]
        tokenizer = self._state.llm.llm.tokenizer
        text = output.prompt
        if text is None:
            text = "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
        builder = self._logprobs.setdefault((job, index), CompletionLogprobs(texts_of(self._state)))
        if self._body.logprobs is None or output.prompt_logprobs is None:
            return text, None
        return text, builder.of(output.prompt_logprobs, output.prompt_token_ids[0])

    def logprobs(self, job: int, index: int, entries: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if self._body.logprobs is None or entries is None:
            return None
        builder = self._logprobs.setdefault((job, index), CompletionLogprobs(texts_of(self._state)))
        return builder.of(entries)

    def whole(self, job: int, output: RequestOutput, answer: Completion) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        text, logprobs = "", None
        if self._body.echo:
            text, logprobs = self.echoed(job, answer.index)
        if not self._silent:
            text += answer.text
            own = self.logprobs(job, answer.index, answer.logprobs)
            logprobs = own if logprobs is None else _joined(logprobs, own)
        return {
            "index": job * self.n + answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._silent else _reason(answer.finish_reason),
            "stop_reason": None if self._silent else answer.stop_reason,
        }

    def usage(self) -> Usage:
        usage = Usage.of(self._generation.results)
        return Usage(usage.prompt, 0, usage.cached) if self._silent else usage

    def tell_log(self, http: Request) -> None:
        """Add to the request's log line what it used."""
        facts(http, self.usage(), [answer for output in self._generation.results for answer in output.completions])

    async def stream(self, http: Request) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        begun: set[tuple[int, int]] = set()
        nothing: dict[str, Any] = {"usage": None} if self._body.wants_usage else {}
        async with aclosing(aiter(self._generation)) as events:  # type: ignore[type-var]
            async for job, event in events:
                if event.finish_reason == "error":
                    error = ApiError(500, f"the answer could not go on: {event.error}", code="engine_error")
                    yield sse.data(error.body(False, ""))
                    return
                text, logprobs = "", None
                if self._body.echo and (job, event.index) not in begun:
                    text, logprobs = self.echoed(job, event.index)
                begun.add((job, event.index))
                if not self._silent:
                    text += event.text
                    own = self.logprobs(job, event.index, event.logprobs)
                    logprobs = own if logprobs is None else _joined(logprobs, own)
                if not (text or logprobs or event.finish_reason or self._body.wants_origins):
                    continue
                choice = {
                    "index": job * self.n + event.index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": self._finish(event),
                }
                if event.finish_reason is not None:
                    choice["stop_reason"] = None if self._silent else event.stop_reason
                if self._body.wants_origins:
                    choice["surefoot"] = {"origins": event.origins}
                yield sse.data({**self.frame, "choices": [choice], **nothing})
        self.tell_log(http)
        if self._body.wants_usage:
            yield sse.data({**self.frame, "choices": [], "usage": self.usage().openai()})
        yield sse.DONE

    def _finish(self, event: OutputEvent) -> str | None:
        return "length" if self._silent and event.finish_reason else _reason(event.finish_reason)


def _reason(finish_reason: str | None) -> str | None:
    """A time-out ends an answer with what it has: for clients that is a length."""
    return "length" if finish_reason == "abort" else finish_reason


def _joined(first: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    return first if second is None else {name: first[name] + second[name] for name in first}


@router.post("/v1/completions")
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue one prompt or several."""
    state = state_of(http)
    state.check_model(body.model)
    prompts = body.prompts()
    if len(prompts) > state.settings.max_batch:
        raise invalid(f"prompt has {len(prompts)} entries; allowed: at most {state.settings.max_batch}", "prompt")
    silent = body.max_tokens == 0 and bool(body.echo)  # only the prompt is wanted: one token is computed and not shown
    max_tokens = 1 if silent else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.params(
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        **state.prediction(body.prediction_text()),
    )
    generation = await start(state, http, ENDPOINT, [Job(prompt, params) for prompt in prompts])
    answers = _Answers(state, body, generation, silent)
    if body.stream:
        return sse.EventStream(answers.stream(http), generation.close)
    outputs = await unless_gone(http, generation.collect)
    choices = [
        answers.whole(job, output, answer) for job, output in enumerate(outputs) for answer in output.completions
    ]
    answers.tell_log(http)
    return JSONResponse({**answers.frame, "choices": choices, "usage": answers.usage().openai()})
