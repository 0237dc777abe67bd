"""`surefoot profile`, and that the other commands find what it saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.engine.fingerprint import table_path
from surefoot.speculation.cost import CostTable
from tests.cli.conftest import strict_json

PROMPT = "def stop(n): return n\ndef stop(n):"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from surefoot.kernels import native

    native.available()  # loaded from the real cache
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_is_saved_where_generate_finds_it(run: Callable[..., Any], checkpoints: Path, cache: Path) -> None:
    engine = ("-m", str(checkpoints / "target"), "-d", "prompt-lookup", "-g", "3")
    before = strict_json(run("generate", PROMPT, *engine, "-n", "100", "--json").stdout)
    assert "no cost table" in before["engine"]["planner"]
    result = run("profile", *engine, "--max-num-seqs", "2", "--seconds", "0")
    assert result.exit_code == 0, result.stderr
    assert "V(k)/V(1)" in result.stdout
    assert "emitted tokens" in result.stdout
    files = list((cache / "cost-tables").glob("*.json"))
    assert len(files) == 1
    assert str(files[0]) in result.stderr
    after = strict_json(run("generate", PROMPT, *engine, "-n", "100", "--json").stdout)
    assert "measured cost table" in after["engine"]["planner"]
    assert after["text"] == before["text"]
    other = strict_json(run("generate", PROMPT, *engine[:-1], "2", "-n", "4", "--json").stdout)
    assert "no cost table" in other["engine"]["planner"]


def test_a_table_of_another_engine_is_refused_with_the_field(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, cache: Path
) -> None:
    target, table = str(checkpoints / "target"), tmp_path / "table.json"
    result = run(
        *("profile", "-m", target, "-d", "prompt-lookup", "-g", "2", "--max-num-seqs", "1"),
        "--seconds",
        "0",
        "-o",
        str(table),
        "--json",
    )
    found = strict_json(result.stdout)
    assert found["table"]["token_buckets"] == [1, 2, 3]
    assert set(found["break_even"]) == {"1", "2"}
    assert not cache.joinpath("cost-tables").exists()
    result = run("generate", PROMPT, "-m", target, "-d", "prompt-lookup", "-g", "3", "--cost-table", str(table))
    assert result.exit_code == 2
    assert "gamma: table 2, engine 3" in result.stderr
    assert "surefoot profile" in result.stderr
    assert result.stderr.count("\n") == 1


ENGINE = ("-d", "prompt-lookup", "-g", "3", "--max-num-seqs", "2")


@pytest.mark.parametrize("form", ["sglang", "tensorrt-llm"])
def test_a_table_goes_out_and_comes_back_in_the_form_of_another_engine(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, cache: Path, form: str
) -> None:
    engine, there = ("-m", str(checkpoints / "target"), *ENGINE), tmp_path / "there.json"
    measured = strict_json(run("profile", *engine, "--seconds", "0", "--json").stdout)["table"]
    saved = next((cache / "cost-tables").glob("*.json"))
    before = CostTable.load(saved)
    assert before.to_dict() == measured
    # A tiny engine on a busy machine may measure a flat curve, which nobody plans with.
    rising = tuple(tuple(ms * (1 + index) for index, ms in enumerate(curve)) for curve in before.verify_ms)
    before = dataclasses.replace(before, verify_ms=rising)
    before.save(saved)
    result = run("profile", *engine, "--export", str(there), "--format", form)
    assert result.exit_code == 0, result.stderr
    assert str(there) in result.stderr
    result = run("profile", *engine, "--import", str(there), "--format", form)
    assert result.exit_code == 0, result.stderr
    after = CostTable.load(saved, before.fingerprint)  # of this engine, where every start looks
    context = before.context_lengths[0]
    for requests in (1, 2):
        expected = before.step_costs(requests, requests, 3 * requests + 1, context)
        assert after.step_costs(requests, requests, 3 * requests + 1).tolist() == pytest.approx(expected.tolist())
    again = strict_json(run("generate", PROMPT, *engine[:-2], "-n", "4", "--json").stdout)
    assert "measured cost table" in again["engine"]["planner"]
    assert again["engine"]["cost_table"]["steadiness"] == "steadiness not known"


def test_an_export_takes_the_times_at_the_length_asked_for(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, cache: Path
) -> None:
    engine, there = ("-m", str(checkpoints / "target"), *ENGINE), tmp_path / "there.json"
    result = run("profile", *engine, "--seconds", "0", "-o", str(tmp_path / "table.json"), "--json")
    table = CostTable.from_dict(strict_json(result.stdout)["table"])
    rising = tuple(
        tuple(ms * (1 + index) + rows for rows, ms in enumerate(curve)) for index, curve in enumerate(table.verify_ms)
    )
    table_path(table.fingerprint).parent.mkdir(parents=True)
    table = dataclasses.replace(table, verify_ms=rising)
    table.save(table_path(table.fingerprint))
    longest = table.context_lengths[-1]
    result = run(
        "profile", *engine, "--export", str(there), "--format", "tensorrt-llm", "--context", str(longest), "--json"
    )
    shown = strict_json(result.stdout)
    assert shown["context"] == longest
    written = strict_json(there.read_text())
    assert written == shown["data"]
    at = dict(zip(written["token_counts"], written["step_time_ms"], strict=True))
    assert at[1] == pytest.approx(table.verify_ms_at(1, longest))
    assert at[8] == pytest.approx(table.verify_ms_at(8, longest))


def test_an_export_measures_where_nothing_was_measured(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.cli.profile.QUICK_SECONDS", 0.0)
    monkeypatch.setattr("surefoot.cli.profile.LONGER_SECONDS", 0.0)
    there = tmp_path / "there.json"
    result = run("profile", "-m", str(checkpoints / "target"), *ENGINE, "--export", str(there), "--format", "sglang")
    assert result.exit_code == 0, result.stderr
    assert "no cost table for this engine: measuring" in result.stderr
    assert strict_json(there.read_text())["m_probes"][-1] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--import", "a", "--export", "b", "--format", "sglang"), "--import and --export exclude each other"),
        (("--import", "a"), "add --format sglang or tensorrt-llm"),
        (("--export", "a"), "add --format sglang or tensorrt-llm"),
        (("--export", "a", "--format", "vllm"), "--format is 'vllm'; allowed: sglang or tensorrt-llm"),
        (("--format", "sglang"), "give --import FILE or --export FILE"),
        (("--context", "3"), "--context is of --export"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_loaded(
    run: Callable[..., Any], options: tuple[str, ...], message: str
) -> None:
    result = run("profile", "-m", "no/model", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("{}", "sample_batch_tokens must be a list of numbers"),
        ('{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}', "strictly increasing"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_fault(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, cache: Path, text: str | None, message: str
) -> None:
    there = tmp_path / "there.json"
    if text is not None:
        there.write_text(text)
    result = run("profile", "-m", str(checkpoints / "target"), *ENGINE, "--import", str(there), "--format", "sglang")
    assert result.exit_code == 2
    assert f"{there} as sglang: " in result.stderr
    assert message in result.stderr
    assert not (cache / "cost-tables").exists()


def test_a_steadier_table_stays_and_says_so(run: Callable[..., Any], checkpoints: Path, cache: Path) -> None:
    """An unsteady measurement does not replace it: the command says which one is used, and how to have the other."""
    engine = ("-m", str(checkpoints / "target"), *ENGINE)
    run("profile", *engine, "--seconds", "0")
    saved = next((cache / "cost-tables").glob("*.json"))
    steady = dataclasses.replace(CostTable.load(saved), unsteady=0.0)
    steady.save(saved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.profiling.samples.Samples.unsteady", lambda samples: 0.38)
        result = run("profile", *engine, "--seconds", "0")
        assert "the repeats of 38% of the points lie far apart" in result.stderr
        assert f"steadier (0% of the points unsteady): delete {saved} to replace it" in result.stderr.replace("\n", "")
        assert CostTable.load(saved) == steady
        saved.unlink()
        result = run("profile", *engine, "--seconds", "0")
        assert "38% of the points unsteady; saved to" in result.stderr
    assert CostTable.load(saved).unsteady == 0.38
    shown = strict_json(run("inspect", str(checkpoints / "target"), "--json").stdout)
    (line,) = shown["checkpoint"]["cost_tables"]
    assert "drafter prompt-lookup, gamma 3, 2 requests" in line
    assert "38% of the points unsteady" in line


def test_a_measurement_that_takes_longer_than_asked_says_so(
    run: Callable[..., Any], checkpoints: Path, cache: Path
) -> None:
    result = run("profile", "-m", str(checkpoints / "target"), *ENGINE, "--seconds", "0")
    assert "one pass over all points takes about" in result.stderr
