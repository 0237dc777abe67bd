"""Assemble an engine from a loaded target and drafter: calibration, cost table, policy, device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from surefoot.drafters.base import Drafter
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.engine.device import device_for
from surefoot.engine.engine import Engine
from surefoot.engine.loading import load
from surefoot.engine.options import EngineOptions
from surefoot.engine.policy import WidthPolicy
from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.cost import CostTable
from surefoot.speculation.estimator import ConfidenceSource, HeadConfidence, LogisticEstimator, SignalConfidence
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.sources import CombinedConfidence
from surefoot.targets.target import Target

CALIBRATION_FILE = "calibration.json"
"""In the drafter's directory, written by `surefoot calibrate`."""


def build_engine(model: str | Path | Target, options: EngineOptions) -> Engine:
    """Load and assemble; see `surefoot.LLM`."""
    return assemble(*load(model, options), options)


def assemble(target: Target, drafter: Drafter | None, options: EngineOptions) -> Engine:
    """An engine over models that are loaded.

    Raises:
        SurefootError: a width, planner, calibration or cost table that does not fit them.
    """
    device = device_for(target.device)
    overlaps = device.overlaps if options.overlap is None else options.overlap
    policy = make_policy(target, drafter, options, reads_are_free=device.reads_are_free and not overlaps)
    return Engine(target, drafter, policy, options, device=device)


def make_policy(
    target: Target,
    drafter: Drafter | None,
    options: EngineOptions,
    *,
    reads_are_free: bool = True,
    suspends: bool | None = None,
) -> WidthPolicy:
    """The planner of an engine, with what it plans from.

    Without `options.planner` it is optimal stopping on this step's confidences where the host may read them within the step,
    and a search on earlier steps' survivals where it must not.

    Args:
        reads_are_free: whether the host may read the device's values within a step without waiting.
        suspends: leave drafting out where it promises a loss; None: unless the drafter decides that itself.
    """
    gamma = drafter.gamma if drafter else 0
    forced = options.forced_widths
    if forced is not None and max(forced.pattern) > gamma:
        if drafter is None:
            raise ConfigurationError(
                f"width {max(forced.pattern)} without a drafter: choose a drafter, or leave the width out"
            )
        raise ConfigurationError(
            f"width {max(forced.pattern)} is more than gamma: this drafter proposes {gamma} tokens; choose a width of 0 ... "
            f"{gamma}, or 'auto' for the planner's"
        )
    return WidthPolicy(
        gamma,
        num_slots=options.max_num_seqs,
        costs=LiveCost(cost_table(target, drafter, options)),
        forced=forced,
        confidence=confidence_source(drafter, options.calibration, target.device) if drafter else None,
        planner=options.planner or ("stopping" if reads_are_free else "stale"),
        breaker=None if options.breaker is None else partial(Breaker, min_acceptance=options.breaker),
        min_gain=options.min_gain,
        min_width=options.min_width,
        max_width=options.max_width,
        # Where every row of a pass costs its own time, drafts beside a prompt chunk do as well.
        trim_beside_prefill=reads_are_free,
        # A combined drafter rests its model where it does not pay, and goes on looking up.
        suspends=not isinstance(drafter, CombinedDrafter) if suspends is None else suspends,
        model_gamma=drafter.trained.gamma if isinstance(drafter, CombinedDrafter) else None,
    )


def cost_table(target: Target, drafter: Drafter | None, options: EngineOptions) -> CostTable | None:
    """What `surefoot profile` saved for this engine (`auto`), nothing (`none`), or a file that must fit this engine."""
    from surefoot.profiling.fingerprint import find_table, fingerprint, load_table

    wanted = options.cost_table
    if wanted == "none":
        return None
    if isinstance(wanted, CostTable):
        return wanted
    measured = fingerprint(
        target, drafter, max_num_seqs=options.max_num_seqs, block_size=options.block_size, graphs=options.graphs
    )
    return find_table(measured) if wanted == "auto" else load_table(wanted, measured)


def confidence_source(drafter: Drafter, calibration: str | Path | None, device: torch.device | str) -> ConfidenceSource:
    """A calibrated head with an estimator that watches it, or an estimator alone; one each for two sources."""
    if isinstance(drafter, CombinedDrafter):
        return CombinedConfidence(drafter.choice, confidence_source(drafter.trained, calibration, device))
    estimator = LogisticEstimator(drafter.gamma, device)
    if not drafter.has_confidence_head:
        if calibration is not None:
            raise CalibrationError(
                f"{calibration}: the drafter {drafter.name} has no confidence head to calibrate; leave the calibration out"
            )
        return SignalConfidence(estimator)
    if calibration is None and (beside := Path(getattr(drafter, "origin", "")) / CALIBRATION_FILE).is_file():
        calibration = beside
    if calibration is None:
        fitted = Calibration.identity(drafter.gamma, device)
    else:
        fitted = _load_calibration(Path(calibration), drafter, device)
    if isinstance(drafter, DSparkDrafter):  # draws by it, and its logits come out calibrated
        drafter.calibration, fitted = fitted, Calibration.identity(drafter.gamma, device)
    return HeadConfidence(fitted, estimator)


def _load_calibration(path: Path, drafter: Drafter, device: torch.device | str) -> Calibration:
    """For the drafter's gamma: its own file, or the first positions of a file for the whole block it was trained on."""
    whole: int = getattr(getattr(drafter, "config", None), "gamma", drafter.gamma)
    try:
        return Calibration.load(path, drafter.gamma, device)
    except CalibrationError:
        if whole == drafter.gamma:
            raise
    return Calibration.load(path, whole, device).first(drafter.gamma)
