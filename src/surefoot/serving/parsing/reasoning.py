"""Reasoning between two markers at the beginning of an answer, `<think>` … `</think>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surefoot.serving.parsing.pieces import Piece, Reasoning, Text, possible_start


class ReasoningSplitter:
    """Splits reasoning from the answer.

    Reasoning stands at the beginning only: a marker later on is text. White space around the markers belongs to neither part.

    Args:
        begin, end: the markers.
        is_open: the prompt has opened the reasoning already.
    """

    def __init__(self, begin: str = "<think>", end: str = "</think>", *, is_open: bool = False) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        self._state = "reasoning" if is_open else "before"
        self._fresh = True  # nothing of the current part has been told: white space is skipped

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        left, self._held = self._held, ""
        if not left:
            return []
        return [Reasoning(left)] if self._state == "reasoning" else [Text(left)]

    def _step(self, pieces: list[Piece]) -> bool:
        """Take what is certain; whether there may be more."""
        if self._state == "before":
            start = self._held.lstrip()
            if start.startswith(self._begin):
                self._held, self._state = start[len(self._begin) :], "reasoning"
                return True
            if not self._begin.startswith(start):
                self._state, self._fresh = "answer", False  # no reasoning: the text stays as it is
                return True
            return False
        if self._fresh:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._fresh = False
        if self._state == "answer":
            if self._held:
                pieces.append(Text(self._held))
                self._held = ""
            return False
        place = self._held.find(self._end)
        if place >= 0:
            said = self._held[:place].rstrip()
            self._held = self._held[place + len(self._end) :]
            self._state, self._fresh = "answer", True
        else:
            cut = len(self._held) - possible_start(self._held, [self._end])
            cut = len(self._held[:cut].rstrip())  # white space before the end marker belongs to nobody
            said, self._held = self._held[:cut], self._held[cut:]
        if said:
            pieces.append(Reasoning(said))
        return place >= 0


class ReasoningTokens:
    """Counts tokens up to the one that completes the end marker, wherever steps end.

    Args:
        is_open: the prompt has opened the reasoning.
        begin, end: the markers.
        text_of: shows one more token as text (an incremental detokenizer's `push`), special tokens included.
    """

    def __init__(self, text_of: Callable[[int], str], begin: str, end: str, *, is_open: bool = False) -> None:
        self.count = 0
        self._text_of, self._begin, self._end = text_of, begin, end
        self._state = "reasoning" if is_open else "before"
        self._seen = ""
        self._unsure = 0  # tokens of which it is not known yet whether they begin the reasoning

    def feed(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._state == "answer":
                return
            self._seen += self._text_of(token_id)
            if self._state == "before":
                self._unsure += 1
                start = self._seen.lstrip()
                if start.startswith(self._begin):
                    self.count, self._state = self._unsure, "reasoning"
                    self._seen = start[len(self._begin) :]
                elif not self._begin.startswith(start):
                    self._state = "answer"
            else:
                self.count += 1
            if self._state == "reasoning":
                if self._end in self._seen:
                    self._state = "answer"
                self._seen = self._seen[-len(self._end) :]
