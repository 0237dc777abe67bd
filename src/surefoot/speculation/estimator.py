"""Confidence of drafts: from a trained head that is calibrated and kept honest, or from an online logistic per position.

c_k = sigma(a_k + b_k s_k) with one scalar signal s_k per position that depends on the context and x_<k alone: the
log-odds of the likeliest token of q_k, the match length of a point-mass drafter, or the logit of a confidence
head. (q_k(x_k) is not such a signal: it looks at the token.) Outcomes are counted per position and bin of the signal;
binned counts are the sufficient statistics of this model, so a few Newton steps on them are an exact refit whatever
the number of past blocks. Counts are forgotten exponentially, so that the fit follows drift, and so that positions no
longer verified ask for full windows again: a trimmed window censors the labels that could have proved the trim wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.speculation.calibration import Calibration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BINS = 48
SETTLED = 1e-9  # Newton steps below this change nothing in float32
REACH = 4.0  # bins cover asinh(signal) in [-REACH, REACH], i.e. signals up to 27


class Evidence(NamedTuple):
    """What the confidences of R blocks are read from. At position k everything depends on the context and x_<k alone."""

    logits: Tensor | None = None  # [R, gamma] raw logits of the confidence head (None: no head, or it did not run)
    signal: Tensor | None = None  # [R, gamma] signal of the drafter
    temperature: Tensor | None = None  # [R] float32 sampling temperatures (None: all 0)
    match: Tensor | None = None  # [R] int64 match length of prompt lookup, 0: none (None: nobody looked it up)

    def first(self, gamma: int) -> Evidence:
        """Of the first `gamma` positions."""
        logits, signal = (None if value is None else value[:, :gamma] for value in (self.logits, self.signal))
        return self._replace(logits=logits, signal=signal)

    def rows(self, index: Tensor) -> Evidence:
        """Of the blocks in `index`."""
        return Evidence(*(None if value is None else value[index] for value in self))

    @classmethod
    def joined(cls, parts: Sequence[Evidence], rows: Sequence[int]) -> Evidence:
        """All blocks of several steps; NaN (temperature and match: 0) where a step has nothing that another one has.

        Args:
            parts: of each step.
            rows: blocks of each step.
        """
        fields = []
        for values, missing in zip(zip(*parts, strict=True), (torch.nan, torch.nan, 0, 0), strict=True):
            given = next((value for value in values if value is not None), None)
            if given is not None:
                given = torch.cat(
                    [
                        given.new_full((count, *given.shape[1:]), missing) if value is None else value
                        for value, count in zip(values, rows, strict=True)
                    ]
                )
            fields.append(given)
        return cls(*fields)


class ConfidenceSource(Protocol):
    """Where confidences come from: a head, an estimator, or a head that an estimator watches.

    It is the one place where a calibration is applied: drafts carry the raw logits of the head.
    """

    gamma: int

    @property
    def warming_up(self) -> bool:
        """Full windows are needed to learn from: some blocks' (`exploration.py`)."""
        ...

    def confidence(self, evidence: Evidence, explored: int = 0) -> Tensor:
        """Calibrated confidences, on the device and without a host read.

        Args:
            evidence: of R blocks.
            explored: the first so many blocks whose estimate has to be learned count as certain.

        Returns:
            [R, gamma] float32 in [0, 1].
        """
        ...

    def observe(self, evidence: Evidence, accepted: Tensor | Ints, widths: Tensor | Ints) -> None:
        """Learn from verified blocks, on the host: [R] accepted lengths of windows of [R] widths."""
        ...


