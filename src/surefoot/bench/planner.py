"""How long planning and allocating take on one core: `python -m surefoot.bench.planner`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.speculation.allocation import allocate
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import CausalPlanner, StalePlanner, StepLoad
from surefoot.speculation.simulation import WORKLOADS, synthetic_table
from surefoot.speculation.stopping import StoppingPlanner
from surefoot.speculation.survival import ConfidenceBoard


@dataclass(frozen=True)
class PlannerTiming:
    """Median time of one step's part, in microseconds."""

    requests: int
    gamma: int
    read_us: float  # ConfidenceBoard.read
    stale_us: float  # StalePlanner.decide
    causal_us: float
    stopping_us: float  # with the learning it does after deciding
    allocate_us: float
    publish_us: float  # ConfidenceBoard.publish

    @property
    def plan_and_allocate_us(self) -> float:
        """The default path: stale plan, then allocation."""
        return self.stale_us + self.allocate_us


def measure_planner(requests: int = 256, gamma: int = 7, repeats: int = 200) -> PlannerTiming:
    """Time every part of the host's work in a step, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(requests, gamma, repeats)
    finally:
        torch.set_num_threads(threads)


def _measure(requests: int, gamma: int, repeats: int) -> PlannerTiming:
    costs = LiveCost(synthetic_table())
    survival = WORKLOADS["chat"].blocks(repeats + 64, requests, gamma, seed=0).survival
    load = StepLoad(requests, np.full(requests, gamma))
    limits = torch.full((requests,), gamma, dtype=torch.int64)
    board = ConfidenceBoard(requests, gamma)
    seats = [board.open(slot) for slot in range(requests)]
    stale, causal = StalePlanner(gamma, costs), CausalPlanner(gamma, costs)
    stopping = StoppingPlanner(gamma, costs)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> object:
        start = time.perf_counter_ns()
        result = call()
        times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000.0)
        return result

    for step, rows in enumerate(survival):
        current = torch.from_numpy(rows)
        published = timed("read", lambda step=step: board.read(step, seats))  # type: ignore[misc]
        decision = timed("stale", lambda published=published: stale.decide(published, load))  # type: ignore[misc]
        timed("causal", lambda rows=rows: causal.decide(rows, load))  # type: ignore[misc]
        timed("stopping", lambda rows=rows: stopping.decide(rows, load))  # type: ignore[misc]
        budget = decision.budget  # type: ignore[attr-defined]
        timed("allocate", lambda current=current, budget=budget: allocate(current, budget, limits))  # type: ignore[misc]
        timed("publish", lambda step=step, current=current: board.publish(step, seats, current))  # type: ignore[misc]
    median = {name: statistics.median(values[64:]) for name, values in times.items()}
    return PlannerTiming(requests, gamma, *(median[name] for name in times))


def main() -> None:
    """Print the timings of one and of 256 requests."""
    for requests in (1, 256):
        timing = measure_planner(requests)
        print(
            f"{requests:3d} requests x gamma {timing.gamma}: plan + allocate {timing.plan_and_allocate_us:.0f} us "
            f"(stale {timing.stale_us:.0f}, allocate {timing.allocate_us:.0f}; read {timing.read_us:.0f}, "
            f"publish {timing.publish_us:.0f}; causal {timing.causal_us:.0f}, stopping {timing.stopping_us:.0f})"
        )


if __name__ == "__main__":
    main()
