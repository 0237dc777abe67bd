"""`surefoot profile`, and that the other commands find what it saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
