"""`surefoot chat`: conversations from a pipe and at a (pretended) terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surefoot.cli import chat as chat_module
from surefoot.cli import input_line
from tests.cli.conftest import strict_json
from tests.cli.stub import Script


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
    found = strict_json(run("chat", "--json", stdin="first\n").stdout)
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
    """Run `surefoot chat` as at a terminal where these messages are typed; an exception is raised in its place."""

    def run_with(*typed: Any, options: tuple[str, ...] = ()) -> Any:
        lines: Iterator[Any] = iter(typed)

        class Typed:
            def read(self) -> str | None:
                line = next(lines, None)
                if line is None or isinstance(line, str):
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
        monkeypatch.setattr(input_line, "InputLine", Typed)
        return run("chat", *options)

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


def test_ctrl_c_stops_an_answer_or_clears_the_line_and_keeps_the_conversation(
    type_in: Callable[..., Any], script: Script
) -> None:
    script.interrupt_after = 1
    result = type_in("one", KeyboardInterrupt, "two", KeyboardInterrupt)
    assert result.exit_code == 0  # the end of the input ends it
    assert result.stderr.count("stopped") == 2
    assert script.asked[1][0] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},  # as far as it came
        {"role": "user", "content": "two"},
    ]


def test_ctrl_c_before_the_first_word_leaves_the_question_out(type_in: Callable[..., Any], script: Script) -> None:
    script.interrupt_after = 0
    type_in("one", "two")
    assert [message["content"] for message in script.asked[1][0]] == ["two"]


def test_ctrl_c_between_answer_and_prompt_keeps_the_conversation(
    type_in: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = chat_module.statistics_line, iter([KeyboardInterrupt])

    def interrupted(output: Any) -> str:
        if (problem := next(calls, None)) is not None:
            raise problem
        return original(output)

    monkeypatch.setattr(chat_module, "statistics_line", interrupted)
    assert type_in("one", "two").exit_code == 0
    assert roles(script.asked[1][0]) == ["user", "assistant", "user"]


def test_two_slashes_are_one_and_a_pasted_block_is_a_message(type_in: Callable[..., Any], script: Script) -> None:
    result = type_in("//etc/hosts is what?", "/etc/hosts", "/* a comment */\nint main()\n", "//\nfoo")
    assert [messages[-1]["content"] for messages, _ in script.asked] == [
        "/etc/hosts is what?",
        "/* a comment */\nint main()",
        "//\nfoo",
    ]
    assert "/etc/hosts is no command" in result.stderr


def test_stop_strings_penalties_and_template_arguments_reach_the_request(
    type_in: Callable[..., Any], script: Script
) -> None:
    options = (
        "--stop",
        r"\n",
        "--presence-penalty",
        "0.5",
        "--frequency-penalty",
        "0.25",
        "--repetition-penalty",
        "1.1",
    )
    type_in("one", options=(*options, "--chat-template-kwargs", '{"enable_thinking": false}'))
    params = script.asked[0][1]
    assert params.stop_strings == ("\n",)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, 0.25, 1.1)
    assert script.variables == [{"enable_thinking": False}]


def test_an_answer_that_failed_says_why(type_in: Callable[..., Any], run: Callable[..., Any], script: Script) -> None:
    script.error = "the logits are NaN: use --dtype bfloat16"
    result = type_in("one", "two")
    assert result.exit_code == 0  # the conversation goes on
    assert result.stderr.count("error: the logits are NaN: use --dtype bfloat16\n") == 2


def test_a_piped_answer_that_failed_is_an_exit_code(run: Callable[..., Any], script: Script) -> None:
    script.error = "the logits are NaN"
    result = run("chat", stdin="one\n")
    assert result.exit_code == 1
    assert "error: the logits are NaN\n" in result.stderr


def test_a_refused_question_leaves_the_conversation_as_it_was(type_in: Callable[..., Any], script: Script) -> None:
    script.refuse = lambda messages: (
        "the prompt has 9000 tokens: shorten it" if messages[-1]["content"] == "too long" else None
    )
    result = type_in("one", "too long", "two")
    assert result.exit_code == 0
    assert "error: the prompt has 9000 tokens: shorten it (or start over with /reset)" in result.stderr
    assert roles(script.asked[1][0]) == ["user", "assistant", "user"]
