"""`surefoot generate` under `kill -INT` at random moments: `python -m tests.interrupts [--times 50] [--model M] …`.

Not part of the suite (it takes minutes); `tests/cli/test_interrupts.py` runs a few chosen moments on a tiny model. Every trial
runs on a pseudo terminal with a cache of its own kind: `--fresh` removes the de-quantised target before each trial, so that
signals meet it being written. After each trial it is checked that

* the process ended in time with 130 (143 for `--signal TERM`), or with 0 if it was faster than the signal;
* the terminal is as before: echo, line mode, cursor;
* nothing was printed that looks like a traceback;
* every finished file of the cache has the bytes that an undisturbed run gives it.

At the end an undisturbed run must succeed and leave no temporary files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from surefoot.paths import cache_directory
from tests.cli.terminal import Terminal

BAD_WORDS = ("Traceback", "Exception ignored", "terminate called", "Segmentation", "Fatal Python")
COMPARED = ("native", "targets")
"""Folders of the cache whose files do not depend on the clock."""
END_SECONDS = 40.0


def is_temporary(path: Path) -> bool:
    """Whether a file of the cache is one that nobody reads: half-written, or a lock."""
    return any(part.startswith((".", "tmp")) or part.endswith((".part", ".lock", ".tmp")) for part in path.parts)


def digests(cache: Path) -> dict[str, str]:
    """SHA-256 of every finished file below the compared folders."""
    files = (path for name in COMPARED for path in sorted((cache / name).rglob("*")) if path.is_file())
    found = {}
    for path in files:
        relative = path.relative_to(cache)
        if not is_temporary(relative):
            with path.open("rb") as file:
                found[str(relative)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def leftovers(cache: Path) -> list[str]:
    """Temporary files that are still there."""
    paths = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if is_temporary(path) and not path.name.endswith(".lock"))


def trial(
    command: Sequence[str],
    cache: Path,
    when: Callable[[Terminal], None],
    number: signal.Signals = signal.SIGINT,
    times: int = 1,
) -> tuple[Terminal, int]:
    """Run a command on a terminal, send it a signal when `when` returns, and wait for its end; what it showed, its code."""
    environment = {"SUREFOOT_CACHE": str(cache), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with Terminal(*command, environment=environment) as terminal:
        when(terminal)
        for _ in range(times):
            if terminal.process.poll() is None:
                os.kill(terminal.process.pid, number)
        code = terminal.wait(END_SECONDS, dump=True)
        assert terminal.is_sane, f"the terminal is not as it was; shown: {terminal.text!r}"
        for word in BAD_WORDS:
            assert word not in terminal.text, terminal.text
    return terminal, code


def after(seconds: float) -> Callable[[Terminal], None]:
    """A moment: so many seconds after the start."""

    def wait(terminal: Terminal) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and terminal.process.poll() is None:
            terminal.read(min(0.02, max(0.0, end - time.monotonic())))

    return wait


def shown(text: str) -> Callable[[Terminal], None]:
    """A moment: when this has been shown."""
    return lambda terminal: terminal.wait_for(text)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background has it ignored
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--signal", default="INT", choices=["INT", "TERM"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--fresh", action="store_true", help="convert the target anew in every trial")
    given = parser.parse_args()
    number, draw = signal.Signals[f"SIG{given.signal}"], random.Random(given.seed)
    command = [sys.executable, "-X", "faulthandler", "-m", "surefoot", "generate", "def main(", "-m", given.model]
    command += ["--max-tokens", str(given.max_tokens)]
    with tempfile.TemporaryDirectory(prefix="interrupts-") as home:
        cache, ends = Path(home), Counter[int]()
        if (compiled := cache_directory() / "native").is_dir():
            shutil.copytree(compiled, cache / "native")
        for attempt in range(2):  # the first may compile
            begin = time.monotonic()
            _, code = trial(command, cache, lambda terminal: terminal.wait(900) and None, number)
            seconds = time.monotonic() - begin
            assert code == 0, f"an undisturbed run ends with {code}"
            if attempt == 0 and given.fresh:
                shutil.rmtree(cache / "targets", ignore_errors=True)
        reference = digests(cache)
        print(f"undisturbed: {seconds:.1f} s, {len(reference)} files in the cache", flush=True)
        for index in range(given.times):
            if given.fresh:
                shutil.rmtree(cache / "targets", ignore_errors=True)
            moment = draw.uniform(0.15, seconds)  # before that the interpreter itself is starting
            begin = time.monotonic()
            terminal, code = trial(command, cache, after(moment), number)
            took = time.monotonic() - begin - moment
            ends[code] += 1
            assert code in (0, 128 + number), f"exit code {code}: {terminal.text!r}"
            wrong = {name for name, digest in digests(cache).items() if reference.get(name) != digest}
            assert not wrong, f"half-written: {sorted(wrong)}"
            print(f"{index + 1:3d}: after {moment:5.2f} s: exit {code}, {took:4.1f} s later", flush=True)
        left = leftovers(cache)
        _, code = trial(command, cache, lambda terminal: terminal.wait(900) and None, number)
        assert code == 0, f"a run after the interrupts ends with {code}"
        assert digests(cache) == reference
        still = leftovers(cache)
        print(f"exit codes {dict(ends)}; temporary files {len(left)} before, {len(still)} after an undisturbed run")
        assert not still, still


if __name__ == "__main__":
    main()
