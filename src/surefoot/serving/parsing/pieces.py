"""What a parser of answers makes, and how parsers are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from uuid import uuid4


@dataclass(frozen=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a tool call; the first one of a call has its id and name, and all have a piece of the arguments' JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str = ""


Piece: TypeAlias = "Text | Reasoning | ToolCallDelta"


class Stage(Protocol):
    """A parser of growing text. How the text is cut never changes what its pieces join to."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with more text."""
        ...

    def finish(self) -> list[Piece]:
        """What is left at the end."""
        ...


class OutputParser:
    """Reasoning first, then tool calls in the rest.

    Args:
        reasoning: splits reasoning off; None: there is none.
        tools: finds tool calls in text; None: there are none.
        counter: counts the tokens of the reasoning.
    """

    def __init__(
        self, reasoning: Stage | None = None, tools: Stage | None = None, counter: TokenCounter | None = None
    ) -> None:
        self._reasoning, self._tools, self._counter = reasoning, tools, counter

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, markers included."""
        return 0 if self._counter is None else self._counter.count

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """The pieces that became certain with more text and its tokens."""
        if self._counter is not None:
            self._counter.feed(token_ids)
        return self._on([Text(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """What is left at the end."""
        left = [] if self._reasoning is None else self._on(self._reasoning.finish())
        return left if self._tools is None else [*left, *self._tools.finish()]

    def _on(self, pieces: Sequence[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Text) and self._tools is not None:
                found += self._tools.feed(piece.text)
            elif not isinstance(piece, Text) or piece.text:
                found.append(piece)
        return found


class TokenCounter(Protocol):
    """Counts the tokens of the reasoning."""

    count: int

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
        ...


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of the markers begins with and goes beyond."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
