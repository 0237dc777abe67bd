"""Every command that a message, a help text or the documentation names is one that the command line accepts."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from surefoot.cli.app import app

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"""(?:`|'|")(surefoot [a-z][^`'"]*)(?:`|'|")""")
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
STAND_IN = "1"
"""For a value that a message fills in, or that a reader is to fill in: a path, a name and a number."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string of a module that may be printed, with stand-ins for what an f-string fills in."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in inside or id(node) in prose:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else STAND_IN for part in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def commands() -> Iterator[tuple[str, str]]:
    """(where, command) of all messages and of the documentation's examples; a bare name in running text is no example."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for line, text in texts(ast.parse(path.read_text())):
            for command in QUOTED.findall(" ".join(text.split())):
                yield f"{path.relative_to(ROOT)}:{line}", command
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        blocks = FENCED.findall(text)
        for command in QUOTED.findall(" ".join(FENCED.sub("", text).split())):
            if " -" in command or "/" in command:
                yield str(path.relative_to(ROOT)), command
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                if line.removeprefix("$ ").startswith("surefoot "):
                    yield str(path.relative_to(ROOT)), line.removeprefix("$ ")


FOUND = sorted(set(commands()))


def arguments(command: str) -> list[str]:
    """What a shell would pass on: without a comment, a pipe or a redirection, and with stand-ins for what is left open."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|<>&;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in lexer:
        if word[0] in "|<>&;":
            break
        words.append(word)
    return [STAND_IN if re.fullmatch(r"[A-Z_]+|\{.*\}", word) else word for word in words if word not in ("…", "...")]


def refusal(words: list[str]) -> str | None:
    """Why the command line refuses these words, without running anything; None if it does not."""
    group: Any = typer.main.get_command(app)
    try:
        while True:
            with group.make_context(words[0], list(words[1:])) as context:
                rest = [*context._protected_args, *context.args]
                if not hasattr(group, "resolve_command"):
                    return None
                if not rest:
                    return f"{words[0]} needs a command"
                _, group, words = group.resolve_command(context, rest)
                words = [group.name, *words]
    except Exception as problem:
        if type(problem).__name__ == "Exit":  # --help
            return None
        return str(problem.format_message())  # type: ignore[attr-defined]


def test_the_command_line_is_asked_for_real() -> None:
    assert refusal(["surefoot", "profile", "--max-num-seqs", "2"]) is None
    assert refusal(["surefoot", "profile", "--no-such-option"]) is not None
    assert refusal(["surefoot", "profile", "--max-num-seqs", "many"]) is not None
    assert refusal(["surefoot", "no-such-command"]) is not None
    assert arguments("surefoot generate -m MODEL 'a b' > out.txt  # why") == [
        "surefoot",
        "generate",
        "-m",
        STAND_IN,
        "a b",
    ]


def test_there_are_many() -> None:
    assert len([where for where, _ in FOUND if where.startswith("src")]) > 10
    assert len(FOUND) > 30


@pytest.mark.parametrize(("where", "command"), FOUND, ids=[f"{where}: {command}" for where, command in FOUND])
def test_a_command_that_is_named_is_accepted(where: str, command: str) -> None:
    assert refusal(arguments(command)) is None, where
