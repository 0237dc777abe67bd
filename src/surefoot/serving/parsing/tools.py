"""Tool calls in the text of an answer, as the common families of models write them.

| format | how a call is written |
|---|---|
| hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3) |
| llama3 | `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or alone; several with `;` between them |
| pythonic | `[f(a=1), g(b="x")]` (Llama 3.2 and 4) |
| mistral | `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| deepseek | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), or V3's code block |

What looks like a call and turns out to be none is text, to the last character, unless a part of it has been told already.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from surefoot.serving.parsing.pieces import Piece, Text, ToolCallDelta, new_call_id, possible_start
from surefoot.serving.parsing.scanner import JsonObject, JsonValue

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


@dataclass(frozen=True)
class NamedForm:
    """A call whose name stands before its arguments: `begin prefix name middle {…} end`."""

    begin: str
    middle: str
    end: str = ""
    prefix: str = ""


class NamedCalls:
    """Calls whose name is written outside the JSON of their arguments.

    Args:
        names: functions that may be called.
        forms: how they are written; of those with the same beginning, one with a prefix that stands there, or else the one
            whose middle comes first.
        noise: markers around groups of calls, which belong to nobody.
    """

    def __init__(self, names: Collection[str], forms: Collection[NamedForm], noise: Collection[str] = ()) -> None:
        self._names, self._forms, self._noise = names, tuple(forms), tuple(noise)
        self._markers = (*dict.fromkeys(form.begin for form in self._forms), *self._noise)
        self._longest_name = max(map(len, names), default=0)
        self._held, self._raw = "", ""
        self._form: NamedForm | None = None
        self._value: JsonValue | None = None
        self._count = 0
        self._state = "text"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and getattr(self, f"_{self._state}")(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        left = "" if self._state == "arguments" else self._raw + self._held
        if self._state == "ending" or (self._count and not left.strip()):
            left = ""
        self._held = self._raw = ""
        return [Text(left)] if left else []

    def _text(self, pieces: list[Piece]) -> bool:
        found = [(place, marker) for marker in self._markers if (place := self._held.find(marker)) >= 0]
        place, marker = min(found, key=lambda pair: (pair[0], -len(pair[1])), default=(-1, ""))
        cut = place if found else len(self._held) - possible_start(self._held, self._markers)
        said = self._held[:cut]
        if self._count and not said.strip():
            if not found:
                return False  # white space after a call: whoever comes next decides
            said = ""
        if said:
            pieces.append(Text(said))
        self._held = self._held[cut:]
        if not found:
            return False
        self._held = self._held[len(marker) :]
        if marker not in self._noise:
            self._raw, self._state = marker, "name"
        return True

    def _name(self, pieces: list[Piece]) -> bool:
        forms = [form for form in self._forms if form.begin == self._raw]
        if any(form.prefix.startswith(self._held) for form in forms if form.prefix):
            return False
        prefixed = [form for form in forms if form.prefix and self._held.startswith(form.prefix)]
        forms = prefixed or [form for form in forms if not form.prefix]
        places = [(place, form) for form in forms if (place := self._held.find(form.middle)) >= 0]
        if places:
            place, form = min(places, key=lambda pair: pair[0])
            name = self._held[len(form.prefix) : place].strip()
            if name in self._names:
                self._held = self._held[place + len(form.middle) :]
                if form.middle == "{":
                    self._held = "{" + self._held
                pieces.append(ToolCallDelta(self._count, new_call_id(), name))
                self._form, self._value, self._state, self._raw = form, JsonValue(), "arguments", ""
                return True
        elif len(self._held) <= self._longest_name + max(len(form.prefix + form.middle) for form in forms) + 8:
            return False
        pieces.append(Text(self._raw))
        self._raw, self._state = "", "text"
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        value = self._value
        assert value is not None
        used = value.feed(self._held)
        said, self._held = self._held[:used], self._held[used:]
        said = said if self._raw else said.lstrip()
        self._raw += said
        if said:
            pieces.append(ToolCallDelta(self._count, None, None, said))
        if not (value.complete or value.broken):
            return False
        self._count += 1
        self._raw, self._state = "", "ending"
        return True

    def _ending(self, pieces: list[Piece]) -> bool:
        assert self._form is not None
        start, end = self._held.lstrip(), self._form.end
        if end and start.startswith(end):
            self._held, self._state = start[len(end) :], "text"
        elif end and end.startswith(start):
            return False
        else:
            self._state = "text"
        return True


def deepseek_calls(names: Collection[str]) -> NamedCalls:
    call, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    old = NamedForm(call, "\n```json\n", f"```{end}", prefix=f"function{sep}")
    return NamedCalls(names, [old, NamedForm(call, sep, end)], ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"])


class MistralCalls:
    """Either of Mistral's forms; what follows the first marker decides which."""

    MARKER = "[TOOL_CALLS]"

    def __init__(self, names: Collection[str]) -> None:
        self._listed = JsonCalls(names, self.MARKER, between=",", listed=True)
        self._named = NamedCalls(names, [NamedForm(self.MARKER, "[ARGS]"), NamedForm(self.MARKER, "{")])
        self._held = ""
        self._chosen: JsonCalls | NamedCalls | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._chosen is not None:
            return self._chosen.feed(text)
        self._held += text
        place = self._held.find(self.MARKER)
        if place < 0:
            cut = len(self._held) - possible_start(self._held, [self.MARKER])
            said, self._held = self._held[:cut], self._held[cut:]
            return [Text(said)] if said else []
        following = self._held[place + len(self.MARKER) :].lstrip()
        if not following:
            return []
        self._chosen = self._listed if following[0] in "[{" else self._named
        said, self._held = self._held, ""
        return self._chosen.feed(said)

    def finish(self) -> list[Piece]:
        if self._chosen is not None:
            return self._chosen.finish()
        left, self._held = self._held, ""
        return [Text(left)] if left else []


