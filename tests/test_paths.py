"""Files that are written whole or not at all, with the permissions of any other file."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import CostTableError, SurefootError
from surefoot.paths import cache_directory, set_aside, write_whole
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.cost import CostTable
from surefoot.speculation.json_files import read_object, write_object


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """Another user of a shared cache must be able to read them."""
    before = os.umask(umask)
    try:
        CostTable((1,), ((1.0,),)).save(tmp_path / "table.json")
        Calibration.identity(2).save(tmp_path / "calibration.json")
        write_whole(tmp_path / "bytes", lambda file: file.write_bytes(b"x"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    write_object(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_object(path, {"a": float("nan")})

    def full(self: Path, text: str, **_: Any) -> None:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(
            SurefootError, match=rf"cannot write {path}: No space left on device; .* must be a directory"
        ):
            write_object(path, {"a": 2})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_object(path, {"a": 3})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written_one_line_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurefootError, match=r"cannot write .*file/table\.json: ") as caught:
        write_object(tmp_path / "file" / "table.json", {})
    assert "\n" not in str(caught.value)


def test_writers_at_once_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "object.json"
    objects = [{"writer": index, "filler": [index] * 2000} for index in range(6)]

    def write(data: dict[str, Any]) -> None:
        for _ in range(20):
            write_object(path, data)
            assert read_object(path, CostTableError) in objects

    threads = [threading.Thread(target=write, args=(data,)) for data in objects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["empty", "a list", "no text", "deep"],
)
def test_what_is_no_object_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CostTableError, match=f"x.json {message}"):
        read_object(path, CostTableError)
    with pytest.raises(CostTableError, match="cannot read"):
        read_object(tmp_path / "nothing.json", CostTableError)


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in ("first", "second"):
        path.write_text(content)
        assert set_aside(path) == tmp_path / "x.json.damaged"
        assert not path.exists()
    assert (tmp_path / "x.json.damaged").read_text() == "second"
    assert set_aside(path) is None


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", "/somewhere/else")
    assert cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv("SUREFOOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/surefoot")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "surefoot"
