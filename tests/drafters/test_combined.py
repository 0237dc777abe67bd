"""Prompt lookup and a trained drafter in one: the law, the choice, the context that must not have gaps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.engine.distribution import BlockSampler
from surefoot.engine.loading import combine
from surefoot.engine.trace import StepReport, TraceWriter
from surefoot.kernels import native
from surefoot.profiling.profile import profile
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.estimator import Evidence
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.sources import COMPARE_EVERY, PROBE_EVERY, CombinedConfidence, SourceChoice
from surefoot.speculation.statistics import Statistics
from tests.engine.engines import FixedChoice, QueueDevice, build, greedy_oracle, tiny_drafter, tiny_dspark
from tests.engine.test_exactness import GAMMA, LEVEL, PLAIN, PROCESSED, STAGES, chi_square, greedy_texts, prompts
from tests.engine.test_fuzz import Life, play
from tests.engine.test_overlap import EVERYTHING, GREEDY, WatchedDevice
from tests.tiny_models import tiny_target

LOOKUP = "prompt-lookup"


def combined(
    target: Any, gamma: int, *, lookup: int | None = None, threshold: int = 3, **options: Any
) -> CombinedDrafter:
    """A trained drafter of `gamma` and a lookup of `lookup` drafts, which takes matches of `threshold` tokens."""
    reads = options.pop("reads_are_free", None)
    trained = tiny_dspark(target, gamma, **options)
    found = PromptLookupDrafter(lookup or gamma, min_match=1)
    choice = FixedChoice(found.gamma, gamma, found.max_match)
    choice.threshold = threshold
    return CombinedDrafter(found, trained, choice, reads_are_free=reads)


def watched(engine: Any) -> list[StepReport]:
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    return reports


# -- exactness -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["combined-dspark", "combined-dspark-reduced", "combined-dflash"])
@pytest.mark.parametrize("width", [3, "0,3,1,4,2", None])
def test_temperature_0_is_token_identical_to_target_only_decoding(architecture: str, kind: str, width: Any) -> None:
    target = tiny_target(architecture)
    texts, expected = greedy_texts(architecture)
    engine = build(target, kind, gamma=GAMMA, width=width, max_num_seqs=7, block_size=4)
    reports = watched(engine)
    got = engine.run(texts, SamplingParams(temperature=0, max_tokens=20))
    assert [r.output.token_ids for r in got] == expected
    engine.assert_clean()
    by_source = engine.statistics.by_source
    assert all(by_source[name].blocks.accepted for name in by_source)
    assert len(by_source) == 2
    assert any(0 < (r.outputs.model_rows or 0) < r.inputs.num_drafting for r in reports), "no step mixed the sources"


@pytest.mark.parametrize("late", [False, True])
def test_a_device_that_must_not_be_read_gives_the_same_texts(late: bool) -> None:
    target = tiny_target("llama")
    texts, expected = greedy_texts("llama")
    drafter = combined(target, 3, lookup=5, reads_are_free=False)
    engine = build(target, drafter, max_num_seqs=7, device=QueueDevice(late=late))
    got = engine.run(texts, SamplingParams(temperature=0, max_tokens=20))
    assert [r.output.token_ids for r in got] == expected
    assert all(part.blocks.accepted for part in engine.statistics.by_source.values())
    assert len(engine.statistics.by_source) == 2


@pytest.mark.skipif(not native.available(), reason="torch's reference attention reads lengths")
def test_no_step_reads_a_device_that_must_not_be_read() -> None:
    target = tiny_target("gemma3")
    drafter = combined(target, 3, lookup=4, reads_are_free=False)
    engine = build(target, drafter, device=WatchedDevice(), table=COSTS, max_num_seqs=3, check_layout=False)
    engine.run(prompts(5, target.vocab_size), [EVERYTHING, GREEDY, EVERYTHING, GREEDY, GREEDY])
    assert len(engine.statistics.by_source) == 2


def test_the_model_draws_for_those_requests_that_take_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their parameters and their uniforms: its sampler is told their rows, and no others."""
    honest, told = BlockSampler.only, []

    def only(self: BlockSampler, rows: torch.Tensor) -> None:
        told.append(rows.tolist())
        honest(self, rows)

    monkeypatch.setattr(BlockSampler, "only", only)
    target = tiny_target("llama")
    engine = build(target, combined(target, 4, lookup=4), gamma=4, width=4, max_num_seqs=4)
    reports = watched(engine)
    prompts = [[5, 6] * 8, [1, 2, 3], [7, 8, 9] * 5, [4, 11, 40]]
    temperatures = [0.7, 1.0, 0.0, 1.3]
    engine.run(prompts, [SamplingParams(temperature=t, max_tokens=24, seed=i) for i, t in enumerate(temperatures)])
    expected = []
    for report in reports:
        rows = [row for row, name in enumerate(report.outputs.sources or ()) if name == "dspark"]
        if 0 < len(rows) < len(report.outputs.sources or ()):
            expected.append(rows)
    assert told == expected
    assert any(rows != list(range(len(rows))) for rows in told), "the first requests alone: nothing is shown"


