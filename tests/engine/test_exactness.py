"""Speculation changes speed, never the distribution: through the whole engine, on tiny random models."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2

from surefoot.drafters.base import Draft, DraftContext
from surefoot.engine import distribution, step
from surefoot.sampling import SamplingParams
from surefoot.speculation.acceptance import Proposal
from surefoot.speculation.calibration import Calibration
from tests.engine.engines import build, greedy_oracle, tiny_dspark
from tests.tiny_models import ARCHITECTURES, tiny_target

GAMMA = 4
DRAFTERS = ("prompt-lookup", "dspark", "dspark-gated", "dspark-rnn", "dspark-reduced", "dflash")
WIDTHS: tuple[Any, ...] = (0, 1, 2, 3, 4, "0,3,1,4,2", None)


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


@lru_cache
def greedy_texts(architecture: str) -> tuple[list[list[int]], list[list[int]]]:
    target = tiny_target(architecture)
    texts = prompts(12, target.vocab_size)
    return texts, greedy_oracle(target, texts, 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_temperature_0_is_token_identical_to_target_only_decoding(architecture: str, drafter: str) -> None:
    """All widths, batches of prompts with contexts that cross windows and blocks; the oracle is transformers itself."""
    target = tiny_target(architecture)
    texts, expected = greedy_texts(architecture)
    accepted = 0
    for width in WIDTHS:
        engine = build(
            target, drafter, gamma=GAMMA, width=width, max_num_seqs=7, block_size=4, check_layout=isinstance(width, str)
        )
        got = engine.run(texts, SamplingParams(temperature=0, max_tokens=20))
        assert [r.output.token_ids for r in got] == expected, f"width {width}"
        accepted += sum(r.statistics.accepted for r in got)
        engine.assert_clean()
    assert accepted > 0, "no draft was ever accepted: the test would pass with drafting broken"


def exact_law(target: Any, prompt: list[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Joint law of the first `length` tokens by enumeration, from transformers' logits and an independent processing."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            ids = torch.tensor([[*prompt, *prefix]])
            logits = target_logits(target, ids)
            for token, p in enumerate(reference_processing(logits, prompt, list(prefix), params)):
                if p > 0:
                    grown[(*prefix, token)] = mass * p
        law = grown
    return law


def target_logits(target: Any, ids: torch.Tensor) -> np.ndarray:
    from tests.engine.engines import stock_logits

    return stock_logits(target, ids)[0, -1].double().numpy()


def reference_processing(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """The documented order, written as plainly as possible."""
    z = logits.copy()
    for token in set(prompt) | set(output):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        z[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        z[token] += bias
    p = np.exp((z - z.max()) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p[p < np.sort(p)[-params.top_k]] = 0
        p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p)
        keep = np.cumsum(p[order]) - p[order] < params.top_p
        p[order[~keep]] = 0
        p /= p.sum()
    if params.min_p:
        p[p < params.min_p * p.max()] = 0
        p /= p.sum()
    return p


PLAIN = SamplingParams(temperature=1.0, max_tokens=3)
PROCESSED = SamplingParams(
    temperature=0.8, top_p=0.85, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=3
)
STAGES = SamplingParams(temperature=1.3, top_k=4, min_p=0.05, logit_bias={1: 0.7, 3: -0.4}, max_tokens=3)


def chi_square(
    engine: Any, target: Any, prompt: list[int], params: SamplingParams, samples: int
) -> tuple[float, int, float]:
    """p-value, degrees of freedom, and the total-variation distance a test of this size detects with 99 % power."""
    law = exact_law(target, prompt, params, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, samples, SAMPLES):  # a waiting list of half a million would be what takes the time
        outputs = engine.run([prompt] * min(SAMPLES, samples - start), params)
        counts.update(tuple(r.output.token_ids) for r in outputs)
    assert set(counts) <= set(law), "a sequence of probability zero was emitted"
    rare = [key for key, p in law.items() if p * samples < 5]
    cells = [(counts[key], p * samples) for key, p in law.items() if p * samples >= 5]
    if rare:
        cells.append((sum(counts[key] for key in rare), sum(law[key] for key in rare) * samples))
        if cells[-1][1] < 5:
            merged = cells.pop()
            smallest = min(range(len(cells)), key=lambda i: cells[i][1])
            cells[smallest] = (cells[smallest][0] + merged[0], cells[smallest][1] + merged[1])
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = len(cells) - 1
    return float(chi2.sf(statistic, freedom)), freedom, detectable_distance(freedom, samples)


def detectable_distance(freedom: int, samples: int, level: float = 1e-4, power: float = 0.99) -> float:
    """Smallest total-variation distance (spread evenly over the cells) that the chi-square test finds with this power."""
    critical = chi2.isf(level, freedom)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        # An even relative deviation d of every cell has chi-square noncentrality n d^2 and total variation d / 2.
        low, high = (middle, high) if ncx2.sf(critical, freedom, samples * (2 * middle) ** 2) < power else (low, middle)
    return high


SAMPLES = 40_000  # half of them for each prompt
LEVEL = 1e-4  # chance of a false alarm per case; the seeds are fixed, so a pass stays a pass


LAW_CASES = [
    ("none", None, PLAIN),
    ("prompt-lookup", 2, PLAIN),
    ("prompt-lookup", "0,2,1", PROCESSED),
    ("dspark", 2, PLAIN),
    ("dspark", "2,0,1", PROCESSED),
    ("dspark", None, STAGES),
    ("dspark-gated", 1, STAGES),
    ("dspark-rnn", "1,2", PLAIN),
    ("dspark-reduced", 2, PROCESSED),
    ("dspark-reduced", "2,1", STAGES),
    ("dflash", 2, PLAIN),
]


def check_law(
    drafter: Any,
    width: Any,
    params: SamplingParams,
    samples: int,
    resolution: float,
    sharpness: Any = None,
    copying: Any = None,
) -> None:
    """Joint law of the first three tokens, chi-square at level 1e-4; a total-variation distance of `resolution` would be
    found with 99 % power. Prompts of one token draft from the first token on, longer ones from the second."""
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    for prompt in ([2], [1, 2, 1, 2, 1]):
        engine = build(target, drafter, gamma=2, width=width, max_num_seqs=512, max_model_len=24, check_layout=False)
        if sharpness is not None:
            engine.drafter.draw_by(Calibration([1.0, 1.0], sharpness=sharpness, copying=copying))
        p_value, freedom, distance = chi_square(engine, target, prompt, params, samples // 2)
        assert distance < resolution
        assert p_value > LEVEL, f"{freedom} degrees of freedom, prompt {prompt}"
        if drafter != "none" and width != 0 and len(prompt) > 1:
            assert engine.statistics.blocks.accepted > 0


@pytest.mark.statistical
@pytest.mark.parametrize(("drafter", "width", "params"), LAW_CASES)
def test_sampled_law_is_the_targets(drafter: str, width: Any, params: SamplingParams) -> None:
    check_law(drafter, width, params, SAMPLES, resolution=0.045)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("changes", "packed", "width", "params", "sharpness", "copying"),
    [
        ({}, True, 2, PLAIN, (0.4, 20.0), None),
        ({"draft_vocab_size": 4}, True, "2,1", STAGES, (1.4, 3.0), None),
        ({"markov_head_type": "gated"}, False, None, PROCESSED, (3.0, 0.6), None),
        ({}, True, 2, PLAIN, (1.0, 1.0), (0.0, 0.4, 0.9, 0.5)),
        ({"draft_vocab_size": 4}, False, "2,1", PROCESSED, (1.5, 1.5), (0.0, 0.7, 0.2)),
    ],
)
def test_sampled_law_at_any_sharpness_and_with_copies(
    changes: dict[str, Any],
    packed: bool,
    width: Any,
    params: SamplingParams,
    sharpness: tuple[float, float],
    copying: Any,
) -> None:
    """Drawn token by token and, packed, a block at once."""
    drafter = tiny_dspark(tiny_target("llama", vocab_size=6, sharpness=4.0), 2, **changes)
    assert not packed or drafter.model.pack()
    check_law(drafter, width, params, SAMPLES // 2, resolution=0.065, sharpness=sharpness, copying=copying)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("drafter", "width", "params"), LAW_CASES)
def test_sampled_law_is_the_targets_longer(drafter: str, width: Any, params: SamplingParams) -> None:
    """500,000 samples a case: pytest -m slow tests/engine/test_exactness.py"""
    check_law(drafter, width, params, 500_000, resolution=0.013)


class TestNegativeControls:
    """Each classic mistake, put in on purpose, must fail the same test."""

    def failing(self, drafter: str, params: SamplingParams, width: Any = 2) -> float:
        target = tiny_target("llama", vocab_size=6, sharpness=4.0)
        engine = build(target, drafter, gamma=2, width=width, max_num_seqs=512, max_model_len=24, check_layout=False)
        law = exact_law(target, [1, 2, 1, 2, 1], params, 3)
        try:
            return chi_square(engine, target, [1, 2, 1, 2, 1], params, SAMPLES // 2)[0]
        except AssertionError:
            assert law
            return 0.0  # emitted what has probability zero

    def test_q_before_top_p(self, monkeypatch: pytest.MonkeyPatch) -> None:
        proposal = distribution.BlockSampler.proposal.fget

        def unprocessed(self: Any) -> Proposal:
            honest = proposal(self)
            assert honest.probs is not None
            return Proposal(torch.softmax(honest.probs.log().clamp(min=-4), -1), honest.vocabulary, honest.draft_ids)

        monkeypatch.setattr(distribution.BlockSampler, "proposal", property(unprocessed))
        assert self.failing("dspark", PROCESSED) < LEVEL

    def test_q_before_it_was_sharpened(self, monkeypatch: pytest.MonkeyPatch) -> None:
        proposal = distribution.BlockSampler.proposal.fget

        def blunt(self: Any) -> Proposal:
            honest = proposal(self)
            assert honest.probs is not None
            q = honest.probs ** (1 / 1.6)
            return Proposal(q / q.sum(-1, keepdim=True), honest.vocabulary, honest.draft_ids)

        monkeypatch.setattr(distribution.BlockSampler, "proposal", property(blunt))
        with pytest.raises(AssertionError, match="degrees of freedom"):
            check_law("dspark", 2, PLAIN, SAMPLES, resolution=0.045, sharpness=(1.6, 1.6))

    def test_acceptance_without_the_residual(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = step.accept_sampled

        def careless(probs: Any, rows: Any, drafts: Any, widths: Any, proposal: Any, u: Any, v: Any, *_: Any) -> Any:
            verdict = honest(probs, rows, drafts, widths, proposal, u, v)
            from surefoot.speculation.acceptance import Verdict, draw

            return Verdict.of(verdict.accepted, draw(probs[rows + verdict.accepted], v))

        monkeypatch.setattr(step, "accept_sampled", careless)
        assert self.failing("dspark", PLAIN) < LEVEL

    def test_penalties_one_position_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = step.processed

        def late(logits: Any, params: Any, flags: Any, history: Any, slots: Any, seen: Any) -> Any:
            return honest(logits, params, flags, history, slots, seen - 1)

        monkeypatch.setattr(step, "processed", late)
        assert self.failing("dspark", PROCESSED) < LEVEL

    def test_width_chosen_by_looking_at_the_drafted_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = step.DecodeStep._allocate

        def peeking(self: Any, inputs: Any, limits: Any, draft: Draft, confidence: Any) -> Any:
            widths = honest(self, inputs, limits, draft, confidence).clone()
            drafted = inputs.num_drafting
            widths[:drafted] = torch.where(draft.tokens[:, 0] >= 3, 0, widths[:drafted])
            return widths

        monkeypatch.setattr(step.DecodeStep, "_allocate", peeking)
        assert self.failing("dspark", PLAIN) < LEVEL


def test_the_acceptance_divides_by_the_tensor_the_drafts_were_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    divided: list[int] = []
    honest_draw, honest_accept = distribution.sample_rows, step.accept_sampled

    def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        assert weights.dtype == torch.float32
        drawn.append(weights.untyped_storage().data_ptr())
        return honest_draw(weights, u)

    def accept(probs: Any, rows: Any, drafts: Any, widths: Any, proposal: Proposal, u: Any, v: Any, *_: Any) -> Any:
        if not drafts.shape[0]:  # the prompt's own step
            return honest_accept(probs, rows, drafts, widths, proposal, u, v)
        assert proposal.probs is not None
        assert proposal.probs.dtype == torch.float32
        divided.append(proposal.probs.untyped_storage().data_ptr())
        assert drawn[-1] == divided[-1]
        return honest_accept(probs, rows, drafts, widths, proposal, u, v)

    monkeypatch.setattr(distribution, "sample_rows", draw)
    monkeypatch.setattr(step, "accept_sampled", accept)
    engine = build(tiny_target("llama"), "dspark", gamma=GAMMA, width=GAMMA)
    engine.run([[1, 2, 3]], SamplingParams(temperature=1, max_tokens=12, seed=3))
    assert divided
    assert len(drawn) >= GAMMA * len(divided)


@pytest.mark.parametrize("drafter", ["dspark", "prompt-lookup"])
def test_a_seed_gives_the_same_output_alone_and_in_a_batch(drafter: str) -> None:
    """True wherever the widths agree (fixed or none) and nobody else holds the seed: a request reads its seed's own stream."""
    target = tiny_target("qwen3")
    params = SamplingParams(temperature=1, seed=7, max_tokens=16)
    alone = build(target, drafter, gamma=3, width=2).run([[5, 6, 5, 6]], params)[0].output.token_ids
    others = prompts(5, target.vocab_size, seed=4)
    batch = build(target, drafter, gamma=3, width=2).run(
        [others[0], [5, 6, 5, 6], *others[1:]],
        [replace(params, seed=100), params, *(replace(params, seed=101 + index) for index in range(4))],
    )
    assert batch[1].output.token_ids == alone
    other = build(target, drafter, gamma=3, width=2).run(
        [[5, 6, 5, 6]], SamplingParams(temperature=1, seed=8, max_tokens=16)
    )
    assert other[0].output.token_ids != alone


