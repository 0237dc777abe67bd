"""`/v1/messages`: conversations in the form of Anthropic's API, which coding agents speak."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from surefoot.sampling import SamplingParams
from surefoot.serving import sse
from surefoot.serving.blocks import Block, Blocks, Change
from surefoot.serving.chat_run import ChatDelta, ChatRun, run_chat
from surefoot.serving.chat_task import ChatTask
from surefoot.serving.errors import ApiError, invalid
from surefoot.serving.generation import unless_gone
from surefoot.serving.responding import state_of
from surefoot.serving.state import ServerState
from surefoot.serving.usage import Usage

router = APIRouter(tags=["Anthropic"])

ENDPOINT = "messages"


class CountRequest(BaseModel):
    """What is counted: the part of a request that becomes the prompt."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    messages: list[dict[str, Any]] = Field(description="The conversation: role and content, oldest first.")
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def task(self, params: SamplingParams) -> ChatTask:
        """The request as a task.

        Raises:
            ApiError: a part that cannot be honoured.
        """
        messages = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        for index, message in enumerate(self.messages):
            messages += _messages(index, message)
        choice, parallel = _tool_choice(self.tool_choice)
        if choice not in ("auto", "none") and not self.tools:
            raise invalid("tool_choice needs tools", "tool_choice")
        return ChatTask(
            messages=messages,
            params=params,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning_effort=_effort(self.thinking),
        )


class MessagesRequest(CountRequest):
    """The body of a message."""

    max_tokens: int = Field(description="Most tokens of the answer.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None

    def params(self) -> SamplingParams:
        names = ("temperature", "top_p", "top_k")
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**said, max_tokens=self.max_tokens, stop=self.stop_sequences or ())


def _text(content: Any, place: str) -> str:
    """A text, or a list of text blocks, as one text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise invalid(f"{place} is neither a text nor a list of blocks", place)
    return "\n".join(_block_text(block, place) for block in content)


def _block_text(block: Any, place: str) -> str:
    if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else block
    raise invalid(f"{place} has a block of the type {kind!r}; this server reads text only", place)


def _messages(index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message as those of a chat template: results of tools stand before the user's words."""
    place, role, content = f"messages.{index}", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{place}.role is {role!r}; allowed: user, assistant", place)
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, place)}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            said = _text(block.get("content"), f"{place}.content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": said})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{place}.content"))
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own] if texts or calls or not results else results


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, Mapping):
        raise invalid(
            "tools: every tool needs a name and an input_schema; tools of Anthropic's own do not run here", "tools"
        )
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": dict(schema)}
    return {"type": "function", "function": function}


def _tool_choice(given: Mapping[str, Any] | None) -> tuple[str | dict[str, Any], bool]:
    if given is None:
        return "auto", True
    parallel = not given.get("disable_parallel_tool_use", False)
    kind = given.get("type")
    if kind == "tool" and isinstance(given.get("name"), str):
        return {"name": given["name"]}, parallel
    words = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in words:
        raise invalid(f"tool_choice.type is {kind!r}; allowed: auto, any, none, or tool with a name", "tool_choice")
    return words[str(kind)], parallel


def _effort(thinking: Mapping[str, Any] | None) -> str | None:
    if thinking is None:
        return None
    return "none" if thinking.get("type") == "disabled" else "high"


class _Message:
    """The answer as a message, streamed or whole."""

    def __init__(self, state: ServerState, run: ChatRun) -> None:
        self._run = run
        self._blocks = Blocks()
        self._last: ChatDelta | None = None
        self.frame: dict[str, Any] = {
            "id": f"msg_{run.request_id}",
            "type": "message",
            "role": "assistant",
            "model": state.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of a streamed message."""
        start = {**self.frame, "usage": _usage(self._run.usage(), 0)}
        yield sse.named("message_start", {"type": "message_start", "message": start})
        yield sse.named("ping", {"type": "ping"})
        try:
            async with aclosing(aiter(self._run)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self._last = delta
                    for change in self._blocks.feed(delta.pieces):
                        yield self._event(change)
        except ApiError as error:
            yield sse.named("error", error.body(True, self._run.request_id))
            return
        for change in self._blocks.finish():
            yield self._event(change)
        end = {"type": "message_delta", "delta": self._end(), "usage": _usage(self._run.usage())}
        yield sse.named("message_delta", end)
        yield sse.named("message_stop", {"type": "message_stop"})

    async def whole(self) -> dict[str, Any]:
        """The same, at once."""
        async with aclosing(aiter(self._run)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                self._last = delta
                for _ in self._blocks.feed(delta.pieces):
                    pass
        content = [_content(block) for block in self._blocks.all]
        return {**self.frame, **self._end(), "content": content, "usage": _usage(self._run.usage())}

    def _end(self) -> dict[str, Any]:
        assert self._last is not None
        reason, stop = self._last.finish_reason, self._last.stop_reason
        words = {"length": "max_tokens", "tool_calls": "tool_use"}
        found = "stop_sequence" if isinstance(stop, str) else words.get(str(reason), "end_turn")
        return {"stop_reason": found, "stop_sequence": stop if isinstance(stop, str) else None}

    @staticmethod
    def _event(change: Change) -> bytes:
        block = change.block
        if change.what == "opened":
            empty = {**_content(Block(block.index, block.kind, "", block.id, block.name))}
            return sse.named(
                "content_block_start", {"type": "content_block_start", "index": block.index, "content_block": empty}
            )
        if change.what == "closed":
            return sse.named("content_block_stop", {"type": "content_block_stop", "index": block.index})
        names = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
        kind, field = names.get(block.kind, ("input_json_delta", "partial_json"))
        delta = {"type": kind, field: change.text}
        return sse.named("content_block_delta", {"type": "content_block_delta", "index": block.index, "delta": delta})


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # cut off by max_tokens
        arguments = {}
    return {
        "type": "tool_use",
        "id": block.id,
        "name": block.name,
        "input": arguments if isinstance(arguments, dict) else {},
    }


def _usage(usage: Usage, output: int | None = None) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion if output is None else output,
    }


@router.post("/v1/messages")
async def messages(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    state = state_of(http)
    state.check_model(body.model)
    run = await run_chat(state, http, ENDPOINT, body.task(body.params()))
    message = _Message(state, run)
    if body.stream:
        return sse.EventStream(message.stream(), run.close)
    return JSONResponse(await unless_gone(http, message.whole))


@router.post("/v1/messages/count_tokens")
def count_tokens(body: CountRequest, http: Request) -> dict[str, int]:
    """Tokens of the prompt that a message would have."""
    state = state_of(http)
    state.check_model(body.model)
    plan = state.dialect.plan(body.task(SamplingParams()), state.settings.chat_template_kwargs)
    return {"input_tokens": len(plan.prompt_token_ids)}
