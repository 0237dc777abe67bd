"""Where the time of a step goes: one lap per stage, on the clock of the device that runs it.

A step is only timed when somebody watches (`Engine.add_observer`). Laps are measured between neighbouring stages and add
up to the step; nothing is subtracted from anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Laps(Protocol):
    """The laps of one step."""

    def __call__(self, stage: str) -> None:
        """The stage ends here; it began where the one before it ended."""
        ...

    def read(self) -> dict[str, float]:
        """Milliseconds by stage, once the step has run."""
        ...


class HostLaps:
    """The monotonic clock, for a device whose work has happened when a call returns."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self._ms[stage] = (now - self._last) * 1e3
        self._last = now

    def read(self) -> dict[str, float]:
        return self._ms


class EventLaps:
    """CUDA events on the stream of the step; reading waits for the last of them."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []
        self("start")

    def __call__(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((stage, event))

    def read(self) -> dict[str, float]:
        self._marks[-1][1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {stage: before.elapsed_time(event) for (_, before), (stage, event) in pairs}


def laps_for(device: torch.device) -> Callable[[], Laps]:
    """The clock of a device: call it at the start of every step."""
    return EventLaps if device.type == "cuda" else HostLaps


def ignore(stage: str) -> None:
    """The lap of a step nobody watches."""
