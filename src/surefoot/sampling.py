"""What one request asks of the sampler and of the output path. Plain data, checked once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: dividing float32 logits by less gains nothing and soon overflows."""

MAX_LOGPROBS = 20
"""The most alternatives per token that a request may ask for (the limit of the OpenAI API, too)."""

MAX_ANSWERS = 1024
"""The most answers to one prompt that a request may ask for."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling, stopping and speculation settings of one request; a wrong value raises `RequestError`.

    Processing order is the field's: penalties and logit bias on the logits, then temperature, top-k, top-p, min-p.
    All of it is applied position by position inside a block, to the target's p and the drafter's q alike.
    """

    temperature: float = 1.0
    """0 takes the argmax; 1 is the target's own distribution."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 (or -1) is off."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies (negative) the logits of tokens in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """{token id: value added to its logit}."""
    seed: int | None = None
    """Same seed, same engine settings, same output; None draws a fresh one."""
    n: int = 1
    """Independent answers to one prompt; the prompt is computed once."""
    best_of: None = None
    """Refused: ask for `n` answers with `logprobs`, and choose."""
    max_tokens: int | None = 256
    """Most tokens to emit; None leaves only the model's context length."""
    min_tokens: int = 0
    """Nothing stops the request before this many tokens."""
    stop: str | Sequence[str] | None = ()
    """Strings that end the request, found wherever they fall between tokens. Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = ()
    """Token ids that end the request, besides the model's own end tokens. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the text of the stop string or stop token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (never out of the token ids)."""
    logprobs: int | None = None
    """None: none; 0: the emitted token's only; n: also those of the n likeliest tokens."""
    priority: int = 0
    """Smaller is served earlier; equal priorities in order of arrival."""
    gamma: int | None = None
    """Most draft tokens per step for this request; None leaves the engine's γ. 0 decodes target-only."""
    speculative: bool = True
    """False decodes this request target-only; the output is the same."""

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:  # the dataclass is frozen for everybody else
            object.__setattr__(self, name, value)

        _number("temperature", self.temperature, low=0.0, remedy="0 is greedy, 1 the target's own distribution")
        put("temperature", 0.0 if self.temperature < GREEDY_BELOW else float(self.temperature))
        put("top_k", 0 if _integer("top_k", self.top_k, low=-1, remedy="use 0 to switch it off") < 1 else self.top_k)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True, remedy="use 1 to switch it off")
        _number("min_p", self.min_p, low=0.0, high=1.0, remedy="use 0 to switch it off")
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True, remedy="use 1 to switch it off")
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0, remedy="use 0 to switch it off")
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0, remedy="use 0 to switch it off")
        put("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1, remedy="leave it out for a fresh one")
        _integer("n", self.n, low=1, high=MAX_ANSWERS, remedy="1 is a single answer")
        if self.best_of is not None:
            raise RequestError(
                f"best_of is {self.best_of!r}; surefoot does not rank answers: ask for n answers with logprobs, and choose"
            )
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1, remedy="None leaves only the context length")
        _integer("min_tokens", self.min_tokens, low=0, remedy="use 0 to switch it off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; allowed: 0 … max_tokens ({self.max_tokens}); raise max_tokens"
            )
        put("stop", _strings(self.stop))
        put("stop_token_ids", _ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, remedy="None for none, 0 for the token's own")
        _integer("priority", self.priority, remedy="smaller is served earlier")
        if self.gamma is not None:
            _integer("gamma", self.gamma, low=0, remedy="None leaves the engine's γ")

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
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; this target's ids are 0 … {vocab_size - 1}: "
                        "take ids from this target's tokenizer"
                    )


def _number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    remedy: str,
) -> None:
    """Raise unless `value` is a finite number in [low, high] (or in (low, high])."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not numeric or not (low < value if open_low else low <= value) or value > high:
        bottom = f"above {low:g}" if open_low else f"{low:g}"
        allowed = f"{bottom} …" if high == math.inf else f"{bottom} … {high:g}"
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}; {remedy}")


def _integer(name: str, value: Any, *, low: int | None = None, high: int | None = None, remedy: str) -> int:
    """`value` if it is a whole number in [low, high]; raise otherwise."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        bounds = f" {'' if low is None else low} … {'' if high is None else high}".rstrip() if low is not None else ""
        raise RequestError(f"{name} is {value!r}; allowed: a whole number{bounds}; {remedy}")
    return value


def _strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop contains {text!r}; allowed: non-empty strings; leave it out to stop at the end token"
            )
    return strings


def _ids(token_ids: Any) -> tuple[int, ...]:
    ids = () if token_ids is None else tuple(token_ids)
    for token_id in ids:
        _integer("stop_token_ids entry", token_id, low=0, remedy="use ids of the target's tokenizer")
    return ids


def _bias(bias: Any) -> dict[int, float]:
    """Checked copy of a logit bias; JSON clients send the ids as strings."""
    if not isinstance(bias, Mapping):
        if bias is None:
            return {}
        raise RequestError(f"logit_bias is {bias!r}; allowed: a mapping from token id to a number")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        _integer("logit_bias token id", token_id, low=0, remedy="use ids of the target's tokenizer")
        _number(
            f"logit_bias of token {token_id}", value, low=-100.0, high=100.0, remedy="-100 bans, 100 forces a token"
        )
        checked[token_id] = float(value)
    return checked
