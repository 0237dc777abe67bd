"""Which drafters the package ships, and where the calibration of a drafter lies.

    shipped/<name>/config.json, model.safetensors    a checkpoint
                   calibration.json                  its temperatures, if it has a confidence head
                   manifest.json                     how it was trained, and digests of every prompt
                   target.json                       what it was trained for: `name` and `identities` of that target

The package's files are never written to. A calibration that a user makes for a shipped drafter lies in the cache, under the
digest of the weights it was made for, and comes before the package's own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from surefoot.paths import cache_directory

log = logging.getLogger(__name__)

DIRECTORY = Path(__file__).parent / "shipped"
TARGET_FILE, FORMAT = "target.json", "surefoot-shipped-drafter"
WEIGHTS_FILE = "model.safetensors"
CALIBRATION_FILE = "calibration.json"
"""In the drafter's directory, written by `surefoot calibrate`."""


@dataclass(frozen=True)
class ShippedDrafter:
    """One of the package's drafters."""

    name: str  # of its target
    path: Path
    identities: tuple[str, ...]  # `target_identity` of every form its target comes in


def shipped_drafters(directory: Path | None = None) -> list[ShippedDrafter]:
    """Everything the package ships, by name. A damaged entry is left out with a warning."""
    found = []
    for file in sorted((directory or DIRECTORY).glob(f"*/{TARGET_FILE}")):
        try:
            raw = json.loads(file.read_text())
            if raw["format"] != FORMAT:
                raise ValueError(f"format is {raw['format']!r}, expected {FORMAT!r}")
            found.append(ShippedDrafter(str(raw["name"]), file.parent, tuple(map(str, raw["identities"]))))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            log.warning("%s is damaged (%s): reinstall surefoot to get its drafter back", file, problem)
    return found


def shipped_named(name: str) -> ShippedDrafter | None:
    """The package's drafter of this name; None if there is none, or if a directory of that name stands here."""
    if "/" in name or Path(name).exists():
        return None
    return next((shipped for shipped in shipped_drafters() if shipped.name == name), None)


def is_shipped(checkpoint: Path) -> bool:
    """Whether a directory belongs to the package."""
    return checkpoint.resolve().parent == DIRECTORY.resolve()


def find_calibration(checkpoint: Path) -> Path | None:
    """The calibration of the drafter in this directory; None where it has none."""
    if is_shipped(checkpoint) and any(_cached_directory().glob(f"{checkpoint.name}-*.json")):
        mine = calibration_destination(checkpoint)
        if mine.is_file():
            return mine
    beside = checkpoint / CALIBRATION_FILE
    return beside if beside.is_file() else None


def calibration_destination(checkpoint: Path) -> Path:
    """Where a calibration of the drafter in this directory is to be saved, so that later starts use it."""
    if not is_shipped(checkpoint):
        return checkpoint / CALIBRATION_FILE
    # Another version of the package may ship other weights under the same name.
    digest = weights_digest(checkpoint).removeprefix("sha256:")[:16]
    return _cached_directory() / f"{checkpoint.name}-{digest}.json"


def _cached_directory() -> Path:
    return cache_directory() / "calibrations"


def weights_digest(checkpoint: Path) -> str:
    """What ties a calibration to the weights it was fitted for."""
    digest = hashlib.sha256()
    with (checkpoint / WEIGHTS_FILE).open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"
