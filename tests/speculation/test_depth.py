"""How deep to draft: the best expected rate over past blocks, by brute force on small tables."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.speculation import CostTable, StepLoad
from surefoot.speculation.depth import PROBE_EVERY, DraftDepth

GAMMA = 6


def table(row_ms: float, draft_row_ms: float) -> CostTable:
    """V rises by `row_ms` a row from 50, D by `draft_row_ms` from 2."""
    depths = tuple(range(1, GAMMA + 1))
    return CostTable(
        token_buckets=(1, 256),
        verify_ms=((50.0, 50.0 + 255 * row_ms),),
        captured_tokens=0,
        draft_requests=(1, 16),
        draft_ms=(2 + GAMMA * draft_row_ms, 2 + 16 * GAMMA * draft_row_ms),
        draft_depths=depths,
        draft_depth_ms=tuple(2 + depth * draft_row_ms for depth in depths),
    )


def load(requests: int) -> StepLoad:
    return StepLoad(requests=requests, limits=[GAMMA] * requests)


def blocks(confidence: float, count: int = 64, seed: int = 0) -> np.ndarray:
    spread = np.random.default_rng(seed).uniform(-0.15, 0.15, (count, GAMMA))
    return np.cumprod(np.clip(confidence + spread, 0.01, 0.99), axis=1)


def best_by_hand(costs: CostTable, requests: int, survival: np.ndarray) -> int:
    """The same rate, position by position."""
    rates = {}
    for depth in range(1, GAMMA + 1):
        for threshold in np.append(np.quantile(survival, np.linspace(0, 1, 16)), 2.0):
            kept = [[s for s in block[:depth] if s >= threshold] for block in survival]
            rows = requests * (1 + np.mean([len(block) for block in kept]))
            tokens = requests * (1 + np.mean([sum(block) for block in kept]))
            verify = 50.0 + (rows - 1) * (costs.verify_ms[0][1] - 50.0) / 255
            rates[depth, threshold] = tokens / (verify + costs.draft_ms_at(requests, depth))
    return max(rates, key=rates.__getitem__)[0]


@pytest.mark.parametrize("requests", [1, 4, 16])
@pytest.mark.parametrize("row_ms", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("confidence", [0.4, 0.8])
def test_depth_is_the_one_of_the_best_rate(requests: int, row_ms: float, confidence: float) -> None:
    chooser, costs, survival = DraftDepth(GAMMA), table(row_ms, 0.8), blocks(confidence)
    chooser.observe(survival)
    assert (chooser.choose(costs, load(requests)) or GAMMA) == best_by_hand(costs, requests, survival)


def test_dear_rows_and_many_requests_make_blocks_shorter() -> None:
    survival = blocks(0.6)

    def depth(row_ms: float, requests: int) -> int:
        chooser = DraftDepth(GAMMA)
        chooser.observe(survival)
        return chooser.choose(table(row_ms, 0.5), load(requests)) or GAMMA

    assert depth(0.01, 1) == GAMMA
    assert depth(20.0, 1) < depth(4.0, 1) < GAMMA
    assert depth(2.0, 16) < depth(2.0, 1)


def test_whole_blocks_until_enough_is_known_and_now_and_then() -> None:
    chooser, costs = DraftDepth(GAMMA, least=16), table(20.0, 0.5)
    chooser.observe(blocks(0.3, count=15))
    assert chooser.choose(costs, load(1)) is None
    chooser.observe(blocks(0.3, count=1))
    depths = [chooser.choose(costs, load(1)) for _ in range(2 * PROBE_EVERY)]
    assert depths.count(None) == 2
    assert {depth for depth in depths if depth} == {1}


def test_workload_that_changes_changes_the_depth() -> None:
    chooser, costs = DraftDepth(GAMMA, keep=64), table(2.0, 0.5)
    chooser.observe(blocks(0.2))
    shallow = chooser.choose(costs, load(1))
    chooser.observe(blocks(0.9))
    assert shallow is not None
    assert (chooser.choose(costs, load(1)) or GAMMA) > shallow


def test_nothing_is_cut_without_measured_depths_or_drafts() -> None:
    chooser, costs = DraftDepth(GAMMA), table(20.0, 0.5)
    chooser.observe(blocks(0.3))
    assert chooser.choose(None, load(1)) is None
    assert chooser.choose(CostTable((1, 8), ((1.0, 9.0),)), load(1)) is None
    assert chooser.choose(costs, StepLoad(requests=4, limits=[])) is None


def test_a_new_table_is_planned_with_at_once() -> None:
    chooser, survival = DraftDepth(GAMMA), blocks(0.6)
    chooser.observe(survival)
    chosen = [chooser.choose(costs, load(4)) or GAMMA for costs in (table(0.01, 0.01), table(8.0, 3.0))]
    assert chosen == [best_by_hand(costs, 4, survival) for costs in (table(0.01, 0.01), table(8.0, 3.0))]
    assert chosen[0] > chosen[1]
