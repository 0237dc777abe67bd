"""Tool calls written as a list of Python calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection

from surefoot.serving.parsing.pieces import Piece, Text, ToolCallDelta, new_call_id


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
