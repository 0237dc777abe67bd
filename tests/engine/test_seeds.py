"""Streams of randomness of different requests are independent, whatever their seeds, and a seed repeats."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.uniforms import SeedStreams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build
from tests.engine.test_exactness import LEVEL, detectable_distance
from tests.tiny_models import tiny_target

PARAMS = SamplingParams(temperature=1.0, max_tokens=3)
PROMPT, OTHER = [2], [3]  # prompts of one token draft from the first step on
PAIRS = {  # prompts of the two requests of a batch, and whether they share their seed
    "equal prompts": (PROMPT, False),
    "equal seeds": (OTHER, True),
    "both": (PROMPT, True),
}
# Two drafts are cheap, a third is not: who is verified depends on who ranks first.
TABLE = CostTable((1, 2, 4, 5, 16), ((1.0, 1.01, 1.02, 9.0, 60.0),), (1, 8), (0.01, 0.02))
SEEDS = 1_500


class RankedByTheOther:
    """Confidences as legal as any, of requests that stand first and second in the batch: c_1 is constant, c_2 depends on x_1.

    If the first one's x_1 is small, its x_2 is verified in place of the second one's x_1. So whether that is verified tells
    about the first one's x_1, and if both drew theirs with the same uniform, about the second one's own.
    """

    gamma, warming_up = 2, False
    FIRST, SECOND, LIKELY, UNLIKELY = 0.9, 0.5, 0.95, 0.05

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None  # of the draft that is being judged

    def confidence(self, evidence: Any, explored: int = 0) -> torch.Tensor:
        assert self.tokens is not None
        c = torch.full(self.tokens.shape, self.FIRST)
        c[1::2, 0] = self.SECOND
        c[:, 1] = torch.where(self.tokens[:, 0] < 3, self.LIKELY, self.UNLIKELY)
        return c

    def observe(self, *_: Any) -> None:
        """Nothing is learned."""


class TableDrafter(Drafter):
    """Draws every position from the same distribution, and shows its tokens to the confidence source."""

    name, gamma = "table", 2

    def __init__(self, source: RankedByTheOther) -> None:
        self.source = source

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        logits = torch.tensor([0.0, 1.0, 0.5, 1.5, 0.2, 0.8]).repeat(len(context.slots), 1)
        self.source.tokens = torch.stack([sampler.draw(k, logits) for k in (1, 2)], 1)
        return Draft(tokens=self.source.tokens, signal=torch.zeros(len(context.slots), 2))


def engine_of(planner: str, table: CostTable = TABLE) -> Any:
    target: Any = CheapTarget(6)
    source = RankedByTheOther()
    engine = build(
        target, TableDrafter(source), gamma=2, planner=planner, table=table, max_num_seqs=2, max_model_len=24,
        check_layout=False, prefix_reuse=False,
    )  # fmt: skip
    engine.decode_step.confidence = engine.policy.confidence = source  # type: ignore[assignment]
    return engine


def first_token_law(target: Any) -> list[float]:
    """Of the target, after `PROMPT`: its log-probabilities of all tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=6)
    (entry,) = build(target, "none").run([PROMPT], params)[0].output.logprobs or []
    return [math.exp(logprob) for _, logprob in sorted(entry.top)]


def law_of_the_second(engine: Any, pair: str, seeds: int) -> tuple[float, float]:
    """p-value of the second request's first token over `seeds` batches of two, and the distance found with 99 % power."""
    first, shared = PAIRS[pair]
    law = first_token_law(engine.target)
    assert sum(law) == pytest.approx(1, abs=1e-5)
    counts: Counter[int] = Counter()
    verified: Counter[int] = Counter()
    for seed in range(seeds):
        params = [replace(PARAMS, seed=seed), replace(PARAMS, seed=seed if shared else seed + 10_000_000)]
        both = [engine.add_request(prompt, own) for prompt, own in zip((first, PROMPT), params, strict=True)]
        engine.step()
        counts[both[1].output.token_ids[0]] += 1
        verified.update(both[1].statistics.widths)
        for request in both:
            engine.cancel(request.request_id)
    assert len(verified) > 1, "the second request's width never changed: nothing was tested"
    statistic = sum((counts[token] - p * seeds) ** 2 / (p * seeds) for token, p in enumerate(law))
    return float(chi2.sf(statistic, len(law) - 1)), detectable_distance(len(law) - 1, seeds)


