"""What is read off the machine, from made-up files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot import machine

X86 = "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: fpu avx2 amx_tile fma nothing\n\nprocessor\t: 1\nflags\t: sve\n"


def test_cpuinfo_is_read_for_the_first_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    info = machine.read_cpuinfo(tmp_path / "cpuinfo")
    assert info["model name"] == "Some CPU: fast"
    assert machine.simd_of(info) == ("avx2", "fma", "amx_tile")
    assert machine.simd_of({"Features": "asimd i8mm"}) == ("asimd", "i8mm")
    assert machine.read_cpuinfo(tmp_path / "nothing") == {}
    assert machine.simd_of({}) == ()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are ours")
def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(siblings + "\n")
    assert machine.physical_cores(tmp_path) == 2
    assert machine.physical_cores(tmp_path / "nowhere") == machine.logical_cores() == 4


def test_caches_are_read_with_their_units(tmp_path: Path) -> None:
    for index, size in enumerate(("32K\n", "2048K\n", "33M\n", "\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert machine.last_level_cache(tmp_path) == 33 << 20
    assert machine.last_level_cache(tmp_path / "nowhere") == 0
