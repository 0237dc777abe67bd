"""A real terminal for a command: a pseudo terminal that is the process's own, with what it shows and its settings."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][AB0]?)")
PASTE_ON, PASTE_BEGIN, PASTE_END = b"\x1b[?2004h", b"\x1b[200~", b"\x1b[201~"
CURSOR_HIDDEN, CURSOR_SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A process on a pseudo terminal; use it as a context manager."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self._main, self._process_side = pty.openpty()
        fcntl.ioctl(self._process_side, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")  # 40 lines of 120
        self.before = termios.tcgetattr(self._process_side)
        self.shown = b""
        side = self._process_side
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **(environment or {})},
        )

    @classmethod
    def stub(cls, *arguments: str, asked: Path | None = None, term: str = "xterm", **fields: Any) -> Terminal:
        """`surefoot ARGUMENTS` over a scripted engine."""
        command = [sys.executable, "-m", "tests.cli.stub", json.dumps(fields), *arguments]
        return cls(*command, environment={"TERM": term, **({"ASKED": str(asked)} if asked else {})})

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._process_side)

    def type(self, text: bytes) -> None:
        os.write(self._main, text)

    def read(self, seconds: float = 0.05) -> None:
        """Take what is shown within this time."""
        end = time.monotonic() + seconds
        while select.select([self._main], [], [], max(0.0, end - time.monotonic()))[0]:
            self.shown += os.read(self._main, 65536)

    def wait_for(self, text: str | bytes, count: int = 1, seconds: float = 60.0) -> None:
        """Until this has been shown so many times, escapes left out (unless bytes are asked for)."""
        end = time.monotonic() + seconds
        while (self.shown if isinstance(text, bytes) else self.text).count(text) < count:  # type: ignore[arg-type]
            assert time.monotonic() < end, f"no {text!r} in {self.text!r}"
            self.read()

    def wait(self, seconds: float = 60.0, *, dump: bool = False) -> int:
        """Until the process has ended; its exit code as a shell counts. `dump`: a process that hangs shows its stacks."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            if dump and time.monotonic() > end:
                self.process.send_signal(signal.SIGABRT)
                self.read(2.0)
            assert time.monotonic() < end, f"still running: {self.text!r}"
            self.read()
        self.read()
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def text(self) -> str:
        return ESCAPES.sub(b"", self.shown).decode(errors="replace").replace("\r", "")

    @property
    def is_sane(self) -> bool:
        """Echo and line mode as before, the cursor visible, pasting not bracketed."""
        settings = termios.tcgetattr(self._process_side)
        cursor = self.shown.rfind(CURSOR_SHOWN) >= self.shown.rfind(CURSOR_HIDDEN)
        paste = self.shown.rfind(b"\x1b[?2004l") >= self.shown.rfind(PASTE_ON)
        return settings == self.before and cursor and paste
