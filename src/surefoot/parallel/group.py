"""A group of ranks that serve one target together, as far as the engine sees it.

Rank 0 schedules and plans; what it decides reaches the others as plain data, so all of them run the same step. There is
one implementation so far: `Alone`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

Plain: TypeAlias = bool | int | float | str | Sequence["Plain"] | Mapping[str, "Plain"] | None
"""What JSON can hold: no objects, no callables, no tensors."""


class Group(Protocol):
    """Ranks 0 ... size - 1. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def broadcast(self, data: Plain) -> Plain:
        """The data of rank 0, on every rank; the argument of the other ranks is ignored."""
        ...

    def all_gather(self, data: Plain) -> list[Plain]:
        """The data of every rank, in the order of ranks."""
        ...

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        ...

    def leave(self) -> None:
        """This rank takes no further part."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def broadcast(self, data: Plain) -> Plain:
        return data

    def all_gather(self, data: Plain) -> list[Plain]:
        return [data]

    def barrier(self) -> None: ...

    def leave(self) -> None: ...
