"""Progress of a training stage: a bar with the time left on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY_S = 15.0


class StageProgress:
    """Progress of one stage. The time left is extrapolated from the fraction of the work that is done."""

    def __init__(self, stage: str, enabled: bool = True) -> None:
        self.stage, self.enabled = stage, enabled
        self.started = time.monotonic()
        self._first: tuple[float, float] | None = None  # time and fraction at the first update
        self._last_line_s = self.started
        self._bar: Any = None
        self._last = ""

    def __enter__(self) -> StageProgress:
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self.stage, total=1.0, note="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.enabled and kind is None and self._last:
            print(f"{self.stage}: done in {self.elapsed_s:.0f} s, {self._last}", file=sys.stderr)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def update(self, fraction: float, note: str = "") -> None:
        """Report the done `fraction` [0, 1] of the stage, and a `note` on amount and speed."""
        now, fraction = time.monotonic(), min(max(fraction, 0.0), 1.0)
        self._last = note
        if not self.enabled:
            return
        if self._first is None:
            self._first = (now, fraction)
        began, at = self._first
        left = (now - began) / (fraction - at) * (1 - fraction) if fraction > at else None
        text = note if left is None or fraction >= 1 else f"{note}, {_clock(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction, note=text)
        elif now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            print(f"{self.stage}: {fraction:.0%}, {text}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
