"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from surefoot.serving.parsing.pieces import Piece, Text, ToolCallDelta, new_call_id, possible_start
from surefoot.serving.parsing.scanner import JsonObject

_ARGUMENTS = ("arguments", "parameters")


class _Call:
    """One call in the form of a JSON object with a name and arguments."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self._index, self._names = index, names
        self.told: list[ToolCallDelta] = []
        self.begun = False  # a part has been told: there is no way back to text
        self._name: str | None = None
        self._name_text, self._waiting = "", ""
        self._as_text = self._seen_arguments = False
        self._object = JsonObject(self._member)

    @property
    def complete(self) -> bool:
        return self._object.complete

    @property
    def broken(self) -> bool:
        return self._object.broken

    def feed(self, text: str) -> int:
        return self._object.feed(text)

    def end(self) -> bool:
        """Whether the object that has ended is a call."""
        if not self.begun and self._name is not None and not self._seen_arguments and self._name in self._names:
            self._begin()
            self.told.append(ToolCallDelta(self._index, None, None, "{}"))
        return self.begun

    def _member(self, key: str, piece: str, done: bool) -> None:
        if key == "name":
            self._name_text += piece
            if done:
                name = _loaded(self._name_text)
                self._name = name if isinstance(name, str) else None
        elif key in _ARGUMENTS:
            if not self._seen_arguments:
                piece = piece.lstrip()
                self._seen_arguments = bool(piece)
                self._as_text = piece.startswith('"')  # arguments as JSON within a JSON string
            self._waiting += piece
            if self._as_text and done:
                inner = _loaded(self._waiting)
                self._waiting, self._as_text = str(inner), False
        if self._name in self._names and self._seen_arguments and not self._as_text and self._waiting:
            if not self.begun:
                self._begin()
            self.told.append(ToolCallDelta(self._index, None, None, self._waiting))
            self._waiting = ""

    def _begin(self) -> None:
        self.begun = True
        self.told.append(ToolCallDelta(self._index, new_call_id(), self._name))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class JsonCalls:
    """Calls that are JSON objects, between markers or alone.

    Args:
        names: functions that may be called; an object that names none of them is text.
        begin: what stands before calls; without a marker, calls stand at the beginning of the answer only.
        end: what may stand after them.
        between: what may stand between two calls of one group, white space aside.
        opening, closing: of a list of calls.
    """

    def __init__(
        self, names: Collection[str], begin: str = "", end: str = "", between: str = "", *, listed: bool = False
    ) -> None:
        self._names, self._begin, self._end, self._between, self._listed = names, begin, end, between, listed
        self._held = ""  # text whose part is not known yet
        self._raw = ""  # of the group under way, since the last call that was told
        self._call: _Call | None = None
        self._count = 0
        self._state = "text" if begin else "start"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        begun = self._call is not None and self._call.begun
        left = self._held if begun or self._state == "after" else self._raw + self._held
        self._held = self._raw = ""
        if begun or (self._state == "after" and not left.strip()):
            return []
        return [Text(left)] if left else []

    def _step(self, pieces: list[Piece]) -> bool:
        return {
            "text": self._text,
            "start": self._start,
            "group": self._group,
            "call": self._inside,
            "after": self._after,
        }[self._state](pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        """Text, in which a marker may come."""
        place = self._held.find(self._begin)
        cut = place if place >= 0 else len(self._held) - possible_start(self._held, [self._begin])
        if self._count:  # white space between two calls belongs to nobody
            kept = self._held[:cut]
            cut = cut if kept.strip() else 0
            if place >= 0 and not cut:
                self._held = self._held[place:]
                place = 0
        if cut:
            pieces.append(Text(self._held[:cut]))
        self._held = self._held[cut:]
        if place < 0:
            return False
        self._raw, self._held = self._begin, self._held[len(self._begin) :]
        self._state = "group"
        return True

    def _start(self, pieces: list[Piece]) -> bool:
        """The beginning of an answer without a marker."""
        start = self._held.lstrip()
        if not start:
            return False
        if start[0] == "{":
            self._raw = self._held[: len(self._held) - len(start)]
            self._held, self._state, self._call = start, "call", _Call(self._count, self._names)
            return True
        return self._give_up(pieces)

    def _group(self, pieces: list[Piece]) -> bool:
        """After a marker: the bracket of a list, and the brace of a call."""
        start = self._held.lstrip()
        if not start:
            return False
        if self._listed and start[0] == "[" and "[" not in self._raw[len(self._begin) :]:
            self._raw, self._held = self._raw + self._held[: len(self._held) - len(start) + 1], start[1:]
            return True
        if start[0] == "{":
            self._raw += self._held[: len(self._held) - len(start)]
            self._held, self._state, self._call = start, "call", _Call(self._count, self._names)
            return True
        return self._give_up(pieces)

    def _inside(self, pieces: list[Piece]) -> bool:
        call = self._call
        assert call is not None
        used = call.feed(self._held)
        self._raw, self._held = self._raw + self._held[:used], self._held[used:]
        pieces += call.told
        call.told.clear()
        if call.broken and not call.begun:
            return self._give_up(pieces)
        if not (call.complete or call.broken):
            return False
        told = call.end()
        pieces += call.told
        if not told:
            return self._give_up(pieces)
        self._count += 1
        self._call, self._raw, self._state = None, "", "after"
        return True

    def _after(self, pieces: list[Piece]) -> bool:
        """After a call: its end marker, the next call, or text."""
        start = self._held.lstrip()
        if not start:
            return False
        closing = "]" if self._listed else self._end
        if self._between and start.startswith(self._between):
            following = start[len(self._between) :].lstrip()
            if not following:
                return False
            self._held, self._state = following, "group" if self._begin else "start"
            return True
        if closing and start.startswith(closing):
            self._held, self._state = start[len(closing) :], "text" if self._begin else "after"
            if not self._begin:
                return bool(self._held)
            return True
        if closing and closing.startswith(start):
            return False
        if not self._begin:
            pieces.append(Text(self._held))
            self._held = ""
            return False
        self._state = "text"
        return True

    def _give_up(self, pieces: list[Piece]) -> bool:
        """What looked like a call is text."""
        text, self._raw, self._call = self._raw, "", None
        if self._begin:
            self._state = "text"
            if text:
                pieces.append(Text(text))
            return True
        self._state = "plain"
        pieces.append(Text(text + self._held))
        self._held = ""
        self._step = self._plain  # type: ignore[method-assign]
        return False

    def _plain(self, pieces: list[Piece]) -> bool:
        """No call can come any more."""
        pieces.append(Text(self._held))
        self._held = ""
        return False


class Llama3Calls(JsonCalls):
    """JSON objects at the beginning of the answer, after `<|python_tag|>` or not."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, between=";")
        self._tag = True

    def feed(self, text: str) -> list[Piece]:
        if self._tag:
            self._held += text
            start = self._held.lstrip()
            if self.TAG.startswith(start):
                return []
            self._tag, text = False, ""
            if start.startswith(self.TAG):
                self._held = start[len(self.TAG) :]
        return super().feed(text)
