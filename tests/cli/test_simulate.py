"""`surefoot simulate`: synthetic texts, recorded traces, published machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.speculation.cost import CostTable
from surefoot.speculation.simulation import example_names, synthetic_table
from tests.cli.conftest import strict_json


def test_adaptive_policies_lie_on_or_above_every_fixed_width(run: Callable[..., Any], tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    result = run("simulate", "--synthetic", "--blocks", "512", "--plot", str(plot), "--json")
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert found["machine"] == "an invented accelerator"
    assert {entry["concurrency"] for entry in found["outcomes"]} == {1 << k for k in range(10)}
    for policy, gain in found["comparison"].items():
        assert gain["least"] >= -0.01, policy
    assert found["comparison"]["clairvoyant"]["least"] >= max(
        gain["least"] for policy, gain in found["comparison"].items() if policy != "clairvoyant"
    )


def test_the_verdict_says_up_to_how_many_requests_speculation_pays(run: Callable[..., Any], tmp_path: Path) -> None:
    """At 512 requests the target alone is faster on the invented accelerator: nobody must have to read that in a table."""
    options = ("simulate", "--synthetic", "--blocks", "512", "--plot", str(tmp_path / "p.png"))
    found = strict_json(run(*options, "--json").stdout)
    rates = {(entry["policy"], entry["concurrency"]): entry["tokens_per_ms"] for entry in found["outcomes"]}
    assert rates["target-only", 512] > rates["stopping", 512]
    for policy, told in found["verdicts"].items():
        pays = [count for count in (1 << k for k in range(10)) if rates[policy, count] > rates["target-only", count]]
        assert told["pays_at"] == pays
        assert pays == [1 << k for k in range(len(pays))]
        assert f"pays up to {pays[-1]} requests at once" in told["verdict"]
        assert f"target-only is faster at {2 * pays[-1]}" in told["verdict"]
        for count in (1, 512):
            assert told["speedup"][str(count)] == rates[policy, count] / rates["target-only", count]
    text = run(*options).stdout
    assert f"stopping {found['verdicts']['stopping']['verdict']}" in text


def test_the_plot_shows_the_speedup_over_target_only(run: Callable[..., Any], tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    assert run("simulate", "--synthetic", "--blocks", "64", "--plot", str(plot)).exit_code == 0
    assert "speedup over target-only" in plot.read_text()


def test_a_trace_is_replayed_on_the_machine_that_recorded_it(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ("-m", str(checkpoints / "target"), "-d", str(checkpoints / "drafter"), "--max-num-seqs", "1")
    table, trace = tmp_path / "table.json", tmp_path / "trace.jsonl"
    assert run("profile", *model, "--seconds", "0", "-o", str(table)).exit_code == 0
    recorded = run("generate", "def f", *model[:-2], "-n", "16", "--trace", str(trace), "--cost-table", str(table))
    assert recorded.exit_code == 0, recorded.stderr
    last = [json.loads(line) for line in trace.read_text().splitlines()]
    used = [CostTable.from_dict(line["cost_table"]) for line in last if line.get("cost_table")]
    assert used[0] == CostTable.load(table)
    found = strict_json(run("simulate", "--trace", str(trace), "--blocks", "64", "--json").stdout)
    assert found["machine"] == "the machine of the trace"
    alone = next(entry for entry in found["outcomes"] if (entry["policy"], entry["concurrency"]) == ("target-only", 1))
    assert alone["tokens_per_ms"] == pytest.approx(1 / used[-1].step_costs(1, 1, 1, draft_requests=0)[0])
    assert (tmp_path / "surefoot-simulate.png").exists()


def test_a_trace_without_a_cost_table_is_not_replayed_on_an_invented_machine(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    model = ("-m", str(checkpoints / "target"), "-d", str(checkpoints / "drafter"))
    assert run("generate", "def f", *model, "-n", "8", "--trace", str(trace), "--cost-table", "none").exit_code == 0
    result = run("simulate", "--trace", str(trace))
    assert result.exit_code == 2
    assert "recorded without a cost table" in result.stderr
    assert "--cost-table FILE" in result.stderr


def test_an_example_draws_its_plot_where_asked(run: Callable[..., Any], tmp_path: Path) -> None:
    plot = tmp_path / "example.svg"
    result = run("simulate", "--example", "a4000-tp4", "--blocks", "64", "--plot", str(plot))
    assert result.exit_code == 0, result.stderr
    assert "speedup over target-only" in plot.read_text()
    assert "example.svg" in result.stderr.replace("\n", "")


def test_a_recorded_trace_is_replayed_against_a_saved_table(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path
) -> None:
    trace, table = tmp_path / "trace.jsonl", tmp_path / "table.json"
    options = ("-m", str(checkpoints / "target"), "-d", str(checkpoints / "drafter"), "-n", "24")
    assert run("generate", "def stop(n):", *options, "--trace", str(trace)).exit_code == 0
    synthetic_table().save(table)
    plot = tmp_path / "curves.png"
    result = run(
        *("simulate", "--trace", str(trace), "--cost-table", str(table), "--blocks", "64"), "--plot", str(plot)
    )
    assert result.exit_code == 0, result.stderr
    assert "expected tokens per ms: trace, gamma 3" in result.stdout
    assert "clairvoyant" in result.stdout
    assert str(plot) in result.stderr.replace("\n", "")


@pytest.mark.parametrize("name", example_names())
def test_examples_reproduce_the_reported_verdicts(run: Callable[..., Any], name: str) -> None:
    found = strict_json(run("simulate", "--example", name, "--blocks", "512", "--json").stdout)
    assert found["workloads"]
    for workload in found["workloads"]:
        assert workload["verdict"] == workload["reported_verdict"], workload
    if found["reported_break_even"]:
        low, high = found["reported_break_even"]
        assert low <= found["break_even"] <= high
    text = run("simulate", "--example", name, "--blocks", "64").stdout
    assert "break-even at full width" in text
    assert found["workloads"][0]["workload"] in text


def test_examples_are_listed(run: Callable[..., Any]) -> None:
    listed = run("simulate", "--example", "list").stdout
    assert all(name in listed for name in example_names())
    assert list(strict_json(run("simulate", "--example", "list", "--json").stdout)["examples"]) == example_names()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--synthetic"),
        (("--synthetic", "--example", "list"), "one of"),
        (("--synthetic", "--workload", "opera"), "chat"),
        (("--example", "toaster"), "a4000-tp4"),
        (("--trace", "no-such-file"), "cannot read"),
        (("--synthetic", "--cost-table", "no-such-file"), "cannot read"),
        (("--synthetic", "--blocks", "1", "--plot", "curves.nonsense"), "curves.nonsense"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(run: Callable[..., Any], options: tuple[str, ...], words: str) -> None:
    result = run("simulate", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
