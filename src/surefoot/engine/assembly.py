"""Assemble an engine from a loaded target and drafter: calibration, cost table, policy, device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from surefoot.drafters.base import Drafter
from surefoot.engine.device import device_for
from surefoot.engine.engine import Engine
from surefoot.engine.fingerprint import find_table, fingerprint, load_table
from surefoot.engine.loading import load
from surefoot.engine.options import EngineOptions
from surefoot.engine.policy import WidthPolicy
from surefoot.errors import ConfigurationError
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.cost import CostTable
from surefoot.speculation.guard import Guard
from surefoot.speculation.live_cost import LiveCost
from surefoot.targets.target import Target


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
        confidence=drafter.confidence_source(target.device, options.calibration) if drafter else None,
        planner=options.planner or ("stopping" if reads_are_free else "stale"),
        breaker=None if options.breaker is None else partial(Breaker, min_acceptance=options.breaker),
        min_gain=options.min_gain,
        min_width=options.min_width,
        max_width=options.max_width,
        # Where every row of a pass costs its own time, drafts beside a prompt chunk do as well.
        trim_beside_prefill=reads_are_free,
        suspends=(drafter is None or not drafter.rests) if suspends is None else suspends,
        model_gamma=drafter.model_gamma if drafter else None,
        guard=Guard(settle=0 if reads_are_free else 1) if options.guard and drafter else None,
    )


def cost_table(target: Target, drafter: Drafter | None, options: EngineOptions) -> CostTable | None:
    """What `surefoot profile` saved for this engine (`auto`), nothing (`none`), or a file that must fit this engine."""
    wanted = options.cost_table
    if wanted == "none":
        return None
    if isinstance(wanted, CostTable):
        return wanted
    measured = fingerprint(
        target, drafter, max_num_seqs=options.max_num_seqs, block_size=options.block_size, graphs=options.graphs
    )
    return find_table(measured) if wanted == "auto" else load_table(wanted, measured)
