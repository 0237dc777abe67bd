"""`surefoot calibrate` on a tiny target and drafter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.drafters.locations import CALIBRATION_FILE
from surefoot.speculation.calibration import Calibration
from tests.cli.conftest import strict_json


@pytest.fixture
def drafter(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "drafter", tmp_path / "drafter"))


def test_temperatures_are_fitted_and_saved_beside_the_drafter(
    run: Callable[..., Any], checkpoints: Path, drafter: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"turns": ["def stop(n):", "and again"]}\n{"category": "chat", "turns": ["a stop is a stop"]}\n'
    )
    target = str(checkpoints / "target")
    options = ("-m", target, "-d", str(drafter), "--prompts", str(prompts), "-n", "40")
    result = run("calibrate", *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    path = drafter / CALIBRATION_FILE
    saved = Calibration.load(path, 3)
    assert saved.temperatures.tolist() == pytest.approx(found["temperatures"])
    assert saved.provenance.num_samples == found["num_samples"] > 60
    assert saved.provenance.dataset == str(prompts)
    assert saved.copying is not None
    assert saved.copying.tolist() == pytest.approx(found["copying"])
    assert saved.copying.max() > 0  # a tiny greedy model repeats itself
    for before, after in zip(found["before"], found["after"], strict=True):
        assert after["ece"] <= before["ece"] + 1e-6
    generated = strict_json(run("generate", "def", "-m", target, "-d", str(drafter), "-n", "8", "--json").stdout)
    assert len(generated["token_ids"]) == 8
    path.write_text("{}")  # it is read: a broken one does not pass in silence
    assert "temperatures" in run("generate", "def", "-m", target, "-d", str(drafter), "-n", "8").stderr
    path.unlink()
    text = run("calibrate", *options, "-o", str(tmp_path / "elsewhere.json"))
    assert "ECE" in text.stdout
    assert "elsewhere.json" in text.stderr
    assert not path.exists()


def test_a_drafter_without_a_head_needs_no_file(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run("calibrate", "-m", str(checkpoints / "target"), "-d", "prompt-lookup")
    assert result.exit_code == 2
    assert "online estimator" in result.stderr
    result = run("calibrate", "-m", str(checkpoints / "target"), "-d", "prompt-lookup", "-o", "somewhere.json")
    assert result.exit_code == 2
    assert "online estimator" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"), [("", "no prompt"), ("{}", "turns"), ("nonsense", "not JSON"), ('{"turns": [1]}', "turns")]
)
def test_prompts_that_are_none_are_refused(run: Callable[..., Any], tmp_path: Path, text: str, words: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    result = run("calibrate", "-d", str(tmp_path), "--prompts", str(prompts))
    assert result.exit_code == 2
    assert words in result.stderr
