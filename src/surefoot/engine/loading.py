"""Load what a user named: a target with its optimisation pass, and a drafter that is bound to it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from surefoot.drafters import load_drafter
from surefoot.drafters.base import Drafter, check_protocol
from surefoot.drafters.checkpoint import describe_checkpoint
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.drafters.shipped import shipped_for
from surefoot.engine.options import COMBINED_PREFIX, LOOKUP_NAMES, EngineOptions, check_drafter
from surefoot.errors import ConfigurationError
from surefoot.speculation.sources import SourceChoice
from surefoot.targets.loading import load_target
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from surefoot.validation import shown

log = logging.getLogger(__name__)

LOOKUP_GAMMA = 7
"""Drafts per block of the prompt-lookup drafter: a pass of eight rows is where the cost curve of a CPU begins to rise."""


class Loaded(NamedTuple):
    """The models of an engine."""

    target: Target
    drafter: Drafter | None


def load(model: str | Path | Target, options: EngineOptions) -> Loaded:
    """Target and drafter, on the device and with the threads of `options`.

    Raises:
        SurefootError: a model or drafter that cannot be found, read, served, or that do not fit together.
    """
    if not isinstance(model, (str, Path, Target)):
        raise ConfigurationError(
            f"model is {shown(model)}; allowed: an alias, a Hugging Face id, a directory, a GGUF file, or a Target"
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(model, Target):
        target = model
    else:
        target = load_target(
            str(model),
            dtype=options.dtype,
            device=str(options.torch_device),
            trust_remote_code=options.trust_remote_code,
        )
        applied = optimise(target.model, quantize=options.quantize)
        if options.quantize is not None and not applied:
            raise ConfigurationError(
                f"quantize {options.quantize!r} needs a CPU target and the native kernels: leave it out here"
            )
    drafter = load_drafter_for(target, options.drafter, options.gamma)
    if drafter is not None:
        drafter.pack()
    return Loaded(target, drafter)


def load_drafter_for(target: Target, drafter: str | Path | Drafter | None, gamma: int | None) -> Drafter | None:
    """The drafter a user asked for, bound to `target`.

    Raises:
        DrafterError: no such drafter, or one made for another target; the message names both sides.
    """
    check_drafter(drafter, gamma)
    loaded: Drafter
    if drafter is None or drafter == "none":
        return None
    shipped = shipped_for(target) if drafter == "auto" else None
    if shipped is not None:
        loaded = combine(target, shipped.path, gamma)
        log.info("drafter: the one shipped for %s, combined with prompt lookup", shipped.name)
    elif drafter in LOOKUP_NAMES:
        loaded = PromptLookupDrafter(LOOKUP_GAMMA if gamma is None else gamma)
        log.info("drafter: prompt lookup%s", "; none is shipped for this target" if drafter == "auto" else "")
    elif isinstance(drafter, (str, Path)) and str(drafter).startswith(COMBINED_PREFIX):
        loaded = combine(target, str(drafter).removeprefix(COMBINED_PREFIX), gamma)
    elif isinstance(drafter, (str, Path)):
        loaded = load_drafter(str(drafter), gamma=gamma, dtype=target.dtype, device=str(target.device))
    else:
        loaded = drafter
    check_protocol(loaded)
    loaded.bind(target)
    return loaded


def combine(target: Target, checkpoint: str | Path | Drafter, gamma: int | None = None) -> CombinedDrafter:
    """Prompt lookup and a trained drafter in one, not bound yet.

    Args:
        checkpoint: of the trained drafter, or the drafter itself.
        gamma: of the lookup, and of the trained drafter up to its own block; None: the default of each.
    """
    if isinstance(checkpoint, (str, Path)):
        trained_gamma = None if gamma is None else min(gamma, describe_checkpoint(checkpoint).gamma)
        trained: Drafter = load_drafter(checkpoint, gamma=trained_gamma, dtype=target.dtype, device=str(target.device))
    else:
        trained = checkpoint
    lookup = PromptLookupDrafter(max(LOOKUP_GAMMA if gamma is None else gamma, trained.gamma))
    choice = SourceChoice(lookup.gamma, trained.gamma, lookup.max_match, target.device)
    return CombinedDrafter(lookup, trained, choice)
