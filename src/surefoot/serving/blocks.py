"""The pieces of an answer as blocks, one after the other: what the Responses and the Messages API stream and answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.serving.parsing.pieces import Piece, Reasoning, Text

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A run of reasoning or text, or one tool call."""

    index: int
    kind: Kind
    text: str = ""  # of a call: its arguments
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Change:
    """What happened to a block."""

    what: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""  # by which it grew


class Blocks:
    """Joins pieces to blocks. How the pieces are cut never changes the blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = -1

    def feed(self, pieces: Sequence[Piece]) -> Iterator[Change]:
        for piece in pieces:
            if isinstance(piece, (Text, Reasoning)):
                if not piece.text:
                    continue
                kind: Kind = "text" if isinstance(piece, Text) else "reasoning"
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(Block(len(self.all), kind))
                yield self._grow(piece.text)
                continue
            if piece.index != self._call:
                self._call = piece.index
                yield from self._begin(Block(len(self.all), "call", id=str(piece.id), name=str(piece.name)))
            if piece.arguments:
                yield self._grow(piece.arguments)

    def finish(self) -> Iterator[Change]:
        """Close what is open."""
        if self._open is not None:
            yield Change("closed", self._open)
            self._open = None

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.finish()
        self.all.append(block)
        self._open = block
        yield Change("opened", block)

    def _grow(self, text: str) -> Change:
        assert self._open is not None
        self._open.text += text
        return Change("grew", self._open, text)
