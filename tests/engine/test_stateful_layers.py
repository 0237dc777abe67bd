"""Layers that keep something else than a key and a value per position, served through the whole engine."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from surefoot.cache.states import StateRing
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target
from tests.engine.engines import EngineUnderTest, QueueDevice, build
from tests.engine.stateful_target import StatefulTarget

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[1], [2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2], [5, 4, 3, 2] * 7, [1, 2, 3] * 4, [3, 3, 3, 3, 1, 3, 3, 3]]


def engine_of(target: StatefulTarget, width: Any, **options: Any) -> EngineUnderTest:
    return build(cast(Target, target), PromptLookupDrafter(4, min_match=1), width=width, **options)


def texts(engine: EngineUnderTest, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    requests = engine.run(prompts, GREEDY)
    engine.assert_clean()
    return [request.output.token_ids for request in requests]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    target = StatefulTarget()
    return [target.greedy(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("width", [0, 1, 4, "0,3,1,4,2"])
@pytest.mark.parametrize("chunk", [12, 15, 64], ids="chunks of {}".format)
def test_a_recurrent_state_is_carried_through_chunks_and_rewound_in_windows(
    width: Any, chunk: int, expected: list[list[int]]
) -> None:
    engine = engine_of(StatefulTarget(), width, max_num_seqs=2, max_num_batched_tokens=chunk)
    requests = engine.run(PROMPTS, GREEDY)
    engine.assert_clean()
    assert [request.output.token_ids for request in requests] == expected
    assert width == 0 or sum(r.statistics.accepted for r in requests) > 0


def test_the_overlapped_loop_commits_the_same_states(expected: list[list[int]]) -> None:
    engine = engine_of(StatefulTarget(), "0,3,1,4,2", device=QueueDevice(), overlap=True, policy={"planner": "stale"})
    assert texts(engine) == expected


def test_a_preempted_request_starts_from_an_empty_state(expected: list[list[int]]) -> None:
    engine = engine_of(StatefulTarget(), 3, num_blocks=28, max_num_seqs=6, max_model_len=64)
    requests = engine.run(PROMPTS, GREEDY)
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output.token_ids for request in requests] == expected


def test_a_prefix_is_not_reused_where_states_cannot_follow_it(expected: list[list[int]]) -> None:
    engine = engine_of(StatefulTarget(), 3, prefix_reuse=True)
    assert texts(engine) == expected
    again = engine.run(PROMPTS, GREEDY)
    assert [request.cached_tokens for request in again] == [0] * len(PROMPTS)
    assert [request.output.token_ids for request in again] == expected


@pytest.mark.parametrize("shared", range(1, 28))
def test_a_compressed_prefix_is_reused_at_every_offset(shared: int) -> None:
    target = StatefulTarget(recurrent=False)
    engine = engine_of(target, 4, block_size=2)
    first = [5, 4, 3, 2, 1] * 6
    second = [*first[:shared], 0, 1]
    assert texts(engine, [first]) == [target.greedy(first, 24)]
    (request,) = engine.run([second], GREEDY)
    assert request.cached_tokens == shared // 6 * 6  # blocks of 2 positions in one group, of 6 in the other
    assert request.output.token_ids == target.greedy(second, 24)


def test_a_state_that_is_not_rewound_is_noticed(monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
    commit = StateRing.commit

    def all_rows(self: StateRing, slots: Tensor, lengths: Tensor) -> None:
        rows = lengths - self.first[slots]
        commit(self, slots, torch.where(rows > 1, self.first[slots] + 5, lengths))

    monkeypatch.setattr(StateRing, "commit", all_rows)
    assert texts(engine_of(StatefulTarget(), 4)) != expected
