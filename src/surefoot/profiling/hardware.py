"""What this machine has to offer a decode step: cores, vector units, native kernels, and how fast memory reads.

A decode pass on a CPU reads every weight once, so the measured stream rate is what its speed is judged by.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SIMD_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""Flags of /proc/cpuinfo, x86 and Arm, that thin matrix products can use."""

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
        cpu=info.get("model name") or info.get("Processor") or platform.processor() or platform.machine(),
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


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The first processor's entry; empty where the system has no such file."""
    if not path.exists():
        return {}
    first = path.read_text(errors="replace").split("\n\n", 1)[0]
    entries = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in entries}


def simd_of(cpuinfo: dict[str, str]) -> tuple[str, ...]:
    """The flags of `SIMD_FLAGS` that a processor's entry lists."""
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    return tuple(flag for flag in SIMD_FLAGS if flag in flags)


def logical_cores() -> int:
    """Cores this process may run on, which a container can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Distinct cores behind the logical ones of this process; the logical ones where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return logical_cores()
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return len(cores)


def total_memory() -> int:
    """Bytes of main memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def native_kernels() -> tuple[bool, str]:
    """Whether the C++ kernels are there (compiled now if need be), and if not, why."""
    from surefoot.kernels import native

    if os.environ.get("SUREFOOT_NATIVE", "1") == "0":
        return False, "switched off by SUREFOOT_NATIVE=0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = native.available()
    if built:
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


def last_level_cache(topology: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache the first core sees; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in topology.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


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
