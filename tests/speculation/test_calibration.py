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
from surefoot.speculation.calibration_fit import fit_weights
from surefoot.speculation.calibration_quality import (
    area_under_curve,
    brier_score,
    error_of_truth,
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
    survival = prefix_survival(torch.sigmoid(fitted.calibrated(torch.tensor(held_out), None, None)))
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
    confidence = torch.sigmoid(calibration.calibrated(torch.tensor(scores).unsqueeze(1), None, None)).squeeze(1)
    order = torch.tensor(scores).argsort(stable=True)
    assert (confidence[order].diff() >= 0).all()


def test_censored_blocks_say_nothing_after_the_trim() -> None:
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


def test_file_round_trip_with_provenance(tmp_path: Path) -> None:
    logits, accepted = blocks(500, [2.0, 2.0], seed=3)
    fitted = fit_temperatures(logits, Outcomes(accepted), dataset="humaneval", drafter="dspark-7")
    fitted.save(tmp_path / "deep" / "sts.json")
    loaded = Calibration.load(tmp_path / "deep" / "sts.json", gamma=2)
    assert torch.equal(loaded.temperatures, fitted.temperatures)
    assert loaded.provenance == fitted.provenance
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sts.json"]  # no partial file is left


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


WEIGHTS = [
    [[0.5, 0.4], [1.2, 0.9], [-0.3, 0.2]],  # temperature 0: head, signal, bias by position
    [[0.2, 0.6], [0.7, 1.1], [0.5, -0.4]],  # temperature 1
]


def sampled_blocks(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, signals and temperatures, and accepted lengths that follow `WEIGHTS`."""
    rng = np.random.default_rng(seed)
    logits, signal = rng.normal(0.5, 1, (samples, 2)), rng.normal(0, 2, (samples, 2))
    temperature = rng.choice([0.0, 0.5, 1.0, 1.5], samples)
    truth = Calibration([1.0, 1.0], weights=WEIGHTS).calibrated(
        *(torch.tensor(a, dtype=torch.float32) for a in (logits, signal, temperature))
    )
    accepted = (rng.random((samples, 2)) < torch.sigmoid(truth).numpy()).cumprod(1).sum(1)
    return logits, signal, temperature, accepted


def test_fitted_weights_are_the_ones_the_outcomes_follow() -> None:
    logits, signal, temperature, accepted = sampled_blocks(40_000, seed=0)
    label = accepted[:, None] > np.arange(2)
    reached = accepted[:, None] >= np.arange(2)
    weights = fit_weights(logits, signal, temperature, label * 1.0, reached * 1.0)
    np.testing.assert_allclose(weights, WEIGHTS, atol=0.12)
    fitted = Calibration([1.0, 1.0], weights=weights)
    logits, signal, temperature, accepted = sampled_blocks(40_000, seed=1)
    for heat in (0.0, 0.5, 1.0, 1.5):
        rows = temperature == heat
        survival = fitted.survival(logits[rows], signal[rows], temperature[rows])
        assert all(q.ece < 0.02 for q in quality_by_position(survival, Outcomes(accepted[rows])))


def test_chances_and_rates_give_the_weights_that_yes_and_no_give() -> None:
    """A block counts as often as it was reached, with its chance in place of outcomes; unknown ones not at all."""
    logits, signal, temperature, accepted = sampled_blocks(3_000, seed=2)
    label, reached = (accepted[:, None] > np.arange(2)) * 1.0, (accepted[:, None] >= np.arange(2)) * 1.0
    repeated = [np.repeat(a, 3, 0) for a in (logits, signal, temperature, label, reached)]
    shared = fit_weights(logits, signal, temperature, label, 3 * reached)
    np.testing.assert_allclose(fit_weights(*repeated), shared, atol=1e-6)
    unknown = [np.concatenate([a, a + 7]) for a in (logits, signal, temperature, label)]
    more = fit_weights(*unknown, np.concatenate([3 * reached, 0 * reached]))
    np.testing.assert_allclose(more, shared, atol=1e-6)


def test_positions_and_temperatures_without_blocks_borrow_from_the_others() -> None:
    logits, signal, _, accepted = sampled_blocks(5_000, seed=3)
    cold = np.zeros(len(logits))
    label, weight = (accepted[:, None] > np.arange(2)) * 1.0, np.array([1.0, 0.0]) * np.ones((len(logits), 1))
    weights = fit_weights(logits, signal, cold, label, weight)
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-9)
    np.testing.assert_allclose(weights[:, :, 0], weights[:, :, 1], atol=0.05)


def test_weights_and_sharpness_survive_a_file_and_a_cut(tmp_path: Path) -> None:
    fitted = Calibration([2.0, 4.0], weights=WEIGHTS, sharpness=[1.5, 2.0], copying=[0.0, 0.1, 0.85])
    fitted.save(tmp_path / "calibration.json")
    saved = json.loads((tmp_path / "calibration.json").read_text())
    assert saved["confidence"]["sampled"]["signal"] == pytest.approx([0.7, 1.1])
    assert saved["temperatures"] == [2.0, 4.0]  # what SGLang reads
    loaded = Calibration.load(tmp_path / "calibration.json", gamma=2)
    assert torch.equal(loaded.weights, fitted.weights)
    assert torch.equal(loaded.sharpness, fitted.sharpness)
    assert torch.equal(loaded.copying, fitted.copying)
    short = loaded.first(1)
    given = torch.tensor([[0.3, -1.0]]), torch.tensor([[2.0, 0.5]]), torch.tensor([0.7])
    first = short.calibrated(given[0][:, :1], given[1][:, :1], given[2])
    torch.testing.assert_close(first, loaded.calibrated(*given)[:, :1])
    assert short.sharpness.tolist() == [1.5]
    assert loaded.uncalibrated().sharpness.tolist() == [1.5, 2.0]
    for same in (short, loaded.uncalibrated()):
        assert torch.equal(same.copying, fitted.copying)
    torch.testing.assert_close(loaded.uncalibrated().calibrated(*given), given[0])


def test_temperatures_alone_mean_what_they_meant() -> None:
    """At every sampling temperature, whatever the signal; and no fields that older readers do not know."""
    plain = Calibration([2.0, 0.5])
    logits, signal = torch.randn(4, 2), torch.randn(4, 2)
    for temperature in (None, torch.tensor([0.0, 0.3, 1.0, 2.0])):
        torch.testing.assert_close(plain.calibrated(logits, signal, temperature), logits / plain.temperatures)
    assert not {"confidence", "draft_sharpness", "copying"} & set(plain.to_dict())
    assert plain.first(1).is_plain


def test_calibrating_reads_nothing_from_the_device() -> None:
    fitted = Calibration([1.0, 1.0], weights=WEIGHTS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fitted.calibrated(torch.ones(3, 2), torch.ones(3, 2), torch.ones(3))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("confidence", 3, "greedy and sampled"),
        ("confidence", {"greedy": {"head": [1.0], "signal": [1.0], "bias": [1.0]}}, "sampled.head is missing"),
        ("confidence", {r: {"head": [1.0], "signal": ["x"], "bias": [1.0]} for r in ("greedy", "sampled")}, "signal"),
        (
            "confidence",
            {r: {"head": [1.0], "signal": [1, 2], "bias": [1]} for r in ("greedy", "sampled")},
            "differ in length",
        ),
        (
            "confidence",
            {r: {n: [1.0, 2.0] for n in ("head", "signal", "bias")} for r in ("greedy", "sampled")},
            "shape",
        ),
        ("draft_sharpness", "sharp", "list of numbers"),
        ("draft_sharpness", [1.0, 2.0], "positive numbers"),
        ("draft_sharpness", [0.0], "positive numbers"),
        ("copying", 0.5, "list of numbers"),
        ("copying", [], "0 first"),
        ("copying", [0.0], "two or more"),
        ("copying", [0.1, 0.2], "0 first"),
        ("copying", [0.0, 1.0], "below 1"),
        ("copying", [0.0, -0.1], "0 to below 1"),
    ],
)
def test_malformed_weights_and_sharpness_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        Calibration.from_dict({"temperatures": [1.0], field: value}, gamma=1)


def test_a_malformed_file_is_named_with_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"temperatures": [1.0, 2.0], "draft_sharpness": [1.45]}')
    with pytest.raises(
        CalibrationError, match=r"calibration.json: draft_sharpness .*got 1: \[1.45\].*surefoot calibrate"
    ):
        Calibration.load(path, 2)


def test_metrics_on_known_values() -> None:
    predicted, outcome = np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 0.0, 1.0, 1.0])
    assert area_under_curve(predicted, outcome) == pytest.approx(3.5 / 4)
    assert brier_score(predicted, outcome) == pytest.approx((0.01 + 0.16 + 0.36 + 0.01) / 4)
    assert expected_calibration_error(predicted, outcome, bins=2) == pytest.approx((abs(0.9 - 1) + abs(0.9 - 1)) / 4)
    assert math.isnan(area_under_curve(predicted, np.zeros(4)))
    assert expected_calibration_error(np.array([1.0]), np.array([1.0])) == 0.0


def test_even_the_truth_shows_an_error_in_few_blocks() -> None:
    """About sqrt(2 / pi) times a binomial's standard deviation in every bin, and less in more blocks."""
    few, many = (np.full(count, 0.5) for count in (100, 10_000))
    assert error_of_truth(few) == pytest.approx(np.sqrt(2 / np.pi) * 0.05, rel=0.5)
    assert error_of_truth(many) < error_of_truth(few) / 5
    assert error_of_truth(np.zeros(50)) == 0


def test_reliability_bins_hold_every_known_sample_once() -> None:
    logits, accepted = blocks(300, [1.0, 1.0], seed=5)
    survival = prefix_survival(torch.sigmoid(torch.tensor(logits))).numpy()
    for quality in quality_by_position(survival, Outcomes(accepted)):
        assert sum(entry.count for entry in quality.bins) == quality.count == 300
        for entry in quality.bins:
            if entry.count:
                assert entry.low <= entry.predicted <= entry.high
