"""What the operating system says about this machine: processor, cores, caches, memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

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


def cpu_name(cpuinfo: dict[str, str]) -> str:
    """The processor's name in its entry, or the architecture where it has none."""
    return cpuinfo.get("model name") or cpuinfo.get("Processor") or platform.processor() or platform.machine()


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
    """Distinct cores that the logical ones of this process run on; the logical ones where the system does not say."""
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


def last_level_cache(topology: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache the first core sees; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in topology.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)
