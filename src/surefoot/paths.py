"""Where surefoot keeps what it computed once: de-quantised targets, compiled kernels, cost tables."""

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
