"""The C++ kernels: compiled on first use into a cache directory (`build.py`), loaded from there.

`available()` is the one question callers ask. It is true when `torch.ops.surefoot.*` exists (compiled and loaded); where
it is false (no compiler, `SUREFOOT_NATIVE=0`) every kernel has a torch fallback that computes the same thing more slowly,
and without the promise that a row's bits do not depend on its neighbours.

A library is compiled for one instruction set and runs on every CPU that has it. AMX and AVX-512 BF16 are asked for at run
time, from the CPU and from the operating system, and are used by the thin products alone.

Environment:
    SUREFOOT_NATIVE: `0` never compiles or loads the kernels.
    SUREFOOT_ISA: `portable`, `avx2`, `avx512` or `amx` forces the instruction set (default: the best there is); an error
        where this machine lacks it.
    SUREFOOT_CACHE: cache directory of surefoot (default `~/.cache/surefoot`); the kernels lie in `native/<key>/`, see
        `build.py`.
"""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.kernels import build

DTYPES = (torch.bfloat16, torch.float32)  # what the kernels compute on

Isa = Literal["portable", "avx2", "avx512", "amx"]
ISAS: tuple[Isa, ...] = ("portable", "avx2", "avx512", "amx")
"""Ascending: a CPU that has one has those before it. "portable" is whatever the compiler vectorises for."""

_NEEDED: dict[Isa, tuple[str, ...]] = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
}
"""CPU flags of a level (those of the levels before it come on top), by the names of /proc/cpuinfo and of g++'s -m."""


@dataclass(frozen=True)
class Kernel:
    """One way of computing thin products: whose operations, and how their weights are laid out (see `products.cpp`)."""

    isa: Isa
    namespace: str
    layout: Literal["panels", "pairs", "tiles"]

    @property
    def operations(self) -> Any:
        """`pack`, `linear` and `linear_argmax`."""
        return getattr(torch.ops, self.namespace)


@functools.cache
def cpu_level() -> Isa:
    """The best level below "amx" that this CPU and its operating system have."""
    if not _x86():
        return "portable"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        return level_of_flags(next((line.split() for line in lines if line.startswith("flags")), []))
    capability = torch.backends.cpu.get_cpu_capability()  # torch has asked the CPU
    return "avx512" if capability.startswith("AVX512") else "avx2" if capability.startswith("AVX2") else "portable"


def level_of_flags(flags: Iterable[str]) -> Isa:
    """The best level below "amx" of a CPU with these flags of /proc/cpuinfo."""
    level: Isa = "portable"
    for name, needed in _NEEDED.items():
        if not set(needed) <= set(flags):
            break
        level = name
    return level


def _x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def requested_isa() -> Isa | None:
    """What SUREFOOT_ISA asks for; None where it is not set.

    Raises:
        ConfigurationError: no such instruction set.
    """
    wanted = os.environ.get("SUREFOOT_ISA", "")
    if wanted and wanted not in ISAS:
        raise ConfigurationError(
            f"SUREFOOT_ISA={wanted}: allowed are {', '.join(ISAS)}; unset it to use the best there is."
        )
    return wanted or None


