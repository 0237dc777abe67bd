"""The process around a command: exit codes, standard streams, signals. Imports nothing that takes time.

Exit codes (`surefoot --help` repeats them in one line):

| code | meaning |
|---|---|
| 0 | done |
| 1 | done, but the result is not what it must be: texts differ, nothing was drafted, lines of a batch or an answer failed |
| 2 | not done: a wrong option, a model or file that does not fit, an output that cannot be written; one line says which |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C (SIGINT), SIGTERM: 128 + the signal, as shells count |
| 141 | whoever read the output has gone (`| head -1`): 128 + SIGPIPE, without a message |
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

GRACE_SECONDS = 15.0
"""After a signal, cleaning up may take this long (a step of a large model, a file being written); then the process ends."""

LAST_SECONDS = 0.5
"""After that, how long other threads may take to notice that their compilers have ended."""

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF}
"""Errors of writing that are the machine's and not a bug."""

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_WATCHDOG = "surefoot-watchdog"
_SANE = "\x1b[?2004l\x1b[?25h"  # pasting not bracketed, the cursor visible

_watchdog: int | None = None  # a pipe to the thread that ends the process if nothing else does
_terminal: Any = None  # settings of the terminal at the start


def prepare() -> None:
    """Make the process fit for a command: before anything that takes time is imported.

    Exits at once when standard output is closed.
    """
    _handle_by(_quit_at_once)
    output_is_closed = sys.stdout is None
    _open_missing_streams()
    if output_is_closed:
        print("error: standard output is closed: redirect it, to /dev/null if nobody wants it", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    _remember_terminal()
    _start_watchdog()
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows a mark instead
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.unraisablehook = _unraisable


# --- streams ----------------------------------------------------------------------------------------------------------


def _open_missing_streams() -> None:
    """Put /dev/null where a standard stream is closed: else the next file opened gets its number, and its output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def output_error(problem: OSError) -> tuple[int, str | None] | None:
    """Exit code and message for an error of writing, or None for an error that is a bug."""
    if problem.errno == errno.EPIPE:
        return EXIT_BROKEN_PIPE, None
    if problem.errno not in UNWRITABLE:
        return None
    where = problem.filename or "the output"
    return EXIT_USER_ERROR, f"cannot write {where}: {os.strerror(problem.errno)}; free some space, or write elsewhere"


def flush_output() -> None:
    """Write what standard output still holds, so that an error shows now and not while the interpreter shuts down."""
    sys.stdout.flush()


def discard_output() -> None:
    """Give up on standard output: what it still holds goes nowhere, without another error at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


# --- signals ----------------------------------------------------------------------------------------------------------


class Terminated(SystemExit):
    """Raised for SIGTERM and SIGHUP."""

    code: int


def _quit_at_once(number: int, frame: FrameType | None) -> None:
    """While modules are imported, and after a command has ended, there is nothing to clean up."""
    restore_terminal()
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    """End the command through its `finally` blocks; the watchdog ends it if they hang, or if the exception is lost."""
    _tell_watchdog(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + number)


def end_after_signal(code: int) -> None:
    """End the process once the `finally` blocks of the command have run. Only in a process that `prepare` has seen.

    The engine's thread may still be loading or compiling, which nobody waits for any more: compilers are ended, the thread has
    a moment to remove their files, and what it says about that is for nobody.
    """
    if _watchdog is None:
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    restore_terminal()
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    for child in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
    end = time.monotonic() + LAST_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name != _WATCHDOG:
            thread.join(max(0.0, end - time.monotonic()))
    os._exit(code)


def _descendants(process: int) -> list[int]:
    """Children and their children, where Linux lists them."""
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def stay() -> None:
    """A signal was meant for something smaller than the process (an answer of `chat`): do not end."""
    _tell_watchdog(0)


def _tell_watchdog(number: int) -> None:
    """A byte in a pipe: all that a signal handler may safely do, for it may interrupt code that holds any lock."""
    if _watchdog is not None:
        with contextlib.suppress(OSError):
            os.write(_watchdog, bytes([number]))


def _start_watchdog() -> None:
    global _watchdog
    reader, _watchdog = os.pipe()
    os.set_blocking(_watchdog, False)
    threading.Thread(target=_watch, args=(reader,), name=_WATCHDOG, daemon=True).start()


def _watch(reader: int) -> None:
    """End the process GRACE_SECONDS after a signal, unless it stays."""
    pending, deadline = 0, 0.0
    while True:
        patience = max(0.0, deadline - time.monotonic()) if pending else None
        if not select.select([reader], [], [], patience)[0]:
            _quit_at_once(pending, None)
        number = os.read(reader, 1)[0]
        if number and not pending:
            deadline = time.monotonic() + GRACE_SECONDS
        pending = (pending or number) if number else 0


def _handle_by(handler: Any) -> dict[signal.Signals, Any]:
    """Handle signals by `handler`, except those that whoever started this process ignores (nohup); what was before."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    return before


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle_by(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Within, a signal raises: KeyboardInterrupt for Ctrl-C, SystemExit for the others."""
    return _handled_by(_raise)


def importing() -> contextlib.AbstractContextManager[None]:
    """Within, a signal ends the process at once: C++ that is being loaded may turn an exception into a crash."""
    return _handled_by(_quit_at_once) if signal.getsignal(signal.SIGINT) is _raise else contextlib.nullcontext()


def _unraisable(problem: Any) -> None:
    """An interrupt that arrived in a destructor or callback is lost there: send it again."""
    if problem.exc_type is KeyboardInterrupt:
        again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))  # which also wakes whatever sleeps
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(problem)


# --- terminal ---------------------------------------------------------------------------------------------------------


def _remember_terminal() -> None:
    global _terminal
    with contextlib.suppress(Exception):  # no terminal, or a system without termios
        import termios

        _terminal = termios.tcgetattr(0)


def restore_terminal() -> None:
    """As it was at the start: echo and line mode on, pasting not bracketed, cursor visible."""
    if _terminal is not None:
        with contextlib.suppress(Exception):
            import termios

            termios.tcsetattr(0, termios.TCSANOW, _terminal)
    with contextlib.suppress(Exception):
        if os.isatty(2):
            os.write(2, _SANE.encode())
