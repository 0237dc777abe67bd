"""`surefoot calibrate` on a tiny target and drafter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.drafters.locations import CALIBRATION_FILE, calibration_destination, find_calibration
from surefoot.llm import LLM
from surefoot.speculation.calibration import Calibration, Provenance
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


# -- shipped drafters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny drafter in the package, with a calibration from many blocks, and an empty cache; the package's directory."""
    from surefoot.drafters.shipped import ship
    from surefoot.targets.loading import load_target

    monkeypatch.setattr("surefoot.drafters.locations.DIRECTORY", tmp_path / "shipped")
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    source = Path(shutil.copytree(checkpoints / "drafter", tmp_path / "drafter"))
    Calibration([1.0] * 3, Provenance(num_samples=40)).save(source / CALIBRATION_FILE)
    return ship(source, load_target(str(checkpoints / "target"))).path


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["def stop(n):", "and again"]}\n')
    return prompts


@pytest.mark.parametrize("name", ["auto", "target", "prompt-lookup+target"])
def test_a_shipped_drafter_is_calibrated_by_its_name_into_the_cache_and_later_starts_use_it(
    run: Callable[..., Any], checkpoints: Path, shipped: Path, asked: Path, tmp_path: Path, name: str
) -> None:
    before, target = contents(shipped), str(checkpoints / "target")
    result = run("calibrate", "-m", target, "-d", name, "--prompts", str(asked), "-n", "40", "--json")
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert contents(shipped) == before
    path = Path(found["path"])
    assert path.parent == tmp_path / "cache" / "calibrations"
    assert path == calibration_destination(shipped)
    for drafter in ("auto", "target"):
        llm = LLM(target, drafter=drafter)
        source: Any = llm.engine.policy.confidence
        head = source.trained if drafter == "auto" else source
        assert head.calibration.temperatures.tolist() == pytest.approx(found["temperatures"])
        assert head.calibration.provenance.num_samples == found["num_samples"] != 40
        llm.close()
    (shipped / "model.safetensors").write_bytes(
        before["model.safetensors"] + b" "
    )  # other weights: not their calibration
    assert find_calibration(shipped) == shipped / CALIBRATION_FILE


def test_few_blocks_do_not_replace_a_calibration_made_from_many(
    run: Callable[..., Any], checkpoints: Path, drafter: Path, asked: Path, tmp_path: Path
) -> None:
    path, target = drafter / CALIBRATION_FILE, str(checkpoints / "target")
    options = ("-m", target, "-d", str(drafter), "--prompts", str(asked), "-t", "0")
    Calibration([1.5] * 3, Provenance(num_samples=13_216)).save(path)
    kept = path.read_bytes()
    # Two answers of 40 tokens hold 78 blocks at most: that is seen before anything is loaded.
    early = run("calibrate", "-m", "/nowhere/at/all", *options[2:], "-n", "40")
    assert early.exit_code == 2
    assert "13,216 blocks and is kept, this one would be from at most 78" in early.stderr
    Calibration([1.5] * 3, Provenance(num_samples=300)).save(path)
    kept = path.read_bytes()
    late = run("calibrate", *options, "-n", "78")
    assert late.exit_code == 2
    assert "300 blocks and is kept, this one is from" in late.stderr
    assert "--force" in late.stderr
    assert path.read_bytes() == kept
    assert run("calibrate", *options, "-n", "40", "-o", str(tmp_path / "new.json")).exit_code == 0
    assert path.read_bytes() == kept
    assert run("calibrate", *options, "-n", "40", "--force").exit_code == 0
    assert Calibration.load(path, 3).provenance.num_samples < 80


@pytest.mark.parametrize(
    ("drafter", "model", "words"),
    [
        ("auto", "target", "no drafter is shipped for"),
        ("none", "target", "the drafter none has no confidence head"),
        ("stranger", "target", "does not fit .*hidden size 40, target has 32"),
        ("headless", "target", "headless has no confidence head to calibrate"),
        ("nobody", "target", "drafter 'nobody' does not exist"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_anything_is_loaded(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, model: str,
    words: str,
) -> None:  # fmt: skip
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("surefoot.cli.options.load_llm", load)
    monkeypatch.setattr("surefoot.drafters.locations.DIRECTORY", tmp_path / "none")
    config = json.loads((checkpoints / "drafter" / "config.json").read_text())
    for name, change in (("headless", {"enable_confidence_head": False}), ("stranger", {})):
        shutil.copytree(checkpoints / ("stranger" if name == "stranger" else "drafter"), tmp_path / name)
        if change:
            (tmp_path / name / "config.json").write_text(json.dumps(config | change))
    monkeypatch.chdir(tmp_path)
    result = run("calibrate", "-m", str(checkpoints / model), "-d", drafter)
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.stderr.split())), result.stderr


def test_gamma_beyond_the_block_is_refused(run: Callable[..., Any], checkpoints: Path, drafter: Path) -> None:
    result = run("calibrate", "-m", str(checkpoints / "target"), "-d", str(drafter), "-g", "9")
    assert result.exit_code == 2
    assert "gamma is 9; allowed for this drafter: 1 … 3" in result.stderr


def test_a_shipped_drafter_generates_by_its_name(run: Callable[..., Any], checkpoints: Path, shipped: Path) -> None:
    target = str(checkpoints / "target")
    texts = [
        strict_json(run("generate", "def", "-m", target, "-d", name, "-n", "8", "--json").stdout)["token_ids"]
        for name in ("none", "target", "prompt-lookup+target")
    ]
    assert texts[0] == texts[1] == texts[2]
    wrong = run("generate", "def", "-m", target, "-d", "tarjet", "-n", "8")
    assert wrong.exit_code == 2
    assert "prompt-lookup, none, target, a checkpoint directory" in " ".join(wrong.stderr.split())