class CombinedLife(Life):
    """Random lives of many requests (tests/engine/test_fuzz.py) over two drafters in one."""

    models = (("gemma3", "combined-dspark"), ("llama", "combined-dflash"), ("llama", "combined-dspark-reduced"))


def test_fuzz_of_two_drafters_in_one() -> None:
    events = play(CombinedLife, 6, 40)
    assert events["steps"] > 200, events
    assert events["accepted drafts"] > 10, events


LAWS = [
    ({}, 2, PLAIN),
    ({"draft_vocab_size": 4}, "2,1", PROCESSED),
    ({"draft_vocab_size": 4, "lookup": 3}, 3, PLAIN),
    ({"reads_are_free": False, "lookup": 3}, "3,2", STAGES),
]


def law_of(drafter: Any, target: Any, width: Any, params: SamplingParams, samples: int = 6_000) -> tuple[float, Any]:
    """p-value of the chi-square test of the first three tokens after a prompt that repeats itself, and the engine."""
    engine = build(target, drafter, width=width, max_num_seqs=512, max_model_len=24, check_layout=False)
    return chi_square(engine, target, [1, 2, 1, 2, 1], params, samples)[0], engine


@pytest.mark.statistical
@pytest.mark.parametrize(("options", "width", "params"), LAWS)
def test_sampled_law_is_the_targets(options: dict[str, Any], width: Any, params: SamplingParams) -> None:
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    p_value, engine = law_of(combined(target, 2, **options), target, width, params)
    assert p_value > LEVEL
    assert all(part.blocks.accepted > 100 for part in engine.statistics.by_source.values())
    assert len(engine.statistics.by_source) == 2, "only one source was ever chosen: mixed batches are not tested"


@pytest.mark.statistical
def test_learning_keeps_the_law() -> None:
    """The real choice, which changes its mind while samples are drawn, with what it has learned from earlier steps."""
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    lookup = PromptLookupDrafter(2, min_match=1)
    choice = SourceChoice(2, 2, lookup.max_match)
    p_value, engine = law_of(CombinedDrafter(lookup, tiny_dspark(target, 2), choice), target, 2, PLAIN)
    assert p_value > LEVEL
    assert choice.lookup.refits > 1  # the first is the prior
    assert choice.trained.refits > 2
    assert len(engine.statistics.by_source) == 2


@pytest.mark.statistical
class TestNegativeControls:
    """Each mistake, put in on purpose, must fail the same test."""

    target = tiny_target("llama", vocab_size=6, sharpness=4.0)

    def failing(self, drafter: CombinedDrafter) -> float:
        return law_of(drafter, self.target, 2, PLAIN)[0]

    def test_a_choice_that_looks_at_the_drafted_tokens(self) -> None:
        class Peeking(CombinedDrafter):
            def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
                drawn = self.trained.propose(context, sampler)
                found = self.lookup.propose(context)
                assert found.lengths is not None
                dislikes = (drawn.tokens[:, 0] >= 2) & (found.lengths > 0)
                return Draft(
                    tokens=torch.where(dislikes.unsqueeze(1), found.tokens, drawn.tokens),
                    confidence_logits=torch.where(dislikes.unsqueeze(1), torch.nan, drawn.confidence_logits),
                    signal=drawn.signal,
                    match=found.signal[:, 0].to(torch.int64),
                    drawn=torch.where(dislikes, -1, torch.arange(len(dislikes))),
                )

        honest = combined(self.target, 2)
        assert self.failing(Peeking(honest.lookup, honest.trained, honest.choice)) < LEVEL

    def test_a_lookup_that_is_accepted_by_the_trained_drafters_q(self) -> None:
        class Wrong(CombinedDrafter):
            def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
                draft = super().propose(context, sampler)
                if draft.drawn is None:
                    return draft
                assert draft.confidence_logits is not None  # NaN where the lookup proposes, which would end its block
                evidence = {"confidence_logits": draft.confidence_logits.nan_to_num(0.0)}
                if draft.signal is not None:
                    evidence["signal"] = draft.signal.nan_to_num(0.0)
                return replace(draft, drawn=torch.arange(len(draft.tokens)), **evidence)

        honest = combined(self.target, 2, reads_are_free=False)
        assert self.failing(Wrong(honest.lookup, honest.trained, honest.choice, reads_are_free=False)) < LEVEL


