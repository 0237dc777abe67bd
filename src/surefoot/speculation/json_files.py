"""The JSON files of this package: read with an error a user can act on, written whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError


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
    """Write `data` beside `path` and rename, so that a reader or a crash never meets half a file.

    The file gets the permissions that any new file gets from the process's umask, so that users of a shared cache can read it.

    Raises:
        SurefootError: there is no writing there, or no space.
    """
    path = Path(path)
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as problem:
        raise SurefootError(
            f"cannot write {path}: {problem.strerror or problem}; {path.parent} must be a directory with space, that may be "
            "written to"
        ) from problem
