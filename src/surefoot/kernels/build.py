"""The compiled library on disk: built on first use, verified before every load, replaced when it is damaged.

A library lies at `native/<key>/<digest>.so` in surefoot's cache. The key hashes everything that decides the machine code;
the digest is the SHA-256 of the file itself, so that one atomic rename publishes a library together with what it is
verified by. Processes that start at once wait for one build (a lock on the folder, released by the operating system when
its holder dies). Builds run in a `.build-*` folder; one left behind by a killed process is removed at the next start.

Where the cache cannot be written (read-only, full), the library is built in a private temporary folder for this process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from surefoot.paths import cache_directory

try:
    import fcntl
except ImportError:  # Windows has no flock: processes that start at once then build one library each
    fcntl = None  # type: ignore[assignment]

HOME = Path(__file__).parent
SOURCES = ("native.cpp", "products.cpp", "layer.cpp", "sequential.cpp", "planning.cpp")
FLAGS = ("-O3", "-mtune=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC")
_DIGEST = re.compile("[0-9a-f]{64}")
_NO_SPACE = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")


class BuildError(RuntimeError):
    """No library: why, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def load(sources: Sequence[str], flags: Sequence[str]) -> None:
    """Load the library's operators into `torch.ops`, building it if need be.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    path = library(sources, flags)
    try:
        torch.ops.load_library(str(path))
    except OSError as problem:
        if path.parent in _private:
            raise _not_loaded(path, problem) from problem
        _set_aside(path, f"cannot be loaded: {problem}")  # intact, but built for another system's libraries
        path = library(sources, flags)
        try:
            torch.ops.load_library(str(path))
        except OSError as again:
            raise _not_loaded(path, again) from again
    finally:
        while _private:  # a mapped file needs no name
            shutil.rmtree(_private.pop(), ignore_errors=True)


def _not_loaded(path: Path, problem: OSError) -> BuildError:
    return BuildError(f"{path} was compiled but cannot be loaded: {problem}", "Set CXX to the compiler of this system.")


def library(sources: Sequence[str], flags: Sequence[str]) -> Path:
    """A verified library; compiled now if the cache has none that is intact.

    Args:
        sources: files of this folder, or paths.
        flags: compiler switches besides `FLAGS`.

    Raises:
        BuildError: the compiler is missing or fails, or there is no space.
    """
    folder = cache_directory() / "native" / build_key(sources, flags)
    _remove_leftovers(folder.parent)
    if found := _intact(folder):
        return found
    console = Console(stderr=True)
    notice = threading.Timer(
        2.0, lambda: console.print("[dim]compiling native kernels, once: about half a minute…[/dim]")
    )
    notice.daemon = True
    notice.start()
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                return _intact(folder) or _build(folder, sources, flags)
        except OSError as problem:
            reason = problem.strerror or str(problem)
        warnings.warn(
            f"{folder} cannot be written ({reason}): native kernels are compiled for this process alone. Make room there"
            " or set SUREFOOT_CACHE to a folder that can be written, so that the next start finds them.",
            RuntimeWarning,
            stacklevel=2,
        )
        try:
            private = Path(tempfile.mkdtemp(prefix="surefoot-native-"))
            _private.add(private)
            return _build(private, sources, flags)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise BuildError(
                f"neither {folder} nor {tempfile.gettempdir()} can be written: {reason}",
                "Make room, or set SUREFOOT_CACHE to a folder that can be written.",
            ) from problem
    finally:
        notice.cancel()


_private: set[Path] = set()
"""Folders of libraries that are this process' alone, until they are loaded."""


def build_key(sources: Sequence[str], flags: Sequence[str]) -> str:
    """Hash of all that decides the machine code: sources, flags, torch, the C library, and the CPU it is tuned for."""
    cpu = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        cpu += "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    files = [HOME / name for name in sources] + sorted(HOME.glob("*.hpp"))
    parts = (
        *(file.read_text() for file in files), " ".join((*FLAGS, *flags)), torch.__version__, *platform.libc_ver(), cpu,
        os.environ.get("CXX", ""),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _intact(folder: Path) -> Path | None:
    """A library of `folder` whose bytes are those that were published; damaged ones are set aside."""
    for path in sorted(folder.glob("*.so")):
        if not _DIGEST.fullmatch(path.stem):
            continue
        try:
            if _digest(path) == path.stem:
                return path
            problem = "is damaged"
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        _set_aside(path, problem)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _set_aside(path: Path, problem: str) -> None:
    aside = path.with_suffix(".damaged")
    try:
        os.replace(path, aside)
        what = f"set aside as {aside.name}"
    except OSError:
        what = "passed over"
    warnings.warn(f"native kernels {path} {problem}: {what}, compiled anew.", RuntimeWarning, stacklevel=3)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the folder's lock; yields whether it is held (not: no flock here, or with `wait=False` somebody has it)."""
    with open(folder / ".lock", "ab") as file:
        held = False
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                held = True
            except OSError:  # held by another process, or a file system without locks
                pass
        yield held


def _remove_leftovers(native: Path) -> None:
    """Remove what killed builds left: a `.build-*` folder that nobody holds the lock for."""
    for folder in {leftover.parent for leftover in native.glob("*/.build-*")}:
        try:
            with _locked(folder, wait=False) as held:
                for leftover in folder.glob(".build-*") if held else ():
                    shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue  # a cache that cannot be written


def _build(folder: Path, sources: Sequence[str], flags: Sequence[str]) -> Path:
    """Compile in a folder of its own and move the finished library into `folder`.

    The compiler is called directly: `torch.utils.cpp_extension.load` needs ninja and setuptools at run time, guards its
    directory with a lock file that outlives a killed process, and hides the compiler's message.

    Raises:
        OSError: nothing can be written.
        BuildError: the compiler is missing or fails.
    """
    home = Path(torch.__file__).parent
    include = [f"-I{HOME}", f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    compiler = [os.environ.get("CXX") or "g++", *FLAGS, *flags]
    own = ["-Wl,-Bsymbolic"] if sys.platform == "linux" else []  # never another library's instance of a template
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as workspace:
        objects = [str(Path(workspace) / f"{Path(name).name}.o") for name in sources]
        built = Path(workspace) / "built.so"
        link = [*compiler, "-shared", *own, *objects, "-o", str(built), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
        compiles = ([*compiler, *include, "-c", str(HOME / s), "-o", o] for s, o in zip(sources, objects, strict=True))
        _run(compiles, workspace)
        _run([link], workspace)
        target = folder / f"{_digest(built)}.so"
        os.replace(built, target)
    return target


def _run(commands: Iterable[Sequence[str]], workspace: str) -> None:
    """All at once; the first failure's message is raised. Temporary files of the compiler lie in `workspace`."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": workspace})
            )
        errors = [process.communicate()[1] for process in running]
    except FileNotFoundError as problem:
        raise BuildError(f"there is no compiler {problem.filename!r}", "Install g++ (or set CXX).") from problem
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, error in zip(running, errors, strict=True):
        if process.returncode:
            if full := next((text for text in _NO_SPACE if text in error), None):
                raise OSError(errno.ENOSPC, full)
            lines = [line.strip() for line in error.splitlines() if line.strip()]
            reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
            raise BuildError(
                reason[:160] or f"the compiler exited with {process.returncode}",
                "Install a g++ that knows C++20 (or set CXX to one).",
            )
