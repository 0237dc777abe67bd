"""From accepted token ids to the text a client sees: one ordered block in, one event out.

Speculation accepts 1 … γ+1 tokens per step. `OutputProcessor.push` takes them as one block and walks them one by one,
so that where a block happens to end can never change what is emitted: stop ids, stop strings, end tokens and the length
cap are applied after every token, the rest of the block is reported as dropped, and only then does one event leave.

Three small machines follow one another, each linear in the output and each unaware of blocks:

    token id ─▶ Detokenizer ─▶ characters that can no longer change ─▶ StopStrings ─▶ text that cannot be part of a stop
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for bytes that are not (yet) a character."""

CONTEXT_TOKENS = 4
"""Tokens decoded before a new one. An unfinished character has at most three bytes, hence at most three tokens,
and rules about leading spaces look one token back."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's own log-probability of one emitted token, and of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class OutputEvent:
    """What one step did for one request; the texts of all events concatenate to the request's text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Ids emitted this step: the block up to and including the token that ended the request."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per entry of `token_ids`, or None if the request asked for none."""
    origins: list[str] = field(default_factory=list)
    """How each token came: the name of the source whose draft was accepted, "recovered" (drawn where a draft was rejected),
    "bonus" (drawn after every verified draft was accepted), or "target" (nothing was verified)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended the request; None for an end token, a length cap or an abort."""
    num_kept: int = 0
    """How many tokens of the block survive. Whatever comes after them must leave the cache, the drafter's context, the
    prefix index and the usage figures."""
    request_id: str | None = None
    index: int = 0
    """Which of the `n` answers of a prompt."""
    error: str | None = None
    """Why the request could not go on; only with `finish_reason` "error"."""


