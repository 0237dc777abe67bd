"""Ctrl-C and SIGTERM at chosen moments of a real `surefoot generate` on a tiny model; at random ones: `tests/interrupts.py`."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

from surefoot.kernels import native
from surefoot.paths import cache_directory
from tests.cli.terminal import PASTE_ON, Terminal
from tests.interrupts import after, digests, shown, trial


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with compiled kernels and nothing else."""
    native.available()
    home = tmp_path_factory.mktemp("cache")
    if (compiled := cache_directory() / "native").is_dir():
        shutil.copytree(compiled, home / "native")
    return home


def command(checkpoints: Path, prompt: str = "def stop(n):", tokens: int = 400) -> list[str]:
    model = ("-m", str(checkpoints / "target"), "--max-model-len", "2048", "-d", str(checkpoints / "drafter"))
    return [sys.executable, "-m", "surefoot", "generate", prompt, *model, "--max-tokens", str(tokens)]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        *((moment, signal.SIGINT) for moment in ("start", "loading", "prefill", "decode", "exit")),
        *((moment, signal.SIGTERM) for moment in ("loading", "decode")),
    ],
)
def test_a_signal_ends_generate_and_leaves_everything_sane(
    checkpoints: Path, cache: Path, moment: str, number: signal.Signals
) -> None:
    before = digests(cache)
    moments = {
        "start": after(0.4),
        "loading": shown("loading "),
        "prefill": in_prefill,
        "decode": wait_for_text,
        "exit": shown("finished:"),
    }
    asked = command(
        checkpoints, *(("stop " * 900,) if moment == "prefill" else ()), tokens=4 if moment == "exit" else 400
    )
    _, found = trial(asked, cache, moments[moment], number)
    assert found == 128 + number or (moment in ("exit", "prefill") and found == 0)
    assert digests(cache) == before


def in_prefill(terminal: Terminal) -> None:
    """About when a long prompt is read."""
    terminal.wait_for("loading ")
    after(2.0)(terminal)


def wait_for_text(terminal: Terminal) -> None:
    """Until the answer has begun: something is shown after the line that says what is loaded."""
    while not terminal.text.partition("…")[2].strip() and terminal.process.poll() is None:
        terminal.read()


def test_pressing_ctrl_c_many_times_is_once(checkpoints: Path, cache: Path) -> None:
    terminal, code = trial(command(checkpoints), cache, wait_for_text, signal.SIGINT, times=5)
    assert code == 130, terminal.text


def test_an_interrupted_chat_goes_on_with_its_conversation(checkpoints: Path, cache: Path) -> None:
    """The real engine: the request that was stopped is gone, the next one is answered."""
    chat = [sys.executable, "-m", "surefoot", "chat", "-m", str(checkpoints / "target"), "--cost-table", "none"]
    chat += ["--max-model-len", "2048", "--max-tokens", "1800"]
    with Terminal(*chat, environment={"SUREFOOT_CACHE": str(cache)}) as terminal:
        terminal.wait_for(PASTE_ON)
        terminal.type(b"one\r")
        terminal.wait_for("> one\n")
        while (
            len(terminal.text.partition("> one\n")[2]) < 8
        ):  # the answer has begun; long, it would not fit a second time
            terminal.read(0.02)
        terminal.type(b"\x03")
        terminal.wait_for("stopped")
        terminal.wait_for(PASTE_ON, 2)
        terminal.type(b"/stats\r")
        terminal.wait_for("running: 0")
        terminal.wait_for(PASTE_ON, 3)
        terminal.type(b"x\r")
        terminal.wait_for("finished: ", 2)
        terminal.wait_for(PASTE_ON, 4)
        terminal.type(b"\x04")
        assert terminal.wait() == 0
        assert terminal.is_sane
        assert "Traceback" not in terminal.text
