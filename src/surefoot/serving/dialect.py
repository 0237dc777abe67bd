"""How one model is talked to: its chat template, how it writes tool calls and reasoning, and what may be enforced of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefoot.engine.output import detokenizer_for, traits_of
from surefoot.errors import ConfigurationError, RequestError
from surefoot.prompts import template_variables_read
from surefoot.serving.chat_task import ChatTask
from surefoot.serving.errors import invalid
from surefoot.serving.parsing.pieces import OutputParser
from surefoot.serving.parsing.reasoning import ReasoningSplitter, ReasoningTokens
from surefoot.serving.parsing.tools import TOOL_STAGES
from surefoot.structured import StructuredOutput

if TYPE_CHECKING:
    from surefoot.llm import LLM

BEGIN, END = "<think>", "</think>"
_SIGNS = (
    ("deepseek", "<｜tool▁call▁begin｜>"),
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("pythonic", "<|python_start|>"),
    ("llama3", "<|python_tag|>"),
)
"""What a chat template or a vocabulary shows of the format of tool calls, the surest first."""
_FORMS: dict[str, tuple[str, str, str, str, str, str]] = {
    "hermes": ("", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", ""),
    "llama3": ("", '{"name": ', ', "parameters": ', "}", "; ", ""),
    "mistral": ("[TOOL_CALLS][", '{"name": ', ', "arguments": ', "}", ", ", "]"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
}
"""Opening of a group, what stands before a name, after it, after the arguments, between two calls, closing of a group."""
_QUIET = ("none", "minimal")
"""Values of `reasoning_effort` that switch reasoning off where the template has a switch."""


def from_client(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of the chat template that a client may set.

    Raises:
        ApiError: a template of the client's own, which is a program: it does not run here.
    """
    for name in ("chat_template", "tools", "documents"):
        if name in variables:
            raise invalid(f"chat_template_kwargs has {name!r}, which a request cannot set", "chat_template_kwargs")
    return variables


@dataclass(frozen=True)
class ChatPlan:
    """What a conversation becomes."""

    prompt_token_ids: list[int]
    structured: StructuredOutput | None
    skip_special_tokens: bool
    parser: Callable[[], OutputParser]


