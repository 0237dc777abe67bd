"""Tool calls whose name is written outside the JSON of their arguments; Mistral's, which are either."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from surefoot.serving.parsing.json_calls import JsonCalls
from surefoot.serving.parsing.pieces import Piece, Text, ToolCallDelta, new_call_id, possible_start
from surefoot.serving.parsing.scanner import JsonValue


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
