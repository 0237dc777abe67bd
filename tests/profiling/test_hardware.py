"""What is read off the machine, on made-up files, and that the stream measurement measures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot.kernels import native
from surefoot.profiling import hardware

X86 = "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: fpu avx2 amx_tile fma nothing\n\nprocessor\t: 1\nflags\t: sve\n"


def test_cpuinfo_is_read_for_the_first_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    info = hardware.read_cpuinfo(tmp_path / "cpuinfo")
    assert info["model name"] == "Some CPU: fast"
    assert hardware.simd_of(info) == ("avx2", "fma", "amx_tile")
    assert hardware.simd_of({"Features": "asimd i8mm"}) == ("asimd", "i8mm")
    assert hardware.read_cpuinfo(tmp_path / "nothing") == {}
    assert hardware.simd_of({}) == ()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are ours")
def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(siblings + "\n")
    assert hardware.physical_cores(tmp_path) == 2
    assert hardware.physical_cores(tmp_path / "nowhere") == hardware.logical_cores() == 4


def test_stream_rate_is_that_of_memory_or_caches() -> None:
    rate = hardware.stream_rate(size=8 << 20, repeats=3)
    assert 1e8 < rate < 1e13  # bytes per second; a unit slip is a factor of 1,000


def test_missing_native_kernels_come_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> bool:
        import warnings

        warnings.warn("native kernels could not be built (no compiler)", RuntimeWarning, stacklevel=1)
        return False

    monkeypatch.delenv("SUREFOOT_NATIVE", raising=False)
    monkeypatch.setattr(native, "available", unavailable)
    assert hardware.native_kernels() == (False, "native kernels could not be built (no compiler)")
    monkeypatch.setattr(native, "available", lambda: True)
    assert hardware.native_kernels() == (True, "")
    monkeypatch.setenv("SUREFOOT_NATIVE", "0")
    assert hardware.native_kernels() == (False, "switched off by SUREFOOT_NATIVE=0")


def test_caches_are_read_with_their_units(tmp_path: Path) -> None:
    for index, size in enumerate(("32K\n", "2048K\n", "33M\n", "\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert hardware.last_level_cache(tmp_path) == 33 << 20
    assert hardware.last_level_cache(tmp_path / "nowhere") == 0


def test_every_instruction_set_is_used_offered_or_explained() -> None:
    found = hardware.instruction_sets(native.available())
    if not native.available():
        assert found == {"isa": "", "isas_missing": ()}
        return
    explained = [text.split(" (")[0] for text in found["isas_missing"]]
    assert set(explained) == {isa for isa in native.ISAS if native.missing(isa)}
    assert found["isa"] not in explained
