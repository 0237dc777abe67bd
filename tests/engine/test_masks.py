"""Masks that follow the tokens of a block: `min_tokens` and grammars, for p and q alike, position by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from surefoot.engine import distribution, masks
from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build, tiny_dspark
from tests.engine.test_exactness import LEVEL, detectable_distance, reference_processing, target_logits
from tests.tiny_models import tiny_target

SAMPLES = 8_000
PROMPT = [1, 2, 1, 2, 1]
DRAFTERS = ["prompt-lookup", "dspark", "dspark-rnn", "dspark-reduced", "combined-dspark"]


class Automaton:
    """A grammar of one state and six tokens: which token leads from which state to which state."""

    def __init__(self, edges: dict[int, dict[int, int]], vocab_size: int = 6) -> None:
        self.edges, self.vocab_size = edges, vocab_size
        self.asked: list[tuple[int, ...]] = []

    def state(self, token_ids: Sequence[int]) -> int | None:
        """None where the text has left the language."""
        state: int | None = 0
        for token in token_ids:
            state = self.edges[state].get(token) if state is not None else None
        return state

    def allowed(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.asked.append(tuple(token_ids))
        state, mask = self.state(token_ids), torch.zeros(self.vocab_size, dtype=torch.bool)
        if state is not None:
            mask[list(self.edges[state])] = True
        return mask


def grammar() -> Automaton:
    """Three states; what may come next depends on the token before, and never is everything allowed."""
    return Automaton({0: {1: 1, 2: 2, 5: 0}, 1: {0: 0, 2: 2}, 2: {1: 1, 3: 0, 4: 2, 5: 1}})


def law_under(target: Any, params: SamplingParams, allowed: Any, length: int) -> dict[tuple[int, ...], float]:
    """Joint law of the first tokens by enumeration; `allowed(output)` names the tokens that may follow."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            logits = target_logits(target, torch.tensor([[*PROMPT, *prefix]]))
            logits[~np.isin(np.arange(len(logits)), allowed(list(prefix)))] = -np.inf
            for token, p in enumerate(reference_processing(logits, PROMPT, list(prefix), params)):
                if p > 0:
                    grown[(*prefix, token)] = mass * p
        law = grown
    return law


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Chi-square of counts against a law, and the total-variation distance it finds with 99 % power."""
    if not set(counts) <= set(law):
        return 0.0, 0.0  # emitted what has probability zero
    samples = sum(counts.values())
    cells = [(counts[key], p * samples) for key, p in law.items() if p * samples >= 5]
    rest = samples - sum(expected for _, expected in cells)
    if rest >= 5:
        cells.append((samples - sum(n for n, _ in cells), rest))
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1)), detectable_distance(len(cells) - 1, samples)


def run(engine: Any, params: SamplingParams, samples: int, mask: Any = None) -> Counter[tuple[int, ...]]:
    requests = [engine.add_request(PROMPT, params, mask=mask) for _ in range(samples)]
    while engine.has_work:
        engine.step()
    return Counter(tuple(request.output.token_ids) for request in requests)


def engine_of(drafter: Any, width: Any = 2, **settings: Any) -> Any:
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    settings = {"max_num_seqs": 512, "max_model_len": 24, "check_layout": False, **settings}
    return build(target, drafter, gamma=2, width=width, **settings)


# -- min_tokens ------------------------------------------------------------------------------------------------------------

ENDS = [1, 3]
EARLY = SamplingParams(temperature=1.0, max_tokens=3, min_tokens=2, stop_token_ids=ENDS)


def early_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of texts that end at an end token: none of them is among the first two."""
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    others = [token for token in range(6) if token not in ENDS]
    return law_under(target, params, lambda prefix: others if len(prefix) < 2 else list(range(6)), 3)


@pytest.mark.statistical
@pytest.mark.parametrize("params", [EARLY, replace(EARLY, temperature=0.8, top_p=0.9, logit_bias={1: 2.0})])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_law_with_min_tokens_is_the_one_without_end_tokens_until_then(drafter: str, params: SamplingParams) -> None:
    engine = engine_of(drafter)
    got, distance = p_value(run(engine, params, SAMPLES), early_law(params))
    assert distance < 0.1
    assert got > LEVEL
    assert engine.statistics.blocks.accepted > 0


