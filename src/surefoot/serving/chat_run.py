"""The one chat pipeline: a conversation becomes a prompt, tokens become text, reasoning and tool calls.

`/v1/chat/completions`, `/v1/responses` and `/v1/messages` translate to a `ChatTask`, and translate `ChatDelta`s back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request as HttpRequest

from surefoot.engine.output import OutputEvent, TokenLogprobs
from surefoot.engine.results import Completion
from surefoot.serving.chat_task import ChatTask
from surefoot.serving.dialect import Dialect
from surefoot.serving.errors import ApiError
from surefoot.serving.generation import TOKENIZE_APART, Generation, Job, start
from surefoot.serving.parsing.pieces import OutputParser, Piece, Reasoning, Text, ToolCallDelta
from surefoot.serving.responding import facts
from surefoot.serving.state import ServerState
from surefoot.serving.usage import Usage


@dataclass
class ChatDelta:
    """What one step did for one answer."""

    index: int
    pieces: list[Piece] = field(default_factory=list)  # in order; the three fields below are made of them
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    origins: list[str] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "tool_calls"
    stop_reason: int | str | None = None

    @property
    def says_nothing(self) -> bool:
        return not (self.text or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason)


@dataclass
class ToolCall:
    """A call that has been put together from its deltas."""

    id: str
    name: str
    arguments: str


@dataclass
class ChatAnswer:
    """A whole answer: the concatenation of its deltas."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def take(self, delta: ChatDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(str(part.id), str(part.name), ""))
            self.tool_calls[part.index].arguments += part.arguments
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason


class ChatRun:
    """The answers under way: iterate for deltas, or `collect` them."""

    def __init__(self, http: HttpRequest, generation: Generation, parsers: list[OutputParser]) -> None:
        self._http, self._generation, self._parsers = http, generation, parsers
        self._calls = [0] * len(parsers)

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self._generation.results[0].prompt_token_ids)

    @property
    def completions(self) -> list[Completion]:
        """The engine's own answers as far as they have come."""
        return self._generation.results[0].completions

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        """The deltas of all answers.

        Raises:
            ApiError: a step has failed.
        """
        async with aclosing(aiter(self._generation)) as events:  # type: ignore[type-var]
            async for _, event in events:
                yield self._delta(event)
        facts(self._http, self.usage(), self.completions)

    def _delta(self, event: OutputEvent) -> ChatDelta:
        if event.finish_reason == "error":
            raise ApiError(500, f"the answer could not go on: {event.error}", code="engine_error")
        parser = self._parsers[event.index]
        pieces = parser.feed(event.text, event.token_ids)
        if event.finish_reason is not None:
            pieces = [*pieces, *parser.finish()]
        delta = ChatDelta(
            event.index,
            pieces,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            origins=event.origins,
            stop_reason=event.stop_reason,
        )
        for piece in pieces:
            self._add(delta, piece)
        if event.finish_reason is not None:
            delta.finish_reason = "length" if event.finish_reason == "abort" else event.finish_reason
            stopped = isinstance(event.stop_reason, str)  # by a string, perhaps inside a call
            if delta.finish_reason == "stop" and self._calls[event.index] and not stopped:
                delta.finish_reason = "tool_calls"
        return delta

    def _add(self, delta: ChatDelta, piece: Piece) -> None:
        if isinstance(piece, Text):
            delta.text += piece.text
        elif isinstance(piece, Reasoning):
            delta.reasoning += piece.text
        else:
            self._calls[delta.index] = max(self._calls[delta.index], piece.index + 1)
            delta.tool_calls.append(piece)

    def usage(self) -> Usage:
        """Of the whole request so far."""
        return Usage.of(self._generation.results, sum(parser.reasoning_tokens for parser in self._parsers))

    async def collect(self) -> list[ChatAnswer]:
        """Wait for the whole answers."""
        answers = [ChatAnswer(index) for index in range(len(self._parsers))]
        async with aclosing(aiter(self)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                answers[delta.index].take(delta)
        return answers

    def close(self) -> None:
        """Cancel what has not ended."""
        self._generation.close()


async def run_chat(state: ServerState, http: HttpRequest, endpoint: str, task: ChatTask) -> ChatRun:
    """Queue the answers to a conversation.

    Raises:
        ApiError, SurefootError: a request that is refused; nothing has been queued then.
    """
    dialect: Dialect = state.dialect
    defaults = state.settings.chat_template_kwargs
    if sum(len(str(message)) for message in task.messages) > TOKENIZE_APART or state.llm.llm.is_tokenizing:
        plan = await asyncio.to_thread(dialect.plan, task, defaults)
    else:
        plan = dialect.plan(task, defaults)
    params = replace(task.params, structured=plan.structured, skip_special_tokens=plan.skip_special_tokens)
    generation = await start(state, http, endpoint, [Job(plan.prompt_token_ids, params)], task.request_id)
    parsers = [plan.parser() for _ in range(params.n)]
    return ChatRun(http, generation, parsers)
