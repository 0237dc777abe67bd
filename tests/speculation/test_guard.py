"""The guard on simulated machines: what it costs where speculation pays, how soon it acts where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from surefoot.speculation import guard as guard_module
from surefoot.speculation.guard import LATEST, Arm, Guard, Load, Rate, Sample

FIRST_AFTER = 32

PLAIN_MS = 20.0


@dataclass
class Machine:
    """Steps that take and bring what they would with noise, and a guard that watches them.

    Attributes:
        accepted: mean accepted tokens a request of a speculative step.
        slower: a speculative step takes so many times as long as one without drafts.
        noise: relative standard deviation of every step.
    """

    accepted: float
    slower: float = 1.15
    noise: float = 0.06
    requests: int = 1
    context: float = 100
    speed: float = 1.0
    stalls: float = 0.0
    seed: int = 0
    guard: Guard = field(default_factory=Guard)
    arms: list[Arm] = field(default_factory=list)
    tokens: float = 0.0
    ms: float = 0.0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def step(self) -> None:
        arm = self.guard.choose(self.requests, self.context, alone=True)
        ms = PLAIN_MS / self.speed * max(0.5, 1 + self.noise * self.random.standard_normal())
        tokens = self.requests
        if arm is Arm.SPECULATIVE:
            ms *= self.slower
            tokens += int(self.random.binomial(5, self.accepted / 5, size=self.requests).sum())
        if self.random.random() < self.stalls:
            ms *= 25
        self.guard.observe(self.requests, self.context, arm, tokens, ms)
        self.arms.append(arm)
        self.tokens += tokens
        self.ms += ms

    def run(self, steps: int) -> float:
        """Tokens per ms over these steps, of target-only."""
        tokens, ms = self.tokens, self.ms
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.ms - ms) / (self.requests * self.speed / PLAIN_MS)

    def until(self, true: Callable[[], bool], most: int) -> int:
        for count in range(most):
            if true():
                return count
            self.step()
        raise AssertionError(f"not within {most} steps")


SEEDS = range(12)


@pytest.fixture(autouse=True)
def _guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "FIRST_AFTER", FIRST_AFTER)


@pytest.mark.parametrize("accepted", [0.25, 0.6, 1.5])
@pytest.mark.parametrize("requests", [1, 8])
def test_where_speculation_pays_one_step_in_a_hundred_is_spent(accepted: float, requests: int) -> None:
    lost = []
    for seed in SEEDS:
        machine = Machine(accepted, slower=1.12, requests=requests, seed=seed)
        rate = machine.run(6000)
        lost.append(1 - rate / ((1 + accepted) / 1.12))
        assert machine.guard.on
    assert np.mean(lost) < 0.01
    if accepted > 1:
        assert machine.arms.count(Arm.TARGET_ONLY) <= 0.01 * 6000 + 4


@pytest.mark.parametrize("slower", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("requests", [1, 4])
def test_a_slow_drafter_is_off_within_two_hundred_steps(slower: float, requests: int) -> None:
    for seed in SEEDS:
        machine = Machine(0.05, slower=slower, requests=requests, seed=seed)
        machine.until(lambda m=machine: not m.guard.on, 200)  # type: ignore[misc]
        assert machine.run(6000) > 0.97


def test_a_drafter_that_loses_little_is_found_too() -> None:
    for seed in SEEDS:
        machine = Machine(0.02, slower=1.07, seed=seed)
        machine.until(lambda m=machine: not m.guard.on, 1500)  # type: ignore[misc]
        assert machine.run(6000) > 0.97


def test_it_recovers_when_the_fault_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(1.5)
    machine.run(1000)
    assert machine.guard.on
    machine.slower = 5.0
    with caplog.at_level(logging.WARNING):
        machine.until(lambda: not machine.guard.on, 200)
    (message,) = caplog.messages
    assert "speculation does not pay at 1 request, contexts up to 511" in message
    assert "tok/s a request without (± " in message
    machine.run(3000)
    assert not machine.guard.on
    machine.slower = 1.15
    machine.until(lambda: machine.guard.on, LATEST + 200)
    assert machine.run(2000) > 0.97 * 2.5 / 1.15
    assert machine.guard.to_dict()["switched_off"] == machine.guard.to_dict()["switched_on"] == 1


def test_a_machine_that_slows_down_is_no_reason() -> None:
    """Another job takes half of the machine, again and again: both arms are slower."""
    for seed in SEEDS:
        machine = Machine(0.6, seed=seed)
        for _ in range(20):
            machine.speed = 1.5 - machine.speed  # 0.5, 1, 0.5 ...
            machine.run(150)
        assert machine.guard.on
        assert not machine.guard.switches


def test_stalls_are_no_reason() -> None:
    for seed in SEEDS:
        machine = Machine(0.6, stalls=0.02, seed=seed)
        machine.run(3000)
        assert not machine.guard.switches


def test_loads_are_judged_apart() -> None:
    guard = Guard()
    one, eight = Machine(1.5, guard=guard), Machine(0.05, slower=2.0, requests=8, guard=guard)
    for _ in range(100):
        one.run(10)
        eight.run(10)
    assert Load.of(8, 100) != Load.of(1, 100) != Load.of(1, 600)
    found = {entry["load"]: entry["on"] for entry in guard.to_dict()["loads"]}
    assert found == {"1 request, contexts up to 511": True, "5 to 8 requests, contexts up to 511": False}
    one.step()
    assert guard.on
    eight.step()
    assert not guard.on


def test_a_trial_that_stalls_the_engine_ends_at_once() -> None:
    machine = Machine(0.0, slower=200.0)
    machine.until(lambda: not machine.guard.on, 200)
    arms = len(machine.arms)
    # 1 % of the time may be lost: a step that loses 200 may come every 20,000 steps
    machine.run(12_000)
    assert machine.arms[arms:].count(Arm.SPECULATIVE) <= 2


def test_a_prompt_beside_it_is_no_time_for_a_window() -> None:
    guard = Guard()
    for _ in range(FIRST_AFTER * 4):
        assert guard.choose(1, 100, alone=False) is Arm.SPECULATIVE
    for _ in range(FIRST_AFTER):
        assert guard.choose(1, 100, alone=True) is Arm.SPECULATIVE
    assert guard.choose(1, 100, alone=True) is Arm.TARGET_ONLY
    assert guard.choose(1, 100, alone=False) is Arm.SPECULATIVE


def test_steps_that_overlap_another_arm_are_not_compared() -> None:
    guard = Guard(settle=1)
    for arm in (Arm.SPECULATIVE, Arm.TARGET_ONLY, Arm.TARGET_ONLY, Arm.SPECULATIVE, Arm.SPECULATIVE):
        guard.observe(1, 100, arm, 1, 10.0)
    (regime,) = guard._regimes.values()
    assert [sample.arm for sample in regime.steps] == [Arm.SPECULATIVE, Arm.TARGET_ONLY, Arm.SPECULATIVE]


def test_the_error_of_a_rate_is_that_of_a_ratio() -> None:
    random = np.random.default_rng(3)
    rates = []
    for _ in range(400):
        tokens, ms = 1 + random.binomial(3, 0.4, 64), 20 + random.standard_normal(64)
        found = Rate.of([Sample(Arm.SPECULATIVE, float(t), float(m)) for t, m in zip(tokens, ms, strict=True)])
        rates.append(found)
    values = np.array([rate.value for rate in rates])
    assert values.std() / values.mean() == pytest.approx(np.mean([rate.error for rate in rates]), rel=0.15)
    assert Rate.of([]).steps == 0
    assert Rate.of([Sample(Arm.SPECULATIVE, 1.0, 10.0)]).error == float("inf")