# -- the context of the trained drafter ------------------------------------------------------------------------------------


class EveryFourth(SourceChoice):
    """The trained drafter gets every fourth step."""

    def decide(self, match: Tensor, context: int, skips_model: bool = True) -> Tensor:
        self._calls += 1
        return torch.full_like(match, self._calls % 4 != 0, dtype=torch.bool)


def recorded(drafter: Any) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    """What `drafter` proposes from now on, by the text it followed: tokens and confidence logits."""
    seen: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    honest = drafter.propose

    def propose(context: DraftContext, sampler: Any) -> Draft:
        draft = honest(context, sampler)
        for row, slot in enumerate(context.slots.tolist()):
            text = context.history[slot, : int(context.lengths[row]) + 1].tolist()
            seen[tuple(text)] = draft.tokens[row].tolist(), draft.confidence_logits[row].tolist()
        return draft

    drafter.propose = propose
    return seen


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_drafts_after_lookups_are_those_of_a_drafter_that_never_paused(architecture: str) -> None:
    target = tiny_target(architecture)
    params, prompt = SamplingParams(temperature=0, max_tokens=60), [3, 1, 4, 1, 5, 3, 1, 4]
    never, paused = tiny_dspark(target, 3), tiny_dspark(target, 3)
    always = recorded(never)
    build(target, never, width=0).run([prompt], params)
    sometimes = recorded(paused)
    lookup = PromptLookupDrafter(3, min_match=1)
    engine = build(target, CombinedDrafter(lookup, paused, EveryFourth(3, 3, 16)))
    engine.run([prompt], params)
    assert engine.statistics.by_source[LOOKUP].blocks.accepted > 0
    assert len(sometimes) >= 3
    for text, (tokens, logits) in sometimes.items():
        assert tokens == always[text][0]
        assert logits == pytest.approx(always[text][1], abs=1e-4)


def test_a_prefix_hit_brings_the_drafters_context_along() -> None:
    target = tiny_target("llama")
    params, prompt = SamplingParams(temperature=0, max_tokens=40), [7, 2, 9, 4, 7, 2, 9, 4, 1, 8, 3, 5]
    lookup, trained = PromptLookupDrafter(3, min_match=1), tiny_dspark(target, 3)
    drafts = recorded(trained)
    engine = build(target, CombinedDrafter(lookup, trained, EveryFourth(3, 3, 16)))
    first = engine.run([prompt], params)[0]
    before = dict(drafts)
    drafts.clear()
    engine.decode_step.drafter.choice._calls = 2  # type: ignore[union-attr]
    second = engine.run([[*prompt, *first.output.token_ids[:20]]], SamplingParams(temperature=0, max_tokens=20))[0]
    assert second.cached_tokens >= len(prompt)
    assert second.output.token_ids == first.output.token_ids[20:]
    always = recorded(never := tiny_dspark(target, 3))
    build(target, never, width=0).run([prompt], params)
    assert drafts
    for text, (tokens, logits) in {**before, **drafts}.items():
        assert tokens == always[text][0]
        assert logits == pytest.approx(always[text][1], abs=1e-4)


# -- the choice ------------------------------------------------------------------------------------------------------------

