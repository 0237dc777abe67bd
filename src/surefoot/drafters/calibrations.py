"""Where the calibration of a drafter lies."""

from __future__ import annotations

from pathlib import Path

CALIBRATION_FILE = "calibration.json"
"""In the drafter's directory, written by `surefoot calibrate`."""


def find_calibration(checkpoint: Path) -> Path | None:
    """The calibration of the drafter in this directory; None where it has none."""
    beside = checkpoint / CALIBRATION_FILE
    return beside if beside.is_file() else None
