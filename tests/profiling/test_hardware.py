"""What is read off the machine, on made-up files, and that the stream measurement measures."""

from __future__ import annotations

import pytest

from surefoot.kernels import native
from surefoot.profiling import hardware


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
    monkeypatch.setattr(native, "available", lambda: not unavailable())
    with pytest.warns(RuntimeWarning, match="native kernels"):  # said while they were built: passed on, not swallowed
        assert hardware.native_kernels() == (True, "")
    monkeypatch.setenv("SUREFOOT_NATIVE", "0")
    assert hardware.native_kernels() == (False, "switched off by SUREFOOT_NATIVE=0")


def test_every_instruction_set_is_used_offered_or_explained() -> None:
    found = hardware.instruction_sets(native.available())
    if not native.available():
        assert found == {"isa": "", "isas_missing": ()}
        return
    explained = [text.split(" (")[0] for text in found["isas_missing"]]
    assert set(explained) == {isa for isa in native.ISAS if native.missing(isa)}
    assert found["isa"] not in explained
