"""`surefoot simulate`: synthetic texts, recorded traces, published machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.speculation.simulation import example_names, synthetic_table
from tests.cli.conftest import strict_json


def test_adaptive_policies_lie_on_or_above_every_fixed_width(run: Callable[..., Any], tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    result = run("simulate", "--synthetic", "--blocks", "512", "--plot", str(plot), "--json")
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {entry["concurrency"] for entry in found["outcomes"]} == {1 << k for k in range(10)}
    for policy, gain in found["comparison"].items():
        assert gain["least"] >= -0.01, policy
    assert found["comparison"]["clairvoyant"]["least"] >= max(
        gain["least"] for policy, gain in found["comparison"].items() if policy != "clairvoyant"
    )


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
