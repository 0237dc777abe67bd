"""A drafter's calibration: what makes its confidences true, how sharply it draws, and how much it copies.

Two forms of a confidence. *Temperatures* are sequential temperature scaling (DSpark paper, section 3.2; SGLang's file): the
head's logit of position k is divided by one number, chosen left to right so that the *cumulative* product up to k has the
least expected calibration error; a positive temperature never changes the order of scores. *Weights* say more: a logistic
of the head's logit and of the draft distribution's own log-odds (`Draft.signal`), whose weights depend on the request's
sampling temperature, because a draft that must be the target's first choice is another event than one that must be likely.
Both inputs of position k depend on the context and x_<k alone, so the confidence does.

*Sharpness* is for drawing: position k is drawn at the request's temperature divided by it. A drafter is blunter than its
target, and what is accepted, the sum of min(p, q), grows when q is made a little sharper. Acceptance divides by the very q
that was drawn from, so that any value is exact; confidences are fitted for it.

*Copying* is for drawing, too: what share of a draft distribution belongs to the token that followed the last time the text
looked like this, by how many tokens alike (`drafters/copying.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
REGIMES, INPUTS = ("greedy", "sampled"), ("head", "signal", "bias")
"""Names in the file of the axes of `Calibration.weights`."""


@dataclass(frozen=True)
class Provenance:
    """Where a calibration comes from."""

    dataset: str = ""
    num_samples: int = 0
    drafter: str = ""
    ece_before: tuple[float, ...] = ()  # [gamma] ECE of the survival, uncalibrated
    ece_after: tuple[float, ...] = ()


class Calibration:
    """Fitted numbers of one drafter.

    Attributes:
        temperatures: [gamma] float32 > 0 on `device`.
        weights: [2, 3, gamma] float32 of head logit, signal and 1; the first for temperature 0, the second for 1 and more,
            in proportion in between. Without fitted ones they say what the temperatures say.
        host_weights: the same on the host, where outcomes are learned from.
        sharpness: [gamma] float32 > 0; None: every position is drawn as it is.
        copying: [M + 1] float32 in [0, 1) by match length, 0 first; None: nothing is copied.
    """

    def __init__(
        self,
        temperatures: Sequence[float] | Tensor,
        provenance: Provenance | None = None,
        device: torch.device | str = "cpu",
        *,
        weights: npt.ArrayLike | Tensor | None = None,
        sharpness: Sequence[float] | Tensor | None = None,
        copying: Sequence[float] | Tensor | None = None,
    ) -> None:
        values = torch.as_tensor(temperatures, dtype=torch.float32)
        if values.ndim != 1 or not values.numel():
            raise CalibrationError(f"temperatures must be a non-empty list of numbers, got shape {tuple(values.shape)}")
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise CalibrationError(f"temperatures must be finite and positive, got {values.tolist()}")
        self.temperatures = values.to(device, copy=True)
        self.is_plain = weights is None  # temperatures are all there is
        scaled = torch.stack([1 / values, torch.zeros_like(values), torch.zeros_like(values)]).expand(2, -1, -1)
        given = scaled if weights is None else torch.as_tensor(weights, dtype=torch.float32)
        if given.shape != scaled.shape or not bool(torch.isfinite(given).all()):
            raise CalibrationError(f"weights must be finite, of shape {list(scaled.shape)}, got {list(given.shape)}")
        self.weights = given.to(device, copy=True, memory_format=torch.contiguous_format)
        self.host_weights = self.weights if self.weights.device.type == "cpu" else given.to("cpu", copy=True)
        self.sharpness: Tensor | None = None
        if sharpness is not None:
            sharp = torch.as_tensor(sharpness, dtype=torch.float32)
            if sharp.shape != values.shape or not bool((torch.isfinite(sharp) & (sharp > 0)).all()):
                raise CalibrationError(
                    f"draft_sharpness must be {self.gamma} positive numbers, got {len(sharp)}: {_shortest(sharp)}"
                )
            self.sharpness = sharp.to(device, copy=True)
        self.copying: Tensor | None = None
        if copying is not None:
            shares = torch.as_tensor(copying, dtype=torch.float32)
            plain = shares.ndim == 1 and len(shares) > 1 and shares[0] == 0
            if not plain or not bool(((shares >= 0) & (shares < 1)).all()):
                raise CalibrationError(
                    f"copying must be two or more numbers of 0 to below 1, 0 first; got {shares.tolist()}"
                )
            self.copying = shares.to(device, copy=True)
        self.provenance = provenance or Provenance()

    @classmethod
    def identity(cls, gamma: int, device: torch.device | str = "cpu") -> Calibration:
        """Temperature 1 everywhere: the head's own confidences."""
        return cls([1.0] * gamma, device=device)

    @property
    def gamma(self) -> int:
        return self.temperatures.shape[0]

    def calibrated(self, logits: Tensor, signal: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Calibrated logits of the confidences, without a host read.

        Args:
            logits: [R, gamma] of the head, on the device or on the host.
            signal: [R, gamma] log-odds of the likeliest token of each position, `Draft.signal`; None where only
                temperatures were fitted.
            temperature: [R] sampling temperatures; None: all are 0.

        Returns:
            [R, gamma] float32 on the device of `logits`.

        Raises:
            CalibrationError: fitted with a signal, and there is none.
        """
        if signal is None:
            if not self.is_plain:
                raise CalibrationError("this calibration was fitted with a signal, and the drafter gives none")
            signal = torch.zeros_like(logits, dtype=torch.float32)
        both = self.weights if logits.device == self.weights.device else self.host_weights
        weights = both[0]
        if temperature is not None:
            weights = torch.lerp(weights, both[1], temperature.clamp(0, 1).view(-1, 1, 1))  # [R, 3, gamma]
        head, odds, bias = weights.unbind(-2)
        return torch.addcmul(bias, logits.to(torch.float32), head) + odds * signal

    def survival(self, logits: npt.ArrayLike, signal: npt.ArrayLike, temperature: npt.ArrayLike) -> Floats:
        """Predicted survivals on the host: [N, gamma], [N, gamma], [N] as for `calibrated` -> [N, gamma]."""
        given = [torch.as_tensor(np.asarray(value), dtype=torch.float32) for value in (logits, signal, temperature)]
        device = self.weights.device
        confidence = torch.sigmoid(self.calibrated(*(value.to(device) for value in given)).double())
        return confidence.cumprod(-1).cpu().numpy()

    def first(self, gamma: int) -> Calibration:
        """Of the first `gamma` positions. A position was fitted with the earlier ones alone: shorter drafts need no other."""
        return Calibration(
            self.temperatures[:gamma],
            self.provenance,
            self.temperatures.device,
            weights=None if self.is_plain else self.weights[..., :gamma],
            sharpness=None if self.sharpness is None else self.sharpness[:gamma],
            copying=self.copying,
        )

    def uncalibrated(self) -> Calibration:
        """The same draws, and the head's own confidences."""
        device = self.temperatures.device
        return Calibration([1.0] * self.gamma, device=device, sharpness=self.sharpness, copying=self.copying)

    def require(self, gamma: int) -> None:
        """Raise `CalibrationError` unless fitted for this gamma."""
        if self.gamma != gamma:
            raise CalibrationError(
                f"calibration was fitted for gamma={self.gamma}, this drafter has gamma={gamma}: "
                "run 'surefoot calibrate -d DRAFTER' again"
            )

    def to_dict(self) -> dict[str, Any]:
        """Our form: SGLang's fields and "format", "version", "gamma", "drafter"; what else is fitted."""
        data = {
            "format": FORMAT,
            "version": 1,
            "gamma": self.gamma,
            **self._sglang(),
            "drafter": self.provenance.drafter,
        }
        if not self.is_plain:
            regimes = zip(REGIMES, self.weights, strict=True)
            data["confidence"] = {
                regime: {name: _shortest(row) for name, row in zip(INPUTS, rows, strict=True)}
                for regime, rows in regimes
            }
        if self.sharpness is not None:
            data["draft_sharpness"] = _shortest(self.sharpness)
        if self.copying is not None:
            data["copying"] = _shortest(self.copying)
        return data

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
        if len(raw) != gamma:
            cls(raw).require(gamma)
        sharpness, copying = _numbers(data, "draft_sharpness"), _numbers(data, "copying")
        weights = _weights(data.get("confidence"))
        return cls(raw, provenance, device, weights=weights, sharpness=sharpness, copying=copying)

    def save(self, path: str | Path) -> None:
        """Write our form, whole or not at all."""
        write_object(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, gamma: int, device: torch.device | str = "cpu") -> Calibration:
        """Read a file in our form or in SGLang's. Raises `CalibrationError`, which names it."""
        data = read_object(path, CalibrationError)
        try:
            return cls.from_dict(data, gamma, device)
        except CalibrationError as problem:
            raise CalibrationError(
                f"{path}: {problem}. Make another one with 'surefoot calibrate -d DRAFTER'"
            ) from problem


def _weights(raw: Any) -> list[list[list[float]]] | None:
    if raw is None:
        return None
    weights: list[list[list[float]]] = []
    for regime in REGIMES:
        weights.append([])
        for name in INPUTS:
            row = raw[regime].get(name) if isinstance(raw, dict) and isinstance(raw.get(regime), dict) else None
            if not isinstance(row, list) or not all(_is_number(value) for value in row):
                raise CalibrationError(
                    f"'confidence' of a calibration file needs {' and '.join(REGIMES)}, each with a number per position "
                    f"named {', '.join(INPUTS)}; {regime}.{name} is {'missing' if row is None else repr(row)}"
                )
            weights[-1].append(row)
    lengths = {len(row) for regime in weights for row in regime}
    if len(lengths) > 1:
        raise CalibrationError(f"the lists in 'confidence' of a calibration file differ in length: {sorted(lengths)}")
    return weights


def _numbers(data: dict[str, Any], name: str) -> list[float] | None:
    raw = data.get(name)
    if raw is not None and not (isinstance(raw, list) and all(_is_number(value) for value in raw)):
        raise CalibrationError(f"'{name}' of a calibration file is a list of numbers; got {raw!r}")
    return raw


def _shortest(values: Tensor) -> list[float]:
    """Few digits that read back as the same float32: 1.45, not 1.4500000476837158."""
    return [float(str(value)) for value in values.cpu().numpy()]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