class OutputProcessor:
    """Output state of one request.

    `tokenizer` is anything with the `decode` of a Hugging Face tokenizer; None serves token ids without text (then stop
    strings cannot be honoured, and are refused). `prompt_token_ids` decide how the first output token is written (some
    tokenizers drop the space before the first word of a text). `max_model_len` caps prompt + output.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Any | None,
        eos_token_ids: Collection[int],
        prompt_token_ids: Sequence[int],
        *,
        max_model_len: int | None = None,
        request_id: str | None = None,
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise RequestError("stop strings need a tokenizer, and this target has none: use stop_token_ids")
        self.params = params
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._prompt_token_ids = prompt_token_ids
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.index = 0
        self._told = 0  # tokens whose events have left
        self._pieces: list[str] = []
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ends = self._stop_ids if params.ignore_eos else self._stop_ids.union(eos_token_ids)
        caps = [params.max_tokens, None if max_model_len is None else max_model_len - len(prompt_token_ids)]
        self._cap = min((cap for cap in caps if cap is not None), default=None)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = detokenizer_for(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end the request, ascending; masked before `min_tokens`."""
        return tuple(sorted(self._ends))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._pieces)

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probs of the prompt are still missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self._prompt_token_ids)

    def read_prompt(self, first: int, logprobs: Sequence[tuple[float, list[tuple[int, float]]]]) -> None:
        """Take the log-probs of the tokens after positions `first`, `first` + 1 … of the prompt; known ones are skipped."""
        for position, (logprob, top) in enumerate(logprobs, first + 1):
            if self.prompt_logprobs is not None and position == len(self.prompt_logprobs) < len(self._prompt_token_ids):
                entry = TokenLogprobs(self._prompt_token_ids[position], logprob, top[: self.params.prompt_logprobs])
                self.prompt_logprobs.append(entry)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> OutputEvent:
        """Emit one block. After the end of the request nothing is kept and nothing is emitted."""
        if self.logprobs is not None and (logprobs is None or len(logprobs) != len(token_ids)):
            given = "none" if logprobs is None else str(len(logprobs))
            raise ValueError(f"{len(token_ids)} tokens came with {given} log-probs; the request asked for one each")
        if self._runs_on(token_ids):
            self.token_ids += token_ids
            text, kept = self._characters(token_ids), len(token_ids)
        else:
            text, kept = "", 0
            for token_id in token_ids:
                if self.finish_reason is not None:
                    break
                kept += 1
                self.token_ids.append(token_id)
                text += self._accept(token_id)
        event = OutputEvent(text=text, token_ids=list(token_ids[:kept]), num_kept=kept)
        if self.logprobs is not None and logprobs is not None:
            event.logprobs = list(logprobs[:kept])
            self.logprobs += event.logprobs
        return self._emit(event)

    def abort(self) -> OutputEvent:
        """End the request now; text held back so far is in the event, and nothing comes after it."""
        return self._emit(OutputEvent(text="" if self.finished else self._finish("abort")))

    def fail(self, error: str) -> OutputEvent:
        """End the request with an error, as `abort` ends it; tokens of a block whose `push` has raised are dropped.

        Never raises, whatever state that has left.
        """
        text = ""
        del self.token_ids[self._told :]
        if self.logprobs is not None:
            del self.logprobs[self._told :]
        if not self.finished:
            self.error = error
            with suppress(Exception):
                text = self._finish("error")
        return self._emit(OutputEvent(text=text))

    def _emit(self, event: OutputEvent) -> OutputEvent:
        event.request_id, event.finish_reason, event.stop_reason = self.request_id, self.finish_reason, self.stop_reason
        event.error, event.index = self.error, self.index
        self._told = len(self.token_ids)
        self._pieces.append(event.text)
        return event

    def _runs_on(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing in this block can end the request, whatever its text is: then it is taken as a whole."""
        return (
            not self.params.stop
            and self.finish_reason is None
            and (self._cap is None or len(self.token_ids) + len(token_ids) < self._cap)
            and self._ends.isdisjoint(token_ids)
        )

    def _accept(self, token_id: int) -> str:
        """Text that one more token releases. A stop is looked for before the length cap."""
        may_stop = len(self.token_ids) >= self.params.min_tokens
        if may_stop and token_id in self._ends:
            visible = self.params.include_stop_str_in_output
            text = self._stops.push(self._characters([token_id]), search=False).text if visible else ""
            return text + self._finish("stop", token_id if token_id in self._stop_ids else None)
        text, found = self._stops.push(self._characters([token_id]), search=may_stop)
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
            return text + found if self.params.include_stop_str_in_output else text
        if self._cap is not None and len(self.token_ids) >= self._cap:
            text += self._finish("length")
        return text

    def _characters(self, token_ids: Sequence[int]) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push_all(token_ids)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> str:
        """Set the reason; return what was held back for a character or a stop string that will not come."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        return self._stops.flush() + ("" if self._detokenizer is None else self._detokenizer.flush())


class StopSearch(NamedTuple):
    text: str  # released: can no longer be part of a stop string
    found: str | None  # the stop string that ended the text


class StopStrings:
    """Looks for stop strings in growing text, holding back the longest end of it that may still become one.

    Of several stop strings the one that is complete first counts; of those complete on the same character, the longest.
    That rule does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> StopSearch:
        """Add text. With `search` false a complete stop string passes as ordinary text."""
        if not self._stops or not text:
            return StopSearch(text, None)
        known, pending = len(self._held), self._held + text
        if search:
            # Only ends inside the new text count: an older one was passed on purpose (min_tokens).
            ends = [
                (start + len(stop), start, stop)
                for stop in self._stops
                if (start := pending.find(stop, max(0, known + 1 - len(stop)))) >= 0
            ]
            if ends:
                _, start, stop = min(ends)
                self._held = ""
                return StopSearch(pending[:start], stop)
        cut = len(pending) - self._overlap(pending)
        self._held = pending[cut:]
        return StopSearch(pending[:cut], None)

    def flush(self) -> str:
        """Release what is held: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with and goes beyond."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class ByteDetokenizer:
    """Turns token ids into the characters they complete where every token is a string of bytes (`ByteLevel` decoders).

    A fifth of the time of `Detokenizer`, which asks the tokenizer for a whole window again with every token.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        traits = traits_of(tokenizer)
        assert traits.token_bytes is not None, "made by `detokenizer_for`"
        self._skipped = traits.special_ids if skip_special_tokens else frozenset()
        self._bytes_of = traits.token_bytes
        self._decoder = getincrementaldecoder("utf-8")("replace")
        shown = [token_id for token_id in prompt_token_ids[-32:] if token_id not in self._skipped]
        for token_id in shown[-CONTEXT_TOKENS:]:
            self._decoder.decode(self._bytes_of[token_id])
        # What the prompt has shown for the character it ends inside of: one replacement, two for half a surrogate.
        self._begun = self._decoder.getstate()[0].decode("utf-8", "replace")

    def push(self, token_id: int) -> str:
        """Characters that became certain with this token."""
        return self.push_all([token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Characters that became certain with these tokens."""
        shown = (self._bytes_of[token_id] for token_id in token_ids if token_id not in self._skipped)
        return self._send(self._decoder.decode(b"".join(shown)))

    def flush(self) -> str:
        """What is left of an unfinished character, as the decoder shows it."""
        return self._send(self._decoder.decode(b"", True))

    def _send(self, text: str) -> str:
        if self._begun and text:  # if nothing came of that character, the prompt has shown it already
            self._begun, text = "", text.removeprefix(self._begun)
        return text


def detokenizer_for(
    tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
) -> Detokenizer | ByteDetokenizer:
    """The detokenizer that suits a tokenizer; both give the same text."""
    kind = Detokenizer if traits_of(tokenizer).token_bytes is None else ByteDetokenizer
    return kind(tokenizer, prompt_token_ids, skip_special_tokens)


class Detokenizer:
    """Turns token ids into the characters they complete, at constant cost per token.

    Text is what `tokenizer.decode` (without space clean-up, which rewrites text already sent) shows for prompt +
    output, less the prompt. A new token is decoded after the few tokens before it, and the difference is its text; a
    replacement character at the very end may be the beginning of a character and waits for the next token.
    `DecodeStream` of the `tokenizers` package works alike, but decodes its whole buffer again for every token until a
    valid character appears (quadratic on malformed bytes), fails where a decoder rewrites older text, and has no flush.

    Byte-fallback tokens (`<0xE2>`) go byte by byte through UTF-8, as in SentencePiece: a character is out as soon as it
    is complete, and a byte that belongs to none shows as one replacement character. The `tokenizers` package instead
    blanks a whole run of bytes, complete characters included, when one of them is malformed; nobody can stream that.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        traits = traits_of(tokenizer)
        self._bytes = traits.byte_values
        self._skipped = traits.special_ids if skip_special_tokens else frozenset()
        self._decode = decoder_of(tokenizer, skip_special_tokens)
        self._window: list[int] = []  # context, then tokens whose text is not complete
        for token_id in reversed(prompt_token_ids):
            if len(self._window) == CONTEXT_TOKENS:
                break
            if token_id not in self._skipped:
                self._window.insert(0, token_id)
        self._text = self._decode(self._window) if self._window else ""  # of the window
        self._sent = self._text  # the part of it that is out
        self._character = b""  # byte-fallback bytes of a character that is not complete

    def push(self, token_id: int) -> str:
        """Characters that became certain with this token."""
        if token_id in self._skipped:
            return ""
        byte = self._bytes.get(token_id)
        text = self._finish_bytes() if byte is None else self._finish_window() + self._push_byte(byte)
        if len(self._window) >= 2 * CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            text_now = self._decode(self._window)
            self._sent = text_now if self._sent == self._text else certain(text_now)
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if byte is not None:
            self._sent = self._text  # as context only: its character takes the other way out
        elif self._sent.endswith(REPLACEMENT) and not self._text.startswith(self._sent):
            self._sent = self._sent[:-1]  # the prompt ended inside this character
        return text + self._send(certain(self._text))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Characters that became certain with these tokens."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """What is left of an unfinished character, as the decoder shows it."""
        return self._finish_window() + self._finish_bytes()

    def _send(self, text: str) -> str:
        """What `text`, of the window, adds to what is out."""
        if len(text) <= len(self._sent):
            return ""
        added, self._sent = text[len(self._sent) :], text
        return added

    def _finish_window(self) -> str:
        return self._send(self._text)

    def _finish_bytes(self) -> str:
        lost, self._character = len(self._character), b""
        return REPLACEMENT * lost

    def _push_byte(self, byte: int) -> str:
        """The character this byte completes, or a replacement for every byte it proves malformed."""
        character = self._character + bytes([byte])
        try:
            text = character.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                self._character = character
                return ""
            if self._character:
                return self._finish_bytes() + self._push_byte(byte)
            return REPLACEMENT
        self._character = b""
        return text


def decoder_of(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode` without space clean-up.

    For one token, what transformers does around the decoding takes five times as long as the decoding; a tokenizer that
    changes nothing about it is asked for its back end.
    """
    if (back_end := _back_end(tokenizer)) is not None:
        return lambda ids: back_end.decode(ids, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def _back_end(tokenizer: Any) -> Any | None:
    """The `tokenizers` object that decodes for `tokenizer`, if nothing is done around it."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    untouched = isinstance(tokenizer, plain) and kind.decode is plain.decode and kind._decode is plain._decode
    return tokenizer.backend_tokenizer if untouched else None


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, for a `ByteLevel` decoder: one byte a character of the token's name, filled on demand."""

    def __init__(self, back_end: Any) -> None:
        super().__init__()
        self._name_of = back_end.id_to_token

    def __missing__(self, token_id: int) -> bytes:
        name: str = self._name_of(token_id) or ""
        try:
            found = bytes(BYTE_OF[character] for character in name)
        except KeyError:  # an added token stands for itself
            found = name.encode()
        self[token_id] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """The characters that GPT-2's alphabet writes bytes with: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


BYTE_OF = _byte_alphabet()


def certain(text: str) -> str:
    """`text` without a replacement character at its end, which the next token may turn into something else."""
    return text[:-1] if text.endswith(REPLACEMENT) else text


class TokenizerTraits(NamedTuple):
    special_ids: frozenset[int]  # ids that `skip_special_tokens` leaves out
    byte_values: dict[int, int]  # byte-fallback id → byte; empty for other tokenizers
    token_bytes: TokenBytes | None  # the bytes of every token, where that is all there is to decoding


_TRAITS: WeakKeyDictionary[Any, TokenizerTraits] = WeakKeyDictionary()


def traits_of(tokenizer: Any) -> TokenizerTraits:
    """What `tokenizer` says about single ids, asked once per tokenizer."""
    if (known := _TRAITS.get(tokenizer)) is not None:
        return known
    added = getattr(tokenizer, "added_tokens_decoder", {})
    candidates = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    special_ids = frozenset(i for i in candidates if not tokenizer.decode([i], skip_special_tokens=True))
    byte_values = {}
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        for byte in range(256):
            name = f"<0x{byte:02X}>"
            token_id = tokenizer.convert_tokens_to_ids(name)
            if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != name:
                continue  # unknown, or the unknown token
            if tokenizer.decode([token_id]) != name:  # else an ordinary token with that very text
                byte_values[token_id] = byte
    from tokenizers.decoders import ByteLevel

    back_end = _back_end(tokenizer)
    token_bytes = TokenBytes(back_end) if back_end is not None and isinstance(back_end.decoder, ByteLevel) else None
    traits = _TRAITS[tokenizer] = TokenizerTraits(special_ids, byte_values, token_bytes)
    return traits
