"""Which drafter `--drafter auto` takes: the one that was trained for this very target, whatever it is called."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.drafters import locations, shipped
from surefoot.drafters.checkpoint import save_drafter
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.locations import CALIBRATION_FILE, shipped_drafters
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.drafters.shipped import ship, shipped_for, target_identity
from surefoot.engine.loading import load_drafter_for
from surefoot.errors import ConfigurationError, DrafterError
from surefoot.llm import LLM
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from tests.engine.engines import greedy_oracle, tiny_dspark
from tests.tiny_models import tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for shipped drafters."""
    monkeypatch.setattr(locations, "DIRECTORY", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A drafter for the tiny llama, with a calibration."""
    save_drafter(tiny_dspark(tiny_target("llama"), 3), tmp_path / "trained")
    Calibration([0.5, 2.0, 3.0], copying=[0.0, 0.25, 0.75]).save(tmp_path / "trained" / CALIBRATION_FILE)
    return tmp_path / "trained"


def loaded(target: Target, drafter: str = "auto", gamma: int | None = None) -> Any:
    return load_drafter_for(target, drafter, gamma)


def test_auto_takes_the_shipped_drafter_with_prompt_lookup(
    package: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target("llama")
    caplog.set_level(logging.INFO)
    assert isinstance(loaded(target), PromptLookupDrafter)
    assert "none is shipped for this target" in caplog.text
    ship(trained, target)
    drafter = loaded(target)
    assert isinstance(drafter, CombinedDrafter)
    assert drafter.name == "prompt-lookup+dspark"
    assert "shipped for tiny-llama" in caplog.text
    confidence: Any = drafter.confidence_source("cpu")
    assert confidence.gamma == drafter.gamma
    assert confidence.trained.calibration.temperatures.tolist() == [0.5, 2.0, 3.0]
    assert drafter.trained.copying.tolist() == [0.0, 0.25, 0.75]
    assert isinstance(loaded(target, "prompt-lookup"), PromptLookupDrafter)
    assert loaded(target, "none") is None


def test_it_serves(package: Path, trained: Path) -> None:
    target = tiny_target("llama")
    ship(trained, target)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    llm = LLM(target, max_model_len=64)
    output = llm.generate([prompt], GREEDY, progress=False)[0]
    assert output.token_ids == greedy_oracle(target, [prompt], 24)[0]
    assert llm.describe()["drafter"] == "prompt-lookup+dspark"
    assert set(output.statistics.sources) == {"prompt-lookup", "dspark"}


def test_a_target_is_known_by_its_weights_and_not_by_its_name(package: Path, trained: Path) -> None:
    target = tiny_target("llama")
    ship(trained, target)
    renamed = Target(copy.deepcopy(target.model), None, name="/somewhere/else")
    assert shipped_for(renamed) is not None
    namesake = Target(copy.deepcopy(tiny_target("llama", seed=1).model), None, name=target.name)
    assert shipped_for(namesake) is None
    assert shipped_for(tiny_target("qwen3")) is None  # same sizes, another architecture
    namesake.model.get_input_embeddings().weight.data.copy_(target.embed_tokens.weight)
    assert shipped_for(namesake) is not None


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_packing_for_serving_keeps_the_identity(quantize: Any) -> None:
    model = copy.deepcopy(tiny_target("gemma3", dtype="bfloat16").model)
    target = Target(model, None, name="packed")
    before = target_identity(target)
    optimise(target.model, quantize=quantize)
    assert target_identity(target) == before
    assert target_identity(Target(copy.deepcopy(tiny_target("gemma3", dtype="bfloat16").model.float()))) == before


def test_identities_of_other_forms_are_kept(package: Path, trained: Path) -> None:
    target = tiny_target("llama")
    ship(trained, target)
    other = Target(copy.deepcopy(target.model), None, name=target.name)
    other.embed_tokens.weight.data.mul_(1.01)
    assert shipped_for(other) is None
    both = ship(trained, other)
    assert len(both.identities) == 2
    assert shipped_for(other) == shipped_for(target) == both


def test_what_does_not_fit_is_refused_when_it_is_shipped(package: Path, trained: Path, monkeypatch: Any) -> None:
    with pytest.raises(DrafterError, match=r"does not fit tiny-llama: .*vocabulary has 64 tokens, target's 32"):
        ship(trained, tiny_target("llama", vocab_size=32))
    monkeypatch.setattr(shipped, "LARGEST", 1000)
    with pytest.raises(DrafterError, match="MiB"):
        ship(trained, tiny_target("llama"))
    assert not shipped_drafters()


@pytest.mark.parametrize("damage", ["json", "format", "weights", "config"])
def test_a_damaged_entry_falls_back_to_prompt_lookup_and_says_so(
    package: Path, trained: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target("llama")
    home = ship(trained, target).path
    if damage == "json":
        (home / "target.json").write_text("{")
    elif damage == "format":
        (home / "target.json").write_text(json.dumps({"format": "x"}))
    elif damage == "weights":
        (home / "model.safetensors").write_bytes(b"short")
    else:
        (home / "config.json").unlink()
    assert isinstance(loaded(target), PromptLookupDrafter)
    assert "damaged" in caplog.text or "cannot be used" in caplog.text


def test_both_in_one_with_a_drafter_of_ones_own(trained: Path) -> None:
    target = tiny_target("llama")
    drafter = loaded(target, f"prompt-lookup+{trained}")
    assert isinstance(drafter, CombinedDrafter)
    assert (drafter.gamma, drafter.trained.gamma) == (7, 3)
    assert (loaded(target, f"prompt-lookup+{trained}", 2).trained.gamma) == 2
    assert loaded(target, f"prompt-lookup+{trained}", 12).gamma == 12
    with pytest.raises(DrafterError, match="unknown drafter 'prompt-lookup"):
        loaded(target, "prompt-lookup+nothing")
    with pytest.raises(ConfigurationError, match="allowed for prompt lookup: 1"):
        loaded(target, "auto", 99)
    with pytest.raises(ConfigurationError, match="allowed for prompt lookup: 1"):
        loaded(target, f"prompt-lookup+{trained}", 99)


def test_what_the_package_ships_is_whole() -> None:
    """Every drafter in the package is readable, small enough, and has its calibration."""
    for drafter in shipped_drafters():
        from surefoot.drafters.checkpoint import load_drafter

        assert drafter.identities
        loaded = load_drafter(drafter.path)
        fitted = Calibration.load(drafter.path / CALIBRATION_FILE, loaded.gamma)
        assert loaded.has_confidence_head
        assert fitted.copying is not None
        assert fitted.copying[-1] > fitted.copying[1]
        assert sum(file.stat().st_size for file in drafter.path.iterdir()) <= shipped.LARGEST
        assert all(torch.isfinite(tensor).all() for tensor in loaded.model.own_tensors().values())
