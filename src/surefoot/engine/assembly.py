"""From what a user typed to an engine: target, optimisation pass, drafter, calibration, cost table, policy."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from surefoot.drafters.base import Drafter
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.drafters.shipped import shipped_for
from surefoot.engine.device import CudaDevice, Device, InlineDevice
from surefoot.engine.engine import Engine, EngineConfig
from surefoot.engine.policy import PlannerName, WidthPolicy
from surefoot.errors import CalibrationError, ConfigurationError, DrafterError
from surefoot.kernels.linear import Quantization
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.cost import CostTable
from surefoot.speculation.estimator import ConfidenceSource, HeadConfidence, LogisticEstimator, SignalConfidence
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import ForcedWidths
from surefoot.speculation.sources import CombinedConfidence, SourceChoice
from surefoot.targets.target import Target

log = logging.getLogger(__name__)

LOOKUP_WORDS = ("auto", "prompt-lookup")
DRAFTER_WORDS = (*LOOKUP_WORDS, "none")
BOTH = "prompt-lookup+"
"""In front of a checkpoint: prompt lookup and this drafter in one."""
LONGEST_LOOKUP = 32
CALIBRATION_FILE = "calibration.json"
"""In the drafter's directory, written by `surefoot calibrate`."""
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
    from surefoot.targets.loading import load_target
    from surefoot.targets.optimise import optimise

    if threads is not None:
        if threads < 1:
            raise ConfigurationError(f"threads is {threads}; allowed: 1 or more; leave it out for all physical cores")
        torch.set_num_threads(threads)
    where = _device(device)
    if quantize not in (None, "int8"):
        raise ConfigurationError(f"quantize is {quantize!r}; allowed: int8; leave it out for the weights as they are")
    check_drafter(drafter, gamma)  # before seconds go into loading the target
    if isinstance(model, Target):
        target = model
    else:
        target = load_target(str(model), dtype=dtype, device=str(where))
        applied = optimise(target.model, quantize=cast("Quantization | None", quantize))
        if quantize is not None and not applied:
            raise ConfigurationError(
                f"quantize {quantize!r} needs a CPU target and the native kernels: leave it out here"
            )
    chosen = load_drafter_for(target, drafter, gamma)
    trained = chosen.trained if isinstance(chosen, CombinedDrafter) else chosen
    if isinstance(trained, DSparkDrafter):
        trained.model.pack()
    config = config or EngineConfig()
    backend: Device = CudaDevice(where) if where.type == "cuda" else InlineDevice()
    policy = make_policy(
        target,
        chosen,
        width=width,
        config=config,
        cost_table=cost_table,
        calibration=calibration,
        reads_are_free=backend.reads_are_free and not config.overlap,
        **policy_options,
    )
    return Engine(target, chosen, policy, config, device=backend)


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as problem:
        raise ConfigurationError(
            f"device {name!r} is not one torch knows; allowed are cpu, cuda and cuda:N"
        ) from problem
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigurationError(f"device {name!r} is not available here; allowed are cpu and, with a GPU, cuda")
    return device


def make_policy(
    target: Target,
    drafter: Drafter | None,
    *,
    width: int | str | None,
    config: EngineConfig,
    cost_table: str | Path | CostTable = "auto",
    calibration: str | Path | None = None,
    planner: PlannerName | None = None,
    reads_are_free: bool = True,
    breaker: float | None = None,
    **options: Any,
) -> WidthPolicy:
    """The planner of an engine, with what it plans from.

    Without a `planner` it is optimal stopping on this step's confidences where the host may read them in mid-step, and a
    search on earlier steps' survivals where it must not.
    """
    gamma = drafter.gamma if drafter else 0
    if isinstance(width, str) and width == "auto":
        width = None
    forced = None if width is None else ForcedWidths.parse(width)
    if forced is not None and max(forced.pattern) > gamma:
        if drafter is None:
            raise ConfigurationError(
                f"width {max(forced.pattern)} without a drafter: choose a drafter, or leave the width out"
            )
        raise ConfigurationError(
            f"width {max(forced.pattern)} is more than gamma: this drafter proposes {gamma} tokens; choose a width of 0 ... "
            f"{gamma}, or 'auto' for the planner's"
        )
    if breaker is not None and not 0 < breaker <= 1:
        raise ConfigurationError(f"breaker is {breaker}; allowed: an acceptance above 0 and up to 1, such as 0.6")
    table = _cost_table(target, drafter, config, cost_table)
    return WidthPolicy(
        gamma,
        breaker=None if breaker is None else partial(Breaker, min_acceptance=breaker),
        num_slots=config.max_num_seqs,
        forced=forced,
        confidence=confidence_source(drafter, calibration, target.device) if drafter else None,
        planner=planner or ("stopping" if reads_are_free else "stale"),
        model_gamma=drafter.trained.gamma if isinstance(drafter, CombinedDrafter) else None,
        # A combined drafter rests its model where it does not pay, and goes on looking up. Where every row of a pass costs its
        # own time, drafts beside a prompt chunk do as well.
        **{
            "costs": LiveCost(table),
            "suspends": not isinstance(drafter, CombinedDrafter),
            "trim_beside_prefill": reads_are_free,
            **options,
        },
    )