def missing(isa: Isa) -> str:
    """Why this machine cannot use an instruction set; empty if it can. Needs the kernels only for "amx"."""
    level = cpu_level()
    if isa != "amx":
        better = ISAS.index(isa) > ISAS.index(level)
        return f"the CPU's best level is {level}" if better else ""
    if level != "avx512":
        return f"AMX comes with AVX-512, and the CPU's best level is {level}"
    return str(_operations("avx512").layout_missing("tiles"))


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether `torch.ops.surefoot` can be called; the first call compiles or loads it (about 30 s, or milliseconds).

    Raises:
        ConfigurationError: SUREFOOT_ISA asks for what there is not.
    """
    return _available()


@functools.cache
def _available() -> bool:
    if os.environ.get("SUREFOOT_NATIVE", "1") == "0":
        return False
    wanted = requested_isa()
    if wanted and missing(_level_of(wanted)):  # what can be said before anything is compiled
        raise ConfigurationError(_refusal(wanted, missing(wanted)))
    try:
        _operations(production_level())
    except Exception as error:  # whatever the tool chain raises, torch's own products still work
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = error.remedy if isinstance(error, build.BuildError) else "Please report this."
        warnings.warn(
            f"no native kernels ({reason}): using torch's own operations, which are slower and do not promise"
            f" bit-identical rows across batch sizes. {remedy} SUREFOOT_NATIVE=0 hides this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _register_fakes()
    kernel()
    return True


def usable(*tensors: Tensor | None) -> bool:
    """Whether the native kernels take these tensors: on the CPU, bfloat16 or float32 where floating."""
    given = [t for t in tensors if t is not None]
    fits = all(t.device.type == "cpu" and (t.dtype in DTYPES or not t.is_floating_point()) for t in given)
    return fits and available()


@functools.cache
def kernel(isa: Isa | None = None) -> Kernel:
    """How thin products are computed: with an instruction set, by default with what SUREFOOT_ISA says or the best there is.

    Another instruction set than the default may need a second, smaller library, which is compiled now.

    Raises:
        ConfigurationError: this machine lacks the instruction set.
    """
    chosen = isa or requested_isa()
    if chosen is None:
        chosen = "amx" if cpu_level() == "avx512" and not missing("amx") else cpu_level()
    if reason := missing(chosen):
        raise ConfigurationError(_refusal(chosen, reason))
    level = _level_of(chosen)
    operations = _operations(level)
    layout: Literal["panels", "pairs", "tiles"] = "panels"
    if chosen == "amx":
        layout = "tiles"
    elif chosen == "avx512" and not operations.layout_missing("pairs"):
        layout = "pairs"
    return Kernel(chosen, operations.name, layout)


def production_level() -> Isa:
    """The level `torch.ops.surefoot` is compiled for."""
    wanted = requested_isa()
    return _level_of(wanted) if wanted else cpu_level()


def _level_of(isa: Isa) -> Isa:
    return "avx512" if isa == "amx" else isa


def _refusal(isa: Isa, reason: str) -> str:
    asked = f"SUREFOOT_ISA={isa}" if os.environ.get("SUREFOOT_ISA") == isa else f"instruction set {isa}"
    return f"{asked} cannot be used here: {reason}. Choose a lower one of {', '.join(ISAS)}, or unset SUREFOOT_ISA."


def level_flags(level: Isa) -> tuple[str, ...]:
    """Compiler switches of a level; where levels mean nothing (not x86-64), whatever this CPU has."""
    if not _x86():
        return ("-march=native",)
    levels = [name for name in _NEEDED if ISAS.index(name) <= ISAS.index(level)]
    return tuple(f"-m{flag}" for name in levels for flag in _NEEDED[name])


@functools.cache
def _operations(level: Isa) -> Any:
    """The operations of a level: production's if it is that level, else those of a library of products alone."""
    if level != production_level():
        return load_products(f"surefoot_{level}", level_flags(level))
    build.load(build.SOURCES, level_flags(level))
    return torch.ops.surefoot


@functools.cache
def load_products(namespace: str, flags: tuple[str, ...]) -> Any:
    """Builds and loads `products.cpp` alone, with flags of its own, as `torch.ops.<namespace>`: for comparisons and tests."""
    build.load(("products.cpp",), (*flags, f"-DSUREFOOT_NAMESPACE={namespace}"))
    return getattr(torch.ops, namespace)


def library(sources: Sequence[str] = build.SOURCES, flags: Sequence[str] | None = None) -> Path:
    """The compiled library, by default production's; compiled now if the cache has none."""
    return build.library(sources, level_flags(production_level()) if flags is None else flags)


def _register_fakes() -> None:
    """Shapes of the results, for torch.compile and FakeTensor."""

    def fake(name: str):  # type: ignore[no-untyped-def]
        return torch.library.register_fake(f"surefoot::{name}")

    @fake("pack")
    def pack(weights: list[Tensor], layout: str) -> Tensor:
        outputs, (inputs, dtype) = sum(w.shape[0] for w in weights), (weights[0].shape[1], weights[0].dtype)
        half, width = dtype == torch.bfloat16, panel_width()
        shape: tuple[int, ...] = (-(-outputs // width), inputs, width)
        if layout == "pairs" and half:
            shape = (-(-outputs // width), -(-inputs // 2), width, 2)
        elif layout == "tiles" and dtype != torch.float32:
            shape = (-(-outputs // 32), -(-inputs // 32), 2, 16, 32)
        return weights[0].new_empty(shape, dtype=torch.int16 if half else dtype)

    @fake("linear")
    def linear(x: Tensor, packed: Tensor, outputs: int, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    @fake("linear_argmax")
    def linear_argmax(
        x: Tensor, packed: Tensor, outputs: int, scale: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.float32)

    @fake("paged_attention")
    def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: object) -> Tensor:
        return query.new_empty((*query.shape[:2], value_cache.shape[2]))

    @fake("rms_norm")
    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, unit_offset: bool, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)

    @fake("rotary")
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @fake("gated_activation")
    def gated_activation(gate_up: Tensor, gelu: bool) -> Tensor:
        return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))

    @fake("decoder_layers")
    def decoder_layers(x: Tensor, *rest: object) -> Tensor:
        return x.new_empty(x.shape)

    @fake("softmax_rows")
    def softmax_rows(logits: Tensor, temperature: Tensor) -> Tensor:
        return logits.new_empty(logits.shape, dtype=torch.float32)

    @fake("argmax_rows")
    def argmax_rows(logits: Tensor) -> Tensor:
        return logits.new_empty(logits.shape[0], dtype=torch.int64)

    @fake("sample_rows")
    def sample_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
        return probs.new_empty(probs.shape[0], dtype=torch.int64)


@functools.cache
def panel_width() -> int:
    """Outputs per weight panel of the compiled kernels: twice the float lanes of a vector."""
    return int(torch.ops.surefoot.pack([torch.zeros(1, 1)], "panels").shape[2])
