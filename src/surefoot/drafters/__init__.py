"""Drafters: small things that propose a block of tokens. `base.py` states the protocol; one file per implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler
    from surefoot.drafters.checkpoint import load_drafter
    from surefoot.drafters.dspark import DSparkDrafter
    from surefoot.drafters.prompt_lookup import PromptLookupDrafter

__all__ = [
    "DSparkDrafter",
    "Draft",
    "DraftContext",
    "DraftSampler",
    "Drafter",
    "PromptLookupDrafter",
    "load_drafter",
]

_HOME = {
    "Draft": "surefoot.drafters.base",
    "DraftContext": "surefoot.drafters.base",
    "DraftSampler": "surefoot.drafters.base",
    "Drafter": "surefoot.drafters.base",
    "DSparkDrafter": "surefoot.drafters.dspark",
    "PromptLookupDrafter": "surefoot.drafters.prompt_lookup",
    "load_drafter": "surefoot.drafters.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a drafter's module when it is first asked for, so that importing the package stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
