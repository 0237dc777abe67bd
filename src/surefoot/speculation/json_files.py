"""The JSON files of this package: read with an error a user can act on, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.paths import write_whole


def read_object(path: str | Path, error: type[SurefootError]) -> dict[str, Any]:
    """The JSON object in `path`; raises `error` when there is no file, no JSON, or no object."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise error(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def write_object(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data` whole or not at all.

    Raises:
        SurefootError: there is no writing there, or no space.
    """
    path = Path(path)
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as problem:
        raise SurefootError(
            f"cannot write {path}: {problem.strerror or problem}; {path.parent} must be a directory with space, that may be "
            "written to"
        ) from problem
