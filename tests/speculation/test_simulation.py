"""The policy simulator: published verdicts, domination of fixed widths, recorded traces."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from surefoot.errors import ConfigurationError
from surefoot.speculation import CostTable
from surefoot.speculation.simulation import (
    ADAPTIVE,
    WORKLOADS,
    DraftedBlocks,
    Outcome,
    SimulationReport,
    Trace,
    break_even_tokens,
    example_names,
    load_example,
    simulate,
    synthetic_table,
    verdict_of,
)

GAMMA = 7


def best_fixed(report: SimulationReport, concurrency: int) -> float:
    return max(report.rate(f"fixed-{width}", concurrency) for width in range(report.gamma + 1))


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda text: text.name)
def test_adaptive_policies_lie_on_or_above_every_fixed_width_and_below_the_clairvoyant(workload: object) -> None:
    report = simulate(synthetic_table(), workload, gamma=GAMMA, concurrency=(1, 4, 16, 64, 512), blocks=2048)  # type: ignore[arg-type]
    for concurrency in report.concurrencies:
        for policy in ADAPTIVE:
            assert report.rate(policy, concurrency) >= best_fixed(report, concurrency) * (1 - 1e-9), (
                policy,
                concurrency,
            )
        bound = report.rate("clairvoyant", concurrency)
        assert all(
            report.rate(policy, concurrency) <= bound * (1 + 1e-9)
            for policy in report.policies
            if policy != "target-only"
        )


def test_optimal_stopping_beats_the_stale_rule_where_confidences_move_fast_and_costs_jump() -> None:
    coarse = synthetic_table([1, 2, 4, 8, 16, 32, 64, 128, 256])
    smooth = CostTable(tuple(range(1, 33)), (tuple(70.0 + 4.0 * size for size in range(1, 33)),), draft_ms=(10.0,))
    for table, concurrency, margin in ((coarse, 6, 0.015), (smooth, 1, 0.05), (smooth, 2, 0.05)):
        report = simulate(table, WORKLOADS["fast-moving"], gamma=GAMMA, concurrency=(concurrency,), blocks=1500)
        assert report.rate("stopping", concurrency) > report.rate("stale", concurrency) * (1 + margin)
        assert report.rate("stopping", concurrency) >= report.rate("causal", concurrency)


@pytest.mark.parametrize("name", example_names())
def test_published_verdicts_are_reproduced(name: str) -> None:
    example = load_example(name)
    if example.reported_break_even is not None:
        low, high = example.reported_break_even
        assert low <= example.break_even <= high
    for workload in example.workloads:
        report = example.report(workload, blocks=600)
        # What ran there: the full window, and the stale rule. Looking at current confidences can turn a loss into
        # break-even on these machines, never into a gain.
        for policy in ("verify-all", "stale"):
            assert verdict_of(report.speedup(policy)) == workload.reported_verdict
        for policy in ("causal", "stopping"):
            assert (verdict_of(report.speedup(policy)) == "gain") == (workload.reported_verdict == "gain")
        low, high = workload.reported_tokens_per_second
        assert 0.85 * low < 1000 * report.rate("stale", 1) < 1.25 * high


def test_the_examples_cover_a_gain_and_both_losses() -> None:
    verdicts = {
        (name, workload.name): workload.reported_verdict
        for name in example_names()
        for workload in load_example(name).workloads
    }
    assert verdicts["a4000-tp4", "structured code"] == "gain"
    assert verdicts["a4000-tp4", "open-ended poem and reasoning"] == "loss"
    assert verdicts["rtx6000-ada-offload", "mixed"] == "loss"
    with pytest.raises(ConfigurationError, match="a4000-tp4"):
        load_example("nonesuch")


def test_break_even_is_the_cost_of_a_step_in_tokens_of_the_target() -> None:
    table = CostTable((1, 2, 3), ((10.0, 12.0, 15.0),), draft_ms=(3.0,), fixed_overhead_ms=2.0)
    assert break_even_tokens(table, 2) == pytest.approx((3 + 15 + 2) / (10 + 2))
    assert break_even_tokens(table, 2, target_only_ms=10.0) == pytest.approx(2.0)


def test_synthetic_text_has_the_acceptance_it_was_asked_for() -> None:
    text = WORKLOADS["chat"].with_acceptance(0.42, 5)
    assert text.blocks(400, 8, 5, seed=9).survival.mean() == pytest.approx(0.42, abs=0.02)
    with pytest.raises(ConfigurationError, match="acceptance"):
        text.with_acceptance(1.0, 5)


def recorded(steps: int = 400, requests: int = 3, seed: int = 0) -> list[str]:
    """Lines as a recorder writes them: the fast-moving text with what became of its full windows."""
    rng = np.random.default_rng(seed)
    blocks = WORKLOADS["fast-moving"].blocks(steps, requests, GAMMA, seed)
    confidence = blocks.survival[:, :, :1].copy()
    ratio = blocks.survival[:, :, 1:] / blocks.survival[:, :, :-1]
    accepted = (rng.random(blocks.survival.shape) < np.concatenate([confidence, ratio], axis=2)).cumprod(2).sum(2)
    return [
        json.dumps(
            {
                "blocks": [
                    {"request": f"r{r}", "survival": row.tolist(), "verified": GAMMA, "accepted": int(accepted[t, r])}
                    for r, row in enumerate(blocks.survival[t])
                ]
            }
        )
        for t in range(steps)
    ]


def test_recorded_outcomes_decide_and_stopping_beats_stale_on_them() -> None:
    trace = Trace.read(recorded())
    assert trace.gamma == GAMMA
    assert len(trace.requests) == 3
    smooth = CostTable(tuple(range(1, 33)), (tuple(70.0 + 4.0 * size for size in range(1, 33)),), draft_ms=(10.0,))
    report = simulate(smooth, trace, gamma=GAMMA, concurrency=(1, 2), blocks=1200)
    assert report.workload == "trace"
    for concurrency in (1, 2):
        assert report.rate("stopping", concurrency) > report.rate("stale", concurrency) * 1.03
        for policy in report.policies:
            if policy != "target-only":
                assert report.rate(policy, concurrency) <= report.rate("clairvoyant", concurrency) * (1 + 1e-9)
    with pytest.raises(ConfigurationError, match=r"gamma=7.*gamma=5"):
        simulate(smooth, trace, gamma=5)


def test_outcomes_of_trimmed_windows_are_unknown_unless_a_token_was_rejected() -> None:
    block = {"request": "a", "survival": [0.9, 0.8]}
    lines = [
        json.dumps({"blocks": [{**block, "verified": 1, "accepted": 1}]}),
        json.dumps({"blocks": [{**block, "verified": 1, "accepted": 0}]}),
        json.dumps({"blocks": [{**block, "accepted": 2}]}),
        "",
        json.dumps({"blocks": [block]}),
    ]
    assert Trace.read(lines).requests[0][1].tolist() == [-1, 0, 2, -1]
    assert Trace.read(lines).blocks(8, 2, 2, seed=0).accepted is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no block"),
        (["{"], "line 1"),
        (
            ['{"blocks": [{"request": "a", "survival": [0.5]}]}', '{"blocks": [{"request": "a", "survival": [1.5]}]}'],
            "line 2",
        ),
        (['{"blocks": [{"request": "a"}]}'], "survival"),
        (['{"steps": []}'], "blocks"),
    ],
)
def test_malformed_traces_name_the_line(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trace.read(lines)


class _Fixed:
    """A source of given blocks."""

    name = "given"

    def __init__(self, blocks: DraftedBlocks) -> None:
        self._blocks = blocks

    def blocks(self, steps: int, lanes: int, gamma: int, seed: int) -> DraftedBlocks:
        repeats = -(-steps // len(self._blocks.survival))
        survival = np.tile(self._blocks.survival, (repeats, 1, 1))[:steps]
        accepted = None if self._blocks.accepted is None else np.tile(self._blocks.accepted, (repeats, 1))[:steps]
        return DraftedBlocks(survival, accepted, np.zeros((steps, lanes), dtype=bool))


def test_rates_by_hand() -> None:
    table = CostTable((1, 2, 3), ((10.0, 12.0, 20.0),), draft_ms=(2.0,))
    blocks = DraftedBlocks(np.array([[[0.5, 0.25]]], np.float32), None, np.ones((1, 1), bool))
    report = simulate(table, _Fixed(blocks), gamma=2, concurrency=(1,), blocks=64)  # type: ignore[arg-type]
    assert report.rate("target-only", 1) == pytest.approx(1 / 10)
    assert report.rate("fixed-1", 1) == pytest.approx(1.5 / 14)
    assert report.rate("verify-all", 1) == report.rate("fixed-2", 1) == pytest.approx(1.75 / 22)
    assert report.rate("threshold", 1) == pytest.approx(1.5 / 14)
    for policy in ADAPTIVE:
        assert report.rate(policy, 1) == pytest.approx(1.5 / 14)
    # The clairvoyant verifies what will be accepted: nothing in 12 ms, one in 14 ms, two in 22 ms.
    ms = 0.5 * 12 + 0.25 * 14 + 0.25 * 22
    assert report.rate("clairvoyant", 1) == pytest.approx((0.5 * 1 + 0.25 * 2 + 0.25 * 3) / ms, rel=1e-6)
    known = replace(blocks, accepted=np.array([[2]]))
    report = simulate(table, _Fixed(known), gamma=2, concurrency=(1,), blocks=64)  # type: ignore[arg-type]
    assert report.rate("fixed-2", 1) == pytest.approx(3 / 22)
    assert report.rate("clairvoyant", 1) == pytest.approx(2 / 14)  # 3 in 22 ms would be slower


def test_report_is_plain_data() -> None:
    report = simulate(synthetic_table(), WORKLOADS["chat"], gamma=3, concurrency=(1, 2), blocks=64)
    data = json.loads(json.dumps(report.to_dict()))
    assert {entry["policy"] for entry in data["outcomes"]} == set(report.policies)
    assert [concurrency for concurrency, _ in report.curve("stale")] == [1, 2]
    assert report.concurrencies == [1, 2]


def report_of(speedups: dict[int, float]) -> SimulationReport:
    """A policy with these speedups over a target-only rate of 2."""
    entries = [
        Outcome(policy, count, 2.0 * rate, 1.0, 1.0)
        for count, speedup in speedups.items()
        for policy, rate in (("target-only", 1.0), ("fixed-0", 0.9), ("stopping", speedup))
    ]
    return SimulationReport("text", 1, tuple(entries))


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ({1: 2.0, 8: 1.5}, "pays from 1 to 8 requests at once: at best 2.00 times target-only, at 1"),
        (
            {1: 2.0, 8: 1.5, 64: 0.91, 512: 0.8},
            "pays up to 8 requests at once: at best 2.00 times target-only, at 1; "
            "target-only is faster at 64 (0.91 times), 512 (0.80 times)",
        ),
        ({1: 0.7, 8: 0.9}, "does not pay: at best 0.90 times target-only, at 8 requests at once"),
        (
            {1: 0.9, 8: 1.2, 64: 0.5},
            "pays at 8 requests at once: at best 1.20 times target-only, at 8; "
            "target-only is faster at 1 (0.90 times), 64 (0.50 times)",
        ),
    ],
)
def test_the_verdict_compares_with_the_target_alone(speedups: dict[int, float], verdict: str) -> None:
    assert report_of(speedups).verdict("stopping") == verdict


def test_a_trace_has_the_last_cost_table_of_its_file() -> None:
    tables = [CostTable((1, 2), ((1.0, float(last)),)) for last in (2, 3)]
    block = {"request": "a", "survival": [0.5]}
    lines = [json.dumps({"blocks": [block], "cost_table": table.to_dict()}) for table in tables]
    assert Trace.read([*lines, json.dumps({"blocks": [block]})]).table == tables[1]
    assert Trace.read([json.dumps({"blocks": [block], "cost_table": None})]).table is None
    with pytest.raises(ConfigurationError, match="trace line 1: cost table lacks 'token_buckets'"):
        Trace.read([json.dumps({"blocks": [], "cost_table": {"format": "surefoot-cost-table", "version": 1}})])
