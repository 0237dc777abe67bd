"""Sequential temperature scaling of the confidences (DSpark paper, section 3.2), and how good a calibration is.

A confidence head is trained position by position, but the planner multiplies its outputs: small over-confidences
compound. STS divides the logit of position k by one temperature, chosen left to right so that the *cumulative* product
up to k has the least expected calibration error, the earlier positions already fixed. A positive temperature never
changes the order of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.errors import CalibrationError
from surefoot.speculation.json_files import read_object, write_object

Floats = npt.NDArray[np.float64]
FORMAT = "surefoot-calibration"
BINS = 15


@dataclass(frozen=True)
class Provenance:
    """Where a calibration comes from."""

    dataset: str = ""
    num_samples: int = 0
    drafter: str = ""
    ece_before: tuple[float, ...] = ()  # [gamma] ECE of the survival, uncalibrated
    ece_after: tuple[float, ...] = ()


class Calibration:
    """Temperatures in a persistent buffer, so that a captured graph sees new values.

    Attributes:
        temperatures: [gamma] float32 > 0 on `device`; changed in place only.
        host: [gamma] the same values on the host, for what is learnt there.
    """

    def __init__(
        self,
        temperatures: Sequence[float] | Tensor,
        provenance: Provenance | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        values = torch.as_tensor(temperatures, dtype=torch.float32)
        if values.ndim != 1 or not values.numel():
            raise CalibrationError(f"temperatures must be a non-empty list of numbers, got shape {tuple(values.shape)}")
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise CalibrationError(f"temperatures must be finite and positive, got {values.tolist()}")
        self.host: Floats = values.numpy().astype(np.float64)
        self.temperatures = values.to(device, copy=True)
        self.provenance = provenance or Provenance()

    @classmethod
    def identity(cls, gamma: int, device: torch.device | str = "cpu") -> Calibration:
        """Temperature 1 everywhere: the head's own confidences."""
        return cls([1.0] * gamma, device=device)

    @property
    def gamma(self) -> int:
        return self.temperatures.shape[0]

    def apply(self, logits: Tensor) -> Tensor:
        """Calibrated confidences, on the device of `logits` and without a host read.

        Args:
            logits: [..., gamma] confidence logits of the head, on the device of the buffer.

        Returns:
            [..., gamma] float32 in (0, 1).
        """
        return torch.sigmoid(logits.to(torch.float32) / self.temperatures)

    def update(self, other: Calibration) -> None:
        """Take over the values of `other` in place. Raises `CalibrationError` for another gamma."""
        other.require(self.gamma)
        self.temperatures.copy_(other.temperatures, non_blocking=True)
        self.host = other.host.copy()
        self.provenance = other.provenance

    def require(self, gamma: int) -> None:
        """Raise `CalibrationError` unless fitted for this gamma."""
        if self.gamma != gamma:
            raise CalibrationError(
                f"calibration was fitted for gamma={self.gamma}, this drafter has gamma={gamma}: "
                "run 'surefoot calibrate' again"
            )

    def to_dict(self) -> dict[str, Any]:
        """Our form: SGLang's fields and "format", "version", "gamma", "drafter"."""
        return {
            "format": FORMAT,
            "version": 1,
            "gamma": self.gamma,
            **self._sglang(),
            "drafter": self.provenance.drafter,
        }

    def to_sglang(self) -> dict[str, Any]:
        """SGLang's STS form (formats.md)."""
        return self._sglang()

    def _sglang(self) -> dict[str, Any]:
        source = self.provenance
        return {
            "temperatures": self.temperatures.tolist(),
            "dataset": source.dataset,
            "num_samples": source.num_samples,
            "ece_before": list(source.ece_before),
            "ece_after": list(source.ece_after),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], gamma: int, device: torch.device | str = "cpu") -> Calibration:
        """Read our form or SGLang's (both name the temperatures alike).

        Raises:
            CalibrationError: malformed, or fitted for another gamma (names both).
        """
        if data.get("format", FORMAT) != FORMAT:
            raise CalibrationError(f"not a calibration file: format is {data['format']!r}, expected {FORMAT!r}")
        raw = data.get("temperatures")
        if not isinstance(raw, list) or not all(_is_number(value) for value in raw):
            raise CalibrationError(f"a calibration file needs 'temperatures', a list of numbers; got {raw!r}")
        try:
            provenance = Provenance(
                dataset=str(data.get("dataset", "")),
                num_samples=int(data.get("num_samples", 0)),
                drafter=str(data.get("drafter", "")),
                ece_before=tuple(float(value) for value in data.get("ece_before", ())),
                ece_after=tuple(float(value) for value in data.get("ece_after", ())),
            )
        except (TypeError, ValueError) as problem:
            raise CalibrationError(f"malformed calibration file: {problem}") from problem
        calibration = cls(raw, provenance, device)
        calibration.require(gamma)
        return calibration

    def save(self, path: str | Path) -> None:
        """Write our form, whole or not at all."""
        write_object(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, gamma: int, device: torch.device | str = "cpu") -> Calibration:
        """Read a file in our form or in SGLang's. Raises `CalibrationError`."""
        return cls.from_dict(read_object(path, CalibrationError), gamma, device)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Outcomes:
    """What verification found out about N blocks.

    Attributes:
        accepted: [N] int64, accepted length.
        verified: [N] int64, width that was verified; None if all gamma positions were.
    """

    accepted: npt.NDArray[np.int64]
    verified: npt.NDArray[np.int64] | None = None

    def survived(self, gamma: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Label of "position k was reached and accepted" and whether it is known, both [N, gamma].

        A block rejected at position j is known to fail everywhere behind j; a block that accepted its whole trimmed
        window says nothing about the positions behind the trim.
        """
        position = np.arange(1, gamma + 1)
        label = (self.accepted[:, None] >= position).astype(np.float64)
        if self.verified is None:
            return label, np.ones(label.shape, dtype=bool)
        rejected = self.accepted < self.verified
        return label, (position <= self.verified[:, None]) | rejected[:, None]


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


def expected_calibration_error(predicted: Floats, outcome: Floats, bins: int = BINS) -> float:
    """ECE over equal-width bins: mean |predicted - observed| weighted by bin size. [N], [N] -> scalar; 0 for no sample."""
    if not len(predicted):
        return 0.0
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=predicted, minlength=bins) - np.bincount(index, weights=outcome, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


def brier_score(predicted: Floats, outcome: Floats) -> float:
    """Mean squared error of the probability. [N], [N] -> scalar; NaN for no sample."""
    return float(np.mean((predicted - outcome) ** 2)) if len(predicted) else math.nan


def area_under_curve(predicted: Floats, outcome: Floats) -> float:
    """Probability that an accepted sample scores above a rejected one, ties counting half; NaN if one kind is missing."""
    positive = outcome > 0.5
    hits, misses = int(positive.sum()), int((~positive).sum())
    if not hits or not misses:
        return math.nan
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return float((mean_rank[inverse][positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


@dataclass(frozen=True)
class ReliabilityBin:
    """Samples whose predicted probability fell into [low, high)."""

    low: float
    high: float
    count: int
    predicted: float  # mean prediction, NaN if empty
    observed: float  # share accepted, NaN if empty


@dataclass(frozen=True)
class PositionQuality:
    """Calibration of the survival at one position."""

    position: int  # 1 ... gamma
    count: int
    ece: float
    brier: float
    auc: float
    bins: list[ReliabilityBin] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quality_by_position(
    survival: npt.NDArray[np.floating], outcomes: Outcomes, bins: int = BINS
) -> list[PositionQuality]:
    """ECE, Brier score, AUC and reliability bins of the survival at every position.

    Args:
        survival: [N, gamma] predicted survivals.
        outcomes: what became of the N blocks; positions about which nothing is known are left out.
    """
    survival = np.asarray(survival, dtype=np.float64)
    label, known = outcomes.survived(survival.shape[1])
    result = []
    for k in range(survival.shape[1]):
        predicted, outcome = survival[known[:, k], k], label[known[:, k], k]
        result.append(
            PositionQuality(
                k + 1,
                len(predicted),
                expected_calibration_error(predicted, outcome, bins),
                brier_score(predicted, outcome),
                area_under_curve(predicted, outcome),
                _reliability(predicted, outcome, bins),
            )
        )
    return result


def _reliability(predicted: Floats, outcome: Floats, bins: int) -> list[ReliabilityBin]:
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_predicted = np.bincount(index, weights=predicted, minlength=bins) / count
        mean_observed = np.bincount(index, weights=outcome, minlength=bins) / count
    return [
        ReliabilityBin(b / bins, (b + 1) / bins, int(count[b]), float(mean_predicted[b]), float(mean_observed[b]))
        for b in range(bins)
    ]
