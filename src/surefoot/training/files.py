"""Directory layout of a training run, and atomic file writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError
from surefoot.paths import write_whole


class Workplace:
    """`output` is the drafter's directory; `work` next to it holds prompts, text and state, and may be deleted."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output).absolute()
        self.work = self.output.with_name(self.output.name + ".training")
        self.prompts = self.work / "prompts.jsonl"
        self.held_out_prompts = self.work / "held_out.jsonl"
        self.read = self.work / "read.safetensors"
        self.regenerated = self.work / "regenerated"
        self.held_out = self.work / "held_out"
        self.vocabulary = self.work / "words.safetensors"
        self.state = self.work / "state.pt"
        self.record = self.work / "record.json"
        self.manifest = self.output / "manifest.json"
        self.calibration = self.output / "calibration.json"
        self.evaluation = self.output / "evaluation"


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines, atomically."""
    write_whole(path, lambda file: file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not a JSON object; names file and line.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}: give a JSON lines file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"{path} line {number} is not JSON ({error}): one object a line") from None
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path} line {number} is no JSON object: one object a line")
        rows.append(row)
    return rows


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
