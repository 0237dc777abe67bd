"""Where surefoot keeps what it has computed once (dequantised targets, compiled kernels, cost tables), and whole files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
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


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file beside `path`, then rename it: a reader or a crash never meets half a file.

    The file gets the permissions that the process's umask gives any new file, so that users of a shared cache can read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
