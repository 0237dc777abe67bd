"""Random lives of many requests in one engine, against each of them decoded alone without a drafter.

A life is a function of its seed alone, so what all lives of a kind have met can be counted and asserted.

The oracle is surefoot's own engine on one request at a time, target-only; `test_exactness` compares that one with transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build, tiny_drafter
from tests.engine.faults import KINDS, STAGES, Faults
from tests.tiny_models import tiny_target

VOCAB = 16
MODEL_LEN = 48
LONGEST = 22  # output tokens
STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 5, 2, 2], [7] * 21, [])
STAIRCASE = CostTable((1, 2, 4, 8, 16, 64), ((1.0, 1.05, 1.3, 2.1, 4.0, 16.0),), (1, 8), (0.2, 0.4))
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "logit_bias": {2: 1.5}}


@cache
def target(architecture: str) -> Any:
    if architecture == "cheap":
        return CheapTarget(VOCAB)
    return tiny_target.__wrapped__(architecture, vocab_size=VOCAB)


@cache
def drafter(architecture: str, name: str, gamma: int) -> Any:
    return tiny_drafter(target(architecture), name, gamma)


@cache
def oracle_engine(architecture: str) -> Any:
    return build(
        target(architecture), "none", max_num_seqs=1, max_model_len=MODEL_LEN, prefix_reuse=False, check_layout=False
    )


def oracle(architecture: str, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """The first greedy tokens and their log-probs: `LONGEST`, or up to the stop.

    Tokens that end the request are masked before `min_tokens`, so the text depends on both.
    """
    early = params.min_tokens and tuple(params.stop_token_ids or ())
    return _oracle(architecture, tuple(prompt), params.penalized, params.min_tokens if early else 0, early or ())


@cache
def _oracle(
    architecture: str, prompt: tuple[int, ...], penalised: bool, min_tokens: int, stops: tuple[int, ...]
) -> tuple[list[int], list[float]]:
    params = SamplingParams(
        temperature=0,
        max_tokens=LONGEST,
        logprobs=0,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        **(PENALISED if penalised else {}),
    )
    (request,) = oracle_engine(architecture).run([list(prompt)], params)
    return request.output.token_ids, [entry.logprob for entry in request.output.logprobs]


def until_stop(tokens: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """What `params` leave of an endless text, and why it ends."""
    assert params.max_tokens is not None
    for count, token in enumerate(tokens[: params.max_tokens], start=1):
        if token in params.stop_token_ids and count >= params.min_tokens:
            return tokens[:count], "stop"
    return tokens[: params.max_tokens], "length"


def some_request(random: Random) -> tuple[list[int], SamplingParams]:
    """A prompt that shares its stem with others', and settings of every kind."""
    pick = random.choice
    prompt = [*pick(STEMS), *random.choices(range(VOCAB), k=random.randint(1, 5))]
    kind = pick(["greedy", "greedy", "penalised", "sampled", "coin"])
    if kind == "coin":  # two tokens, alike: drafts go on after the one that ends the text
        prompt, settings = [*prompt, *[5, 6] * 4], {"temperature": 0.9, "logit_bias": {5: 100, 6: 100}}
        return prompt, SamplingParams(**settings, max_tokens=random.randint(4, LONGEST), stop_token_ids=[6])
    settings = {"temperature": 0} if kind != "sampled" else {"temperature": 0.9, "top_p": 0.9, "top_k": 9}
    max_tokens = random.randint(1, LONGEST)
    return prompt, SamplingParams(
        **settings,
        **(PENALISED if kind == "penalised" else {}),
        max_tokens=max_tokens,
        min_tokens=min(pick([0, 0, 3]), max_tokens),
        stop_token_ids=random.choices(range(VOCAB), k=pick([0, 1, 2, 3])),
        gamma=pick([None, None, None, 0, 1, 2]),
        speculative=pick([True, True, True, False]),
        logprobs=pick([None, None, 0, 2]),
        priority=pick([0, 0, 0, -1, 1]),
        prediction=random.choices(range(VOCAB), k=pick([0, 0, 1, 30])),
    )


