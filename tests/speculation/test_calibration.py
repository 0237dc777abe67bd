"""Sequential temperature scaling: never reorders, lowers the error, lands in place, and refuses another gamma."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.errors import CalibrationError
from surefoot.speculation import Calibration, Outcomes, fit_temperatures, prefix_survival, quality_by_position
from surefoot.speculation.calibration import (
    area_under_curve,
    brier_score,
    expected_calibration_error,
)


def blocks(samples: int, sharpness: list[float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a head that overstates the true log-odds by `sharpness`, and accepted lengths."""
    rng = np.random.default_rng(seed)
    log_odds = rng.normal(1.0, 1.2, (samples, len(sharpness)))
    accepted = (rng.random(log_odds.shape) < 1 / (1 + np.exp(-log_odds))).cumprod(1).sum(1)
    return log_odds * np.array(sharpness), accepted


def test_over_confident_head_falls_to_one_percent_on_held_out_blocks() -> None:
    sharpness = [3.0, 2.0, 2.5, 1.5]
    logits, accepted = blocks(60_000, sharpness, seed=0)
    fitted = fit_temperatures(logits, Outcomes(accepted), dataset="synthetic", drafter="test")
    np.testing.assert_allclose(fitted.temperatures.numpy(), sharpness, rtol=0.15)
    held_out, outcome = blocks(60_000, sharpness, seed=1)
    survival = prefix_survival(fitted.apply(torch.tensor(held_out)))
    before = prefix_survival(torch.sigmoid(torch.tensor(held_out)))
    for raw, calibrated in zip(
        quality_by_position(before.numpy(), Outcomes(outcome)),
        quality_by_position(survival.numpy(), Outcomes(outcome)),
        strict=True,
    ):
        assert raw.ece > 0.05
        assert calibrated.ece <= 0.01
        assert calibrated.brier < raw.brier
    assert max(fitted.provenance.ece_after) <= 0.01
    assert fitted.provenance.num_samples == 60_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=8), st.floats(0.1, 10))
def test_a_temperature_never_changes_the_order(scores: list[float], temperature: float) -> None:
    calibration = Calibration([temperature])
    confidence = calibration.apply(torch.tensor(scores).unsqueeze(1)).squeeze(1)
    order = torch.tensor(scores).argsort(stable=True)
    assert (confidence[order].diff() >= 0).all()


def test_censored_blocks_say_nothing_behind_the_trim() -> None:
    label, known = Outcomes(np.array([2, 1, 0]), np.array([2, 3, 0])).survived(4)
    assert known.tolist() == [[True, True, False, False], [True] * 4, [False] * 4]
    assert label.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_fit_names_a_position_that_was_never_verified() -> None:
    with pytest.raises(CalibrationError, match="position 3"):
        fit_temperatures(np.ones((5, 3)), Outcomes(np.full(5, 2), np.full(5, 2)))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.ones((0, 3)), "shape"),
        (np.ones(3), "shape"),
        (np.full((2, 3), np.nan), "NaN"),
        (np.ones((3, 3)), "outcomes"),
    ],
)
def test_fit_refuses_malformed_data(logits: np.ndarray, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        fit_temperatures(logits, Outcomes(np.zeros(2, np.int64)))


def test_update_writes_into_the_buffer_a_captured_graph_holds() -> None:
    calibration = Calibration.identity(2)
    buffer = calibration.temperatures
    apply = torch.compile(calibration.apply, fullgraph=True, backend="eager")
    logits = torch.tensor([[1.0, 2.0]])
    before = apply(logits)
    calibration.update(Calibration([2.0, 4.0]))
    assert calibration.temperatures is buffer
    assert calibration.temperatures.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(apply(logits), torch.sigmoid(torch.tensor([[0.5, 0.5]])))
    assert not torch.equal(before, apply(logits))
    with FakeTensorMode(allow_non_fake_inputs=True):  # a device-to-host read would raise here
        calibration.apply(torch.ones(3, 2))


def test_file_round_trip_with_provenance(tmp_path: Path) -> None:
    logits, accepted = blocks(500, [2.0, 2.0], seed=3)
    fitted = fit_temperatures(logits, Outcomes(accepted), dataset="humaneval", drafter="dspark-7")
    fitted.save(tmp_path / "deep" / "sts.json")
    loaded = Calibration.load(tmp_path / "deep" / "sts.json", gamma=2)
    assert torch.equal(loaded.temperatures, fitted.temperatures)
    assert loaded.provenance == fitted.provenance
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sts.json"]  # no partial file stays behind


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    good = Calibration([2.0])
    good.save(path)
    bad = Calibration([3.0])
    object.__setattr__(bad.provenance, "ece_after", (math.nan,))
    with pytest.raises(ValueError, match="JSON"):
        bad.save(path)
    assert Calibration.load(path, 1).temperatures.tolist() == [2.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["sts.json"]


def test_sglang_form_reads_and_writes(tmp_path: Path) -> None:
    form = {
        "temperatures": [1.5, 2.5],
        "dataset": "d",
        "num_samples": 7,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.0, 0.1],
    }
    path = tmp_path / "sglang.json"
    path.write_text(json.dumps(form))
    assert Calibration.load(path, 2).to_sglang() == form


def test_a_file_for_another_gamma_is_refused_naming_both(tmp_path: Path) -> None:
    Calibration([1.0] * 7).save(tmp_path / "sts.json")
    with pytest.raises(CalibrationError, match=r"gamma=7.*gamma=5"):
        Calibration.load(tmp_path / "sts.json", gamma=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "object"),
        ("{", "not JSON"),
        ("{}", "temperatures"),
        ('{"temperatures": ["a"]}', "temperatures"),
        ('{"temperatures": []}', "non-empty"),
        ('{"temperatures": [0]}', "positive"),
        ('{"temperatures": [Infinity]}', "finite"),
        ('{"temperatures": [1], "ece_before": 3}', "malformed"),
        ('{"format": "surefoot-cost-table", "temperatures": [1]}', "not a calibration"),
    ],
)
def test_malformed_files_each_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sts.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(path, gamma=1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"none\.json"):
        Calibration.load(tmp_path / "none.json", gamma=1)


def test_metrics_on_known_values() -> None:
    predicted, outcome = np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 0.0, 1.0, 1.0])
    assert area_under_curve(predicted, outcome) == pytest.approx(3.5 / 4)
    assert brier_score(predicted, outcome) == pytest.approx((0.01 + 0.16 + 0.36 + 0.01) / 4)
    assert expected_calibration_error(predicted, outcome, bins=2) == pytest.approx((abs(0.9 - 1) + abs(0.9 - 1)) / 4)
    assert math.isnan(area_under_curve(predicted, np.zeros(4)))
    assert expected_calibration_error(np.array([1.0]), np.array([1.0])) == 0.0


def test_reliability_bins_hold_every_known_sample_once() -> None:
    logits, accepted = blocks(300, [1.0, 1.0], seed=5)
    survival = prefix_survival(torch.sigmoid(torch.tensor(logits))).numpy()
    for quality in quality_by_position(survival, Outcomes(accepted)):
        assert sum(entry.count for entry in quality.bins) == quality.count == 300
        for entry in quality.bins:
            if entry.count:
                assert entry.low <= entry.predicted <= entry.high
