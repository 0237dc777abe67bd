"""Measures a drafter by speculative decoding at full width: records proposed blocks and their outcomes, fits calibrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from surefoot.drafters.checkpoint import describe_checkpoint
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.locations import weights_digest
from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.options import EngineOptions
from surefoot.engine.trace import StepReport
from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration, Provenance
from surefoot.speculation.calibration_fit import fit_temperatures, fit_weights
from surefoot.speculation.calibration_quality import Outcomes, PositionQuality, quality_by_position
from surefoot.targets.target import Target
from surefoot.training.forced import WrittenText, choose_sharpness, follow
from surefoot.training.progress import StageProgress

COPYING_TEXTS = 48  # number of texts, about, that the copying shares are fitted to
WRITING = 0.35  # share of a calibration's time spent on generating texts


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads; None keeps torch's choice.

    Raises:
        ConfigurationError: `threads` is below 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise ConfigurationError(f"threads is {threads}; allowed: 1 or more; leave it out for all physical cores")
    torch.set_num_threads(threads)


def serving_target(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Target:
    """A target packed for its device, as `surefoot.LLM` loads it."""
    from surefoot.targets.loading import load_target
    from surefoot.targets.optimise import optimise

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(name, dtype=dtype, device=where, trust_remote_code=trust_remote_code, quiet=quiet)
    optimise(target.model)
    return target


def speculation_engine(
    target: Target, drafter: Path, *, batch: int, max_model_len: int, calibration: Path | None = None
) -> Engine:
    """An engine that verifies every block at full width, whatever its confidences.

    Args:
        calibration: file whose sharpness and copying the drafter uses; None: the one in its directory, if any.
    """
    gamma = describe_checkpoint(drafter).gamma
    options = EngineOptions(
        drafter=drafter,
        width=gamma,
        cost_table="none",
        calibration=calibration,
        max_num_seqs=batch,
        max_num_batched_tokens=max(512, batch * (gamma + 2)),
        max_model_len=min(target.max_model_len, max_model_len),
        seed=0,
    )
    return build_engine(target, options)


@dataclass
class VerifiedBlocks:
    """N verified blocks."""

    gamma: int
    accepted: list[int] = field(default_factory=list)  # [N]
    verified: list[int] = field(default_factory=list)  # [N] below gamma only at the end of a text
    temperature: list[float] = field(default_factory=list)  # [N]
    logits: list[list[float]] = field(default_factory=list)  # [N, gamma] of the confidence head; empty without one
    signal: list[list[float]] = field(default_factory=list)  # [N, gamma]; empty without a head

    def merge(self, other: VerifiedBlocks) -> None:
        for name in ("accepted", "verified", "temperature", "logits", "signal"):
            getattr(self, name).extend(getattr(other, name))

    def at(self, temperature: float) -> VerifiedBlocks:
        """The blocks of requests sampled at this temperature."""
        kept = [i for i, t in enumerate(self.temperature) if t == temperature]
        lists = {
            name: [values[i] for i in kept] if (values := getattr(self, name)) else []
            for name in ("accepted", "verified", "temperature", "logits", "signal")
        }
        return VerifiedBlocks(self.gamma, **lists)

    def survival(self, calibration: Calibration) -> npt.NDArray[np.float64]:
        """[N, gamma] survival as predicted by `calibration`."""
        shape = (-1, self.gamma)
        return calibration.survival(
            np.reshape(self.logits, shape), np.reshape(self.signal, shape), np.array(self.temperature)
        )

    def quality(self, calibration: Calibration) -> list[PositionQuality]:
        """[gamma] quality of that prediction by position."""
        return quality_by_position(self.survival(calibration), self.outcomes)

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(np.array(self.accepted, dtype=np.int64), np.array(self.verified, dtype=np.int64))

    def confidence_logits(self) -> npt.NDArray[np.float64]:
        return np.array(self.logits, dtype=np.float64).reshape(-1, self.gamma)

    @property
    def accepted_length(self) -> float:
        """Mean accepted draft tokens of the blocks verified at full width; NaN without one."""
        whole = [a for a, v in zip(self.accepted, self.verified, strict=True) if v == self.gamma]
        return float(np.mean(whole)) if whole else float("nan")

    def conditional(self) -> tuple[list[float], list[int]]:
        """Acceptance of position k given that k - 1 was accepted, and the number of blocks that reached k: [gamma], [gamma]."""
        accepted, verified = np.array(self.accepted), np.array(self.verified)
        rates, counts = [], []
        for k in range(1, self.gamma + 1):
            reached = (accepted >= k - 1) & (verified >= k)
            counts.append(int(reached.sum()))
            rates.append(float((accepted[reached] >= k).mean()) if counts[-1] else float("nan"))
        return rates, counts


def note_blocks(report: StepReport, temperature: float, blocks_of: Callable[[str], VerifiedBlocks]) -> None:
    """Record the blocks of one step and their outcomes; `blocks_of` maps a request id to the record to extend."""
    outputs = report.outputs
    logits, signal = (
        None if value is None else value.tolist() for value in (outputs.evidence.logits, outputs.evidence.signal)
    )
    for row in range(report.inputs.num_drafting):
        if report.kept[row] == 0 or not outputs.widths[row]:
            continue
        blocks = blocks_of(report.request_ids[row])
        blocks.accepted.append(outputs.accepted[row])
        blocks.verified.append(outputs.widths[row])
        blocks.temperature.append(temperature)
        if logits is not None and signal is not None:
            blocks.logits.append(logits[row])
            blocks.signal.append(signal[row])


def watch(
    engine: Engine,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    params: SamplingParams,
    progress: StageProgress,
    *,
    span: tuple[float, float] = (0.0, 1.0),
    texts: list[WrittenText] | None = None,
) -> dict[str, VerifiedBlocks]:
    """Complete the prompts of every workload and return its blocks.

    Args:
        prompts: token ids by workload.
        params: of all requests; each gets its own seed.
        span: part of `progress` that this call covers.
        texts: list to which the generated texts are appended.
    """
    found = {workload: VerifiedBlocks(engine.gamma) for workload in prompts}
    owner: dict[str, str] = {}

    def observe(report: StepReport) -> None:
        note_blocks(report, params.temperature, lambda request: found[owner[request]])

    engine.add_observer(observe)
    requests = []
    try:
        for workload, tokenised in prompts.items():
            for number, tokens in enumerate(tokenised):
                requests.append(engine.add_request(tokens, replace(params, seed=number)))
                owner[requests[-1].request_id] = workload
        while engine.has_work:
            for request, _ in engine.step():
                request.raise_error()
            done = len(requests) - len(engine.requests)
            progress.update(
                span[0] + (span[1] - span[0]) * done / max(len(requests), 1), f"{done}/{len(requests)} texts"
            )
    finally:
        engine.remove_observer(observe)
        for request_id in list(engine.requests):
            engine.cancel(request_id)
    if texts is not None:
        texts += [WrittenText(tuple(r.token_ids), len(r.prompt_token_ids), params.temperature) for r in requests]
    return found


def calibrate(
    engine: Engine,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    progress: StageProgress,
    *,
    dataset: str,
) -> tuple[Calibration, dict[str, object]]:
    """Fit a calibration on the blocks of held-out prompts, all sampling temperatures together.

    Returns the calibration, and its quality for the record. For a drafter with a confidence head only.
    """
    assert isinstance(engine.drafter, DSparkDrafter)
    engine.drafter.draw_by(None)  # whatever lies beside it
    texts: list[WrittenText] = []
    share = WRITING / len(temperatures)
    for number, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        span = (number * share, (number + 1) * share)
        watch(engine, {dataset: prompts}, params, progress, span=span, texts=texts)
    fitted, _ = fit_calibration(
        engine.target, engine.drafter, texts, progress, dataset=dataset, name=weights_digest(drafter)
    )
    provenance = fitted.provenance
    record: dict[str, object] = {
        "blocks": provenance.num_samples,
        "temperatures": _rounded(fitted.temperatures.tolist(), 4),
        "draft_sharpness": None if fitted.sharpness is None else _rounded(fitted.sharpness.tolist(), 4),
        "copying": None if fitted.copying is None else _rounded(fitted.copying.tolist(), 4),
        "ece_before": _rounded(provenance.ece_before),
        "ece_after": _rounded(provenance.ece_after),
    }
    return fitted, record


def fit_calibration(
    target: Target,
    drafter: DSparkDrafter,
    texts: Sequence[WrittenText],
    progress: StageProgress,
    *,
    dataset: str,
    name: str,
) -> tuple[Calibration, VerifiedBlocks]:
    """Fit copying, sharpness and confidences from the blocks `drafter` proposes along `texts`.

    Copying is fitted first, on a part of the texts, because the others depend on it; then sharpness, then confidences.

    Args:
        drafter: bound to `target`, with a confidence head; afterwards it draws without a calibration.
        name: the drafter's name in the calibration's provenance.

    Returns:
        The calibration, whose provenance holds the calibration error of the survival before and after; and the blocks it is
        measured on: those that a loop which draws as calibrated drafts along the texts.

    Raises:
        CalibrationError: no text of two tokens.
    """
    written = [text for text in texts if len(text.tokens) > text.start + 1]
    if not written:
        raise CalibrationError("no block was drafted: give longer or more prompts, or raise --max-tokens")
    some = written[:: max(1, len(written) // COPYING_TEXTS)]
    middle = WRITING + (1 - WRITING) * len(some) / (len(some) + len(written))
    gamma = drafter.gamma
    try:
        alone = follow(target, drafter, some, progress, sharpness=(1.0,), span=(WRITING, middle))
        copying = Calibration([1.0] * gamma, device=target.device, copying=alone.shares())
        drafter.draw_by(copying)
        seen = follow(target, drafter, written, progress, span=(middle, 1.0))
    finally:
        drafter.draw_by(None)
    level = choose_sharpness(seen)
    chance = seen.chance[:, :, level]
    rows, accepted, known = seen.met(chance, np.random.default_rng(0))
    columns = (seen.temperature, seen.logits, seen.signal)
    met = VerifiedBlocks(gamma, accepted.tolist(), known.tolist(), *(column[rows].tolist() for column in columns))
    plain = fit_temperatures(met.confidence_logits(), met.outcomes)
    reached = seen.reached(chance)
    weights = fit_weights(seen.logits, seen.signal, seen.temperature, seen.overlap[:, :, level], reached)
    sharpness = None if seen.sharpness[level] == 1 else [seen.sharpness[level]] * gamma
    fitted = Calibration(plain.temperatures, weights=weights, sharpness=sharpness, copying=copying.copying)
    before, after = (tuple(q.ece for q in met.quality(judge)) for judge in (fitted.uncalibrated(), fitted))
    fitted.provenance = Provenance(dataset, len(rows), name, before, after)
    return fitted, met


def describe_blocks(blocks: VerifiedBlocks, calibration: Calibration | None) -> dict[str, object]:
    """All figures of one workload at one temperature, ready for JSON (None where nothing was observed)."""
    rates, counts = blocks.conditional()
    length = blocks.accepted_length
    figures: dict[str, object] = {
        "blocks": len(blocks.accepted),
        "accepted_length": _number(length),
        "accepted_length_with_bonus": _number(length + 1),
        "conditional_acceptance": [_number(rate) for rate in rates],
        "reached": counts,
    }
    if blocks.logits:
        for arm, fitted in arms_of(blocks, calibration).items():
            quality = blocks.quality(fitted)
            figures[f"ece_{arm}"] = [_number(q.ece) for q in quality]
            figures[f"auc_{arm}"] = [_number(q.auc) for q in quality]
            figures[f"ece_by_chance_{arm}"] = [_number(q.chance) for q in quality]
            figures["labelled"] = [q.count for q in quality]
    return figures


def arms_of(blocks: VerifiedBlocks, calibration: Calibration | None) -> dict[str, Calibration]:
    """The calibrations to compare: "before" (the identity) and, if there is one, "after"."""
    before = {"before": Calibration.identity(blocks.gamma)}
    return before if calibration is None else {**before, "after": calibration}


def _rounded(values: Sequence[float], digits: int = 5) -> list[float]:
    return [round(value, digits) for value in values]


def _number(value: float) -> float | None:
    return round(float(value), 5) if np.isfinite(value) else None