class LogisticEstimator:
    """A two-parameter logistic per position, refitted from forgetting counts.

    Attributes:
        parameters: [2, gamma] float32 on `device`, intercept and slope; changed in place, so a captured graph sees it.

    Args:
        gamma: block length.
        device: where `confidence` runs.
        half_life: blocks after which an outcome counts half.
        warm_up: outcomes at position 1 before the estimates are used.
        prior: slope of a fresh estimator (the confidence it starts from is one half at signal 0).
        refit_every: blocks between refits; up to four times as many when they come many at a time.
    """

    def __init__(
        self,
        gamma: int,
        device: torch.device | str = "cpu",
        *,
        half_life: int = 1024,
        warm_up: int = 64,
        prior: tuple[float, float] = (0.0, 0.5),
        refit_every: int = 16,
    ) -> None:
        self.gamma, self.half_life, self.warm_up, self.refit_every = gamma, half_life, warm_up, refit_every
        self.prior = np.array(prior, dtype=np.float64)
        self.parameters = torch.empty(2, gamma, dtype=torch.float32, device=device)
        self._intercept, self._slope = self.parameters  # views
        self.refits = 0  # rises whenever the parameters change
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._tried = np.zeros((self.gamma, BINS))  # outcomes per bin ...
        self._signal = np.zeros((self.gamma, BINS))  # ... sum of the signals ...
        self._accepted = np.zeros((self.gamma, BINS))  # ... and acceptances
        self._fit = np.repeat(self.prior[:, None], self.gamma, axis=1)
        self._waiting: list[tuple[Floats, Ints, Ints]] = []
        self._since_refit = 0
        self._ready = False
        self.parameters.copy_(torch.from_numpy(self._fit))
        self.refits += 1

    @property
    def fit(self) -> Floats:
        """[2, gamma] the parameters, on the host."""
        return self._fit

    @property
    def warming_up(self) -> bool:
        """Not enough outcomes yet, or not any more. Leaves at `warm_up` outcomes, returns below half of them."""
        return not self._ready

    def estimate(self, signal: Tensor) -> Tensor:
        """[R, gamma] signal -> [R, gamma] confidence."""
        return torch.sigmoid(self._intercept + self._slope * signal.to(torch.float32))

    def observe(self, signal: Floats, accepted: Ints, widths: Ints) -> None:
        """Take N blocks: position k has a label where the chain reached it and it was verified.

        Args:
            signal: [N, gamma].
            accepted: [N] accepted lengths.
            widths: [N] verified widths.
        """
        self._waiting.append((signal, accepted, widths))
        self._since_refit += len(signal)
        # A step of many requests brings more blocks than make a difference: up to four steps are taken together then.
        due = self._since_refit >= max(self.refit_every, min(4 * len(signal), 4 * self.refit_every))
        if due or not self._ready:
            self._count()
        if due:
            self.refit()

    def _count(self) -> None:
        """Take the blocks that wait, forgetting by every call as if it had been counted at once."""
        ages = np.cumsum([0, *(len(signal) for signal, _, _ in reversed(self._waiting))])  # blocks after each call
        keep = 0.5 ** (ages / self.half_life)
        signal, accepted, widths = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        weight = np.concatenate([np.full(len(part[0]), k) for part, k in zip(self._waiting, keep[-2::-1], strict=True)])
        self._waiting.clear()
        position = np.arange(self.gamma)
        labelled = (position < np.minimum(accepted + 1, widths)[:, None]) & np.isfinite(signal)
        value = np.where(labelled, signal, 0.0)
        share = (np.arcsinh(value) / REACH + 1.0) / 2.0
        cell = (position * BINS + (share * BINS).clip(0, BINS - 1).astype(np.int64)).ravel()
        survived = labelled & (position < accepted[:, None])
        for total, new in ((self._tried, labelled), (self._signal, value), (self._accepted, survived)):
            total *= keep[-1]
            total += np.bincount(cell, (new * weight[:, None]).ravel(), total.size).reshape(total.shape)
        evidence = float(self._tried[0].sum())
        self._ready = evidence >= (self.warm_up / 2 if self._ready else self.warm_up)

    def refit(self) -> None:
        """Newton steps on the counts: one fit over all positions, then every position drawn towards it.

        Deep positions are reached rarely; the common fit is what they are believed to be until they have counts of
        their own.
        """
        self._since_refit = 0
        common = _newton(
            self._tried.sum(0)[None], self._signal.sum(0)[None], self._accepted.sum(0)[None], self.prior[:, None], 1.0
        )
        self._fit = _newton(self._tried, self._signal, self._accepted, common, 8.0)
        fitted = torch.from_numpy(self._fit).to(self.parameters.dtype)
        # A pageable source would make the host wait for the device.
        self.parameters.copy_(fitted.pin_memory() if self.parameters.is_cuda else fitted, non_blocking=True)
        self.refits += 1


def _newton(tried: Floats, signal: Floats, accepted: Floats, prior: Floats, weight: float, steps: int = 8) -> Floats:
    """Maximum a posteriori (intercept, slope) of P binned logistics.

    Args:
        tried, signal, accepted: [P, bins] outcomes, sum of signals, acceptances.
        prior: [2, P] or [2, 1] mean of a Gaussian prior.
        weight: its precision.

    Returns:
        [2, P]; slopes are at least 0, so that the order of the signal is never reversed.
    """
    x = signal / np.maximum(tried, 1e-12)  # mean signal of the bin
    a, b = np.broadcast_to(prior, (2, len(tried))).copy()
    for _ in range(steps):
        p = 0.5 * (1.0 + np.tanh(0.5 * (a[:, None] + b[:, None] * x)))
        residual, curvature = accepted - tried * p, tried * p * (1 - p)
        grad_a = residual.sum(1) - weight * (a - prior[0])
        grad_b = (residual * x).sum(1) - weight * (b - prior[1])
        haa, hab = curvature.sum(1) + weight, (curvature * x).sum(1)
        hbb = (curvature * x * x).sum(1) + weight
        determinant = haa * hbb - hab * hab  # > 0: the prior makes the Hessian definite
        step_a, step_b = (hbb * grad_a - hab * grad_b) / determinant, (haa * grad_b - hab * grad_a) / determinant
        damping = np.minimum(1.0, 2.0 / np.maximum(np.abs(step_a), np.abs(step_b)).clip(min=1e-12))
        old, (a, b) = (a, b), (a + damping * step_a, np.maximum(b + damping * step_b, 0.0))
        if max(np.abs(a - old[0]).max(), np.abs(b - old[1]).max()) < SETTLED:
            break
    return np.stack([a, b])