def _cost_table(
    target: Target, drafter: Drafter | None, config: EngineConfig, wanted: str | Path | CostTable
) -> CostTable | None:
    """What `surefoot profile` saved for this engine (`auto`), nothing (`none`), or a file that must fit this engine."""
    from surefoot.profiling.fingerprint import find_table, fingerprint, load_table

    if wanted == "none":
        return None
    if isinstance(wanted, CostTable):
        return wanted
    measured = fingerprint(
        target, drafter, max_num_seqs=config.max_num_seqs, block_size=config.block_size, graphs=config.graphs
    )
    return find_table(measured) if wanted == "auto" else load_table(wanted, measured)


def confidence_source(drafter: Drafter, calibration: str | Path | None, device: torch.device | str) -> ConfidenceSource:
    """A head behind its temperatures with an estimator that watches over it, or an estimator alone; one each for two."""
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


def check_drafter(drafter: str | Path | Drafter | None, gamma: int | None) -> None:
    """Refuse what needs no model to be seen as wrong.

    Raises:
        DrafterError, ConfigurationError: a word that is no drafter; a gamma that cannot be.
    """
    if (drafter is None or drafter == "none") and gamma:
        raise ConfigurationError(f"gamma is {gamma}, but there is no drafter: choose one, or leave gamma out")
    looks_up = drafter in LOOKUP_WORDS or str(drafter).startswith(BOTH)
    if looks_up and gamma is not None and not 1 <= gamma <= LONGEST_LOOKUP:
        raise ConfigurationError(f"gamma is {gamma}; allowed for prompt lookup: 1 ... {LONGEST_LOOKUP}")
    if isinstance(drafter, (str, Path)) and drafter not in DRAFTER_WORDS:
        checkpoint = str(drafter).removeprefix(BOTH)
        if not Path(checkpoint).exists() and "/" not in checkpoint:
            raise DrafterError(
                f"unknown drafter {str(drafter)!r}: allowed are {', '.join(DRAFTER_WORDS)}, a checkpoint directory, a "
                f"Hugging Face id (owner/name), or {BOTH} in front of either for both in one"
            )


def load_drafter_for(target: Target, drafter: str | Path | Drafter | None, gamma: int | None) -> Drafter | None:
    """The drafter a user asked for, bound to `target`.

    Raises:
        DrafterError: no such drafter, or one made for another target; the message names both sides.
    """
    from surefoot.drafters import load_drafter

    check_drafter(drafter, gamma)
    loaded: Drafter
    if drafter is None or drafter == "none":
        return None
    shipped = shipped_for(target) if drafter == "auto" else None
    if shipped is not None:
        loaded = combine(target, shipped.path, gamma)
        log.info("drafter: the one shipped for %s, combined with prompt lookup", shipped.name)
    elif drafter in LOOKUP_WORDS:
        loaded = PromptLookupDrafter(LOOKUP_GAMMA if gamma is None else gamma)
        log.info("drafter: prompt lookup%s", "; none is shipped for this target" if drafter == "auto" else "")
    elif isinstance(drafter, (str, Path)) and str(drafter).startswith(BOTH):
        loaded = combine(target, str(drafter).removeprefix(BOTH), gamma)
    elif isinstance(drafter, (str, Path)):
        loaded = load_drafter(str(drafter), gamma=gamma, dtype=target.dtype, device=str(target.device))
    else:
        loaded = drafter
    loaded.bind(target)
    return loaded


def combine(target: Target, checkpoint: str | Path | Drafter, gamma: int | None = None) -> CombinedDrafter:
    """Prompt lookup and a trained drafter in one, not bound yet.

    Args:
        checkpoint: of the trained drafter, or the drafter itself.
        gamma: of the lookup, and of the trained drafter as far as it goes; None: the usual one of each.
    """
    from surefoot.drafters.checkpoint import describe_checkpoint, load_drafter

    if isinstance(checkpoint, (str, Path)):
        trained_gamma = None if gamma is None else min(gamma, describe_checkpoint(checkpoint).gamma)
        trained: Drafter = load_drafter(checkpoint, gamma=trained_gamma, dtype=target.dtype, device=str(target.device))
    else:
        trained = checkpoint
    lookup = PromptLookupDrafter(max(LOOKUP_GAMMA if gamma is None else gamma, trained.gamma))
    choice = SourceChoice(lookup.gamma, trained.gamma, lookup.max_match, target.device)
    return CombinedDrafter(lookup, trained, choice)
