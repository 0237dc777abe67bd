"""What an answer must look like: JSON, a schema, a regular expression, one of several texts, or a grammar.

Plain data, checked when it is made; `engine/grammar.py` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from surefoot.errors import RequestError
from surefoot.validation import shown

LONGEST = 1 << 18
"""Characters that a schema, expression or grammar may have."""
MOST_CHOICES = 1024
_PLACES = ("starts_after", "free_from")


@dataclass(frozen=True)
class StructuredOutput:
    """Exactly one form that the text of an answer must have; a wrong value raises `RequestError`.

    Args:
        json_object: any JSON object.
        json_schema: a JSON schema, as a mapping or as JSON text. Kept as text.
        regex: a regular expression that the whole text matches.
        choice: the texts of which it is one. Kept as a tuple.
        grammar: an EBNF grammar whose first rule is `root`, as xgrammar and llama.cpp's GBNF write it.
        structural_tag: xgrammar's structural tag, as a mapping or as JSON text: free text in which marked parts follow
            schemas. `{"type": "structural_tag", "format": {...}}`. Kept as text.
        starts_after: a text that ends a free part at the beginning, such as `</think>`; what follows has the form.
        free_from: the free part is there only if the answer begins with this text; None: it always is.
    """

    json_object: bool = False
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    starts_after: str | None = None
    free_from: str | None = None

    def __post_init__(self) -> None:
        given = [entry.name for entry in self._forms() if getattr(self, entry.name) not in (None, False)]
        if self.json_schema is False:
            raise RequestError("json_schema is false, which nothing satisfies; allowed: a JSON schema")
        if len(given) != 1:
            names = ", ".join(entry.name for entry in self._forms())
            raise RequestError(
                f"structured output has {len(given)} forms ({', '.join(given) or 'none'}); give one of {names}"
            )
        (name,) = given
        value = getattr(self, name)
        if name in ("json_schema", "structural_tag"):
            value = _json_text(name, value)
        elif name == "choice":
            value = _choices(value)
        elif name == "json_object":
            if value is not True:
                raise RequestError(f"json_object is {shown(value)}; allowed: true")
        elif not isinstance(value, str) or not value:
            raise RequestError(f"{name} is {shown(value)}; allowed: a text that is not empty")
        if isinstance(value, str) and len(value) > LONGEST:
            raise RequestError(f"{name} has {len(value)} characters; allowed: at most {LONGEST}; make it smaller")
        object.__setattr__(self, name, value)
        for name in _PLACES:
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"{name} is {shown(text)}; allowed: a text that is not empty, or None")
        if self.free_from is not None and self.starts_after is None:
            raise RequestError("free_from needs starts_after: where the free part ends")

    @classmethod
    def _forms(cls) -> list[Any]:
        return [entry for entry in fields(cls) if entry.name not in _PLACES]

    @property
    def form(self) -> tuple[str, Any]:
        """The name of the form, and its value."""
        return next((e.name, value) for e in self._forms() if (value := getattr(self, e.name)) not in (None, False))


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as problem:
            raise RequestError(f"{name} is not valid JSON: {problem}") from None
    if not isinstance(value, (Mapping, bool)):
        raise RequestError(f"{name} is {shown(value)}; allowed: a JSON object, or its text")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"{name} is not plain JSON data: {problem}") from None


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"choice is {shown(value)}; allowed: a list of texts")
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice contains {shown(text)}; allowed: texts that are not empty")
    if len(value) > MOST_CHOICES or sum(map(len, value)) > LONGEST:
        raise RequestError(
            f"choice has {len(value)} texts; allowed: at most {MOST_CHOICES}, of {LONGEST} characters in all"
        )
    return tuple(value)