class SignalConfidence:
    """Confidence of a drafter without a head: estimated online from its signal."""

    def __init__(self, estimator: LogisticEstimator) -> None:
        self.estimator, self.gamma = estimator, estimator.gamma

    @property
    def warming_up(self) -> bool:
        return self.estimator.warming_up

    def confidence(self, evidence: Evidence, explored: int = 0) -> Tensor:
        signal = _given(evidence.signal, "signal")
        return certain(self.estimator.estimate(signal), signal[:, 0] > 0, explored)

    def observe(self, evidence: Evidence, accepted: Tensor | Ints, widths: Tensor | Ints) -> None:
        self.estimator.observe(_host(_given(evidence.signal, "signal")), _host_int(accepted), _host_int(widths))


class HeadConfidence:
    """A trained head and its calibration; with an estimator, recalibrated online once they no longer hold.

    The estimator learns from the calibrated logits all the time. Over a window of recent blocks the mean confidence is
    compared with what was accepted; when they differ by more than `tolerance` and by more than chance explains, the
    estimator's logistic is put after the calibration. It is taken away when the head is back in line.

    Args:
        calibration: the identity for an uncalibrated head.
        estimator: None trusts the head.
        tolerance: difference between predicted and observed acceptance that is left alone.
        window: labels over which the difference is taken, exponentially forgotten.
    """

    def __init__(
        self,
        calibration: Calibration,
        estimator: LogisticEstimator | None = None,
        *,
        tolerance: float = 0.05,
        window: int = 512,
    ) -> None:
        if estimator is not None and estimator.gamma != calibration.gamma:
            raise ConfigurationError(
                f"estimator has gamma={estimator.gamma}, calibration has gamma={calibration.gamma}"
            )
        self.calibration, self.estimator, self.gamma = calibration, estimator, calibration.gamma
        self.tolerance, self.window = tolerance, window
        self.recalibrating = False
        self._sums = np.zeros(4)  # labels, predicted, accepted, variance of the accepted if the head were right
        self._use_estimator = torch.zeros((), dtype=torch.bool, device=calibration.temperatures.device)

    @property
    def warming_up(self) -> bool:
        return False  # the head knows from the first block

    @property
    def drift(self) -> float:
        """Mean predicted minus mean observed acceptance of the head over the window."""
        return float((self._sums[1] - self._sums[2]) / self._sums[0]) if self._sums[0] else 0.0

    def confidence(self, evidence: Evidence, explored: int = 0) -> Tensor:
        logits = self.logits(evidence)
        head = torch.sigmoid(logits)
        return (
            head if self.estimator is None else torch.where(self._use_estimator, self.estimator.estimate(logits), head)
        )

    def logits(self, evidence: Evidence) -> Tensor:
        """[R, gamma] float32, calibrated."""
        raw = _given(evidence.logits, "confidence logits")
        return self.calibration.calibrated(raw, evidence.signal, evidence.temperature)

    def observe(self, evidence: Evidence, accepted: Tensor | Ints, widths: Tensor | Ints) -> None:
        if self.estimator is None:
            return
        scores = _host(self.logits(evidence))
        accepted, widths = _host_int(accepted), _host_int(widths)
        self.estimator.observe(scores, accepted, widths)
        position = np.arange(self.gamma)
        labelled = position < np.minimum(accepted + 1, widths)[:, None]
        predicted = 0.5 * (1.0 + np.tanh(0.5 * scores[labelled]))
        observed = (position < accepted[:, None])[labelled]
        self._sums *= 0.5 ** (len(predicted) / self.window)
        self._sums += (len(predicted), predicted.sum(), observed.sum(), (predicted * (1 - predicted)).sum())
        labels, _, _, variance = self._sums
        if labels < self.window / 2:
            return
        by_chance = 3.0 * float(np.sqrt(variance)) / labels
        limit = max(self.tolerance / 2 if self.recalibrating else self.tolerance, by_chance)
        self.recalibrating = abs(self.drift) > limit and not self.estimator.warming_up
        self._use_estimator.fill_(self.recalibrating)


def certain(confidence: Tensor, learned: Tensor, explored: int) -> Tensor:
    """`confidence` ([R, gamma]), with 1 in the first `explored` of the blocks that are `learned` from ([R] bool)."""
    if not explored:
        return confidence
    return confidence.masked_fill((learned & (learned.cumsum(0) <= explored)).unsqueeze(1), 1.0)


def _given(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ConfigurationError(f"this confidence source needs the drafter's {name}, and the drafter gives none")
    return value


def _host(value: Tensor) -> Floats:
    return value.detach().to("cpu", torch.float64).numpy()


def _host_int(value: Tensor | Ints) -> Ints:
    return value.detach().to("cpu", torch.int64).numpy() if isinstance(value, Tensor) else np.asarray(value, np.int64)
