"""Real speculative decoding with full windows, watched: what the drafter proposed, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from surefoot.drafters.checkpoint import describe_checkpoint
from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine, EngineConfig
from surefoot.engine.trace import StepReport
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration, Outcomes, fit_temperatures, quality_by_position
from surefoot.targets.target import Target
from surefoot.training.files import file_digest
from surefoot.training.progress import Progress

WEIGHTS = "model.safetensors"


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads; None leaves torch's choice."""
    if threads is None:
        return
    if threads < 1:
        raise ConfigurationError(f"threads is {threads}; allowed: 1 or more; leave it out for all physical cores")
    torch.set_num_threads(threads)


def serving_target(name: str, *, device: str | None = None, dtype: str | None = None, quiet: bool = False) -> Target:
    """A target packed for its device, as `surefoot.LLM` loads it."""
    from surefoot.targets.loading import load_target
    from surefoot.targets.optimise import optimise

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(name, dtype=dtype, device=where, quiet=quiet)
    optimise(target.model)
    return target


def speculation_engine(target: Target, drafter: Path, *, batch: int, max_model_len: int) -> Engine:
    """An engine that verifies every block whole, whatever its confidences."""
    gamma = describe_checkpoint(drafter).gamma
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=max(512, batch * (gamma + 2)),
        max_model_len=min(target.max_model_len, max_model_len),
        seed=0,
    )
    return build_engine(target, drafter=str(drafter), width=gamma, cost_table="none", config=config)


@dataclass
class Blocks:
    """N verified blocks."""

    gamma: int
    accepted: list[int] = field(default_factory=list)  # [N]
    verified: list[int] = field(default_factory=list)  # [N] less than gamma only at the end of a text
    logits: list[list[float]] = field(default_factory=list)  # [N, gamma] of the confidence head; empty without one

    def merge(self, other: Blocks) -> None:
        for name in ("accepted", "verified", "logits"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(np.array(self.accepted, dtype=np.int64), np.array(self.verified, dtype=np.int64))

    def confidence_logits(self) -> npt.NDArray[np.float64]:
        return np.array(self.logits, dtype=np.float64).reshape(-1, self.gamma)

    @property
    def accepted_length(self) -> float:
        """Mean accepted draft tokens of the blocks that were verified whole; NaN without one."""
        whole = [a for a, v in zip(self.accepted, self.verified, strict=True) if v == self.gamma]
        return float(np.mean(whole)) if whole else float("nan")

    def conditional(self) -> tuple[list[float], list[int]]:
        """Acceptance of position k given that k - 1 was accepted, and how often that was seen: [gamma], [gamma]."""
        accepted, verified = np.array(self.accepted), np.array(self.verified)
        rates, counts = [], []
        for k in range(1, self.gamma + 1):
            reached = (accepted >= k - 1) & (verified >= k)
            counts.append(int(reached.sum()))
            rates.append(float((accepted[reached] >= k).mean()) if counts[-1] else float("nan"))
        return rates, counts


def watch(
    engine: Engine,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    params: SamplingParams,
    progress: Progress,
    *,
    span: tuple[float, float] = (0.0, 1.0),
) -> dict[str, Blocks]:
    """Complete the prompts of every workload and return its blocks.

    Args:
        prompts: token ids by workload.
        params: of all; each request gets a seed of its own.
        span: which part of `progress` this is.
    """
    found = {workload: Blocks(engine.gamma) for workload in prompts}
    owner: dict[str, str] = {}

    def observe(report: StepReport) -> None:
        outputs = report.outputs
        logits = None if outputs.confidence_logits is None else outputs.confidence_logits.tolist()
        for row in range(report.inputs.num_drafted):
            if report.kept[row] == 0 or not outputs.widths[row]:
                continue
            blocks = found[owner[report.request_ids[row]]]
            blocks.accepted.append(outputs.accepted[row])
            blocks.verified.append(outputs.widths[row])
            if logits is not None:
                blocks.logits.append(logits[row])

    engine.add_observer(observe)
    try:
        for workload, texts in prompts.items():
            for number, tokens in enumerate(texts):
                request = engine.add_request(tokens, replace(params, seed=number))
                owner[request.request_id] = workload
        total = len(owner)
        while engine.has_work:
            engine.step()
            done = total - len(engine.requests)
            progress.update(span[0] + (span[1] - span[0]) * done / max(total, 1), f"{done}/{total} texts")
    finally:
        engine.remove_observer(observe)
        for request_id in list(engine.requests):
            engine.cancel(request_id)
    return found


def weights_digest(drafter: Path) -> str:
    """What ties a calibration to the weights it was fitted for."""
    return f"sha256:{file_digest(drafter / WEIGHTS)}"


def calibrate(
    engine: Engine,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    progress: Progress,
    *,
    dataset: str,
) -> tuple[Calibration, dict[str, object]]:
    """Fit sequential temperature scaling on the blocks of held-out prompts, all sampling temperatures together.

    Returns the calibration, and its quality for the record. For a drafter with a confidence head only.
    """
    pooled = Blocks(engine.gamma)
    for number, temperature in enumerate(temperatures):
        span = (number / len(temperatures), (number + 1) / len(temperatures))
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        pooled.merge(watch(engine, {dataset: prompts}, params, progress, span=span)[dataset])
    fitted = fit_temperatures(
        pooled.confidence_logits(), pooled.outcomes, dataset=dataset, drafter=weights_digest(drafter)
    )
    provenance = fitted.provenance
    record: dict[str, object] = {
        "blocks": provenance.num_samples,
        "temperatures": [round(t, 4) for t in fitted.temperatures.tolist()],
        "ece_before": [round(e, 5) for e in provenance.ece_before],
        "ece_after": [round(e, 5) for e in provenance.ece_after],
    }
    return fitted, record


def survival_of(
    logits: npt.NDArray[np.float64], temperatures: npt.NDArray[np.floating] | float
) -> npt.NDArray[np.float64]:
    """[N, gamma] confidence logits -> survivals."""
    return np.cumprod(1 / (1 + np.exp(-np.clip(logits / temperatures, -60, 60))), axis=1)


def describe_blocks(blocks: Blocks, calibration: Calibration | None) -> dict[str, object]:
    """Every figure of one workload at one temperature, JSON-ready (NaN where nothing was seen is None)."""
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
        logits = blocks.confidence_logits()
        arms: dict[str, npt.NDArray[np.floating] | float] = {"before": 1.0}
        if calibration is not None:
            arms["after"] = calibration.temperatures.numpy().astype(np.float64)
        for arm, temperatures in arms.items():
            quality = quality_by_position(survival_of(logits, temperatures), blocks.outcomes)
            figures[f"ece_{arm}"] = [_number(q.ece) for q in quality]
            figures[f"auc_{arm}"] = [_number(q.auc) for q in quality]
            figures["labelled"] = [q.count for q in quality]
    return figures


def _number(value: float) -> float | None:
    return round(float(value), 5) if np.isfinite(value) else None
