"""`surefoot chat`: conversations from a pipe and at a (pretended) terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surefoot.cli import chat as chat_module
from surefoot.errors import RequestError
from tests.cli.stub import Script, StubLLM


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_piped_lines_are_turns_of_one_conversation(run: Callable[..., Any], script: Script) -> None:
    result = run("chat", stdin="first\n\nsecond\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world\nHello, world\n"
    assert result.stderr.count("accepted length") == 2
    assert script.asked[0][0] == [{"role": "user", "content": "first"}]
    assert script.asked[1][0] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Hello, world"},
        {"role": "user", "content": "second"},
    ]


def test_whole_input_can_be_one_message_and_a_system_message_leads(run: Callable[..., Any], script: Script) -> None:
    run("chat", "--whole", "--system", "Be short.", stdin="first\nsecond\n")
    assert script.asked[0][0] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "first\nsecond\n"},
    ]


def test_json_holds_the_conversation(run: Callable[..., Any], script: Script) -> None:
    found = json.loads(run("chat", "--json", stdin="first\n").stdout)
    assert roles(found["messages"]) == ["user", "assistant"]
    assert found["turns"][0]["text"] == "Hello, world"


def test_models_without_a_template_are_refused_before_the_first_question(
    run: Callable[..., Any], script: Script
) -> None:
    script.chat_template = None
    result = run("chat", stdin="first\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    assert script.asked == []


@pytest.fixture
def type_in(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `surefoot chat` as at a terminal where these lines are typed; an exception is raised in its place."""

    def run_with(*typed: Any) -> Any:
        lines: Iterator[Any] = iter(typed)

        def read(prompt: str) -> str:
            line = next(lines, EOFError)
            if isinstance(line, str):
                return line
            raise line

        class Terminal:
            @staticmethod
            def isatty() -> bool:
                return True

        class Sys:  # the module as `chat` sees it: its own standard input, everything else as it is
            stdin = Terminal()

            def __getattr__(self, name: str) -> Any:
                return getattr(sys, name)

        monkeypatch.setattr(chat_module, "sys", Sys())
        monkeypatch.setattr("builtins.input", read)
        return run("chat")

    return run_with


def test_talk_answers_resets_and_leaves(type_in: Callable[..., Any], script: Script) -> None:
    result = type_in("one", "two", "/reset", "three", "/exit", "never read")
    assert result.exit_code == 0
    assert [len(messages) for messages, _ in script.asked] == [1, 3, 1]
    assert result.stdout.count("Hello, world\n") == 3


def test_talk_shows_figures_and_help(type_in: Callable[..., Any], script: Script) -> None:
    result = type_in("/stats", "one", "/stats", "/what")
    assert "nothing has been answered yet" in result.stderr
    assert "last answer: 4 tokens" in result.stderr
    assert "rate: 0.500" in result.stderr
    assert result.stderr.count("/reset forgets") == 2
    assert result.exit_code == 0  # Ctrl-D


def test_ctrl_c_stops_an_answer_and_leaves_at_the_prompt(type_in: Callable[..., Any], script: Script) -> None:
    script.interrupt_after = 1
    result = type_in("one", "two", KeyboardInterrupt)
    assert result.exit_code == 130
    assert result.stderr.count("stopped") == 2
    assert script.asked[1][0][1] == {"role": "assistant", "content": "Hello"}  # as far as it came


def test_a_refused_question_leaves_the_conversation_as_it_was(
    type_in: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StubLLM.stream_chat

    def refuse(self: StubLLM, messages: list[dict[str, Any]], params: Any) -> Any:
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt has 9000 tokens: shorten it")
        return original(self, messages, params)

    monkeypatch.setattr(StubLLM, "stream_chat", refuse)
    result = type_in("one", "too long", "two")
    assert result.exit_code == 0
    assert "error: the prompt has 9000 tokens: shorten it (or start over with /reset)" in result.stderr
    assert roles(script.asked[1][0]) == ["user", "assistant", "user"]
