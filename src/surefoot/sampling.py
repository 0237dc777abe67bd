"""What one request asks of the sampler and of the output path. Plain data, checked once, when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import RequestError
from surefoot.structured import StructuredOutput
from surefoot.validation import LARGEST_INT32, LARGEST_INT64, flag, integer, number, shown

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: dividing float32 logits by less gains nothing and soon overflows."""

MAX_LOGPROBS = 20
"""The most alternatives per token that a request may ask for (the limit of the OpenAI API, too)."""

MOST_IDS = 1 << 17
"""The most stop token ids, or token ids of a prediction."""

MAX_ANSWERS = 1024
"""The most answers to one prompt that a request may ask for."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling, stopping and speculation settings of one request; a wrong value raises `RequestError`.

    Processing order is the field's: penalties and logit bias on the logits, then temperature, top-k, top-p, min-p.
    All of it is applied position by position inside a block, to the target's p and the drafter's q alike. Scalars of numpy
    are accepted as numbers and kept as Python's.

    Args:
        temperature: 0 takes the argmax; 1 is the target's own distribution.
        top_k: keep the k likeliest tokens; 0 (or -1) is off.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 is off.
        min_p: drop tokens less likely than this share of the likeliest; 0 is off.
        repetition_penalty: 0.01 to 100; divides (positive) or multiplies (negative) the logits of tokens in prompt or output;
            1 is off.
        presence_penalty: -2 to 2, subtracted from the logits of tokens already in the output.
        frequency_penalty: -2 to 2, subtracted from a token's logit once per occurrence in the output.
        logit_bias: {token id: value from -100 to 100 added to its logit}.
        seed: same seed, same engine settings, same output; None draws a fresh one.
        n: independent answers to one prompt, which is computed once; at most 1024.
        best_of: refused: ask for `n` answers with `logprobs`, and choose.
        max_tokens: most tokens to emit; None leaves only the model's context length.
        min_tokens: nothing stops the request before this many tokens.
        stop: strings that end the request, found wherever they fall between tokens. Kept as a tuple.
        stop_token_ids: token ids that end the request, besides the model's own end tokens. Kept as a tuple.
        ignore_eos: go on after the model's own end tokens.
        include_stop_str_in_output: keep the text of the stop string or stop token.
        skip_special_tokens: leave special tokens out of the text (never out of the token ids).
        logprobs: None: none; 0: the emitted token's only; n: also those of the n likeliest tokens, at most 20 and at most
            the vocabulary.
        prompt_logprobs: the same for the tokens of the prompt, each given those before it. Its prompt is computed in full,
            whatever of it is cached already.
        priority: smaller is served earlier; equal priorities in order of arrival.
        gamma: most draft tokens per step for this request; None leaves the engine's gamma. 0 decodes target-only.
        speculative: False decodes this request target-only; the output is the same.
        structured: the form that the text must have; needs the extra `serve` (xgrammar).
        prediction: token ids of a text that the answer is likely to repeat: a third source of drafts, beside the request's own
            text and the drafter, where the drafter looks texts up (`auto`, `prompt-lookup`). Kept as a tuple.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    best_of: None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    gamma: int | None = None
    speculative: bool = True
    structured: StructuredOutput | None = None
    prediction: Sequence[int] | None = ()

    def __post_init__(self) -> None:
        self._number("temperature", low=0.0, remedy="0 is greedy, 1 the target's own distribution")
        if self.temperature < GREEDY_BELOW:
            self._put("temperature", 0.0)
        self._integer("top_k", -1, LARGEST_INT32, "use 0 to switch it off")
        self._put("top_k", max(self.top_k, 0))
        self._number("top_p", low=0.0, high=1.0, open_low=True, remedy="use 1 to switch it off")
        self._number("min_p", low=0.0, high=1.0, remedy="use 0 to switch it off")
        self._number("repetition_penalty", low=0.01, high=100.0, remedy="use 1 to switch it off")
        self._number("presence_penalty", low=-2.0, high=2.0, remedy="use 0 to switch it off")
        self._number("frequency_penalty", low=-2.0, high=2.0, remedy="use 0 to switch it off")
        self._put("logit_bias", _bias(self.logit_bias))
        self._integer("seed", -(2**63), 2**64 - 1, "leave it out for a fresh one", optional=True)
        self._integer("n", 1, MAX_ANSWERS, "1 is a single answer")
        if self.best_of is not None:
            raise RequestError(
                f"best_of is {shown(self.best_of)}; surefoot does not rank answers: ask for n answers with logprobs, and choose"
            )
        self._integer("max_tokens", 1, LARGEST_INT64, "None leaves only the context length", optional=True)
        self._integer("min_tokens", 0, LARGEST_INT64, "use 0 to switch it off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; allowed: 0 … max_tokens ({self.max_tokens}); raise max_tokens"
            )
        self._put("stop", _strings(self.stop))
        self._put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._put("prediction", _ids("prediction", self.prediction))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative"):
            self._put(name, flag(name, getattr(self, name), RequestError))
        for name in ("logprobs", "prompt_logprobs"):
            self._integer(name, 0, MAX_LOGPROBS, "None for none, 0 for the token's own", optional=True)
        self._integer("priority", -LARGEST_INT64, LARGEST_INT64, "smaller is served earlier")
        self._integer("gamma", 0, LARGEST_INT32, "None leaves the engine's gamma", optional=True)
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured is {shown(self.structured)}; allowed: a StructuredOutput, or None")
        if self.structured is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise RequestError(
                f"{name} and structured are given together: a form decides itself when it ends; leave {name} out"
            )

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    def _number(self, name: str, **bounds: Any) -> None:
        self._put(name, number(name, getattr(self, name), RequestError, **bounds))

    def _integer(self, name: str, low: int, high: int, remedy: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            self._put(name, integer(name, value, RequestError, low=low, high=high, remedy=remedy))

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax rather than a draw."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, in the one form it is kept in."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on which tokens the request has seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` if a biased or a stop token id lies outside the target's vocabulary."""
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids, "prediction": self.prediction}
        for name, ids in named.items():
            for token_id in ids or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; this target's ids are 0 … {vocab_size - 1}: "
                        "take ids from this target's tokenizer"
                    )


def _strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else _listed("stop", stop, "strings")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop contains {shown(text)}; allowed: non-empty strings; leave it out to stop at the end token"
            )
    return strings


def _ids(name: str, token_ids: Any) -> tuple[int, ...]:
    ids = () if token_ids is None else _listed(name, token_ids, "token ids")
    if len(ids) > MOST_IDS:
        raise RequestError(f"{name} has {len(ids)} token ids; allowed: at most {MOST_IDS}; shorten it")
    return tuple(_token_id(f"{name} entry", token_id) for token_id in ids)


def _listed(name: str, values: Any, what: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {shown(values)}; allowed: a list of {what}; leave it out for none")
    return tuple(values)


def _token_id(name: str, value: Any) -> int:
    return integer(name, value, RequestError, low=0, high=LARGEST_INT32, remedy="use ids of the target's tokenizer")


def _bias(bias: Any) -> dict[int, float]:
    """Checked copy of a logit bias; JSON clients send the ids as strings."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {shown(bias)}; allowed: a mapping from token id to a number; leave it out")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        numeral = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = _token_id("logit_bias token id", int(key) if numeral else key)
        remedy = "-100 bans, 100 forces a token"
        checked[token_id] = number(
            f"logit_bias of token {token_id}", value, RequestError, low=-100.0, high=100.0, remedy=remedy
        )
    return checked
