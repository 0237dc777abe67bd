"""What the benchmark and the calibration ask: code, edits, maths and chat, from very predictable to open-ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation seen from the user's side."""

    kind: str
    turns: tuple[str, ...]
    chat: bool = True  # False: one turn, continued as it is

    def tokens(self, tokenizer: Any) -> list[int]:
        """Token ids of the first turn, through the chat template where there is one."""
        if self.chat and getattr(tokenizer, "chat_template", None):
            return chat_tokens(tokenizer, [{"role": "user", "content": self.turns[0]}])
        return list(tokenizer(self.turns[0])["input_ids"])


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


_CLASS = """class Basket:
    def __init__(self, owner, limit):
        self.owner = owner
        self.limit = limit
        self.entries = {}

    def put(self, name, count):
        if len(self.entries) >= self.limit and name not in self.entries:
            raise OverflowError(f"the basket of {self.owner} is full")
        self.entries[name] = self.entries.get(name, 0) + count

    def take(self, name, count):
        left = self.entries.get(name, 0) - count
        if left < 0:
            raise KeyError(f"{self.owner} has not so many of {name}")
        self.entries[name] = left
"""

BUILT_IN = (
    BenchPrompt(
        "code",
        (
            'def transpose(matrix: list[list[float]]) -> list[list[float]]:\n    """Rows become columns.\n\n'
            '    >>> transpose([[1, 2], [3, 4], [5, 6]])\n    [[1, 3, 5], [2, 4, 6]]\n    """\n',
        ),
        chat=False,
    ),
    BenchPrompt("edit", (f"Add type hints to every method. Answer with the complete class only.\n\n{_CLASS}",)),
    BenchPrompt(
        "maths",
        (
            "A train leaves at 9:40 and covers 168 km at 96 km/h, waits 14 minutes, and covers another 75 km at 60 km/h. "
            "When does it arrive? Show every step.",
        ),
    ),
    BenchPrompt("chat", ("My neighbour plays the trumpet every evening. How do I bring it up without a quarrel?",)),
    BenchPrompt(
        "code",
        ("Write a Python function that parses a line of a CSV file with quoted fields, and unit tests for it.",),
    ),
    BenchPrompt(
        "edit", (f"Rename `entries` to `contents` everywhere. Answer with the complete class only.\n\n{_CLASS}",)
    ),
    BenchPrompt(
        "maths", ("A tank holds 340 litres and loses 6 % a day. After how many whole days is it less than half full?",)
    ),
    BenchPrompt("chat", ("Tell me about a market town in the mountains on the morning of the first snow.",)),
)


def read_prompts(path: Path | None) -> tuple[BenchPrompt, ...]:
    """The built-in prompts, or those of a file: JSON lines with `turns` (or `prompt`), or text with one prompt a line.

    Raises:
        ConfigurationError: cannot be read, or holds no prompt; names the line.
    """
    if path is None:
        return BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(
            f"cannot read the prompts {path}: {problem}. Give a file of JSON lines with 'turns', or of text"
        ) from problem
    parse = _from_json if path.suffix in (".jsonl", ".json") else _from_text
    prompts = tuple(parse(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise ConfigurationError(
            f"{path} holds no prompt: give JSON lines with 'turns', or text with one prompt a line"
        )
    return prompts


def _from_text(line: str, where: str) -> BenchPrompt:
    return BenchPrompt("file", (line.strip(),))


def _from_json(line: str, where: str) -> BenchPrompt:
    try:
        data = json.loads(line)
    except ValueError as problem:
        raise ConfigurationError(f"{where} is not JSON: {problem}") from problem
    turns = data.get("turns", data.get("prompt")) if isinstance(data, dict) else None
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigurationError(f"{where}: expected an object with 'turns', a list of texts")
    return BenchPrompt(str(data.get("category", data.get("kind", "file"))), tuple(turns))
