"""Structured output: a form of the text as a mask of tokens that follows the drafts of a block (xgrammar, extra `serve`)."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import ConfigurationError, RequestError
from surefoot.structured import StructuredOutput
from surefoot.targets.target import Target

if TYPE_CHECKING:
    import xgrammar

_SOURCE_PLACE = re.compile(r"\[\d+:\d+:\d+\] \S+:\d+: ")  # where in xgrammar's own source an error was raised
KEPT = 64
"""Compiled forms that are kept, the most recently used ones."""
CACHE_BYTES = 512 << 20
"""Memory the compiler may keep for parts that forms share."""
MOST_WHITESPACE = 32
"""White space in a row that JSON may have: a model must not fill its whole answer with it."""


class Grammars:
    """Compiles the forms of one target's answers; any thread may use it.

    Compiling runs where it is called, without Python's lock, and takes milliseconds to seconds.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[tuple[str, Any], xgrammar.CompiledGrammar] = OrderedDict()

    def mask(self, structured: StructuredOutput, end_ids: Collection[int]) -> GrammarMask:
        """A fresh mask for one answer.

        Args:
            end_ids: tokens that end the answer; they are allowed where the form is complete, and nowhere else.

        Raises:
            RequestError: a form that cannot be compiled, or a target that cannot end an answer.
            ConfigurationError: xgrammar is not installed, or the target has no tokenizer.
        """
        if not end_ids:
            raise RequestError(
                f"structured output needs a token that ends the answer, and {self._target.name} has none: give stop_token_ids"
            )
        return GrammarMask(self._compile(structured), structured, end_ids, self._target)

    def _compile(self, structured: StructuredOutput) -> xgrammar.CompiledGrammar:
        form = structured.form
        with self._lock:  # compiling itself uses several threads
            if (found := self._compiled.get(form)) is not None:
                self._compiled.move_to_end(form)
                return found
            compiler = self._compiler = self._compiler or self._make_compiler()
            try:
                found = _compiled(compiler, *form)
            except Exception as problem:  # xgrammar has no common error
                reason = " ".join(_SOURCE_PLACE.sub("", str(problem)).split())
                raise RequestError(f"{form[0]} cannot be used as a form of the answer: {reason[:300]}") from problem
            self._compiled[form] = found
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return found

    def _make_compiler(self) -> xgrammar.GrammarCompiler:
        try:
            import xgrammar
        except ImportError:
            raise ConfigurationError(
                'structured output needs xgrammar, which is not installed: pip install "surefoot[serve]"'
            ) from None
        if self._target.tokenizer is None:
            raise ConfigurationError(f"structured output needs a tokenizer, and {self._target.name} has none")
        ends = sorted(self._target.eos_token_ids) or None
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._target.tokenizer, vocab_size=self._target.vocab_size, stop_token_ids=ends
            )
        except Exception as problem:
            raise ConfigurationError(
                f"structured output is not possible with the tokenizer of {self._target.name}: {problem}"
            ) from problem
        threads = min(8, torch.get_num_threads())
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)


