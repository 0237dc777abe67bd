"""The C++ kernels: compiled on first use into a cache directory, found there ever after.

`available()` is the one question callers ask. It is true when `torch.ops.surefoot.*` exists (`native.cpp` compiled and
loaded); where it is false (no compiler, `SUREFOOT_NATIVE=0`) every kernel has a torch fallback that computes the same
thing more slowly, and without the promise that a row's bits do not depend on its neighbours.

Environment:
    SUREFOOT_NATIVE: `0` never compiles or loads the kernels.
    SUREFOOT_CACHE: cache directory of surefoot (default `~/.cache/surefoot`); the kernels live in `native/<key>/`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from surefoot.paths import cache_directory

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC", "-shared"]
LIBRARY = "surefoot_native.so"
DTYPES = (torch.bfloat16, torch.float32)  # what the kernels compute on


def build_key() -> str:
    """Hash of all that decides the machine code: source, flags, torch, and the instruction set of this CPU."""
    cpu = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        cpu += "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    parts = (SOURCE.read_text(), " ".join(FLAGS), torch.__version__, cpu, os.environ.get("CXX", ""))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether `torch.ops.surefoot` can be called; the first call compiles or loads it (about 30 s, or milliseconds)."""
    return _available()


@functools.cache
def _available() -> bool:
    if os.environ.get("SUREFOOT_NATIVE", "1") == "0":
        return False
    try:
        _load()
    except Exception as error:  # whatever the tool chain raises, torch's own products still work
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
        warnings.warn(
            f"native kernels could not be built ({reason[:160]}): using torch's own operations, which are slower and do"
            " not promise bit-identical rows across batch sizes. Install g++ (or set CXX); SUREFOOT_NATIVE=0 hides this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def usable(*tensors: Tensor | None) -> bool:
    """Whether the native kernels take these tensors: on the CPU, bfloat16 or float32 where floating."""
    given = [t for t in tensors if t is not None]
    fits = all(t.device.type == "cpu" and (t.dtype in DTYPES or not t.is_floating_point()) for t in given)
    return fits and available()


def _load() -> None:
    target = cache_directory() / "native" / build_key() / LIBRARY
    if not target.exists():
        _build(target)
    torch.ops.load_library(str(target))
    _register_fakes()


def _build(target: Path) -> None:
    """Compiles in a private directory and moves the library into place, so that processes may start at once.

    The compiler is called directly: `torch.utils.cpp_extension.load` needs ninja and setuptools at run time, guards its
    directory with a lock file that outlives a killed process, and hides the compiler's message.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    notice = threading.Timer(2.0, lambda: console.print("[dim]compiling native kernels…[/dim]"))
    notice.daemon = True
    home = Path(torch.__file__).parent
    notice.start()
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as workspace:
            built = Path(workspace) / LIBRARY
            headers = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
            command = [os.environ.get("CXX") or "g++", *FLAGS, *headers, str(SOURCE), "-o", str(built)]
            command += [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(result.stderr or f"compiler exited with {result.returncode}")
            os.replace(built, target)
    finally:
        notice.cancel()


def _register_fakes() -> None:
    """Shapes of the results, for torch.compile and FakeTensor."""

    def fake(name: str):  # type: ignore[no-untyped-def]
        return torch.library.register_fake(f"surefoot::{name}")

    @fake("pack")
    def pack(weight: Tensor) -> Tensor:
        width = panel_width()
        dtype = torch.int16 if weight.dtype == torch.bfloat16 else weight.dtype
        return weight.new_empty((-(-weight.shape[0] // width), weight.shape[1], width), dtype=dtype)

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
    return int(torch.ops.surefoot.pack(torch.zeros(1, 1)).shape[2])
