"""A conversation to answer, whatever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.sampling import SamplingParams


@dataclass(frozen=True)
class ChatTask:
    """A conversation to answer, in the form of the chat template.

    Args:
        messages: role, content, and tool_calls, tool_call_id, name or reasoning_content where a role has them.
        tools: in OpenAI's form, `{"type": "function", "function": {…}}`.
        tool_choice: "auto", "none", "required", or the name of a function as `{"name": …}`.
        params: `max_tokens` None leaves the context; its `structured` is the form of the text after the reasoning.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    request_id: str | None = None
