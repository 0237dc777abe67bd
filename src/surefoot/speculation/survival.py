"""Survival of draft positions, and the one type that proves it is old enough to choose a budget with.

The budget K may be chosen by a global search only from survivals that were known before any token of this step's
blocks was drawn (`docs/planning.md`; DSpark paper, Appendix A). `PublishedSurvival` is that proof: only
`ConfidenceBoard.read` makes one, and the board hands out nothing that was published in the step that asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
_SEAL = object()  # known to this module alone


def prefix_survival(confidence: Tensor) -> Tensor:
    """S_k = c_1 ... c_k, the probability that position k is reached and accepted.

    Args:
        confidence: [..., gamma] float32 in [0, 1].

    Returns:
        [..., gamma], non-increasing along gamma.
    """
    return confidence.cumprod(-1)


class Seat(NamedTuple):
    """A slot as one request holds it: the next request in the same slot has another epoch."""

    slot: int
    epoch: int


@dataclass(frozen=True, eq=False)
class PublishedSurvival:
    """Survivals published in an earlier step, on the host. Made by `ConfidenceBoard.read` alone.

    Attributes:
        values: [R, gamma] float32, read-only; 1 for a request that has published nothing yet.
        forecast: [R, gamma] float32, what a block is expected to survive given the values of the block before it: drawn
            towards the mean as far as past publications were. Equal to `values` until enough of them have been seen.
        cold: [R] bool, the request has published nothing yet.
        age: [R] int64, steps since the publication; 0 where cold.
    """

    values: npt.NDArray[np.float32]
    forecast: npt.NDArray[np.float32]
    cold: npt.NDArray[np.bool_]
    age: Ints
    lag: float  # mean age of the survivals that are not neutral; 0 if all are
    seal: InitVar[object] = None

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError(
                "PublishedSurvival is made by ConfidenceBoard.read alone: survivals of the current step must not "
                "choose the budget by a global search (publish them and read them in a later step)"
            )
        for array in (self.values, self.forecast, self.cold, self.age):
            array.flags.writeable = False


@dataclass(frozen=True)
class _Publication:
    step: int
    slots: Ints  # [R]
    epochs: Ints  # [R]
    values: npt.NDArray[np.float32]  # [R, gamma], valid once `event` has passed
    event: torch.Event | None


class ConfidenceBoard:
    """Slot-indexed [S, gamma] survivals between the step that published them and the later steps that plan with them.

    A publication is kept aside until a later step reads, so that neither order of the two calls inside a step can show
    a request its own current block. A device tensor is copied to pinned memory without waiting; the wait, if the copy
    has not passed yet, is in the later `read`, and it is for the draft of an earlier step only.
    """

    def __init__(self, num_slots: int, gamma: int) -> None:
        self.num_slots, self.gamma = num_slots, gamma
        self._epoch = np.zeros(num_slots, dtype=np.int64)  # the request now in the slot
        self._values = np.ones((num_slots, gamma), dtype=np.float32)
        self._owner = np.full(num_slots, -1, dtype=np.int64)  # epoch the row belongs to
        self._step = np.zeros(num_slots, dtype=np.int64)  # step the row was published in
        self._persistence = _Persistence(gamma)
        self._pending: deque[_Publication] = deque()
        self._last_step: int | None = None
        self._seats: list[Seat] = []  # whose columns these are
        self._columns = np.zeros((2, 0), dtype=np.int64)

    def open(self, slot: int) -> Seat:
        """Begin a request in `slot`: its survivals are neutral (all ones) whatever stood there before."""
        self._epoch[slot] += 1
        self._values[slot] = 1.0
        self._owner[slot] = -1
        return Seat(slot, int(self._epoch[slot]))

    def publish(self, step: int, seats: Sequence[Seat], survival: Tensor | npt.NDArray[np.float32]) -> None:
        """Post the current survivals of `step` for later steps.

        Args:
            step: number of the step that drafted them; never falls from call to call.
            seats: R seats, in the order of the rows.
            survival: [R, gamma] float32, calibrated, on any device.

        Raises:
            ValueError: a shape that does not fit, or a step older than the last publication.
        """
        if tuple(survival.shape) != (len(seats), self.gamma):
            raise ValueError(f"survival has shape {tuple(survival.shape)}, expected {(len(seats), self.gamma)}")
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step {step} was published after step {self._last_step}")
        self._last_step = step
        event = None
        if isinstance(survival, np.ndarray) or survival.device.type == "cpu":
            values = np.array(survival, dtype=np.float32)  # a copy: the step's buffer lives on
        else:
            host = torch.empty(survival.shape, dtype=torch.float32, pin_memory=True)
            host.copy_(survival.detach(), non_blocking=True)
            event = torch.Event(survival.device)
            event.record()
            values = host.numpy()
        slots, epochs = self._columns_of(seats)
        self._pending.append(_Publication(step, slots, epochs, values, event))

    def read(self, step: int, seats: Sequence[Seat]) -> PublishedSurvival:
        """The newest survivals of each seat that were published before `step`; ones where the seat's request has none."""
        while self._pending and self._pending[0].step < step:
            self._fold(self._pending.popleft())
        slots, epochs = self._columns_of(seats)
        cold = self._owner[slots] != epochs
        values = self._values[slots]
        forecast = self._persistence.forecast(values)
        age = step - self._step[slots]
        if cold.any():
            values[cold], forecast[cold], age[cold] = 1.0, 1.0, 0
        warm = len(age) - np.count_nonzero(cold)
        return PublishedSurvival(values, forecast, cold, age, int(age.sum()) / warm if warm else 0.0, _SEAL)

    def _columns_of(self, seats: Sequence[Seat]) -> Ints:
        """[2, R] slots and epochs. Mostly they are those of the call before."""
        if self._seats != seats:
            self._seats = list(seats)
            self._columns = np.array(self._seats, dtype=np.int64).reshape(-1, 2).T.copy()
        return self._columns

    def _fold(self, publication: _Publication) -> None:
        if publication.event is not None:
            publication.event.synchronize()
        slots, epochs, values = publication.slots, publication.epochs, publication.values
        alive = self._epoch[slots] == epochs  # the others' slots have a new owner
        if not alive.all():
            slots, epochs, values = slots[alive], epochs[alive], values[alive]
        again = self._owner[slots] == epochs
        self._persistence.observe(self._values[slots[again]], values[again])
        self._values[slots] = values
        self._owner[slots] = epochs
        self._step[slots] = publication.step


