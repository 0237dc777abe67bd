"""Fit a calibration to what verification found out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.errors import CalibrationError
from surefoot.speculation.calibration import Calibration, Provenance
from surefoot.speculation.calibration_quality import BINS, Floats, Outcomes, expected_calibration_error


def fit_temperatures(
    logits: npt.NDArray[Any], outcomes: Outcomes, *, dataset: str = "", drafter: str = "", bins: int = BINS
) -> Calibration:
    """Sequential temperature scaling: per position a 1-D grid search, then refinement around the best.

    Args:
        logits: [N, gamma] raw confidence logits.
        outcomes: what became of the N blocks; best collected with full windows.

    Returns:
        A calibration on the CPU whose provenance carries the ECE of the survival before and after.

    Raises:
        CalibrationError: no block, non-finite logits, or a position about which nothing is known.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2 or not logits.size:
        raise CalibrationError(f"calibration needs logits of shape [samples, gamma], got {logits.shape}")
    if not np.isfinite(logits).all():
        raise CalibrationError("calibration logits contain NaN or infinity")
    gamma = logits.shape[1]
    label, known = outcomes.survived(gamma)
    if label.shape != logits.shape:
        raise CalibrationError(f"{logits.shape[0]} blocks of logits but {label.shape[0]} outcomes")
    raw: Floats = np.cumprod(_sigmoid(logits), axis=1, dtype=np.float64)
    survival = np.ones(len(logits))
    temperatures, before, after = [], [], []
    for k in range(gamma):
        rows = known[:, k]
        if not rows.any():
            raise CalibrationError(f"position {k + 1} was never verified: collect calibration data with full windows")

        def error(temperature: float, k: int = k, rows: npt.NDArray[np.bool_] = rows, s: Floats = survival) -> float:
            return expected_calibration_error(s[rows] * _sigmoid(logits[rows, k] / temperature), label[rows, k], bins)

        best = _minimise(error)
        before.append(expected_calibration_error(raw[rows, k], label[rows, k], bins))
        after.append(error(best))
        survival = survival * _sigmoid(logits[:, k] / best)
        temperatures.append(best)
    return Calibration(temperatures, Provenance(dataset, len(logits), drafter, tuple(before), tuple(after)))


def fit_weights(
    logits: Floats, signal: Floats, temperature: Floats, accepted: Floats, weight: Floats
) -> npt.NDArray[np.float64]:
    """`Calibration.weights` of maximum likelihood: a logistic for every position that was reached.

    All positions are fitted as one first, and every position is then drawn towards that: deep ones are reached rarely.

    Args:
        logits: [N, gamma] of the confidence head, uncalibrated.
        signal: [N, gamma] log-odds of the likeliest draft token.
        temperature: [N] sampling temperatures.
        accepted: [N, gamma] in [0, 1], whether a position was accepted, or the chance that it is.
        weight: [N, gamma], how often it was reached; 0 where nothing is known.

    Returns:
        [2, 3, gamma] float64.
    """
    inputs = np.stack([logits, signal, np.ones_like(signal)], -1)
    share = np.clip(temperature, 0.0, 1.0)[:, None, None]
    features = np.concatenate([inputs, share * inputs], -1)  # [N, gamma, 6]: for temperature 0, and what 1 adds to it
    prior, precision = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), np.array([1.0, 1.0, 1.0, 4.0, 4.0, 4.0])
    common = _logistic(features.reshape(-1, 6), accepted.ravel(), weight.ravel(), prior, precision)
    fitted = np.stack(
        [
            _logistic(features[:, k], accepted[:, k], weight[:, k], common, 10 * precision)
            for k in range(logits.shape[1])
        ],
        -1,
    )  # [6, gamma]
    return np.stack([fitted[:3], fitted[:3] + fitted[3:]])


def _logistic(x: Floats, y: Floats, weight: Floats, prior: Floats, precision: Floats, steps: int = 50) -> Floats:
    """Maximum a posteriori coefficients [F] under a Gaussian prior: [N, F], [N] and [N], by damped Newton steps."""
    seen = weight > 0
    x, y, weight, at = x[seen], y[seen], weight[seen], prior.copy()
    for _ in range(steps):
        p = _sigmoid(x @ at)
        gradient = x.T @ (weight * (y - p)) - precision * (at - prior)
        curvature = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(precision)
        step = np.linalg.solve(curvature, gradient)
        at += step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-6:
            break
    return at


def _minimise(error: Any, low: float = 0.1, high: float = 10.0) -> float:
    """Least `error` over temperatures: a geometric grid that always contains 1, narrowed three times."""
    grid = np.append(np.geomspace(low, high, 41), 1.0)
    for _ in range(4):
        errors = [error(temperature) for temperature in grid]
        best = float(grid[int(np.argmin(errors))])
        ratio = float(np.max(grid) / np.min(grid)) ** (1 / 20)
        grid = np.append(np.geomspace(best / ratio, best * ratio, 13), best)
    return best


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)