class Life:
    """Joins, steps and leaves in any order, in an engine of any make.

    Args:
        seed: decides everything.
        events: counts what has happened.
    """

    models: tuple[tuple[str, str], ...] = (("cheap", "prompt-lookup"),)
    faults_come = False

    def __init__(self, seed: int, events: Counter[str]) -> None:
        self.random, self.events = Random(seed), events
        self.build(*self.models[seed % len(self.models)])

    def build(self, architecture: str, name: str) -> None:
        pick = self.random.choice
        self.architecture = architecture
        gamma, block_size, slots = pick([4, 4, 1, 3]), pick([4, 1, 16]), pick([4, 4, 2, 1])
        widths = pick([None, None, "0,3,1,4,2", "2"])
        if name == "none":
            widths = None
        elif widths is not None:
            widths = ",".join(str(min(int(width), gamma)) for width in widths.split(","))
        crowded, loop = pick([True, True, True, False]), pick(["plain", "late", "early"])
        longest = MODEL_LEN + 2 * (gamma + 1)
        self.engine = build(
            target(self.architecture),
            drafter(self.architecture, name, gamma),
            width=widths,
            device=None if loop == "plain" else QueueDevice(late=loop == "late"),
            policy={"planner": pick([None, "causal", "stale"]) if loop == "plain" else None},
            table=STAIRCASE,
            max_num_seqs=slots,
            max_model_len=MODEL_LEN,
            block_size=block_size,
            num_blocks=-(-longest // block_size) + 1 if crowded else None,
            prefix_reuse=pick([True, False]),
            max_num_batched_tokens=slots * (gamma + 1) + pick([1, 64]),
            check_layout=True,
        )
        self.faults = Faults(self.engine)
        self.faulty = 0  # faults that were raised up to the last step
        self.alive: dict[str, Request] = {}
        self.seen: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.events.update([f"loop: {loop}", f"drafter: {name}", "engines"])

    def play(self, actions: int) -> None:
        """So many actions, then whoever is left runs to its end."""
        try:
            for _ in range(actions):
                self.act()
                self.every_block_has_an_owner()
        finally:
            self.finish()

    def act(self) -> None:
        action = self.random.random()
        if action < 0.3 and len(self.alive) < 8:
            self.enter()
        elif action < 0.35 and self.alive:
            self.leave(self.random.choice(sorted(self.alive)))
        elif action < 0.47 and self.faults_come:
            self.arm()
        else:
            self.advance()

    def arm(self) -> None:
        """Something fails when its stage comes next."""
        pick = self.random.choice
        self.faults.arm(pick(list(STAGES)), pick(list(KINDS)), self.random.random() < 0.5)

    def enter(self) -> None:
        request = self.engine.add_request(*some_request(self.random))
        self.alive[request.request_id] = request
        self.seen[request.request_id] = []
        self.limits[request.request_id] = request.gamma  # which a fault may lower
        self.events["joins"] += 1

    def leave(self, request_id: str) -> None:
        request = self.alive.pop(request_id)
        self.events[f"cancelled {request.status.value}{', in flight' if request.in_flight else ''}"] += 1
        last = self.engine.cancel(request_id)
        if (
            last is None
        ):  # it has ended in a step that an interrupt cut short: the next call of `step` brings its last event
            assert request_id in {owner.request_id for owner, _ in self.engine._events}
            self.alive[request_id] = request
            return
        assert last.finish_reason == "abort"
        self.check(request)
        assert self.engine.cancel(request_id) is None

    def advance(self) -> None:
        self.events["steps"] += 1
        told: set[str] = set()
        try:
            events = self.engine.step()
        except KeyboardInterrupt:
            self.events["interrupts"] += 1
            events = []  # the next step returns them
        for request, happened in events:
            assert request.request_id not in told, "two events for one request in one step"
            told.add(request.request_id)
            self.take(request, happened)

    def take(self, request: Request, happened: OutputEvent) -> None:
        assert request.request_id in self.alive, "an event for somebody who has left"
        assert happened.num_kept == len(happened.token_ids) <= self.engine.gamma + 1
        assert happened.token_ids or happened.finish_reason == "error"
        self.seen[request.request_id] += happened.token_ids
        assert self.seen[request.request_id] == request.output.token_ids
        assert request.token_ids == [*request.prompt_token_ids, *request.output.token_ids]
        assert request.statistics.accepted <= request.statistics.verified <= request.statistics.drafted
        assert max(request.statistics.widths, default=0) <= self.limits[request.request_id]
        if happened.finish_reason is not None:
            del self.alive[request.request_id]
            self.events[f"ended: {happened.finish_reason}"] += 1
            if happened.finish_reason == "error":
                assert self.faults.fired, "nothing has failed"
                assert "injected at" in (happened.error or "")
                self.check(request)
                return
            self.events["preemptions"] += request.preemptions
            self.events["prefix hits"] += request.cached_tokens > 0
            self.events["accepted drafts"] += request.statistics.accepted
            self.events["predicted drafts"] += request.statistics.verified_by_source["prediction"]
            self.events["ended well after a fault"] += request.failures > 0 or self.faults.fired.total() > 0
            self.events["stops inside a block"] += happened.finish_reason == "stop" and self.inside(request)
            self.check(request)
            tokens, reason = self.expected(request)
            assert len(request.output.token_ids) == len(tokens)
            assert happened.finish_reason == reason

    def inside(self, request: Request) -> bool:
        return request.statistics.emitted < request.statistics.accepted + request.statistics.steps

    def expected(self, request: Request) -> tuple[list[int], str]:
        params, tokens = request.params, request.output.token_ids
        if params.temperature == 0:
            tokens = oracle(self.architecture, request.prompt_token_ids, params)[0]
        return until_stop(tokens, params)

    def check(self, request: Request) -> None:
        """What came out so far is a beginning of what target-only decoding gives."""
        tokens = request.output.token_ids
        assert tokens == self.expected(request)[0][: len(tokens)]
        if request.params.logprobs is None:
            return
        assert [entry.token_id for entry in request.output.logprobs] == tokens
        if request.params.temperature == 0:
            own = oracle(self.architecture, request.prompt_token_ids, request.params)[1]
            got = [entry.logprob for entry in request.output.logprobs]
            assert all(abs(a - b) < 1e-5 for a, b in zip(got, own, strict=False))

    def every_block_has_an_owner(self) -> None:
        engine = self.engine
        running = engine.scheduler.running
        assert {request.slot for request in running} == set(engine.blocks.sequences)
        assert len({request.slot for request in running}) == len(running) <= engine.options.max_num_seqs
        for group, pool in enumerate(engine.blocks.pools):
            held = {b for sequence in engine.blocks.sequences.values() for b in sequence.blocks[group] if b}
            assert pool.num_used == len(held)

    def finish(self) -> None:
        try:
            for _ in range(2000):
                if not self.engine.has_work:
                    break
                self.advance()
        finally:
            self.faults.remove()
        self.events["faults"] += self.faults.fired.total()
        self.events.update({f"fault at {stage}": count for stage, count in self.faults.fired.items()})
        assert not self.alive, "the engine makes no progress"
        self.engine.assert_clean()
        assert self.engine.step() == []


class ModelLife(Life):
    """The same over models of transformers and drafters with a context of their own."""

    models = (
        ("gemma3", "dspark"),
        ("llama", "dflash"),
        ("gpt_oss", "dspark"),
        ("gemma3", "prompt-lookup"),
        ("llama", "none"),
        ("llama", "dspark-reduced"),
    )


class FaultLife(Life):
    """The same while steps fail: who does not end with an error is right, and so is whoever comes later."""

    models = (("cheap", "prompt-lookup"), ("cheap", "dspark"))
    faults_come = True


def play(kind: type[Life], lives: int, actions: int) -> Counter[str]:
    """What so many lives have met. A life that fails names its seed."""
    events: Counter[str] = Counter()
    for seed in range(lives):
        try:
            kind(seed, events).play(actions)
        except BaseException:
            print(f"the life that fails: {kind.__name__}({seed}, Counter()).play({actions})")
            raise
    return events


def test_fuzz() -> None:
    events = play(Life, 48, 80)
    assert events["steps"] + events["joins"] > 3000, events
    for kind in ("prefix hits", "accepted drafts", "predicted drafts", "ended: length", "ended: stop"):
        assert events[kind] >= 20, events
    assert events["stops inside a block"] >= 8, events
    for kind in ("preemptions", "cancelled waiting", "cancelled running", "cancelled running, in flight"):
        assert events[kind] >= 3, events
    for loop in ("plain", "late", "early"):
        assert events[f"loop: {loop}"] >= 5, events


def test_fuzz_models() -> None:
    events = play(ModelLife, 12, 40)
    assert events["steps"] > 400, events
    for _, drafter in ModelLife.models:
        assert events[f"drafter: {drafter}"] >= 2, events


def assert_met_faults(events: Counter[str]) -> None:
    assert events["faults"] > 50, events
    assert events["interrupts"] > 5, events
    assert events["ended well after a fault"] > 50, events
    assert events["ended: error"] < events["ended well after a fault"], events
    for stage in STAGES:
        assert events[f"fault at {stage}"], (stage, events)


def test_fuzz_faults() -> None:
    events = play(FaultLife, 16, 80)
    assert events["steps"] > 1000, events
    assert_met_faults(events)


@pytest.mark.slow
def test_fuzz_faults_long() -> None:
    """Ten thousand steps."""
    events = play(FaultLife, 120, 120)
    assert events["steps"] > 10_000, events
    assert_met_faults(events)