@pytest.mark.statistical
def test_masking_by_the_blocks_start_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a block masked as its anchor is: end tokens are kept back one block too long."""
    honest = distribution.processed

    def at_the_start(logits: Any, params: Any, flags: Any, history: Any, slots: Any, seen: Any, *rest: Any) -> Any:
        first = torch.stack([seen[slots == slot].min() for slot in slots])
        early = params.min_tokens + torch.zeros_like(params.min_tokens)
        shifted = replace(params, min_tokens=early.scatter_reduce(0, slots, seen - first, "amax") + early)
        return honest(logits, shifted, flags, history, slots, seen, *rest)

    import surefoot.engine.step as step

    monkeypatch.setattr(step, "processed", at_the_start)
    assert p_value(run(engine_of("dspark"), EARLY, SAMPLES), early_law(EARLY))[0] < LEVEL


@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_comes_before_min_tokens_and_greedy_texts_agree(
    drafter: str, temperature: float, device: Any
) -> None:
    target: Any = CheapTarget()
    prompts = [[3, 1, 4, 1, 5], [2, 7, 2, 7, 2, 7], [5, 6] * 5, [1]]
    free = build(target, "none").run(prompts, SamplingParams(temperature=0, max_tokens=24))
    said = Counter(token for request in free for token in request.output.token_ids)
    (first, _), (second, _), (third, _) = said.most_common(3)  # what the target likes to say ends a text
    target.eos_token_ids = frozenset({first, second})
    cases = [
        SamplingParams(temperature=temperature, max_tokens=24, min_tokens=9, stop_token_ids=[third]),
        SamplingParams(temperature=temperature, max_tokens=24, min_tokens=13, ignore_eos=True, stop_token_ids=[third]),
        SamplingParams(temperature=temperature, max_tokens=24, min_tokens=24),
        SamplingParams(temperature=temperature, max_tokens=24, stop_token_ids=[third]),
    ]
    engine = build(target, drafter, width=None, device=device())
    got = engine.run(prompts * 2, cases * 2)
    reasons = Counter(request.output.finish_reason for request in got)
    for request in got:
        ends = {third} if request.params.stop_token_ids else set()
        ends |= set() if request.params.ignore_eos else {first, second}
        tokens = request.output.token_ids
        assert len(tokens) >= request.params.min_tokens
        assert not ends & set(tokens[: request.params.min_tokens])
        assert not ends & set(tokens[:-1])
    assert reasons["stop"], "nobody met an end token: nothing was tested"
    if temperature == 0:
        plain = build(target, "none").run(prompts * 2, cases * 2)
        assert [r.output.token_ids for r in got] == [r.output.token_ids for r in plain]


def test_min_tokens_counts_output_across_a_preemption() -> None:
    target: Any = CheapTarget()
    target.eos_token_ids = frozenset(range(2, 16))  # whatever can end, ends
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=22)
    prompts = [[3, 1, 4, 1, 5, i] for i in range(5)]
    engine = build(target, "prompt-lookup", num_blocks=28, max_num_seqs=4)
    got = engine.run(prompts, params)
    assert sum(r.preemptions for r in got) > 0
    for request in got:
        assert set(request.output.token_ids[:22]) <= {0, 1}
        assert len(request.output.token_ids) >= 22


def test_steps_pay_for_min_tokens_only_until_then() -> None:
    target: Any = CheapTarget()
    target.eos_token_ids = frozenset({2})
    engine = build(target, "none")
    seen: list[tuple[int, bool]] = []
    request = engine.add_request([1], SamplingParams(temperature=0, max_tokens=12, min_tokens=4, stop_token_ids=[9]))
    engine.add_observer(lambda report: seen.append((request.num_output, report.inputs.flags.greedy)))
    while engine.has_work:
        engine.step()
    assert [greedy for _, greedy in seen[:6]] == [False] * 4 + [True] * 2


# -- grammars --------------------------------------------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_the_law_under_a_grammar_is_exact_and_every_text_is_valid(drafter: str) -> None:
    params, mask = SamplingParams(temperature=1.0, max_tokens=3), grammar()
    engine = engine_of(drafter, width=None if drafter == "none" else 2)

    def allowed(prefix: list[int]) -> list[int]:
        state = mask.state(prefix)
        assert state is not None
        return list(mask.edges[state])

    law = law_under(engine.target, params, allowed, 3)
    counts = run(engine, params, SAMPLES, mask)
    assert all(mask.state(text) is not None for text in counts)
    got, distance = p_value(counts, law)
    assert distance < 0.1
    assert got > LEVEL
    assert drafter == "none" or engine.statistics.blocks.accepted > 0


@pytest.mark.statistical
def test_a_mask_of_the_blocks_start_alone_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, honest = grammar(), masks.masked

    def at_the_start(logits: Any, by_slot: Any, history: Any, slots: Any, begins: Any, ends: Any, *rest: Any) -> Any:
        first = torch.stack([ends[slots == slot].min() for slot in slots])
        return honest(logits, by_slot, history, slots, begins, first, *rest)

    monkeypatch.setattr(distribution, "masked", at_the_start)
    counts = run(engine_of("dspark"), SamplingParams(temperature=1.0, max_tokens=3), 2_000, mask)
    assert any(mask.state(text) is None for text in counts)


def test_a_mask_on_p_alone_is_exact_and_slow_and_on_both_it_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """q gets the mask, too: else drafts that the grammar forbids are proposed and rejected."""
    params, mask = SamplingParams(temperature=1.0, max_tokens=12), grammar()
    both = engine_of("dspark", max_num_seqs=8)
    run(both, params, 64, mask)
    alone = engine_of("dspark", max_num_seqs=8)
    honest = distribution.BlockSampler.draw

    def unmasked(self: Any, k: int, logits: Any, sharpness: Any = None) -> Any:
        self._flags = self._flags._replace(masked=False)
        return honest(self, k, logits, sharpness)

    monkeypatch.setattr(distribution.BlockSampler, "draw", unmasked)
    run(alone, params, 64, mask)
    rates = [engine.statistics.blocks.accepted / engine.statistics.blocks.verified for engine in (alone, both)]
    assert rates[1] > 1.2 * rates[0]


@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_and_free_requests_share_a_batch(drafter: str, temperature: float, device: Any) -> None:
    """Every position of a masked request is valid, greedy texts are those of plain decoding, free ones are untouched."""
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    params = SamplingParams(temperature=temperature, max_tokens=20)

    def texts(name: str, width: Any, with_masks: bool = True) -> list[Any]:
        engine = build(target, name, gamma=3, width=width, device=device(), max_num_seqs=3, max_model_len=64)
        own = [grammar() if i % 2 and with_masks else None for i in range(6)]
        requests = [engine.add_request([*PROMPT, i], params, mask=mask) for i, mask in enumerate(own)]
        while engine.has_work:
            engine.step()
        engine.assert_clean()
        return [(request.output, mask) for request, mask in zip(requests, own, strict=True)]

    got = texts(drafter, "3,0,2")
    for output, mask in got:
        assert output.finish_reason == "length"
        if mask is not None:
            assert mask.state(output.token_ids) is not None
            assert all(mask.state(text[:-1]) is None or len(text) <= 20 + 4 for text in mask.asked)
    if temperature == 0:
        plain = texts("none", None)
        assert [output.token_ids for output, _ in got] == [output.token_ids for output, _ in plain]
        free = texts("none", None, with_masks=False)
        assert [output.token_ids for output, _ in plain][::2] == [output.token_ids for output, _ in free][::2]
        assert [output.token_ids for output, _ in plain][1::2] != [output.token_ids for output, _ in free][1::2]


def test_a_grammar_that_ends_ends_the_request_with_a_reason() -> None:
    engine = engine_of("dspark", max_num_seqs=2)
    closed = Automaton({0: {1: 1, 2: 1}, 1: {3: 2}, 2: {}})
    request = engine.add_request(PROMPT, SamplingParams(temperature=1.0, max_tokens=9), mask=closed)
    while engine.has_work:
        engine.step()
    assert request.output.finish_reason == "error"
    assert "mask allows no token" in request.output.error
    assert closed.state(request.output.token_ids) is not None
    engine.assert_clean()


def test_a_slots_mask_leaves_with_its_request() -> None:
    """Its slot goes to a free request, beside another one that has a mask: so the step does look at masks."""
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = engine_of("none", width=None, max_num_seqs=2)
    run(engine, SamplingParams(temperature=0, max_tokens=3), 2, grammar())
    free, other = engine.add_request(PROMPT, params), engine.add_request(PROMPT, params, mask=grammar())
    while engine.has_work:
        engine.step()
    alone = run(engine_of("none", width=None), params, 1)
    assert tuple(free.output.token_ids) in alone
    assert tuple(other.output.token_ids) not in alone


def test_drafts_end_where_a_reduced_vocabulary_has_nothing_allowed() -> None:
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    drafter = tiny_dspark(target, 2, draft_vocab_size=3)
    known = set(drafter.vocabulary.tolist())
    missing = next(token for token in range(6) if token not in known)
    only = Automaton({0: {missing: 0}})
    engine = build(target, drafter, gamma=2, width=2, max_model_len=24)
    request = engine.add_request(PROMPT, SamplingParams(temperature=1.0, max_tokens=6), mask=only)
    while engine.has_work:
        engine.step()
    assert request.output.token_ids == [missing] * 6
    assert request.statistics.drafted == request.statistics.verified == 0
