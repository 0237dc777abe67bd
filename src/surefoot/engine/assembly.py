"""From what a user typed to an engine: target, optimisation pass, drafter, calibration, cost table, policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surefoot.drafters.base import Drafter
from surefoot.engine.device import CudaDevice, Device, InlineDevice
from surefoot.engine.engine import Engine, EngineConfig
from surefoot.engine.policy import WidthPolicy
from surefoot.errors import CalibrationError, ConfigurationError, DrafterError
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.estimator import ConfidenceSource, HeadConfidence, LogisticEstimator, SignalConfidence
from surefoot.speculation.planner import ForcedWidths
from surefoot.targets.target import Target

DRAFTER_WORDS = ("auto", "none", "prompt-lookup")
LOOKUP_GAMMA = 7
"""Drafts per block of the prompt-lookup drafter: a pass of eight rows is where the cost curve of a CPU begins to rise."""


def build_engine(
    model: str | Path | Target,
    *,
    drafter: str | Path | Drafter | None = "auto",
    gamma: int | None = None,
    width: int | str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    cost_table: str | Path = "auto",
    calibration: str | Path | None = None,
    threads: int | None = None,
    config: EngineConfig | None = None,
    **policy_options: Any,
) -> Engine:
    """Load and join everything; see `surefoot.LLM` for the arguments."""
    from surefoot.targets import load_target, optimise

    if threads is not None:
        if threads < 1:
            raise ConfigurationError(f"threads is {threads}; allowed: 1 or more; leave it out for all physical cores")
        torch.set_num_threads(threads)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(model, Target):
        target = model
    else:
        target = load_target(str(model), dtype=dtype, device=str(where))
        optimise(target.model, quantize=quantize)
    chosen = load_drafter_for(target, drafter, gamma)
    config = config or EngineConfig()
    policy = make_policy(
        target, chosen, width=width, config=config, cost_table=cost_table, calibration=calibration, **policy_options
    )
    backend: Device = CudaDevice(where) if where.type == "cuda" else InlineDevice()
    return Engine(target, chosen, policy, config, device=backend)


def make_policy(
    target: Target,
    drafter: Drafter | None,
    *,
    width: int | str | None,
    config: EngineConfig,
    cost_table: str | Path = "auto",
    calibration: str | Path | None = None,
    **options: Any,
) -> WidthPolicy:
    """The planner of an engine, with what it plans from."""
    gamma = drafter.gamma if drafter else 0
    if isinstance(width, str) and width == "auto":
        width = None
    forced = None if width is None else ForcedWidths.parse(width)
    if forced is not None and max(forced.pattern) > gamma:
        raise ConfigurationError(
            f"width {max(forced.pattern)} is more than gamma: this drafter proposes {gamma} tokens; allowed are 0 ... {gamma}"
        )
    return WidthPolicy(
        gamma,
        num_slots=config.max_num_seqs,
        forced=forced,
        confidence=confidence_source(drafter, calibration, target.device) if drafter else None,
        **options,
    )


def confidence_source(drafter: Drafter, calibration: str | Path | None, device: torch.device | str) -> ConfidenceSource:
    """A head behind its temperatures with an estimator that watches over it, or an estimator alone."""
    estimator = LogisticEstimator(drafter.gamma, device)
    if not getattr(getattr(drafter, "config", None), "enable_confidence_head", False):
        if calibration is not None:
            raise CalibrationError(
                f"{calibration}: the drafter {drafter.name} has no confidence head to calibrate; leave the calibration out"
            )
        return SignalConfidence(estimator)
    if calibration is None:
        temperatures = Calibration.identity(drafter.gamma, device)
    else:
        temperatures = Calibration.load(calibration, drafter.gamma, device)
    return HeadConfidence(temperatures, estimator)


def load_drafter_for(target: Target, drafter: str | Path | Drafter | None, gamma: int | None) -> Drafter | None:
    """The drafter a user asked for, bound to `target`.

    Raises:
        DrafterError: no such drafter, or one made for another target; the message names both sides.
    """
    from surefoot.drafters import PromptLookupDrafter, load_drafter

    if drafter is None or drafter == "none":
        if gamma:
            raise ConfigurationError(f"gamma is {gamma}, but there is no drafter: choose one, or leave gamma out")
        return None
    if drafter in ("auto", "prompt-lookup"):
        lookup = PromptLookupDrafter(LOOKUP_GAMMA if gamma is None else _checked_gamma(gamma))
        lookup.bind(target)
        return lookup
    if isinstance(drafter, (str, Path)):
        if not Path(drafter).exists() and "/" not in str(drafter):
            raise DrafterError(
                f"unknown drafter {str(drafter)!r}: allowed are {', '.join(DRAFTER_WORDS)}, a checkpoint directory, or a "
                f"Hugging Face id (owner/name)"
            )
        drafter = load_drafter(str(drafter), gamma=gamma, dtype=target.dtype, device=str(target.device))
    drafter.bind(target)
    return drafter


def _checked_gamma(gamma: int) -> int:
    if not 1 <= gamma <= 32:
        raise ConfigurationError(f"gamma is {gamma}; allowed for prompt lookup: 1 ... 32")
    return gamma