COSTS = CostTable((1, 2, 4, 8, 16, 64), ((10.0, 10.0, 10.5, 11.0, 14.0, 40.0),), (1, 8), (2.0, 4.0), captured_tokens=0)
DEAR = CostTable((1, 8, 64), ((10.0, 11.0, 40.0),), (1, 8), (30.0, 40.0), captured_tokens=0)


def blocks(choice: SourceChoice, *, match: int, accepted: int, drawn: bool, count: int = 96, width: int = 4) -> None:
    """Tell the choice and its lookup estimate about `count` equal outcomes."""
    source = CombinedConfidence(choice, SimpleNamespace(gamma=4, observe=lambda *_: None))  # type: ignore[arg-type]
    evidence = Evidence(torch.full((count, 4), 0.0 if drawn else torch.nan), match=torch.full((count,), match))
    source.observe(evidence, np.full(count, accepted), np.full(count, width))


def test_before_anything_is_known_long_matches_are_copied_and_fresh_text_is_drafted() -> None:
    takes = SourceChoice(4, 4, 16, costs=LiveCost(COSTS)).takes_lookup(1, 100.0)
    assert not takes[:3].any()
    assert takes[8:].all()


def test_the_choice_follows_what_each_source_achieved() -> None:
    good = SourceChoice(4, 4, 16, costs=LiveCost(COSTS))
    blocks(good, match=4, accepted=4, drawn=False)
    blocks(good, match=2, accepted=0, drawn=False)
    blocks(good, match=0, accepted=2, drawn=True)
    assert good.takes_lookup(1, 100.0)[4:].all()
    assert not good.takes_lookup(1, 100.0)[:3].any()

    misled = SourceChoice(4, 4, 16, costs=LiveCost(COSTS))
    blocks(misled, match=12, accepted=0, drawn=False)
    blocks(misled, match=4, accepted=4, drawn=True)
    assert not misled.takes_lookup(1, 100.0).any()


def test_equal_drafts_go_to_the_one_that_costs_nothing() -> None:
    choice = SourceChoice(4, 4, 16, costs=LiveCost(COSTS))
    for drawn in (True, False):
        blocks(choice, match=8, accepted=3, drawn=drawn, count=400)
    assert choice.takes_lookup(1, 100.0)[8]
    choice.costs.use(None)
    alone = choice.takes_lookup(1, 100.0, skips_model=False)
    assert alone.shape == (17,)
    assert not alone[0]


def test_the_outcomes_of_one_source_leave_the_other_alone() -> None:
    choice = SourceChoice(4, 4, 16)
    trained = choice.trained.fit.copy()
    blocks(choice, match=8, accepted=0, drawn=False)
    assert np.array_equal(choice.trained.fit, trained)
    lookup = choice.lookup.fit.copy()
    blocks(choice, match=8, accepted=0, drawn=True)
    assert np.array_equal(choice.lookup.fit, lookup)
    assert not np.array_equal(choice.trained.fit, trained)


def test_a_head_is_judged_and_taught_by_its_own_blocks_alone() -> None:
    target = tiny_target("llama")
    drafter = combine(target, tiny_dspark(target, 3))
    source = drafter.confidence_source("cpu")
    assert isinstance(source, CombinedConfidence)
    alone = drafter.trained.confidence_source("cpu")
    logits = torch.tensor([[1.0, -1.0, 0.5], [2.0, 0.0, -3.0]])
    mixed = torch.full((4, 7), torch.nan)
    mixed[[0, 2], :3] = logits
    evidence, own = Evidence(mixed, mixed, match=torch.tensor([0, 8, 2, 0])), Evidence(logits, logits)
    confidence = source.confidence(evidence, explored=1)
    assert torch.equal(confidence[[0, 2], :3], alone.confidence(own))
    assert not confidence[[0, 2], 3:].any()  # the trained block ends there
    assert torch.equal(confidence[1], torch.ones(7))  # a new lookup estimate is learned from whole windows
    prior = source.confidence(evidence)
    assert torch.equal(prior[[0, 2, 3]], confidence[[0, 2, 3]])
    assert torch.equal(prior[1], torch.full((7,), torch.sigmoid(torch.tensor(-2.0 + 3.0)).item()))
    assert torch.equal(source.confidence(Evidence(match=evidence.match))[1], prior[1])  # the model did not run
    for _ in range(40):
        source.observe(evidence, np.array([1, 7, 0, 0]), np.array([3, 7, 3, 0]))
        alone.observe(own, np.array([1, 0]), np.array([3, 3]))
    estimator: Any = source.trained
    reference: Any = alone
    assert np.array_equal(estimator.estimator.fit, reference.estimator.fit)
    assert estimator.drift == reference.drift


