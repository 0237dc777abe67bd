"""JSON text that arrives in pieces: where a value ends, and the members of an object as they come."""

from __future__ import annotations

from collections.abc import Callable


class JsonValue:
    """Follows one JSON value, character by character, without reading more than its brackets and strings.

    `feed` returns how many characters of the text belong to the value; `complete` says whether it has ended. A number or a
    word (`true`) ends at the character after it.
    """

    def __init__(self) -> None:
        self.complete = self.broken = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._kind = ""  # of the value: "{", '"' or "a" for a number or a word

    def feed(self, text: str) -> int:
        for place, character in enumerate(text):
            if self.complete or self.broken:
                return place
            self._take(character)
            if self.complete and self._kind == "a":
                return place  # that character is not the value's
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self.complete = self._depth == 0
            return
        if not self._kind:
            if character in " \t\r\n":
                return
            self._kind = "{" if character in "{[" else '"' if character == '"' else "a"
            if self._kind == "a" and not (character.isalnum() or character == "-"):
                self.broken = True
                return
        if self._kind == "a":
            self.complete = not (character.isalnum() or character in "+-.")
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.complete = self._depth == 0


class JsonObject:
    """Follows one JSON object and hands out its members: the text of each value, as it comes.

    Args:
        on_value: told the member's name, a piece of its value's text, and whether the value ends with it.
    """

    def __init__(self, on_value: Callable[[str, str, bool], None]) -> None:
        self.complete = self.broken = False
        self._on_value = on_value
        self._expect = "{"
        self._key = ""
        self._value = JsonValue()

    def feed(self, text: str) -> int:
        """How many characters of the text belong to the object. Of a broken one, those before the fault."""
        place = 0
        while place < len(text) and not (self.complete or self.broken):
            if self._expect in ("key", "value"):
                used = self._value.feed(text[place:])
                piece = text[place : place + used]
                place += used
                self._take(piece)
                continue
            character = text[place]
            if character in " \t\r\n":
                place += 1
                continue
            if not self._punctuation(character):
                self.broken = True
                break
            place += self._expect != "key" or character != '"'
        return place

    def _take(self, piece: str) -> None:
        done = self._value.complete
        self.broken = self._value.broken
        if self._expect == "key":
            self._key += piece
            if done:
                self._key = self._key.strip().strip('"')
                self._expect = ":"
            return
        self._on_value(self._key, piece, done)
        if done:
            self._expect = ","

    def _punctuation(self, character: str) -> bool:
        """Take a character between names and values; whether it may stand there."""
        if self._expect == "{" and character == "{":
            self._expect = "first key"
        elif self._expect in ("first key", "next key") and character == '"':
            self._expect, self._key, self._value = "key", "", JsonValue()
        elif (self._expect == "first key" or self._expect == ",") and character == "}":
            self.complete = True
        elif self._expect == ":" and character == ":":
            self._expect, self._value = "value", JsonValue()
        elif self._expect == "," and character == ",":
            self._expect = "next key"
        else:
            return False
        return True