class PythonicCalls:
    """A list of Python calls with literal arguments. It is read as a whole, and never run."""

    _START = re.compile(r"\s*(<\|python_start\|>)?\s*\[\s*([A-Za-z_][\w.]*)\s*\(")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._plain = False

    def feed(self, text: str) -> list[Piece]:
        if self._plain:
            return [Text(text)] if text else []
        self._held += text
        start = self._held.lstrip()
        longest = max(map(len, self._names), default=0) + 24
        if start and not self._may_begin(start, longest):
            return self._as_text()
        found = _bracketed(start)
        if found is None:
            return []
        calls = self._read(start[:found].removeprefix("<|python_start|>"))
        if calls is None:
            return self._as_text()
        rest = start[found:].removeprefix("<|python_end|>").strip()
        self._held, self._plain = "", True
        return [*calls, Text(rest)] if rest else list(calls)

    def finish(self) -> list[Piece]:
        return self._as_text() if self._held else []

    def _as_text(self) -> list[Piece]:
        left, self._held, self._plain = self._held, "", True
        return [Text(left)] if left else []

    def _may_begin(self, start: str, longest: int) -> bool:
        if found := self._START.match(start):
            return found[2] in self._names
        return len(start) < longest and (start[0] == "[" or "<|python_start|>".startswith(start[:16]))

    def _read(self, text: str) -> list[ToolCallDelta] | None:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            assert isinstance(tree, ast.List)
            assert tree.elts
            deltas = []
            for index, call in enumerate(tree.elts):
                assert isinstance(call, ast.Call)
                name = ast.unparse(call.func)
                assert name in self._names
                assert not call.args
                arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                deltas.append(ToolCallDelta(index, new_call_id(), name, written))
        except (AssertionError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return deltas


def _bracketed(text: str) -> int | None:
    """Where the first bracket of a text is closed, strings aside."""
    depth, quote, escaped = 0, "", False
    for place, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
            if depth == 0:
                return place + 1
    return None


ToolStage = JsonCalls | NamedCalls | MistralCalls | PythonicCalls

TOOL_STAGES: dict[str, Callable[[Collection[str]], ToolStage]] = {
    "hermes": lambda names: JsonCalls(names, "<tool_call>", "</tool_call>"),
    "llama3": lambda names: Llama3Calls(names),
    "pythonic": PythonicCalls,
    "mistral": MistralCalls,
    "deepseek": deepseek_calls,
}
"""By the name of the format."""


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
