"""The process around a command: closed, full and abandoned outputs, and signals, in real processes over a scripted engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import process as citizen
from tests.cli.conftest import strict_json

ROOT = Path(__file__).parents[2]


def shell(line: str, *arguments: str, **fields: Any) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which `$@` is the command line over a stub; exit codes of every part of a pipe count."""
    command = [sys.executable, "-m", "tests.cli.stub", json.dumps(fields), *arguments]
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


def test_the_stub_answers() -> None:
    done = shell('"$@"', "generate", "x")
    assert (done.returncode, done.stdout) == (0, "Hello, world\n")


@pytest.mark.parametrize("arguments", [("generate", "x"), ("generate", "x", "--json"), ("--version",), ("--help",)])
def test_closed_standard_output_is_one_line(arguments: tuple[str, ...]) -> None:
    done = shell('"$@" >&-', *arguments)
    assert done.returncode == 2
    assert done.stderr == "error: standard output is closed: redirect it, to /dev/null if nobody wants it\n"


@pytest.mark.parametrize(
    "arguments", [("generate", "x"), ("generate", "x", "--json"), ("chat",), ("demo",), ("--version",), ("--help",)]
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    done = (
        shell('"$@" >/dev/full', *arguments) if arguments[0] != "chat" else shell('echo hi | "$@" >/dev/full', "chat")
    )
    assert done.returncode == 2, done.stderr
    assert "error: cannot write the output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_full_disk_under_a_batch_is_one_line(tmp_path: Path) -> None:
    done = shell('echo \'{"prompt": "x"}\' | "$@"', "generate", "--batch", "-", "-o", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_a_reader_that_goes_away_is_no_message() -> None:
    for arguments in (("generate", "x"), ("generate", "x", "--json")):
        done = shell('"$@" | true', *arguments, pieces=["Hello\n"] * 50, pause=0.01)
        assert (done.returncode, done.stderr) == (141, "")
    done = shell('"$@" | head -1', "generate", "x", pieces=["Hello\n"] * 200, pause=0.01)
    assert (done.returncode, done.stdout, done.stderr) == (141, "Hello\n", "")


def test_standard_error_may_be_closed_full_or_abandoned() -> None:
    for line in ('"$@" 2>&-', '"$@" 2>/dev/full', '{ "$@" 2>&3 | cat; } 3> >(true)'):
        done = shell(line, "generate", "x")
        assert (done.returncode, done.stdout) == (0, "Hello, world\n"), line
    assert shell('"$@" 2>&-', "generate", "x", "--temperature", "-1").returncode == 2


def test_closed_standard_input_is_an_empty_one() -> None:
    done = shell('"$@" <&-', "generate", "-")
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr
    assert shell('"$@" <&-', "chat").returncode == 0


def test_files_never_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """With 2 closed, the first file opened would be standard error of every library written in C."""
    code = (
        "from surefoot.cli import process as citizen; citizen._open_missing_streams(); import os, sys; "
        "print(os.open(os.devnull, 0) > 2, sys.stderr.fileno() == 2)"
    )
    done = subprocess.run(
        ["bash", "-c", '"$@" 2>&- <&-', "bash", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True\n"


# --- signals ----------------------------------------------------------------------------------------------------------


def started(*arguments: str, launcher: tuple[str, ...] = ("-m", "tests.cli.stub"), **fields: Any) -> Any:
    return subprocess.Popen(
        [sys.executable, *launcher, json.dumps(fields), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_in_an_answer_end_with_their_code_and_keep_the_text(number: signal.Signals, code: int) -> None:
    process = started("generate", "x", pieces=["Hello "] * 1000, pause=0.01)
    assert process.stdout is not None
    seen = process.stdout.read(12)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert set((seen + rest).split()) == {"Hello"}
    assert errors.strip() == ""


def test_signals_at_any_moment_of_a_short_command_end_it_cleanly() -> None:
    """From the first import of ours to the end of the interpreter."""
    code = """if True:
        import os
        from surefoot.cli import process as citizen
        citizen._handle_by(citizen._quit_at_once)  # as its main() does before all else
        os.write(1, b"*")
        from tests.cli.stub import main
        main()
        """
    launch = {"launcher": ("-c", code), "pieces": ["a"] * 20, "pause": 0.01}

    def ready() -> Any:
        process = started("generate", "x", **launch)
        assert process.stdout.read(1) == "*"
        return process

    begin = time.monotonic()
    ready().communicate(timeout=60)
    seconds = time.monotonic() - begin
    ends = []
    for share in range(10):
        process = ready()
        time.sleep(seconds * share / 8)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode in (130, 0, -signal.SIGINT), errors  # the last at the very end, 130 for a shell, too
        assert "Traceback" not in errors
        assert "Exception ignored" not in errors
        assert set(output.strip()) <= {"a"}
        ends.append(process.returncode)
    assert ends[:3] == [130] * 3


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    done = shell("trap '' INT; \"$@\" & pid=$!; sleep 2; kill -INT $pid; wait $pid", "generate", "x", pause=1.0)
    assert (done.returncode, done.stdout) == (0, "Hello, world\n")


def test_an_interrupt_that_is_lost_in_a_destructor_comes_again() -> None:
    code = """if True:
        import sys, time
        from surefoot.cli import process as citizen
        class Lost:
            def __del__(self):
                raise KeyboardInterrupt
        sys.unraisablehook = citizen._unraisable
        with citizen.interruptible():
            try:
                Lost()
                time.sleep(20)
            except KeyboardInterrupt:
                print("came again")
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=True)
    assert (done.stdout, done.stderr) == ("came again\n", "")


def test_compilers_that_a_command_has_started_end_with_it(tmp_path: Path) -> None:
    """Signals for this process alone do not reach them, and the thread that waits for them cannot be interrupted."""
    code = f"""if True:
        import signal, subprocess, threading, time
        from surefoot.cli import process as citizen
        citizen.prepare()
        def build():
            compiler = subprocess.Popen(["bash", "-c", "sleep 60 & wait"])
            open({str(tmp_path / "pid")!r}, "w").write(str(compiler.pid))
            compiler.wait()
            open({str(tmp_path / "cleaned")!r}, "w").close()
        threading.Thread(target=build, daemon=True).start()
        while not __import__("os").path.exists({str(tmp_path / "pid")!r}):
            time.sleep(0.01)
        time.sleep(0.3)
        with citizen.interruptible():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                citizen.end_after_signal(130)
        """
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert time.monotonic() - begin < 40
    assert (tmp_path / "cleaned").exists()
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_does_not_end_after_a_signal_is_ended() -> None:
    code = """if True:
        import signal, time
        from surefoot.cli import process as citizen
        citizen.GRACE_SECONDS = 0.3
        citizen.prepare()
        with citizen.interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                time.sleep(20)
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stderr) == (143, "")


def test_all_exit_codes_are_listed_where_help_says() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "surefoot", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    text = " ".join(found.stdout.split())
    for code in (citizen.EXIT_FAILED, citizen.EXIT_USER_ERROR, citizen.EXIT_INTERRUPTED, citizen.EXIT_BROKEN_PIPE):
        assert str(code) in text.partition("Exit codes:")[2]
        assert f"| {code} |" in str(citizen.__doc__) or f"{code}," in str(citizen.__doc__)


def test_json_that_python_would_read_but_nobody_else_is_refused_by_the_tests() -> None:
    with pytest.raises(ValueError, match="NaN is not JSON"):
        strict_json('{"speedup": NaN}')
