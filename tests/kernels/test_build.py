"""The compiled library in the cache: verified, set aside when damaged, built anew; caches that cannot be written.

A stand-in for the compiler hands out the library that exists (the real build takes half a minute); its calls are counted.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.kernels import build, native

if not native.available():
    pytest.skip("no compiler", allow_module_level=True)

ASK = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from surefoot.kernels import native
    from surefoot.kernels.linear import PackedLinear
    import torch
    y = PackedLinear(torch.eye(3), quantize="int8")(torch.ones(1, 3))
print(native.available(), [round(v, 4) for v in y[0].tolist()])
for w in seen:
    if "native kernels" in str(w.message): print(w.message)
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that is quick, and notes every call in the file `calls` beside it."""
    path = tmp_path / "quick-compiler"
    path.write_text(
        f"#!{sys.executable}\nimport os, shutil, sys, time\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write('call\\n')\n"
        "time.sleep(float(os.environ.get('COMPILER_SLEEPS', '0')))\n"
        f"shutil.copy({str(native.library())!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    path.chmod(0o755)
    return path


def start(compiler: Path, cache: Path, *prefix: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CXX": str(compiler), "SUREFOOT_CACHE": str(cache), **environment}
    command = [*prefix, sys.executable, "-c", ASK]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def answer(process: subprocess.Popen[str]) -> list[str]:
    out, error = process.communicate()
    lines = out.splitlines()
    assert lines, error
    assert lines[0] == "True [1.0, 1.0, 1.0]", (out, error)
    return lines[1:]


def calls(compiler: Path) -> int:
    return len((compiler.parent / "calls").read_text().splitlines())


def published(cache: Path) -> list[Path]:
    return sorted(cache.glob("native/*/*.so"))


BUILD = len(build.SOURCES) + 1  # calls of the compiler


def test_a_second_start_finds_the_library_and_writes_nothing(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert answer(start(compiler, cache)) == answer(start(compiler, cache)) == []
    assert calls(compiler) == BUILD
    (library,) = published(cache)
    assert sorted(p.name for p in library.parent.iterdir()) == sorted([".lock", library.name])


@pytest.mark.parametrize("damage", ["truncated", "a flipped byte", "empty"])
def test_a_damaged_library_is_set_aside_said_once_and_built_anew(compiler: Path, tmp_path: Path, damage: str) -> None:
    """A truncated library used to end the process with a bus error."""
    cache = tmp_path / "cache"
    answer(start(compiler, cache))
    (library,) = published(cache)
    whole = library.read_bytes()
    changed = {
        "truncated": whole[: len(whole) // 2],
        "a flipped byte": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "empty": b"",
    }[damage]
    library.write_bytes(changed)
    said = answer(start(compiler, cache))
    assert said == [f"native kernels {library} is damaged: set aside as {library.stem}.damaged, compiled anew."]
    assert library.read_bytes() == whole
    assert library.with_suffix(".damaged").read_bytes() == changed
    assert answer(start(compiler, cache)) == []
    assert calls(compiler) == 2 * BUILD


def test_a_library_for_another_system_is_built_anew(compiler: Path, tmp_path: Path) -> None:
    """Intact but not loadable: the compiler is not to blame."""
    cache = tmp_path / "cache"
    answer(start(compiler, cache))
    (library,) = published(cache)
    good = library.read_bytes()
    library.write_bytes(b"not a library of this system")
    foreign = library.with_stem(build._digest(library))
    library.rename(foreign)
    (said,) = answer(start(compiler, cache))
    assert f"{foreign} cannot be loaded" in said
    assert [path.read_bytes() for path in published(cache)] == [good]
    assert answer(start(compiler, cache)) == []


def test_processes_that_start_at_once_build_once(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start(compiler, cache, COMPILER_SLEEPS="2.5") for _ in range(2)]
    for process in processes:
        out, error = process.communicate()
        assert out.splitlines() == ["True [1.0, 1.0, 1.0]"]
        assert error.strip() == "compiling native kernels, once: about half a minute…"
    assert calls(compiler) == BUILD
    assert len(published(cache)) == 1


def test_a_killed_build_leaves_nothing_that_the_next_start_does_not_remove(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    killed = start(compiler, cache, COMPILER_SLEEPS="3")
    while not (tmp_path / "calls").exists():
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(cache.glob("native/*/.build-*"))
    assert not published(cache)
    old = cache / "native" / "0123456789abcdef" / ".build-of-another-version"  # whose sources no longer exist
    old.mkdir(parents=True)
    assert answer(start(compiler, cache)) == []
    assert not list(cache.glob("native/*/.build-*"))
    assert len(published(cache)) == 1


def test_a_build_under_way_is_no_leftover(tmp_path: Path) -> None:
    folder = tmp_path / "native" / "key"
    (folder / ".build-now").mkdir(parents=True)
    with build._locked(folder) as held:
        assert held
        build._remove_leftovers(tmp_path / "native")
        assert (folder / ".build-now").exists()
    build._remove_leftovers(tmp_path / "native")
    assert not (folder / ".build-now").exists()


def test_the_cache_of_another_version_is_left_alone(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answer(start(compiler, cache))
    (library,) = published(cache)
    for other in (library.parent / "surefoot_native.so", cache / "native" / "fedcba9876543210" / library.name):
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"of another version")
    assert answer(start(compiler, cache)) == []
    assert calls(compiler) == BUILD
    assert len(published(cache)) == 3


CANNOT_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0


def mounted(where: Path, options: str) -> tuple[str, ...]:
    where.mkdir()
    return ("unshare", "-rm", "sh", "-c", f'mount {options} {where} && exec "$@"', "sh")


@pytest.mark.skipif(CANNOT_MOUNT, reason="this process may not mount")
@pytest.mark.parametrize(
    ("options", "reason"),
    [("-t tmpfs -o ro tmpfs", "Read-only file system"), ("-t tmpfs -o size=64k tmpfs", "No space left")],
)
def test_a_cache_that_cannot_be_written_costs_one_line(
    compiler: Path, tmp_path: Path, options: str, reason: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(compiler, tmp_path / "cache", *mounted(tmp_path / "cache", options), TMPDIR=str(temporary))
    (said,) = answer(process)
    assert reason in said
    assert "set SUREFOOT_CACHE to a folder that can be written" in said
    assert not list(temporary.iterdir())  # the private build goes once it is loaded


@pytest.mark.skipif(CANNOT_MOUNT, reason="this process may not mount")
def test_a_read_only_cache_with_a_library_is_used(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answer(start(compiler, cache))
    read_only = ("unshare", "-rm", "sh", "-c", f'mount -o bind,ro {cache} {cache} && exec "$@"', "sh")
    assert answer(start(compiler, cache, *read_only)) == []
    assert calls(compiler) == BUILD


def test_no_space_anywhere_is_said_in_one_line(compiler: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk; it is inherited by the compiler."""
    code = (
        "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + ASK
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CXX": str(compiler), "SUREFOOT_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)
    first, *warned = result.stdout.splitlines()
    assert first == "False [1.0, 1.0, 1.0]"
    assert "SUREFOOT_CACHE" in warned[-1]
    assert "space" in warned[-1].lower() or "large" in warned[-1].lower()
    assert "g++" not in " ".join(warned)
    assert not published(tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "old-compiler"
    compiler.write_text(
        "#!/bin/sh\necho 'old-compiler: note' >&2\necho 'error: unrecognized option -std=c++20' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    out, _ = start(compiler, tmp_path / "cache").communicate()
    first, warned = out.splitlines()
    assert first == "False [1.0, 1.0, 1.0]"
    assert "(error: unrecognized option -std=c++20)" in warned
    assert "Install a g++ that knows C++20 (or set CXX to one)" in warned
