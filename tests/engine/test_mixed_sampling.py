"""Requests of different parameters in one batch: each is sampled as it would be alone. And drafters that know fewer tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from surefoot.drafters.base import Draft
from surefoot.engine.distribution import DraftVocabulary, SamplingFlags, processed
from surefoot.engine.state import DeviceState, SlotUpdate, StateUpdates
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import build, tiny_dspark
from tests.engine.test_exactness import LEVEL
from tests.tiny_models import tiny_target

TOKENS = 24
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "warm": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [1, 2, 3, 4]},
}


class Batch:
    """State of one slot for each of several parameters, with a text of its own in each."""

    def __init__(self, kinds: list[dict[str, Any]]) -> None:
        self.params = [SamplingParams(max_tokens=16, **{"temperature": 1.0, **kind}) for kind in kinds]
        self.state = DeviceState(len(kinds), 32, 4, "cpu")
        self.texts = torch.randint(0, TOKENS, (len(kinds), 12), generator=torch.Generator().manual_seed(1))
        for slot, params in enumerate(self.params):
            text = self.texts[0].tolist()
            ends = tuple(params.stop_token_ids or ())
            update = SlotUpdate(slot, text, 0, 5, params, slot, ends)
            self.state.apply(StateUpdates(slots=[update]), ())

    def flags(self, slots: list[int]) -> SamplingFlags:
        return SamplingFlags.union(
            SamplingFlags.of(self.params[slot], min_tokens=self.params[slot].min_tokens > 7) for slot in slots
        )

    def law(self, logits: torch.Tensor, slots: list[int], vocabulary: DraftVocabulary | None = None) -> torch.Tensor:
        flags, index = self.flags(slots), torch.tensor(slots)
        seen = torch.full_like(index, 12)
        return processed(logits, self.state.sampling, flags, self.state.history, index, seen, vocabulary)


@pytest.mark.parametrize("pair", itertools.combinations(KINDS, 2), ids=lambda pair: "+".join(pair))
@pytest.mark.parametrize("native", [True, False])
def test_a_row_is_processed_as_if_alone_whatever_stands_beside_it(
    pair: tuple[str, str], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        from surefoot.kernels import sampling

        monkeypatch.setattr(sampling.native, "usable", lambda *_: False)
    batch = Batch([KINDS[name] for name in pair])
    logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(2)) * 2
    together = batch.law(logits.expand(2, -1).clone(), [0, 1])
    alone = [batch.law(logits.clone(), [slot])[0] for slot in (0, 1)]
    for row in (0, 1):
        assert torch.equal(together[row], alone[row])
    assert not torch.allclose(alone[0], alone[1], atol=1e-3), "the two kinds do not differ here: nothing was tested"


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("plain", "warm")])
def test_every_stage_changes_the_law_and_the_neighbour_keeps_its_own(kind: str) -> None:
    """Against the law of the plain request: the stage is on for its own request, and off for the other."""
    batch = Batch([KINDS[kind], {}])
    logits = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(2)) * 2
    together = batch.law(logits.clone(), [0, 1])
    plain = logits.softmax(-1)
    torch.testing.assert_close(together[1], plain[1], rtol=1e-4, atol=1e-7)
    assert (together[0] - plain[0]).abs().sum() > 0.05


def test_top_p_and_min_p_of_one_request_among_many_are_kept_through_the_engine() -> None:
    """One strict request among free ones: only its likeliest tokens appear, while the others still say anything."""
    target = CheapTarget()
    greedy = build(target, "none").run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12))[0].output.token_ids
    for strict in ({"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1}):
        for drafter, width in (("none", None), ("prompt-lookup", 2), ("dspark", 2)):
            engine = build(target, drafter, width=width)
            params = [
                SamplingParams(temperature=1.0, max_tokens=12, seed=i, **strict if i == 2 else {}) for i in range(5)
            ]
            got = engine.run([[1, 2, 3]] * 5, params)
            assert got[2].output.token_ids == greedy
            assert all(r.output.token_ids != greedy for i, r in enumerate(got) if i != 2)


def test_penalties_remember_the_output_across_a_preemption() -> None:
    """The output so far is output, not prompt, when a request is read again: frequency penalties go on counting it."""
    params = SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.7, presence_penalty=0.4)
    prompts = [[3, 1, 4, 1, 5, i] for i in range(5)]
    expected = [build(CheapTarget(), "none").run([prompt], params)[0].output.token_ids for prompt in prompts]
    unpenalised = build(CheapTarget(), "none").run(prompts, SamplingParams(temperature=0, max_tokens=30))
    assert expected != [r.output.token_ids for r in unpenalised]
    for drafter in ("none", "prompt-lookup"):
        engine = build(CheapTarget(), drafter, num_blocks=28, max_num_seqs=4)
        got = engine.run(prompts, params)
        assert sum(r.preemptions for r in got) > 1
        assert [r.output.token_ids for r in got] == expected


# -- reduced vocabularies --------------------------------------------------------------------------------------------------


def reduced(ids: list[int]) -> DraftVocabulary:
    vocabulary = DraftVocabulary.of(torch.tensor(ids))
    assert vocabulary is not None
    return vocabulary


@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency", "bias", "min_tokens", "top_k"])
def test_q_over_some_tokens_is_processed_as_p_is(kind: str) -> None:
    """The law over the known tokens is p's, renormalised before the filters; tokens above the largest count for nobody."""
    settings = dict(KINDS[kind])
    if kind == "bias":
        settings["logit_bias"] = {3: 4.0, TOKENS - 1: 7.0}
    if kind == "min_tokens":
        settings["stop_token_ids"] = [3, TOKENS - 1]
    batch = Batch([settings])
    ids = [11, 2, 7, 3, 14]  # in no order, and far below the largest target id
    assert set(batch.texts[0].tolist()) - set(range(15)), "no token of the text is above the largest known one"
    wide = torch.full((1, TOKENS), -torch.inf)
    narrow = torch.randn(1, len(ids), generator=torch.Generator().manual_seed(3))
    wide[:, ids] = narrow
    q, p = batch.law(narrow.clone(), [0], reduced(ids)), batch.law(wide, [0])
    torch.testing.assert_close(q[0], p[0, ids], rtol=1e-5, atol=1e-7)