class _Persistence:
    """How much of a block's survival the next block of the same request keeps: one regression line per position."""

    def __init__(self, gamma: int, memory: int = 2048, batch: int = 64) -> None:
        self.memory, self.batch = memory, batch
        self._waiting: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []
        self._count = 0  # rows in them
        self._sums = np.zeros((5, gamma))  # of 1, before, after, before^2, before * after
        self._slope, self._offset = np.ones(gamma, np.float32), np.zeros(gamma, np.float32)

    def observe(self, before: npt.NDArray[np.float32], after: npt.NDArray[np.float32]) -> None:
        """Take pairs of consecutive publications of the same requests, [N, gamma] each; they count `batch` at a time."""
        self._waiting.append((before, after))
        self._count += len(before)
        if self._count < self.batch:
            return
        x, y = (np.concatenate(rows).astype(np.float64) for rows in zip(*self._waiting, strict=True))
        self._waiting.clear()
        self._count = 0
        self._sums *= 0.5 ** (len(x) / self.memory)
        self._sums += (np.full(x.shape[1], len(x)), x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0))
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        variance = sum_xx - sum_x * sum_x / count
        covariance = sum_xy - sum_x * sum_y / count
        slope = np.where(variance > 1e-9 * count, covariance / np.maximum(variance, 1e-12), 0.0).clip(0.0, 1.0)
        self._slope[:] = slope
        self._offset[:] = (sum_y - slope * sum_x) / count

    def forecast(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[N, gamma] expected next survivals, non-increasing along gamma like the real ones."""
        return np.minimum.accumulate((self._offset + self._slope * values).clip(0.0, 1.0), axis=1)
