"""`surefoot bench` on a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.bench import planner
from surefoot.bench.decode import Decode
from surefoot.bench.throughput import ArmFigures, jobs_of
from surefoot.kernels import native
from surefoot.sampling import SamplingParams
from tests.cli.conftest import strict_json

ARMS = ("none", "fixed:2", "adaptive")


@pytest.fixture(autouse=True)
def _measured_in_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.available()  # loaded from the real cache
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("surefoot.cli.profile.QUICK_SECONDS", 0.2)
    monkeypatch.setattr("surefoot.cli.profile.LONGER_SECONDS", 0.2)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "{}/drafter"])
def test_throughput_has_every_column(run: Callable[..., Any], checkpoints: Path, tmp_path: Path, drafter: str) -> None:
    prompts, saved, trace = tmp_path / "prompts.txt", tmp_path / "bench.json", tmp_path / "trace.jsonl"
    prompts.write_text("def stop(n): return n def stop(n):\na stop is a stop is a\n")
    result = run(
        *("bench", "throughput", "-m", str(checkpoints / "target"), "-d", drafter.format(checkpoints), "-g", "3"),
        *("-c", "1,3", "--arms", ",".join(ARMS), "--repeats", "2", "-n", "12", "--prompts", str(prompts)),
        *("--output", str(saved), "--trace", str(trace), "--json"),
    )
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert strict_json(saved.read_text())["rows"] == found["rows"]
    assert [(row["concurrency"], row["arm"]) for row in found["rows"]] == [(c, arm) for c in (1, 3) for arm in ARMS]
    for row in found["rows"]:
        assert set(row) == set(ArmFigures.__dataclass_fields__)
        assert row["identical"] is True
        assert row["tokens_per_s"] > 0
        assert row["ratio"] == pytest.approx(
            row["tokens_per_s"] / found["rows"][0 if row["concurrency"] == 1 else 3]["tokens_per_s"]
        )
        assert row["host_ms_per_step"] > 0
        assert row["target_ms"] > 0
        assert len(row["repeats"]) == 2
        # Three requests for each that runs at once, twice.
        jobs = jobs_of([[1]], SamplingParams(max_tokens=12), 3 * row["concurrency"])
        tokens = 2 * sum(job.params.max_tokens or 0 for job in jobs)
        steps = sum(row["width_histogram"].values())
        assert steps * (1 + row["accepted_length"]) == pytest.approx(tokens, rel=0.1)
        widest = max(map(int, row["width_histogram"]))
        assert widest <= {"none": 0, "fixed:2": 2, "adaptive": 3}[row["arm"]]
    assert "measuring this machine" in result.stderr
    assert "no cost table" not in found["arms"]["adaptive"]["planner"]
    assert {line["concurrency"] for line in found["summary"]} == {1, 3}
    assert len(trace.read_text().splitlines()) > 10


def test_decode_compares_with_transformers(run: Callable[..., Any], checkpoints: Path, tmp_path: Path) -> None:
    prompts, saved = tmp_path / "prompts.txt", tmp_path / "decode.json"
    prompts.write_text("a stop is a stop is a\nnot this one\n")
    asked = ("bench", "decode", "-m", str(checkpoints / "target"), "-d", "prompt-lookup", "--prompts", str(prompts))
    result = run(*asked, "--count", "1", "-n", "40", "--output", str(saved))
    assert result.exit_code == 0, result.stderr
    assert "measuring this machine" in result.stderr
    for arm in ("transformers", "target-only", "speculative", "int8"):
        assert arm in result.stdout
    assert "equal transformers' on 1 of 1 prompts" in result.stdout
    assert "the same on all" in result.stdout
    assert strict_json(saved.read_text())["speculation_identical"] is True
    found = strict_json(run(*asked, "-n", "40", "--no-int8", "--json").stdout)
    assert "no cost table" not in found["engine"]["planner"]
    assert [row["arm"] for row in found["rows"]] == ["transformers", "target-only", "speculative"]
    assert found["answers"] == 2


def test_a_decode_in_which_speculation_changes_a_token_fails(
    run: Callable[..., Any], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decode, "identical", False)
    result = run("bench", "decode", "-m", str(checkpoints / "target"), "-d", "prompt-lookup", "--no-int8", "-n", "4")
    assert result.exit_code == 1
    assert "TEXTS DIFFER" in result.stderr


def test_a_decode_in_which_nothing_is_drafted_fails(run: Callable[..., Any], checkpoints: Path, tmp_path: Path) -> None:
    refused = run("bench", "decode", "-m", str(checkpoints / "target"), "-d", "none")
    assert refused.exit_code == 2
    assert "--drafter auto, prompt-lookup or a path" in refused.stderr
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")  # nothing to look up in two tokens
    asked = ("bench", "decode", "-m", str(checkpoints / "base"), "-d", "prompt-lookup", "--prompts", str(prompts))
    result = run(*asked, "--no-int8", "-n", "2")
    assert result.exit_code == 1
    assert "NOTHING WAS DRAFTED" in result.stderr


def test_throughput_as_a_table(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run(
        *("bench", "throughput", "-m", str(checkpoints / "target"), "-d", "none", "-c", "2", "--arms", "none"),
        *("--repeats", "1", "-n", "4"),
    )
    assert result.exit_code == 0, result.stderr
    assert "host" in result.stdout
    assert "2 at once: best is none" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-c", "0"), "concurrency"),
        (("-c", "many"), "concurrency"),
        (("--arms", "fixed"), "fixed:K"),
        (("--arms", "fast"), "adaptive"),
        (("--arms", "fixed:9", "-g", "3"), "width 9"),
        (("--arms", "adaptive", "-d", "none"), "drafter"),
        (("--arms", "none", "--trace", "nowhere.jsonl"), "--arms"),
        (("--prompts", "no-such-file"), "no-such-file"),
    ],
)
def test_what_does_not_fit_is_one_line(
    run: Callable[..., Any], checkpoints: Path, options: tuple[str, ...], words: str
) -> None:
    drafter = () if "-d" in options else ("-d", "prompt-lookup")
    result = run("bench", "throughput", "-m", str(checkpoints / "target"), *drafter, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_planner_times_one_and_many_requests(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measure = planner.measure_planner
    monkeypatch.setattr(planner, "measure_planner", lambda requests: measure(requests, repeats=4))
    found = strict_json(run("bench", "planner", "--json").stdout)
    assert [row["requests"] for row in found["rows"]] == [1, 256]
    assert all(row["plan_and_allocate_us"] > 0 for row in found["rows"])
    assert "256 requests" in run("bench", "planner").stdout
