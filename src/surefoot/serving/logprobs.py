"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.engine.output import TokenLogprobs, traits_of

LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class TokenTexts:
    """How single tokens of one tokenizer are shown. Without a tokenizer, as `token_id:N`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """The text of a token and its bytes in UTF-8; the bytes are right where a token is a part of a character, too."""
        if (found := self._known.get(token_id)) is None:
            found = self._known[token_id] = self._shown(token_id)
        return found

    def _shown(self, token_id: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", []
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        traits = traits_of(self._tokenizer)
        if token_id in traits.byte_values:
            return text, [traits.byte_values[token_id]]
        if traits.token_bytes is not None:
            try:
                return text, list(traits.token_bytes[token_id])
            except (KeyError, IndexError):
                pass
        return text, list(text.encode("utf-8", "replace"))


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


def chat_entry(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """One item of `choices[].logprobs.content`."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = texts.of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    return {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*pair) for pair in entry.top]}


def chat_logprobs(entries: Sequence[TokenLogprobs] | None, texts: TokenTexts) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat."""
    return None if entries is None else {"content": [chat_entry(entry, texts) for entry in entries], "refusal": None}


class CompletionLogprobs:
    """Builds `choices[].logprobs` of a completion; offsets count characters of the text as its tokens show it."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts, self._offset = texts, offset

    def of(self, entries: Sequence[TokenLogprobs | None], first_token: int | None = None) -> dict[str, Any]:
        """The next tokens.

        Args:
            entries: None stands for the first token of an echoed prompt, which has no probability.
            first_token: its id.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text, _ = self._texts.of(first_token if entry is None and first_token is not None else entry.token_id)  # type: ignore[union-attr]
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            top = None
            if entry is not None and entry.top:
                top = {self._texts.of(token_id)[0]: finite(logprob) for token_id, logprob in reversed(entry.top)}
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found