class Dialect:
    """How the served model is talked to; what `auto` means is decided once, from its chat template and vocabulary.

    Args:
        tool_parser, reasoning_parser: as in `ServeSettings`.

    Attributes:
        tools: the format of tool calls, or None.
        reasons: whether the model may reason between `<think>` and `</think>`.
    """

    def __init__(self, llm: LLM, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._llm, self._tokenizer = llm, llm.tokenizer
        template = getattr(self._tokenizer, "chat_template", None) or ""
        self._template = template if isinstance(template, str) else json.dumps(template)
        self.reads = frozenset() if not self._template else template_variables_read(self._tokenizer)
        self.tools = self._tool_format() if tool_parser == "auto" else None if tool_parser == "none" else tool_parser
        thinks = BEGIN in self._template or END in self._template
        self.reasons = thinks if reasoning_parser == "auto" else reasoning_parser == "think"
        self._special = () if self._tokenizer is None else self._special_markers()

    def _tool_format(self) -> str | None:
        if "tools" not in self.reads:
            return None
        for name, sign in _SIGNS:
            if sign in self._template:
                return name
        vocabulary = self._tokenizer.get_vocab()
        return next((name for name, sign in _SIGNS if sign in vocabulary), "llama3")

    def _special_markers(self) -> tuple[str, ...]:
        """Markers of this model that are special tokens, which plain text does not show."""
        special = traits_of(self._tokenizer).special_ids
        markers = [BEGIN, END, *(sign for _, sign in _SIGNS), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
        markers += ["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[ARGS]", "</tool_call>", "<|python_end|>"]
        known = self._tokenizer.get_vocab()
        return tuple(marker for marker in markers if known.get(marker) in special)

    def describe(self) -> str:
        """For the start-up report."""
        if not self._template:
            return "no chat template: /v1/completions only"
        return f"tool calls: {self.tools or 'none'}; reasoning: {f'{BEGIN} … {END}' if self.reasons else 'none'}"

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise `ConfigurationError` if the template does not read one of the server's own variables."""
        if unread := sorted(set(variables) - self.reads):
            raise ConfigurationError(
                f"chat-template-kwargs has {unread[0]!r}, which this model's chat template does not read; "
                f"it reads: {', '.join(sorted(self.reads)) or 'none'}"
            )

    def plan(self, task: ChatTask, defaults: Mapping[str, Any]) -> ChatPlan:
        """Prompt, constraints and parser of one conversation.

        Raises:
            ApiError, RequestError: what the model's template cannot say, or nothing can enforce.
        """
        names = [self._function(tool)["name"] for tool in task.tools]
        called = names if task.tool_choice != "none" else []
        variables = {**defaults, **from_client(task.chat_template_kwargs), **self._effort(task.reasoning_effort)}
        if called:
            if "tools" not in self.reads:
                raise invalid("tools: the chat template of this model takes no tools: leave them out", "tools")
            variables["tools"] = [dict(tool) for tool in task.tools]
        tokens = self._llm.chat_tokens([self._message(message) for message in task.messages], variables)
        is_open = self.reasons and self._opens(tokens)
        structured = task.params.structured
        if called:
            structured = self._enforced(task, called, structured)
        if structured is not None and self.reasons:
            begins = None if is_open else BEGIN
            structured = replace(structured, starts_after=END, free_from=begins)
        return ChatPlan(
            tokens,
            structured,
            skip_special_tokens=task.params.skip_special_tokens and not self._special,
            parser=lambda: self._parser(tokens, called, is_open),
        )

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """`reasoning_effort` as the template understands it; one that reads nothing of the kind has nothing to change."""
        if effort is None:
            return {}
        found: dict[str, Any] = {}
        if "reasoning_effort" in self.reads:
            found["reasoning_effort"] = effort
        for name in ("enable_thinking", "thinking"):
            if name in self.reads:
                found[name] = effort not in _QUIET
        return found

    def _opens(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt ends inside the reasoning."""
        end = self._tokenizer.decode(list(tokens[-16:]), skip_special_tokens=False)
        return end.rstrip().endswith(BEGIN)

    def _parser(self, prompt: Sequence[int], called: Sequence[str], is_open: bool) -> OutputParser:
        stage = TOOL_STAGES[self.tools](called) if called and self.tools is not None else None
        if not self.reasons:
            return OutputParser(None, stage)
        detokenizer = detokenizer_for(self._tokenizer, prompt, False)
        counter = ReasoningTokens(detokenizer.push, BEGIN, END, is_open=is_open)
        return OutputParser(ReasoningSplitter(BEGIN, END, is_open=is_open), stage, counter)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates want it: the arguments of earlier calls as mappings, not as text."""
        plain = {name: value for name, value in message.items() if value is not None or name == "content"}
        calls = plain.get("tool_calls")
        if calls:
            plain["tool_calls"] = [self._earlier_call(call) for call in calls]
            if plain.get("content") is None:
                plain["content"] = ""
        return plain

    @staticmethod
    def _earlier_call(call: Any) -> dict[str, Any]:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise invalid("messages: a tool call needs a function with name and arguments", "messages")
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError):  # what the model wrote then: the template shows it as it is
                arguments = json.loads(arguments or "{}")
        return {**call, "type": "function", "function": {**function, "arguments": arguments}}

    @staticmethod
    def _function(tool: Any) -> Mapping[str, Any]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid('tools: every tool is {"type": "function", "function": {"name": …}}', "tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise invalid(f"tools: the parameters of {function['name']!r} are no JSON schema", "tools")
        return function

    def _enforced(
        self, task: ChatTask, names: Sequence[str], structured: StructuredOutput | None
    ) -> StructuredOutput | None:
        """The form of an answer whose tool calls are enforced; `structured` where nothing is."""
        choice = task.tool_choice
        functions = [self._function(tool) for tool in task.tools]
        if isinstance(choice, Mapping):
            functions = [function for function in functions if function["name"] == choice.get("name")]
            if not functions:
                raise invalid(f"tool_choice names {choice.get('name')!r}; tools has: {', '.join(names)}", "tool_choice")
        elif choice != "required":
            strict = any(function.get("strict") for function in functions)
            if structured is None and not strict:
                return None
            if structured is not None:
                return self._calls_or(structured, functions, task)
            return self._tagged(functions, task)
        calls = self._calls(functions, task.parallel_tool_calls and not isinstance(choice, Mapping))
        return StructuredOutput(structural_tag={"type": "structural_tag", "format": calls})

    def _form(self) -> tuple[str, str, str, str, str, str]:
        form = None if self.tools is None else _FORMS.get(self.tools)
        if form is None:
            raise invalid(
                f"tool_choice: calls in the format {self.tools or 'none'} cannot be enforced: use tool_choice auto",
                "tool_choice",
            )
        return form

    def _calls(self, functions: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
        """xgrammar's format of one call, or of one and more."""
        opening, _, _, _, between, closing = self._form()
        one: dict[str, Any] = {"type": "or", "elements": [self._call(function) for function in functions]}
        parts = [*self._text(opening), one]
        if several:
            again = {"type": "sequence", "elements": [*self._text(between), one]}
            parts.append({"type": "star", "content": again})
        parts += self._text(closing)
        return {"type": "sequence", "elements": parts}

    def _call(self, function: Mapping[str, Any]) -> dict[str, Any]:
        _, before, after, end, _, _ = self._form()
        name = function["name"] if self.tools == "deepseek" else json.dumps(function["name"], ensure_ascii=False)
        schema = function.get("parameters") or {"type": "object"}
        arguments = {"type": "json_schema", "json_schema": dict(schema)}
        return {"type": "sequence", "elements": [*self._text(f"{before}{name}{after}"), arguments, *self._text(end)]}

    def _text(self, text: str) -> list[dict[str, Any]]:
        """A fixed text; its special tokens as tokens."""
        for marker in self._special:
            if marker in text:
                left, right = text.split(marker, 1)
                return [*self._text(left), {"type": "token", "token": marker}, *self._text(right)]
        return [{"type": "const_string", "value": text}] if text else []

    def _calls_or(
        self, structured: StructuredOutput, functions: Sequence[Mapping[str, Any]], task: ChatTask
    ) -> StructuredOutput:
        """Either calls, or an answer in the form that was asked for."""
        name, value = structured.form
        forms: dict[str, Callable[[], dict[str, Any]]] = {
            "json_object": lambda: {"type": "json_schema", "json_schema": {"type": "object"}},
            "json_schema": lambda: {"type": "json_schema", "json_schema": json.loads(value)},
            "regex": lambda: {"type": "regex", "pattern": value},
            "grammar": lambda: {"type": "grammar", "grammar": value},
            "choice": lambda: {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]},
        }
        if name not in forms:
            raise RequestError("structural_tag and tools are given together: leave one of them out")
        either = {"type": "or", "elements": [self._calls(functions, task.parallel_tool_calls), forms[name]()]}
        return StructuredOutput(structural_tag={"type": "structural_tag", "format": either})

    def _tagged(self, functions: Sequence[Mapping[str, Any]], task: ChatTask) -> StructuredOutput | None:
        """Free text in which every call that begins is a right one; None where the format cannot say it."""
        if self.tools != "hermes":
            return None
        _, before, after, end, _, _ = self._form()
        tags = [
            {
                "type": "tag",
                "begin": f"{before}{json.dumps(function['name'], ensure_ascii=False)}{after}",
                "content": {
                    "type": "json_schema",
                    "json_schema": dict(function.get("parameters") or {"type": "object"}),
                },
                "end": end,
            }
            for function in functions
        ]
        form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
        return StructuredOutput(structural_tag={"type": "structural_tag", "format": form})
