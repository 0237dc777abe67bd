"""The frame around the commands: help, version, one-line errors, Ctrl-C, and what may not be imported for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import surefoot
from surefoot.errors import ModelError
from tests.cli.stub import Script, StubLLM

COMMANDS = ("generate", "chat", "demo", "inspect")


def test_python_m_surefoot_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "surefoot", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"surefoot {surefoot.__version__}\n"


def test_version(run: Callable[..., Any]) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"surefoot {surefoot.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page_and_stands_in_the_list(run: Callable[..., Any], command: str) -> None:
    assert command in run("--help").stdout
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['surefoot', 'generate', '--help']\n"
        "from surefoot.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "-1"), ("temperature is -1.0", "allowed")),
        (("--width", "wide"), ("width is 'wide'", "rotating pattern")),
        (("--width", "0,x"), ("width is '0,x'", "rotating pattern")),
        (("--gamma", "0"), ("gamma is 0", "--drafter none")),
        (("--stop", ""), ("stop contains ''", "allowed")),
        (("--max-tokens", "0"), ("max_tokens is 0", "allowed")),
    ],
)
def test_wrong_options_are_one_line_with_the_remedy_and_exit_code_2(
    run: Callable[..., Any], script: Script, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = run("generate", "x", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert script.options == []  # found before a model is loaded


def test_errors_of_the_library_are_one_line_and_exit_code_2(
    run: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: StubLLM, **options: Any) -> None:
        raise ModelError(f"unknown model {options['model']!r}:\n  use one of ours")

    monkeypatch.setattr(StubLLM, "__init__", refuse)
    result = run("generate", "x", "--model", "nothing")
    assert result.exit_code == 2
    assert result.stderr == "error: unknown model 'nothing': use one of ours\n"


def test_bugs_keep_their_traceback(run: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(self: StubLLM, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(StubLLM, "__init__", break_down)
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")


def test_ctrl_c_keeps_the_text_so_far_and_exits_with_130(run: Callable[..., Any], script: Script) -> None:
    script.interrupt_after = 2
    result = run("generate", "x")
    assert result.exit_code == 130
    assert result.stdout == "Hello, "
    assert "Traceback" not in result.stderr
    assert script.closed == 1


def test_unknown_options_are_refused(run: Callable[..., Any]) -> None:
    assert run("generate", "x", "--no-such-option").exit_code == 2