class Oracle(Drafter):
    """A trained drafter that knows the text: what a well trained one is for the choice. It has no head."""

    name = "oracle"

    def __init__(self, gamma: int, text: list[int], size: int) -> None:
        self.gamma, self.text, self.size = gamma, torch.tensor([*text, *[0] * gamma]), size
        self.calls = 0

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        self.calls += 1
        tokens = []
        for k in range(1, self.gamma + 1):
            truth = self.text[context.lengths + k]
            tokens.append(sampler.draw(k, torch.nn.functional.one_hot(truth, self.size).float() * 20))
        return Draft(torch.stack(tokens, 1), signal=torch.full((len(context.slots), self.gamma), 5.0))


@pytest.mark.parametrize("planner", ["stopping", "stale"])
def test_copied_text_is_looked_up_and_fresh_text_is_drafted_by_the_model(planner: str) -> None:
    """The end to end of it: in one text whose beginning is new and whose end repeats itself, with the model at rest there."""
    target = tiny_target("llama")
    prompt, count = [3, 17, 29, 41, 53, 11], 90
    text = greedy_oracle(target, [prompt], count)[0]
    oracle: Any = Oracle(3, [*prompt, *text], target.vocab_size)
    drafter = combine(target, oracle)
    engine = build(target, drafter, max_model_len=128, table=COSTS, policy={"planner": planner})
    reports = watched(engine)
    got = engine.run([prompt], SamplingParams(temperature=0, max_tokens=count))[0]
    assert got.output.token_ids == text
    decodes = [report for report in reports if report.inputs.num_drafting]
    match = [int(report.outputs.evidence.match[0]) for report in decodes]
    source = [report.outputs.sources[0] for report in decodes]
    assert all(name == "oracle" for name, found in zip(source, match, strict=True) if found == 0)
    assert all(name == LOOKUP for name, found in zip(source, match, strict=True) if found >= 8)
    assert set(source) == {"oracle", LOOKUP}
    assert source.count("oracle") == oracle.calls, "the model ran in a step in which nobody took its draft"
    assert got.statistics.sources == {name: source.count(name) for name in set(source)}
    for report, name in zip(decodes, source, strict=True):  # a step without the model is not charged for it
        rows = 1 + sum(report.outputs.widths)
        drafted = int(name == "oracle")
        assert report.plan.predicted_ms == pytest.approx(
            COSTS.step_costs(1, rows, 1, report.plan.load.context, drafted)[0]
        )


