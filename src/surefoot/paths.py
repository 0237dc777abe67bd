"""Where surefoot keeps what it has computed once: dequantised targets, compiled kernels, cost tables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$SUREFOOT_CACHE`, else `$XDG_CACHE_HOME/surefoot`, else `~/.cache/surefoot` (not created here)."""
    if chosen := os.environ.get("SUREFOOT_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "surefoot"
    return Path.home() / ".cache" / "surefoot"


def set_aside(path: Path) -> Path | None:
    """Rename a damaged file of the cache, so that it is made anew and can still be looked at.

    Returns:
        Its new path; None where it cannot be renamed (a read-only cache).
    """
    aside = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, aside)
    except OSError:
        return None
    return aside
