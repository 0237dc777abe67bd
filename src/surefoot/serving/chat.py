"""`/v1/chat/completions`: conversations, with tool calls, reasoning and structured output."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from surefoot.serving import sse
from surefoot.serving.chat_run import ChatAnswer, ChatDelta, ChatRun, run_chat
from surefoot.serving.chat_task import ChatTask
from surefoot.serving.errors import ApiError, invalid
from surefoot.serving.fields import SamplingFields
from surefoot.serving.generation import unless_gone
from surefoot.serving.logprobs import chat_logprobs
from surefoot.serving.responding import state_of, texts_of
from surefoot.serving.state import ServerState

router = APIRouter(tags=["OpenAI"])

ENDPOINT = "chat"


class ChatRequest(SamplingFields):
    """The body of a chat completion."""

    messages: list[dict[str, Any]] = Field(description="The conversation: role and content, oldest first.")
    max_tokens: int | None = Field(default=None, description="Most tokens of an answer; by default the context's rest.")
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def task(self, state: ServerState) -> ChatTask:
        """The request as a task.

        Raises:
            ApiError, RequestError: a field that cannot be honoured.
        """
        if self.modalities is not None and self.modalities != ["text"]:
            raise invalid(f"modalities is {self.modalities}; allowed: ['text']", "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **state.prediction(self.prediction_text()),
        )
        return ChatTask(
            messages=self.messages,
            params=params,
            tools=self.tools or (),
            tool_choice=read_tool_choice(self.tool_choice, bool(self.tools)),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            chat_template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
        )


def read_tool_choice(given: str | dict[str, Any] | None, has_tools: bool) -> str | dict[str, Any]:
    """OpenAI's `tool_choice` as that of a `ChatTask`.

    Raises:
        ApiError: one that is not understood, or that needs tools where there are none.
    """
    if given is None:
        return "auto"
    if isinstance(given, dict):
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, dict) else None
        if given.get("type") != "function" or not isinstance(name, str):
            raise invalid('tool_choice: an object is {"type": "function", "function": {"name": …}}', "tool_choice")
        chosen: str | dict[str, Any] = {"name": name}
    elif given in ("auto", "none", "required"):
        chosen = given
    else:
        raise invalid(f"tool_choice is {given!r}; allowed: auto, none, required, or a function", "tool_choice")
    if not has_tools and chosen not in ("auto", "none"):
        raise invalid("tool_choice needs tools", "tool_choice")
    return chosen


class _Chunks:
    """Makes the chunks of one streamed request."""

    def __init__(self, state: ServerState, body: ChatRequest, run: ChatRun) -> None:
        self._state, self._body, self._run = state, body, run
        self.frame = {
            "id": f"chatcmpl-{run.request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": state.model,
        }
        self._nothing: dict[str, Any] = {"usage": None} if body.wants_usage else {}

    async def stream(self) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            async with aclosing(aiter(self._run)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.index not in begun:
                        begun.add(delta.index)
                        yield self._chunk(delta.index, {"role": "assistant", "content": ""})
                    if not delta.says_nothing or self._body.wants_origins:
                        yield self._of(delta)
        except ApiError as error:
            yield sse.data(error.body(False, ""))
            return
        if self._body.wants_usage:
            yield sse.data({**self.frame, "choices": [], "usage": self._run.usage().openai()})
        yield sse.DONE

    def _of(self, delta: ChatDelta) -> bytes:
        said: dict[str, Any] = {}
        if delta.text:
            said["content"] = delta.text
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = [
                {
                    "index": call.index,
                    **({} if call.id is None else {"id": call.id, "type": "function"}),
                    "function": {**({} if call.name is None else {"name": call.name}), "arguments": call.arguments},
                }
                for call in delta.tool_calls
            ]
        more: dict[str, Any] = {}
        if delta.finish_reason is not None:
            more["stop_reason"] = delta.stop_reason
        if self._body.wants_origins:
            more["surefoot"] = {"origins": delta.origins, "tokens": self._texts(delta)}
        return self._chunk(delta.index, said, delta, more)

    def _texts(self, delta: ChatDelta) -> list[str]:
        texts = texts_of(self._state)
        return [texts.of(token_id)[0] for token_id in delta.token_ids]

    def _chunk(
        self, index: int, said: dict[str, Any], delta: ChatDelta | None = None, more: dict[str, Any] | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "delta": said,
            "logprobs": None if delta is None else chat_logprobs(delta.logprobs, texts_of(self._state)),
            "finish_reason": None if delta is None else delta.finish_reason,
            **(more or {}),
        }
        return sse.data({**self.frame, "choices": [choice], **self._nothing})


def _choice(answer: ChatAnswer, state: ServerState) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.tool_calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return {
        "index": answer.index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs, texts_of(state)),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    state = state_of(http)
    state.check_model(body.model)
    run = await run_chat(state, http, ENDPOINT, body.task(state))
    chunks = _Chunks(state, body, run)
    if body.stream:
        return sse.EventStream(chunks.stream(), run.close)
    answers = await unless_gone(http, run.collect)
    return JSONResponse(
        {
            **chunks.frame,
            "object": "chat.completion",
            "choices": [_choice(answer, state) for answer in answers],
            "usage": run.usage().openai(),
        }
    )