@pytest.mark.statistical
@pytest.mark.parametrize("planner", ["stopping", "causal", "stale"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_request_keeps_its_law_beside_one_of_the_same_seed(pair: str, planner: str) -> None:
    """1,500 seeds: a total-variation distance of 0.1 in the law of a token is found with 99 % power at level 1e-4."""
    p_value, distance = law_of_the_second(engine_of(planner), pair, SEEDS)
    assert distance < 0.1
    assert p_value > LEVEL


@pytest.mark.statistical
@pytest.mark.parametrize("planner", ["stopping", "causal", "stale"])
def test_streams_by_seed_alone_fail_the_same_test(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeedStreams, "open", lambda self, seed: seed)
    monkeypatch.setattr(SeedStreams, "close", lambda self, stream: None)
    assert law_of_the_second(engine_of(planner), "both", SEEDS)[0] < LEVEL


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark"])
@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
def test_a_seed_repeats_alone_and_in_a_batch_and_equal_ones_by_their_order(drafter: str, device: Any) -> None:
    """With fixed widths. The first of the requests that share a seed is the one alone; the others repeat in their places."""
    target = tiny_target("llama")
    width = None if drafter == "none" else 2
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=7)
    unseeded = replace(params, seed=None)

    def texts(prompts: list[list[int]], settings: list[SamplingParams]) -> list[list[int]]:
        engine = build(target, drafter, width=width, device=device())
        return [request.output.token_ids for request in engine.run(prompts, settings)]

    alone = texts([PROMPT], [params])[0]
    batch = texts([OTHER, PROMPT, PROMPT, OTHER, PROMPT], [unseeded, params, params, params, unseeded])
    assert batch[1] == alone
    assert batch[2] != alone, "equal requests draw different tokens"
    again = texts([PROMPT, PROMPT, OTHER], [params, params, params])
    assert again == batch[1:4], "the same arrivals with this seed, whoever else is there"


def test_a_seed_repeats_on_one_engine_once_its_holder_has_ended() -> None:
    engine = build(tiny_target("llama"), "dspark", width=2)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7)
    first = [r.output.token_ids for r in engine.run([PROMPT, PROMPT], params)]
    assert [r.output.token_ids for r in engine.run([PROMPT, PROMPT], params)] == first
    assert engine.run([PROMPT], params)[0].output.token_ids == first[0]
    cancelled = engine.add_request(PROMPT, params)
    engine.step()
    engine.cancel(cancelled.request_id)
    assert engine.run([PROMPT], params)[0].output.token_ids == first[0]


def test_a_preempted_request_keeps_its_stream_and_its_place_in_it() -> None:
    """It goes on with the uniforms of its next step: those of the steps before have decided already."""
    target = tiny_target("llama")
    used: dict[int, list[int]] = {}
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=7)
    engine = build(target, "prompt-lookup", width=2, num_blocks=28, max_num_seqs=4)
    honest = engine.decode_step.__class__.__call__

    class Watched(engine.decode_step.__class__):  # type: ignore[name-defined,misc]
        def __call__(self, inputs: Any) -> Any:
            streams = self.state.sampling.seed
            outputs = honest(self, inputs)
            for slot, step in zip(inputs.slots, inputs.steps, strict=False):
                used.setdefault(int(streams[slot]), []).append(step)
            return outputs

    engine.decode_step.__class__ = Watched
    requests = engine.run([[*PROMPT, i] for i in range(5)], params)
    assert sum(r.preemptions for r in requests) > 0
    assert len(used) == 5
    for steps in used.values():
        assert steps == list(range(len(steps))), "a step's uniforms were used twice, or left out"