@pytest.mark.parametrize("reads_are_free", [True, False])
def test_a_model_that_does_not_pay_rests_and_is_tried_again(reads_are_free: bool) -> None:
    target = tiny_target("llama")
    drafter = combine(target, tiny_dspark(target, 3))
    drafter.reads_are_free = reads_are_free
    device = None if reads_are_free else QueueDevice()
    engine = build(target, drafter, device=device, table=DEAR, max_model_len=128)
    reports = watched(engine)
    engine.run([[5, 9, 33, 2, 61]], SamplingParams(temperature=1, max_tokens=100, seed=1))
    ran = [bool(report.outputs.model_rows) for report in reports if report.inputs.num_drafting]
    unseen = 0 if reads_are_free else 2  # the host has seen no step yet
    assert 0 < sum(ran[unseen:]) <= -(-len(ran) // PROBE_EVERY)
    assert not any(report.plan.suspended for report in reports)  # looking up goes on


def test_neither_source_is_written_off_for_ever() -> None:
    """A step now and then belongs to the source that was believed the worse one, and its outcomes turn the choice."""
    match = torch.tensor([0, 2, 12])
    choice = SourceChoice(4, 4, 16, costs=LiveCost(COSTS))
    blocks(choice, match=12, accepted=0, drawn=False)
    blocks(choice, match=0, accepted=4, drawn=True)
    decisions = [choice.decide(match, 100).tolist() for _ in range(COMPARE_EVERY)]
    assert decisions.count([False] * 3) == COMPARE_EVERY - 1
    assert decisions.count([False, True, True]) == 1

    other = SourceChoice(4, 4, 16, costs=LiveCost(DEAR))
    blocks(other, match=12, accepted=4, drawn=False)
    blocks(other, match=0, accepted=0, drawn=True)
    decisions = [other.decide(match, 100).tolist() for _ in range(COMPARE_EVERY)]
    assert decisions.count([True] * 3) == COMPARE_EVERY - COMPARE_EVERY // PROBE_EVERY
    probes = [decision for decision in decisions if not all(decision)]
    assert all(decision.count(False) == 1 for decision in probes), "a resting model is tried on one request"
    assert {decision.index(False) for decision in probes} == {0, 1, 2}, "in turn"


def test_where_nothing_may_be_read_the_model_runs_by_what_the_host_saw_last() -> None:
    target = tiny_target("llama")
    drafter = combined(target, 3, reads_are_free=False, threshold=2)
    engine = build(target, drafter, device=QueueDevice(), max_model_len=128)
    reports = watched(engine)
    engine.run([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=80))
    rows = [report.outputs.model_rows for report in reports if report.inputs.num_drafting]
    assert rows[0] == 1
    assert 0 in rows, "a text that repeats itself should have put the model to rest"


# -- what can be seen ------------------------------------------------------------------------------------------------------


def test_statistics_and_trace_name_the_source(tmp_path: Path) -> None:
    target = tiny_target("llama")
    engine = build(target, "combined-dspark", gamma=3)
    writer = TraceWriter(tmp_path / "trace", engine.describe())
    engine.add_observer(writer)
    requests = engine.run(prompts(6, target.vocab_size), SamplingParams(temperature=0, max_tokens=20))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    named = [block["source"] for line in lines for block in line["blocks"]]
    counts = engine.stats()["blocks"]["sources"]
    assert counts == {name: named.count(name) for name in (LOOKUP, "dspark")}
    assert sum((r.statistics.sources for r in requests), type(requests[0].statistics.sources)()) == counts
    parts = engine.statistics.by_source
    assert {name: part.blocks.steps for name, part in parts.items()} == counts
    assert sum(part.blocks.accepted for part in parts.values()) == engine.statistics.blocks.accepted
    assert sum(part.labelled[0] for part in parts.values()) == engine.statistics.labelled[0]
    again = Statistics.from_dict(json.loads(json.dumps(engine.statistics.to_dict())))
    assert again == engine.statistics
    again.merge(engine.statistics)
    assert again.by_source[LOOKUP].blocks.drafted == 2 * parts[LOOKUP].blocks.drafted
    assert engine.describe()["drafter"] == "prompt-lookup+dspark"


@pytest.mark.parametrize("reads_are_free", [True, False])
def test_a_profile_measures_the_model_though_its_texts_repeat(reads_are_free: bool) -> None:
    target = tiny_target("llama")
    drafter = combine(target, tiny_dspark(target, 3))
    drafter.reads_are_free, drafter.choice.wants_model = reads_are_free, False
    engine = build(target, drafter, max_num_seqs=2)
    drafts: list[tuple[int, int | None]] = []
    propose = drafter.propose

    def watched_propose(context: DraftContext, sampler: DraftSampler) -> Draft:
        draft = propose(context, sampler)
        drafts.append((len(context.slots), draft.model_rows))
        return draft

    drafter.propose = watched_propose  # type: ignore[method-assign]
    profile(engine, budget_s=0.0)
    assert drafts
    assert all(model_rows in (None, requests) for requests, model_rows in drafts)
    assert not drafter.choice.only_trained


def test_gammas_of_both() -> None:
    target = tiny_target("llama")
    assert combine(target, tiny_dspark(target, 3)).gamma == 7
    assert combine(target, tiny_dspark(target, 9)).gamma == 9
    shorter = combine(target, tiny_dspark(target, 3), gamma=5)
    assert (shorter.gamma, shorter.trained.gamma) == (5, 3)
    assert tiny_drafter(target, "combined-dflash", 4) is not None