def test_tokens_above_the_largest_known_one_are_not_counted_for_it() -> None:
    batch = Batch([{"frequency_penalty": 2.0, "repetition_penalty": 3.0}])
    batch.state.history[0, :12] = TOKENS - 1  # a text of unknown tokens alone
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    q = batch.law(logits, [0], reduced([0, 4, 9]))
    torch.testing.assert_close(q, torch.full((1, 3), 1 / 3))


def test_penalties_by_their_definition() -> None:
    """Frequency counts every time a token has come in the output, presence once; the prompt counts for neither."""
    batch = Batch([{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}])
    batch.state.history[:, :12] = torch.tensor([3, 3, 3, 4, 4, 1, 1, 1, 2, 2, 0, 1])  # five of them are the prompt
    penalty = -batch.law(torch.zeros(2, TOKENS), [0, 1]).log()
    counts = torch.zeros(TOKENS)
    counts[:3] = torch.tensor([1.0, 4.0, 2.0])
    torch.testing.assert_close(penalty[0] - penalty[0, 5], 0.5 * counts, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(penalty[1] - penalty[1, 5], 0.5 * (counts > 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_on_a_token_the_drafter_does_not_know_is_served(temperature: float) -> None:
    target = tiny_target("llama")
    last = target.vocab_size - 1
    drafters = (tiny_dspark(target, 3, seed=seed, draft_vocab_size=8) for seed in range(20))
    drafter = next(each for each in drafters if int(each.vocabulary.max()) < last)
    bias = {last: 100.0}
    params = SamplingParams(temperature=temperature, max_tokens=8, logit_bias=bias)
    free = SamplingParams(temperature=temperature, max_tokens=8)
    got = build(target, drafter, width=3).run([[1, 2, 3], [4, 5]], [params, free])
    assert got[0].output.token_ids == [last] * 8
    assert len(got[1].output.token_ids) == 8


# -- what may decide -------------------------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_a_rank_that_peeks_one_position_ahead_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the ranking: x_1's slot goes to whoever has the larger c_2, which depends on x_1."""
    from surefoot.engine import step
    from tests.engine.test_seeds import SEEDS, engine_of, law_of_the_second

    honest = step.allocate

    def peeking(survival: torch.Tensor, *rest: Any) -> torch.Tensor:
        ahead = torch.cat([survival[:, 1:], survival[:, -1:] * 0], 1)
        return honest(ahead, *rest)

    one = CostTable((1, 2, 3, 4, 16), ((1.0, 1.01, 1.02, 9.0, 60.0),), (1, 8), (0.01, 0.02))  # a second draft is dear
    monkeypatch.setattr(step, "allocate", peeking)
    assert law_of_the_second(engine_of("stale", one), "equal prompts", SEEDS)[0] < LEVEL


def test_what_is_accepted_is_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens in the history are those of the draft: a shorter proposal leaves no other token in its place."""
    target = tiny_target("llama")
    engine = build(target, "combined-dspark", width=3)
    written: Counter[bool] = Counter()
    honest = engine.decode_step._draft

    def watched(inputs: Any, requests: Any) -> Any:
        draft, proposal = honest(inputs, requests)
        assert isinstance(draft, Draft)
        for row, (slot, length) in enumerate(zip(requests.slots.tolist(), requests.lengths.tolist(), strict=True)):
            if row < inputs.num_drafting:
                ahead = engine.state.history[slot, length + 1 : length + 1 + draft.tokens.shape[1]]
                written[bool(torch.equal(ahead, draft.tokens[row]))] += 1
        return draft, proposal

    engine.decode_step._draft = watched
    engine.run([[1, 2, 1, 2, 1], [4, 5, 6], [7]], SamplingParams(temperature=1.0, max_tokens=20))
    assert written[True] > 10
    assert not written[False]
