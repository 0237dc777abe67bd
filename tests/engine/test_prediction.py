"""Drafts from a text that the client predicts, and how every token is said to have come."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build
from tests.engine.test_masks import PROMPT as LAW_PROMPT
from tests.engine.test_masks import law_under, p_value
from tests.tiny_models import tiny_target

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def answer(target: Any, params: SamplingParams = GREEDY, prompt: list[int] = PROMPT) -> list[int]:
    (request,) = build(target, "none").run([prompt], params)
    return request.output.token_ids


@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "combined-dspark"])
def test_a_right_prediction_is_accepted_from_its_first_token(drafter: str, device: Any) -> None:
    target = tiny_target("llama")
    expected = answer(target)
    engine = build(target, drafter, gamma=4, width=4, device=device())
    with_it, without = engine.run([PROMPT, PROMPT], [replace(GREEDY, prediction=expected), GREEDY])
    assert with_it.output.token_ids == without.output.token_ids == expected
    counts = with_it.statistics
    assert counts.steps <= 2 + 24 // 5, "the prediction was not drafted from the start"
    assert counts.accepted_by_source["prediction"] >= 18
    assert counts.accepted_by_source["prediction"] == counts.verified_by_source["prediction"]
    assert (
        without.statistics.accepted_by_source["prediction"] == without.statistics.verified_by_source["prediction"] == 0
    )


def test_a_prediction_with_an_edit_is_found_again_after_it() -> None:
    target = tiny_target("llama")
    expected = answer(target, replace(GREEDY, max_tokens=40))
    predicted = [*expected[:10], 63, 62, *expected[12:]]
    engine = build(target, "prompt-lookup", gamma=4, width=4)
    (request,) = engine.run([PROMPT], replace(GREEDY, max_tokens=40, prediction=predicted))
    assert request.output.token_ids == expected
    assert request.statistics.accepted_by_source["prediction"] >= 20
    assert request.statistics.verified_by_source["prediction"] > request.statistics.accepted_by_source["prediction"]


def test_a_prediction_is_the_drafts_of_its_own_request_alone() -> None:
    target: Any = CheapTarget()
    prompts = [[3, 1, 4, 1, 5, i] for i in range(6)]
    expected = [answer(target, GREEDY, prompt) for prompt in prompts]
    # Everybody but the third is told another's answer: too late in the list to be right by chance.
    engine = build(target, "prompt-lookup", gamma=4, width=4, max_num_seqs=3)
    got = engine.run(prompts, [replace(GREEDY, prediction=expected[2])] * 3 + [GREEDY] * 3)
    assert [request.output.token_ids for request in got] == expected
    assert got[2].statistics.accepted_by_source["prediction"] >= 15
    assert all(request.statistics.verified_by_source["prediction"] == 0 for request in got[3:])
    assert not engine.decode_step.state.predictions or len(engine.decode_step.state.predictions) <= 3


@pytest.mark.statistical
@pytest.mark.parametrize("drafter", ["prompt-lookup", "combined-dspark"])
def test_the_law_with_a_prediction_is_exact(drafter: str) -> None:
    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    params = SamplingParams(temperature=0.9, top_p=0.97, max_tokens=3, prediction=[1, 2, 3, 1, 0])
    law = law_under(target, params, lambda prefix: list(range(6)), 3)
    engine = build(target, drafter, gamma=2, width=2, max_num_seqs=512, max_model_len=24, check_layout=False)
    requests = engine.run([LAW_PROMPT] * 6000, params)
    got, distance = p_value(Counter(tuple(request.output.token_ids) for request in requests), law)
    assert distance < 0.1
    assert got > 1e-4
    assert sum(request.statistics.accepted_by_source["prediction"] for request in requests) > 100


def test_a_prediction_survives_preemption() -> None:
    target: Any = CheapTarget()
    prompts = [[3, 1, 4, 1, 5, i] for i in range(5)]
    params = replace(GREEDY, max_tokens=30)
    expected = [answer(target, params, prompt) for prompt in prompts]
    engine = build(target, "prompt-lookup", gamma=4, width=4, num_blocks=28, max_num_seqs=4)
    got = engine.run(prompts, [replace(params, prediction=text) for text in expected])
    assert sum(request.preemptions for request in got) > 0
    assert [request.output.token_ids for request in got] == expected
    assert all(request.statistics.accepted_by_source["prediction"] > 10 for request in got)


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark", "combined-dspark"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_origins_are_those_of_the_tokens(drafter: str, temperature: float) -> None:
    """One for every token; accepted ones are as many as the statistics count, by source."""
    target: Any = CheapTarget()
    engine = build(target, drafter, gamma=4, width=None if drafter == "none" else 3)
    params = SamplingParams(temperature=temperature, max_tokens=30, stop_token_ids=[9], seed=5)
    requests = [engine.add_request([*PROMPT, *PROMPT, i], params) for i in range(6)]
    heard: dict[str, list[tuple[list[int], list[str]]]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for request, event in engine.step():
            heard[request.request_id].append((event.token_ids, event.origins))
    names = {"prompt-lookup": {"prompt-lookup"}, "dspark": {engine.drafter.name if engine.drafter else ""}}
    sources = names.get(drafter, set(engine.drafter.sources[:2]) if engine.drafter else set())
    seen: Counter[str] = Counter()
    for request in requests:
        for tokens, origins in heard[request.request_id]:
            assert len(tokens) == len(origins)
            assert all(origin in sources for origin in origins[:-1])
            seen.update(origins)
        steps = heard[request.request_id]
        accepted = sum(origin in sources for _, origins in steps for origin in origins)
        assert request.statistics.accepted - 4 <= accepted <= request.statistics.accepted  # the last block may be cut
        assert steps[0][1] == ["target"], "the first token comes without a draft"
    if drafter == "none":
        assert set(seen) == {"target"}
    else:
        assert seen["recovered"] > 5
        assert seen["bonus"] > 0
        assert sum(seen[source] for source in sources) > 5
