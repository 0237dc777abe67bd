"""A drafter served with fewer drafts than it was trained for takes the first temperatures of its calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.errors import CalibrationError
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.estimator import Evidence
from tests.engine.engines import tiny_drafter
from tests.tiny_models import tiny_target


@pytest.mark.parametrize("gamma", [1, 3, 4])
def test_first_temperatures(gamma: int, tmp_path: Path) -> None:
    drafter = tiny_drafter(tiny_target(), "dspark", 4)
    weights, sharpness = torch.randn(2, 3, 4), torch.tensor([1.5, 1.25, 1.0, 2.0])
    Calibration([1.5, 0.5, 2.0, 3.0], weights=weights, sharpness=sharpness).save(tmp_path / "calibration.json")
    drafter.gamma = gamma
    source = drafter.confidence_source("cpu", tmp_path / "calibration.json")
    fitted = source.calibration
    assert source.gamma == fitted.gamma == gamma
    assert fitted.temperatures.tolist() == [1.5, 0.5, 2.0, 3.0][:gamma]
    assert torch.equal(fitted.weights, weights[..., :gamma])
    assert torch.equal(drafter.sharpness, sharpness[:gamma])
    logits, signal = torch.randn(3, gamma), torch.randn(3, gamma)
    expected = torch.sigmoid(
        torch.stack([logits, signal, torch.ones_like(logits)], 1).mul(weights[0, :, :gamma]).sum(1)
    )
    torch.testing.assert_close(source.confidence(Evidence(logits, signal)), expected)


@pytest.mark.parametrize("gamma", [2, 4])
def test_a_file_for_another_block_is_refused(gamma: int, tmp_path: Path) -> None:
    drafter = tiny_drafter(tiny_target(), "dspark", 4)
    drafter.gamma = gamma
    Calibration([1.0] * 5).save(tmp_path / "calibration.json")
    with pytest.raises(CalibrationError, match="gamma=5"):
        drafter.confidence_source("cpu", tmp_path / "calibration.json")
