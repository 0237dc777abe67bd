"""`/v1/responses`: OpenAI's Responses API, stateless: every request brings its whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from surefoot.engine.output import TokenLogprobs
from surefoot.serving import sse
from surefoot.serving.blocks import Block, Blocks, Change
from surefoot.serving.chat import read_tool_choice
from surefoot.serving.chat_run import ChatDelta, ChatRun, run_chat
from surefoot.serving.chat_task import ChatTask
from surefoot.serving.errors import ApiError, invalid
from surefoot.serving.fields import SamplingFields, read_format
from surefoot.serving.generation import unless_gone
from surefoot.serving.logprobs import chat_entry
from surefoot.serving.responding import state_of, texts_of
from surefoot.serving.state import ServerState
from surefoot.serving.usage import Usage
from surefoot.structured import StructuredOutput

router = APIRouter(tags=["OpenAI"])

ENDPOINT = "responses"
WITH_LOGPROBS = "message.output_text.logprobs"
STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class ResponsesRequest(SamplingFields):
    """The body of a response."""

    input: str | list[dict[str, Any]] = Field(description="A text, or the items of the conversation, oldest first.")
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return WITH_LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def structured(self) -> StructuredOutput | None:
        given = (self.text or {}).get("format")
        if given is None:
            return super().structured()
        form = read_format(given, "text.format")
        return None if form is None else StructuredOutput(**form)

    def task(self, state: ServerState) -> ChatTask:
        """The request as a task.

        Raises:
            ApiError, RequestError: a field that cannot be honoured.
        """
        for name in STATEFUL:
            if (self.model_extra or {}).get(name):
                raise invalid(f"{name}: this server keeps no conversations: send all items in input", name)
        if (self.n or 1) > 1:
            raise invalid("n: a response is one answer: use /v1/chat/completions for several", "n")
        params = self.params(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            **state.prediction(self.prediction_text()),
        )
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return ChatTask(
            messages=[*messages, *read_input(self.input)],
            params=params,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=read_tool_choice(self.tool_choice, bool(self.tools)),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            chat_template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=(self.reasoning or {}).get("effort"),
        )


def read_input(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat template; reasoning and calls join the assistant's message that they belong to.

    Raises:
        ApiError: an item that is not understood.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("user", "assistant", "system"):
                raise invalid(f"input.{index}.role is {role!r}; allowed: user, assistant, system, developer", "input")
            message: dict[str, Any] = {"role": role, "content": _content_text(index, item.get("content"))}
            messages.append({**message, "reasoning_content": thoughts} if thoughts and role == "assistant" else message)
            thoughts = ""
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments") or "{}")}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
                if thoughts:
                    messages[-1]["reasoning_content"], thoughts = thoughts, ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _content_text(index, output)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
        elif kind == "reasoning":
            thoughts += "".join(str(part.get("text", "")) for part in item.get("content") or ())
        else:
            raise invalid(
                f"input.{index}.type is {kind!r}; this server reads messages, function calls and reasoning", "input"
            )
    return messages


def _content_text(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise invalid(
                f"input.{index}.content has a part of the type {kind!r}; this server reads text only", "input"
            )
        texts.append(part["text"])
    return "".join(texts)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"tools: a tool of the type {tool.get('type')!r} does not run here; allowed: function", "tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


class _Items:
    """The answer as items, streamed or whole."""

    def __init__(self, state: ServerState, body: ResponsesRequest, run: ChatRun) -> None:
        self._state, self._body, self._run = state, body, run
        self._blocks = Blocks()
        self._number = 0
        self._last: ChatDelta | None = None
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # by block
        self.frame: dict[str, Any] = {
            "id": f"resp_{run.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": state.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The finished response."""
        async with aclosing(aiter(self._run)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                for _ in self._take(delta):
                    pass
        return self._ended()

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of a streamed response."""
        yield self._event("response.created", response=self.frame)
        yield self._event("response.in_progress", response=self.frame)
        try:
            async with aclosing(aiter(self._run)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    for change in self._take(delta):
                        for event in self._events(change, delta):
                            yield event
        except ApiError as error:
            problem = {"code": "server_error", "message": error.message}
            yield self._event("response.failed", response={**self.frame, "status": "failed", "error": problem})
            return
        for change in self._blocks.finish():
            for event in self._events(change, None):
                yield event
        ended = self._ended()
        yield self._event(f"response.{ended['status']}", response=ended)

    def _take(self, delta: ChatDelta) -> list[Change]:
        self._last = delta
        changes = list(self._blocks.feed(delta.pieces))
        texts = [block for block in self._blocks.all if block.kind == "text"]
        if texts and delta.logprobs is not None:
            self._logprobs.setdefault(texts[-1].index, []).extend(self._entries(delta.logprobs))
        return changes

    def _entries(self, logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [chat_entry(entry, texts_of(self._state)) for entry in logprobs]

    def _ended(self) -> dict[str, Any]:
        assert self._last is not None
        cut = self._last.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        blocks = self._blocks.all
        output = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        return {
            **self.frame,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": _usage(self._run.usage()),
        }

    def _name(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._run.request_id}_{block.index}"

    def _item(self, block: Block, status: str, *, empty: bool = False) -> dict[str, Any]:
        frame = {"id": self._name(block), "status": status}
        text = "" if empty else block.text
        if block.kind == "call":
            return {**frame, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": text}
        content = [] if empty else [self._part(block, text)]
        if block.kind == "text":
            return {**frame, "type": "message", "role": "assistant", "content": content}
        return {**frame, "type": "reasoning", "summary": [], "content": content}

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": self._logprobs.get(block.index, []) if text else []}

    def _events(self, change: Change, delta: ChatDelta | None) -> list[bytes]:
        block = change.block
        where = {"item_id": self._name(block), "output_index": block.index}
        inner = {**where, "content_index": 0}
        names = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
        name = names.get(block.kind, "response.function_call_arguments")
        if change.what == "opened":
            item = self._item(block, "in_progress", empty=True)
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "call":
                events.append(self._event("response.content_part.added", **inner, part=self._part(block, "")))
            return events
        if change.what == "grew":
            place = where if block.kind == "call" else inner
            more: dict[str, Any] = {}
            if block.kind == "text":
                more["logprobs"] = self._entries((delta.logprobs if delta else None) or [])
            return [self._event(f"{name}.delta", **place, delta=change.text, **more)]
        events = []
        if block.kind == "call":
            events.append(self._event(f"{name}.done", **where, name=block.name, arguments=block.text))
        else:
            more = {"logprobs": self._logprobs.get(block.index, [])} if block.kind == "text" else {}
            events.append(self._event(f"{name}.done", **inner, text=block.text, **more))
            events.append(self._event("response.content_part.done", **inner, part=self._part(block, block.text)))
        item = self._item(block, "completed")
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, name: str, /, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.named(name, {"type": name, "sequence_number": number, **values})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation."""
    state = state_of(http)
    state.check_model(body.model)
    run = await run_chat(state, http, ENDPOINT, body.task(state))
    items = _Items(state, body, run)
    if body.stream:
        return sse.EventStream(items.stream(), run.close)
    return JSONResponse(await unless_gone(http, items.whole))
