"""Engines over tiny targets for tests, and the oracle: transformers' own greedy decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from surefoot.drafters.base import Drafter
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.model import DSparkModel
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.engine.assembly import make_policy
from surefoot.engine.device import HostOutputs
from surefoot.engine.engine import Engine
from surefoot.engine.messages import StepInputs
from surefoot.engine.options import EngineOptions
from surefoot.engine.request import Request
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.sources import SourceChoice
from surefoot.targets.target import Target


def tiny_dspark(target: Target, gamma: int = 4, seed: int = 1, **changes: Any) -> DSparkDrafter:
    """A random DSpark drafter that fits `target` and agrees with it often enough to be accepted now and then."""
    torch.manual_seed(seed)
    size = target.vocab_size
    settings: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": gamma,
        "mask_token_id": 0,
        "target_layer_ids": (-1, 0, 1),
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **changes,
    }
    reduced = settings.get("draft_vocab_size")
    vocabulary = torch.randperm(size)[:reduced].sort().values if reduced else None
    model = DSparkModel(DSparkConfig(**settings), vocabulary=vocabulary).to(target.dtype)
    drafter = DSparkDrafter(model)
    drafter.bind(target)
    return drafter


def tiny_drafter(target: Target, name: str, gamma: int) -> Drafter | None:
    if name == "none":
        return None
    if name == "prompt-lookup":
        return PromptLookupDrafter(gamma, min_match=1)
    if name.startswith("combined-"):  # both sources get their share: a match of one or two tokens is drafted for
        trained = tiny_drafter(target, name.removeprefix("combined-"), gamma)
        assert trained is not None
        return combine_at(trained, gamma, threshold=3)
    changes: dict[str, dict[str, Any]] = {
        "dspark": {},
        "dspark-gated": {"markov_head_type": "gated"},
        "dspark-rnn": {"markov_head_type": "rnn"},
        "dspark-reduced": {"draft_vocab_size": max(2, target.vocab_size * 2 // 3)},
        "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    }
    return tiny_dspark(target, gamma, **changes[name])


class FixedChoice(SourceChoice):
    """Matches of `threshold` or more tokens are looked up, whatever is learned."""

    threshold = 3

    def takes_lookup(self, requests: int, context: float, skips_model: bool = True) -> Any:
        return np.arange(self.longest_match + 1) >= self.threshold


def combine_at(trained: Drafter, gamma: int, threshold: int) -> CombinedDrafter:
    lookup = PromptLookupDrafter(gamma, min_match=1)
    choice = FixedChoice(gamma, trained.gamma, lookup.max_match)
    choice.threshold = threshold
    return CombinedDrafter(lookup, trained, choice)


class QueueDevice:
    """An overlapping device without a thread: a step runs as soon as it is submitted, or as late as its result allows.

    Late, the host has changed everything it changes for the next step before this one runs. Both are deterministic.
    """

    overlaps = True
    reads_are_free = False

    def __init__(self, late: bool = True) -> None:
        self.late = late
        self._queue: deque[_Queued] = deque()

    def submit(self, step: Any, inputs: StepInputs) -> _Queued:
        queued = _Queued(self, step, inputs)
        self._queue.append(queued)
        if not self.late:
            self.run_until(queued)
        return queued

    def run_until(self, last: _Queued) -> None:
        while self._queue and last.outputs is None:
            queued = self._queue.popleft()
            queued.outputs = HostOutputs(queued.step(queued.inputs), device_ms=1.0)


@dataclass
class _Queued:
    device: QueueDevice
    step: Any
    inputs: StepInputs
    outputs: HostOutputs | None = None

    def result(self) -> HostOutputs:
        self.device.run_until(self)
        assert self.outputs is not None
        return self.outputs


class EngineUnderTest(Engine):
    def run(self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """All prompts to their end; the requests, in order."""
        settings: dict[str, Any] = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = [self.add_request(prompt, setting) for prompt, setting in zip(prompts, settings, strict=True)]
        steps = 0
        while self.has_work:
            for request, _ in self.step():
                if request.failure is not None:
                    raise request.failure
            steps += 1
            assert steps < 100_000, "the engine makes no progress"
        return requests

    def assert_clean(self) -> None:
        """Nothing is held once everybody has left."""
        assert not self.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert [pool.num_used for pool in self.blocks.pools] == [0] * len(self.blocks.pools)


def build(
    target: Target,
    drafter: str | Drafter | None = "dspark",
    *,
    gamma: int = 4,
    width: Any = None,
    device: Any = None,
    runner: Any = None,
    policy: dict[str, Any] | None = None,
    table: CostTable | None = None,
    **config: Any,
) -> EngineUnderTest:
    chosen = tiny_drafter(target, drafter, gamma) if isinstance(drafter, str) else drafter
    settings: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 96,
        "block_size": 4,
        "check_layout": True,
        "seed": 0,
        "guard": False,
    }
    settings |= {**(policy or {}), **config}
    settings.setdefault("max_num_batched_tokens", max(64, settings["max_num_seqs"] * 16))
    suspends = settings.pop("suspends", None)
    options = EngineOptions(width=width, cost_table="none" if table is None else table, **settings)
    made = make_policy(
        target,
        chosen,
        options,
        reads_are_free=(device is None or device.reads_are_free) and not options.overlap,
        suspends=suspends,
    )
    return EngineUnderTest(target, chosen, made, options, device=device, runner=runner)


def stock_logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, n, V] of transformers' own eager attention."""
    model = target.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation("surefoot")


def greedy_oracle(target: Target, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The next `count` greedy tokens of each prompt."""
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(stock_logits(target, torch.tensor([ids]))[0, -1].argmax()))
        texts.append(ids[len(prompt) :])
    return texts
