"""From a prompt and its parameters to a request, checked where it is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from surefoot.engine.grammar import Grammars
from surefoot.engine.masks import TokenMask
from surefoot.engine.output import OutputProcessor
from surefoot.engine.request import Request
from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target


class RequestFactory:
    """Makes the requests of one engine. It has no state but a counter, so any thread may use it.

    Args:
        gamma: drafts per block.
        max_model_len: longest prompt and answer, in tokens.
        seed: of the engine; requests that bring no seed of their own get one derived from it.
    """

    def __init__(self, target: Target, gamma: int, max_model_len: int, seed: int) -> None:
        self.target, self.gamma, self.max_model_len, self.seed = target, gamma, max_model_len, seed
        self._arrivals = count()
        self._grammars = Grammars(target)

    def make(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        request_id: str | None,
        mask: TokenMask | None,
    ) -> Request:
        """A request that is not queued yet.

        Raises:
            RequestError: an empty or too long prompt, a token id outside the vocabulary, or a form of the answer that cannot be.
        """
        self._check(prompt_token_ids, params)
        room = self.max_model_len - len(prompt_token_ids)
        if params.max_tokens is None or params.max_tokens > room:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        number = next(self._arrivals)
        request_id = request_id or f"request-{number}"
        gamma = self.gamma if params.gamma is None else min(params.gamma, self.gamma)
        output = OutputProcessor(
            params, self.target.tokenizer, self.target.eos_token_ids, prompt_token_ids, request_id=request_id
        )
        if params.structured is not None:
            if mask is not None:
                raise RequestError("a mask and a structured output are given together: give one of them")
            mask = self._grammars.mask(params.structured, output.end_ids)
        return Request(
            request_id,
            prompt_token_ids,
            params,
            seed=params.seed if params.seed is not None else (self.seed + 1) * 0x9E3779B1 + number,
            output=output,
            gamma=gamma if params.speculative else 0,
            arrival=number,
            prompt=prompt,
            mask=mask,
        )

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise RequestError("the prompt has no tokens: give at least one")
        if len(tokens) >= self.max_model_len:
            limit = self.target.max_model_len
            remedy = (
                f"shorten it, or raise max_model_len (--max-model-len) to at most {limit}"
                if self.max_model_len < limit
                else "shorten it; the model itself can address no more"
            )
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, this engine serves at most {self.max_model_len} with the answer: {remedy}"
            )
        vocab = self.target.vocab_size
        params.check_vocabulary(vocab)
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt token {bad} is outside the target's vocabulary (0 ... {vocab - 1})")
