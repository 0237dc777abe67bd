"""`surefoot chat` at a real (pseudo) terminal: pasting, keys, Ctrl-C, Ctrl-D, and how it leaves the terminal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import PASTE_BEGIN, PASTE_END, PASTE_ON, Terminal

CTRL_C, CTRL_D, ENTER, ALT_ENTER = b"\x03", b"\x04", b"\r", b"\x1b\r"


def conversations(asked: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line) for line in asked.read_text().splitlines()]


def test_a_pasted_block_is_one_message_and_keys_do_what_help_says(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with Terminal.stub("chat", asked=asked) as terminal:
        terminal.wait_for(PASTE_ON)
        block = b"def f():\n    return 1\n\n/exit\n"
        terminal.type(PASTE_BEGIN + block + PASTE_END)
        terminal.read(0.5)
        assert not asked.exists()  # nothing is sent before Enter
        terminal.type(ENTER)
        terminal.wait_for("finished: length")
        terminal.wait_for(PASTE_ON, 2)
        terminal.type(b"one" + ALT_ENTER + b"two" + ENTER)
        terminal.wait_for("finished: length", 2)
        terminal.wait_for(PASTE_ON, 3)
        terminal.type(b"//x" + ENTER)
        terminal.wait_for("finished: length", 3)
        terminal.wait_for(PASTE_ON, 4)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert terminal.is_sane
    questions = [messages[-1]["content"] for messages in conversations(asked)]
    assert questions == [block.decode().strip(), "one\ntwo", "/x"]


def test_ctrl_c_clears_the_line_and_stops_an_answer_and_never_ends_the_conversation(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with Terminal.stub("chat", asked=asked, pieces=["Hello "] * 300, pause=0.02) as terminal:
        terminal.wait_for(PASTE_ON)
        terminal.type(b"never sent")
        terminal.wait_for("never sent")
        terminal.type(CTRL_C)
        terminal.wait_for(PASTE_ON, 2)
        terminal.type(CTRL_C + CTRL_C)
        terminal.wait_for(PASTE_ON, 4)
        terminal.type(b"first" + ENTER)
        terminal.wait_for("Hello Hello")
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for(PASTE_ON, 5)
        terminal.type(b"second" + ENTER)
        terminal.wait_for("Hello Hello", 3)
        os.kill(terminal.process.pid, signal.SIGINT)  # not from the keyboard: the same
        terminal.wait_for("stopped", 2)
        terminal.wait_for(PASTE_ON, 6)
        terminal.type(b"/exit" + ENTER)
        assert terminal.wait() == 0
        assert terminal.is_sane
    first, second = conversations(asked)
    assert [message["content"] for message in first] == ["first"]
    assert second[0]["content"] == "first"
    assert set(second[1]["content"].split()) == {"Hello"}
    assert second[2]["content"] == "second"


@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_sigterm_ends_a_chat_and_leaves_the_terminal_as_it_was(when: str) -> None:
    with Terminal.stub("chat", pieces=["Hello "] * 300, pause=0.02) as terminal:
        terminal.wait_for(PASTE_ON)
        if when == "in an answer":
            terminal.type(b"first" + ENTER)
            terminal.wait_for("Hello Hello")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.is_sane
        assert "Traceback" not in terminal.text


def test_ctrl_c_in_a_demo_shows_what_is_done_and_leaves_the_cursor_visible() -> None:
    with Terminal.stub("demo", pieces=["Hello "] * 100, pause=0.01) as terminal:
        terminal.wait_for("speculative", 2)
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
        assert terminal.is_sane
        assert "Traceback" not in terminal.text


def test_a_terminal_that_can_nothing_still_has_a_prompt(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with Terminal.stub("chat", asked=asked, term="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type(b"hello" + ENTER)
        terminal.wait_for("finished: length")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert conversations(asked)[0][-1]["content"] == "hello"
