"""What this machine has to offer a decode step: cores, vector units, native kernels, and how fast memory reads.

A decode pass on a CPU reads every weight once, so the measured stream rate is what its speed is judged by.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from surefoot.machine import cpu_name, logical_cores, physical_cores, read_cpuinfo, simd_of, total_memory

STREAM_BYTES = 512 << 20
"""Beyond every last-level cache of a workstation."""


@dataclass(frozen=True)
class Hardware:
    """One machine as surefoot sees it."""

    cpu: str
    physical_cores: int
    logical_cores: int  # that this process may run on
    threads: int  # that torch uses
    memory_gib: float
    simd: tuple[str, ...]
    torch_capability: str
    native_kernels: bool
    native_reason: str  # why there are none; empty when there are
    isa: str  # the instruction set of the thin products; empty without native kernels
    isas_missing: tuple[str, ...]  # those that cannot be used here, and why
    stream_gb_s: float
    gpus: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_hardware() -> Hardware:
    """Look and measure; takes a second or two (half a minute if the native kernels have yet to be compiled)."""
    info = read_cpuinfo()
    native, reason = native_kernels()
    return Hardware(
        cpu=cpu_name(info),
        physical_cores=physical_cores(),
        logical_cores=logical_cores(),
        threads=torch.get_num_threads(),
        memory_gib=total_memory() / 2**30,
        simd=simd_of(info),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        native_kernels=native,
        native_reason=reason,
        **instruction_sets(native),
        stream_gb_s=stream_rate() / 1e9,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
    )


def native_kernels() -> tuple[bool, str]:
    """Whether the C++ kernels are there (compiled now if need be), and if not, why."""
    from surefoot.kernels import native

    if os.environ.get("SUREFOOT_NATIVE", "1") == "0":
        return False, "switched off by SUREFOOT_NATIVE=0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = native.available()
    if built:
        for warning in caught:  # a damaged library that was built anew, a cache that cannot be written
            warnings.warn(warning.message, stacklevel=2)
        return True, ""
    return False, str(caught[-1].message) if caught else "could not be built; the warning came earlier in this process"


def instruction_sets(available: bool) -> dict[str, Any]:
    """What the thin products run on, and why not on more."""
    from surefoot.kernels import native

    if not available:
        return {"isa": "", "isas_missing": ()}
    missing = {isa: native.missing(isa) for isa in native.ISAS}
    return {
        "isa": native.kernel().isa,
        "isas_missing": tuple(f"{isa} ({reason})" for isa, reason in missing.items() if reason),
    }


def stream_rate(size: int = STREAM_BYTES, repeats: int = 5) -> float:
    """Bytes per second at which torch's number of threads reads memory, each byte once: the best of `repeats` passes.

    The best, not the median: it is the ceiling that other processes can only lower.
    """
    from surefoot.kernels import native

    read = torch.ops.surefoot.stream if native.usable() else torch.sum  # the sum computes, which can be what limits it
    data = torch.ones(size // 8, dtype=torch.int64)  # written here, so that every page exists
    rates = []
    for _ in range(repeats + 1):  # the first pass only wakes the threads
        start = time.perf_counter()
        read(data)
        rates.append(data.nbytes / (time.perf_counter() - start))
    return max(rates[1:])