@pytest.mark.parametrize(("drafter", "width"), itertools.product(("dspark", "prompt-lookup"), (0, 3, "1,3,0")))
def test_logprobs_are_the_targets_own_with_and_without_speculation(drafter: str, width: Any) -> None:
    target = tiny_target("gemma3")
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3)
    texts = prompts(3, target.vocab_size, seed=9)
    plain = build(target, "none").run(texts, params)
    fast = build(target, drafter, gamma=4, width=width).run(texts, params)
    for one, other in zip(plain, fast, strict=True):
        assert one.output.token_ids == other.output.token_ids
        assert len(other.output.logprobs) == len(other.output.token_ids)
        for a, b in zip(one.output.logprobs, other.output.logprobs, strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


def test_the_context_a_drafter_sees_is_what_was_committed() -> None:
    """Drafts after a rejection equal drafts of a fresh request with the same history: nothing rejected is left over."""
    target = tiny_target("qwen3")
    drafter = tiny_dspark(target, gamma=4)
    seen: list[tuple[list[int], list[int]]] = []
    honest = drafter.propose

    def propose(context: DraftContext, sampler: Any) -> Draft:
        draft = honest(context, sampler)
        for row, slot in enumerate(context.slots.tolist()):
            length = int(context.lengths[row])
            seen.append((context.history[slot, : length + 1].tolist(), draft.tokens[row].tolist()))
        return draft

    drafter.propose = propose  # type: ignore[method-assign]
    engine = build(target, drafter, width="4,1,0,2")
    engine.run([[3, 1, 4, 1, 5]], SamplingParams(temperature=0, max_tokens=20))
    walked = list(seen)
    assert len(walked) > 4
    for history, tokens in walked[::3]:
        seen.clear()
        # Greedy: one token after history[:-1] is history[-1], and the next step drafts after exactly `history`.
        build(target, drafter, width=0).run([history[:-1]], SamplingParams(temperature=0, max_tokens=3))
        assert {tuple(h): t for h, t in seen}[tuple(history)] == tokens
