"""`surefoot train` and `surefoot evaluate` on a tiny target: from nothing to a drafter that `surefoot generate` uses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli import app, evaluate, generate, train
from surefoot.drafters.shipped import ship
from surefoot.targets.loading import load_target
from tests.cli.conftest import strict_json

Invoke = Callable[..., Any]
FAST = (
    *("--layers", "1", "--gamma", "3", "--rank", "4", "--vocab", "200", "--max-new", "12", "--batch", "8"),
    *("--row-tokens", "64", "--row-anchors", "8", "--batch-rows", "2", "--lr", "0.003", "--held-out", "0.3"),
)


@pytest.fixture(scope="module")
def surefoot() -> Invoke:
    """Run a command; exceptions that are no exit codes pass through."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "COMMANDS", (generate, train, evaluate))
        commands = app.build_app()

    def invoke(*arguments: str) -> Any:
        result = CliRunner().invoke(commands, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def write_prompts(path: Path, first: int, count: int) -> Path:
    rows = [{"turns": [f"def stop{i}(n): return n + {i}"], "workload": "code"} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def drafter(surefoot: Invoke, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("train")
    prompts = write_prompts(home / "prompts.jsonl", 0, 20)
    result = surefoot(
        *("train", "--target", str(checkpoints / "target"), "-o", str(home / "drafter"), "--prompts", str(prompts)),
        *("--anchors", "200", *FAST),
    )
    assert result.exit_code == 0, result.stderr
    assert "anchors at" in result.stderr
    assert "held-out accepted length" in result.stderr
    printed = re.search(r"try it with: surefoot (.*)", result.stderr)
    assert printed is not None
    tried = surefoot(*shlex.split(printed[1]), "--max-tokens", "3")
    assert tried.exit_code == 0, tried.stderr
    assert "nothing drafted" not in tried.stderr
    return home / "drafter"


def test_one_command_makes_a_drafter_that_generate_uses(surefoot: Invoke, checkpoints: Path, drafter: Path) -> None:
    target = ("-m", str(checkpoints / "target"), "-n", "16", "--json")
    with_drafter = surefoot("generate", "def stop(n):", *target, "-d", str(drafter))
    assert with_drafter.exit_code == 0, with_drafter.stderr
    found = strict_json(with_drafter.stdout)
    assert found["statistics"]["drafted"] > 0
    assert (
        found["token_ids"]
        == strict_json(surefoot("generate", "def stop(n):", *target, "-d", "none").stdout)["token_ids"]
    )


def test_training_twice_gives_the_same_bytes(
    surefoot: Invoke, checkpoints: Path, drafter: Path, tmp_path: Path
) -> None:
    again = surefoot(
        *("train", "--target", str(checkpoints / "target"), "-o", str(tmp_path / "again")),
        *("--prompts", str(drafter.parent / "prompts.jsonl"), "--anchors", "200", "--json", *FAST),
        *(part for stage in ("prompts", "regenerate", "features", "train") for part in ("--stage", stage)),
    )
    assert again.exit_code == 0, again.stderr
    assert list(strict_json(again.stdout)["stages"]) == ["prompts", "regenerate", "features", "train"]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "again", drafter)]
    assert weights[0] == weights[1]


def test_evaluate_prints_the_card_and_refuses_what_was_trained_on(
    surefoot: Invoke, checkpoints: Path, drafter: Path, tmp_path: Path
) -> None:
    options = ("-m", str(checkpoints / "target"), "--max-tokens", "8", "-o", str(tmp_path / "report"))
    fresh = write_prompts(tmp_path / "fresh.jsonl", 100, 4)
    result = surefoot("evaluate", str(drafter), "--prompts", str(fresh), *options)
    assert result.exit_code == 0, result.stderr
    assert "none of the 4 prompts" in result.stdout
    assert "| fresh | 0 |" in result.stdout
    assert result.stdout.strip() == (tmp_path / "report" / "card.md").read_text().strip()
    assert (tmp_path / "report" / "reliability.png").exists()
    seen = surefoot("evaluate", str(drafter), "--prompts", str(drafter.parent / "prompts.jsonl"), *options)
    assert seen.exit_code == 2
    assert "were trained on" in seen.stderr


def test_a_shipped_drafter_is_evaluated_by_its_name(
    surefoot: Invoke, checkpoints: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.drafters.locations.DIRECTORY", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    target = load_target(str(checkpoints / "target"), quiet=True)
    target.name = "tiny"
    ship(drafter, target, tmp_path / "shipped")
    fresh = write_prompts(tmp_path / "fresh.jsonl", 100, 4)
    options = ("-m", str(checkpoints / "target"), "--prompts", str(fresh), "--max-tokens", "8")
    assert surefoot("evaluate", "tiny", *options).exit_code == 0
    assert (tmp_path / "tiny-evaluation" / "card.md").exists()
    unknown = surefoot("evaluate", "tin", *options)
    assert unknown.exit_code == 2
    assert "drafter tin is no directory" in unknown.stderr
    assert "one of tiny" in unknown.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gamma", "16"), ("gamma", "15")),
        (("--head", "tail"), ("tail", "vanilla")),
        (("--stage", "polish"), ("polish", "regenerate")),
        (("--temperatures", "warm"), ("warm", "numbers")),
        (("--layout", "paper"), ("paper", "deepspec")),
        (("--minutes", "0"), ("minutes", "more than 0")),
        (("--prompts", "no-such-file"), ("no-such-file", "builtin")),
    ],
)
def test_what_cannot_be_is_one_line_with_the_remedy(
    surefoot: Invoke, checkpoints: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = surefoot("train", "-m", str(checkpoints / "target"), "-o", str(tmp_path / "out"), *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