def _compiled(compiler: xgrammar.GrammarCompiler, form: str, value: Any) -> xgrammar.CompiledGrammar:
    if form == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=MOST_WHITESPACE)
    if form == "json_schema":
        return compiler.compile_json_schema(value, max_whitespace_cnt=MOST_WHITESPACE)
    if form == "regex":
        return compiler.compile_regex(value)
    if form == "grammar":
        return compiler.compile_grammar(value)
    if form == "choice":
        texts = [{"type": "const_string", "value": text} for text in value]
        either = {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
        return compiler.compile_structural_tag(either)
    return compiler.compile_structural_tag(value)


class GrammarMask:
    """The `TokenMask` of one answer. Used on the engine's thread alone.

    The engine asks for growing and for shorter texts, since drafts are rejected: the matcher goes back as far as two texts
    agree, and reads only what is new.
    """

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        structured: StructuredOutput,
        end_ids: Collection[int],
        target: Target,
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_ids))
        self._vocab_size = target.vocab_size
        self._bits = xgrammar.allocate_token_bitmask(1, target.vocab_size)
        self._free = _FreePart(structured, target.tokenizer) if structured.starts_after else None
        self._seen: list[int] = []
        self._begin = 0 if self._free is None else -1  # tokens of the free part; -1: it has not ended
        self._broken = -1  # the token from which on the text has not the form; -1: it has

    def allowed(self, token_ids: Sequence[int]) -> Tensor:
        """[V] bool: see `TokenMask`."""
        known = _common(self._seen, token_ids)
        if known < len(self._seen):
            self._rewind(known)
        for token_id in token_ids[known:]:
            self._accept(token_id)
        if self._broken >= 0 or self._matcher.is_terminated():
            # A draft that will be rejected, or what comes after the end and is dropped: any answer will do.
            return torch.ones(self._vocab_size, dtype=torch.bool)
        if self._begin >= 0 or self._may_begin_either():
            mask = self._form_mask()
            if self._begin < 0:
                assert self._free is not None
                mask[self._free.start[0]] = True
            return mask
        assert self._free is not None
        mask = torch.ones(self._vocab_size, dtype=torch.bool)
        if len(self._seen) < len(self._free.start):  # it has begun, and goes on as it must
            mask.zero_()[self._free.start[len(self._seen)]] = True
        return mask

    def _may_begin_either(self) -> bool:
        """Whether the first token decides between the free part and the form."""
        return not self._seen and self._free is not None and bool(self._free.start)

    def _form_mask(self) -> Tensor:
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits).view(torch.bool)

    def _accept(self, token_id: int) -> None:
        place = len(self._seen)
        if self._begin < 0 and self._may_begin_either() and self._free is not None and token_id != self._free.start[0]:
            self._begin = 0
        self._seen.append(token_id)
        if self._broken >= 0:
            return
        if self._begin < 0:
            assert self._free is not None
            rest = self._free.feed(token_id)
            if rest is not None:
                self._begin = place + 1
                if rest and not self._matcher.accept_string(rest):
                    self._broken = place
            return
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            self._broken = place

    def _rewind(self, count: int) -> None:
        """Forget all but the first tokens."""
        accepted = (len(self._seen) if self._broken < 0 else self._broken) - self._begin
        del self._seen[count:]
        if self._begin >= 0:
            if count >= self._begin:
                back = accepted - (min(count, self._broken) if self._broken >= 0 else count) + self._begin
                if back > 0:
                    self._matcher.rollback(back)
            else:
                self._matcher.reset()
                self._begin = -1
            if self._may_begin_either():
                self._begin = -1
        if self._free is not None and self._begin < 0:
            self._free.rewind(count)
        if count <= self._broken:
            self._broken = -1


class _FreePart:
    """Follows the free text at the beginning of an answer up to the text that ends it."""

    def __init__(self, structured: StructuredOutput, tokenizer: Any) -> None:
        assert structured.starts_after is not None
        self._end = structured.starts_after
        start = structured.free_from
        self.start = () if start is None else tuple(tokenizer(start, add_special_tokens=False)["input_ids"])
        """Tokens with which it begins; none where it always does."""
        self._tokenizer = tokenizer
        self._tails = [""]  # after each token, the end of the text in which the marker may stand

    def feed(self, token_id: int) -> str | None:
        """Read a token; the text after the marker, if it stands there now."""
        text = self._tails[-1] + self._tokenizer.decode([token_id], skip_special_tokens=False)
        place = text.find(self._end)
        self._tails.append(text[-len(self._end) :])
        return None if place < 0 else text[place + len(self._end) :]

    def rewind(self, count: int) -> None:
        del self._tails[count + 1 :]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):  # as a rule, and fast
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
