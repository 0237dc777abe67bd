"""How true confidences are: calibration error, Brier score, area under the curve and reliability, by position."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BINS = 15


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

        A block rejected at position j is known to fail everywhere after j; a block that accepted its whole trimmed
        window says nothing about the positions after the trim.
        """
        position = np.arange(1, gamma + 1)
        label = (self.accepted[:, None] >= position).astype(np.float64)
        if self.verified is None:
            return label, np.ones(label.shape, dtype=bool)
        rejected = self.accepted < self.verified
        return label, (position <= self.verified[:, None]) | rejected[:, None]


def expected_calibration_error(predicted: Floats, outcome: Floats, bins: int = BINS) -> float:
    """ECE over equal-width bins: mean |predicted - observed| weighted by bin size. [N], [N] -> scalar; 0 for no sample."""
    if not len(predicted):
        return 0.0
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=predicted, minlength=bins) - np.bincount(index, weights=outcome, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


def error_of_truth(predicted: Floats, bins: int = BINS, draws: int = 20) -> float:
    """The ECE that these predictions would show if they were true: what chance makes of [N] outcomes. Falls as 1 / sqrt(N)."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(draws):
        outcome: Floats = (rng.random(len(predicted)) < predicted).astype(np.float64)
        errors.append(expected_calibration_error(predicted, outcome, bins))
    return float(np.mean(errors))


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
    chance: float  # ECE that as many outcomes would show if the predictions were true
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
                error_of_truth(predicted, bins),
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
