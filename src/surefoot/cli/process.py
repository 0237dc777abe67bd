"""The process around a command: exit codes, standard streams, signals. Imports nothing that takes time.

Exit codes (the only list of them; `docs/` and `surefoot --help` repeat it):

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
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

GRACE_SECONDS = 15.0
"""After a signal, cleaning up may take this long (a step of a large model, a file being written); then the process ends."""

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF}
"""Errors of writing that are the machine's and not a bug."""

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_SHOW_CURSOR = "\x1b[?25h"

_watchdog: threading.Timer | None = None
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


def _quit_at_once(number: int, frame: FrameType | None) -> None:
    """While modules are imported, and after a command has ended, there is nothing to clean up."""
    restore_terminal()
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    """End the command through its `finally` blocks; the watchdog ends it if they hang, or if the exception is lost."""
    global _watchdog
    if _watchdog is None:
        _watchdog = threading.Timer(GRACE_SECONDS, _quit_at_once, (number, None))
        _watchdog.daemon = True
        _watchdog.start()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def stay() -> None:
    """A signal was meant for something smaller than the process (an answer of `chat`): do not end."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.cancel()
        _watchdog = None


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
    """As it was at the start: echo and line mode on, cursor visible."""
    if _terminal is not None:
        with contextlib.suppress(Exception):
            import termios

            termios.tcsetattr(0, termios.TCSANOW, _terminal)
    with contextlib.suppress(Exception):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR.encode())
