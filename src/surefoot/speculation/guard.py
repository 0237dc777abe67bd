"""The live guard: whether speculation pays, by what steps took and brought, not by what a table says of them.

A cost table is measured beside serving, and may be wrong about it: a drafter that was fast alone and is slow here, a machine
that somebody shares, a text that nobody drafts well. So a few steps run target-only while everything else speculates, and
both are compared in tokens per ms, for each load apart. If speculation seems to be slower, it is examined: both kinds of
steps alternate, so that whatever else happens to the machine happens to both. Where it is slower beyond doubt it is switched
off; then a few steps speculate every now and then, to see whether that has changed.

The choice is made before anything of a step is drafted, from past steps alone, so it does not change the law of the output.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

FIRST_AFTER = 32
"""Steps at a load before its first window."""
WINDOW = 2
"""Target-only steps of a window."""
RATE = 0.01
"""Share of target-only steps while speculation pays, and of the time that trials may lose while it does not."""
BETWEEN = 4
"""Speculative steps between two windows of an examination: if speculation is slower, the windows cost nothing."""
TRIAL, LONG_TRIAL = 4, 16
"""Speculative steps after which a trial may end, and after which it switches speculation on."""
LEAST_SPECULATIVE, ENOUGH = 16, 128
"""Speculative steps of an examination before it may end, and after which it ends unless speculation is slower."""
BOUND = 2.5
"""Standard errors between two rates that differ beyond doubt."""
FEW, MANY = 48, 640
"""Recent steps of a load that are looked at: few notice a sudden fault soon, many a small loss at all."""
LOOK_EVERY = 16
"""Speculative steps between two looks."""
SOONEST, LATEST = 128, 2048
"""Target-only steps before a trial: the first one, and one after many that failed."""
STALL = 4.0
"""A step that takes longer than so many medians counts as so many: what stalls a machine says nothing about speculation."""


class Arm(str, Enum):
    """What a step did."""

    SPECULATIVE = "speculative"
    TARGET_ONLY = "target_only"


class Load(NamedTuple):
    """Steps that are compared with each other: as many requests (1, 2, 3-4, 5-8, …), contexts of the same power of two."""

    requests: int
    context: int

    @classmethod
    def of(cls, requests: int, context: float) -> Load:
        return cls((requests - 1).bit_length(), max(0, int(context).bit_length() - 9))

    def __str__(self) -> str:
        low = (1 << self.requests >> 1) + 1 if self.requests else 1
        most = 1 << self.requests
        near = f"up to {(1 << (self.context + 9)) - 1}"
        count = "1 request" if most == 1 else f"{low}{'' if low == most else f' to {most}'} requests"
        return f"{count}, contexts {near}"


class Sample(NamedTuple):
    """One step."""

    arm: Arm
    tokens: float  # per request
    ms: float
    share: float = 1.0  # what one token of one request adds to `tokens`


class Rate(NamedTuple):
    """Tokens per ms of one request, over several steps."""

    value: float
    error: float  # relative standard error
    steps: int

    @property
    def low(self) -> float:
        return self.value * max(0.0, 1 - BOUND * self.error)

    @property
    def high(self) -> float:
        return self.value * (1 + BOUND * self.error)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Rate:
        """The ratio of sums, with the standard error of a ratio of means.

        Few steps may happen to be alike; an accepted draft more or less is always possible, and counts as an error.
        """
        if not samples:
            return cls(0.0, math.inf, 0)
        median = sorted(sample.ms for sample in samples)[len(samples) // 2]
        ms = [min(sample.ms, STALL * median) for sample in samples]
        tokens = sum(sample.tokens for sample in samples)
        value, count = tokens / sum(ms), len(samples)
        if count < 2 or not tokens:
            return cls(value, math.inf, count)
        squares = sum((sample.tokens - value * own) ** 2 for sample, own in zip(samples, ms, strict=True))
        if samples[0].arm is Arm.SPECULATIVE:
            squares += max(sample.share for sample in samples) ** 2
        return cls(value, math.sqrt(squares * count / (count - 1)) / tokens, count)


class Compared(NamedTuple):
    """The rates of both arms."""

    speculative: Rate
    target_only: Rate

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Compared:
        return cls(*(Rate.of([sample for sample in samples if sample.arm is arm]) for arm in Arm))

    @property
    def slower(self) -> bool:
        """Whether speculation seems to be slower."""
        return self.speculative.value < self.target_only.value

    @property
    def suspicious(self) -> bool:
        """Whether it is slower by more than its noise."""
        return self.speculative.value * (1 + min(self.speculative.error, 1.0)) < self.target_only.value

    @property
    def pays(self) -> bool:
        """Whether it is faster by more than its noise, or not slower after many steps."""
        margin = 0.0 if self.speculative.steps >= ENOUGH else min(self.speculative.error, 1.0)
        return self.speculative.value * (1 - margin) > self.target_only.value

    @property
    def loses(self) -> bool:
        """Whether it is slower beyond doubt."""
        return self.speculative.high < self.target_only.low

    def to_dict(self) -> dict[str, float]:
        return {
            "speculative_tokens_per_s": 1e3 * self.speculative.value,
            "target_only_tokens_per_s": 1e3 * self.target_only.value,
            "speculative_error": self.speculative.error,
            "target_only_error": self.target_only.error,
        }

    def __str__(self) -> str:
        parts = zip(("with speculation", "without"), self, strict=True)
        return ", ".join(
            f"{1e3 * rate.value:.1f} tok/s a request {name} (± {rate.error:.1%}, {rate.steps} steps)"
            for name, rate in parts
        )


@dataclass
class _Regime:
    """What is known about one load."""

    load: Load
    on: bool = True  # speculation is
    steps: deque[Sample] = field(default_factory=lambda: deque(maxlen=MANY))
    since: int = 0  # steps of the usual arm since the last window or trial began
    wait: int = field(default_factory=lambda: FIRST_AFTER)  # such steps before the next one
    probing: int = 0  # steps of it that are still to be launched
    unseen: int = 0  # steps since the last look
    examined: list[Sample] | None = None  # the steps of the examination under way
    trial: list[Sample] | None = None  # the steps of the trial under way
    patience: int = field(default_factory=lambda: SOONEST)
    price_ms: float = 0.0  # what a step of a trial is expected to cost
    spare_ms: float = 0.0  # what trials may cost by now
    found: Compared | None = None  # at the last switch

    @property
    def usual(self) -> Arm:
        return Arm.SPECULATIVE if self.on else Arm.TARGET_ONLY


class Guard:
    """Decides for every step whether it may speculate, and learns from what it took.

    Args:
        settle: steps after a change of arm that are not compared; 1 where a step overlaps the one before it.

    Attributes:
        switches: times that speculation was switched off, and on again.
        probes: steps of windows, and of trials.
    """

    def __init__(self, settle: int = 0) -> None:
        self.settle = settle
        self.switches: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self._regimes: dict[Load, _Regime] = {}
        self._now: _Regime | None = None  # of the last step
        self._arm, self._same = Arm.SPECULATIVE, 0  # of the last observed steps: which one, and how many

    def choose(self, requests: int, context: float, *, alone: bool) -> Arm:
        """What the coming step does.

        Args:
            requests: that emit; at least one could have a draft.
            context: mean cached length, in tokens.
            alone: no prompt chunk shares the step: windows and trials run in such steps only.
        """
        regime = self._regime(requests, context)
        if not alone:
            return regime.usual
        affordable = regime.on or regime.spare_ms >= TRIAL * regime.price_ms
        if not regime.probing and regime.trial is None and regime.since >= regime.wait and affordable:
            regime.since = 0
            regime.probing = WINDOW if regime.on else TRIAL
            regime.trial = None if regime.on else []  # only what it is worth now counts
        if regime.probing:
            regime.probing -= 1
            self.probes["window" if regime.on else "trial"] += 1
            return Arm.TARGET_ONLY if regime.on else Arm.SPECULATIVE
        regime.since += 1
        return regime.usual

    def observe(self, requests: int, context: float, arm: Arm, tokens: int, ms: float) -> None:
        """Take a step without a prompt chunk.

        Args:
            tokens: delivered, by all its requests.
            ms: what it took, host time included.
        """
        self._same = self._same + 1 if arm is self._arm else 0
        self._arm = arm
        regime = self._regime(requests, context)
        if self._same < self.settle or not ms > 0:
            return
        sample = Sample(arm, tokens / requests, ms, 1 / requests)
        regime.steps.append(sample)
        if regime.examined is not None:
            regime.examined.append(sample)
            self._examine(regime, regime.examined)
        elif regime.on:
            regime.unseen += 1
            if arm is Arm.TARGET_ONLY or regime.unseen >= LOOK_EVERY:
                self._look(regime)
        elif arm is Arm.TARGET_ONLY:
            regime.spare_ms += RATE * ms
        elif regime.trial is not None:
            regime.trial.append(sample)
            self._try(regime, regime.trial)

    def _look(self, regime: _Regime) -> None:
        """Examine speculation where it may be slower; else the next window is far."""
        regime.unseen = 0
        steps = list(regime.steps)
        whole = Compared.of(steps)
        if not whole.target_only.steps:
            return
        recent = Rate.of([sample for sample in steps[-FEW:] if sample.arm is Arm.SPECULATIVE])
        regime.wait = round(WINDOW / RATE)
        if len(steps) == MANY:
            regime.patience = SOONEST  # the last fault is long gone
        if whole.slower or Compared(recent, whole.target_only).suspicious:
            regime.examined, regime.wait = [], BETWEEN

    def _examine(self, regime: _Regime, examined: list[Sample]) -> None:
        """After a step of an examination: switch speculation off, acquit it, or go on."""
        if examined[-1].arm is not Arm.TARGET_ONLY or regime.probing:
            return
        found = Compared.of(examined[-MANY:])
        if found.speculative.steps < LEAST_SPECULATIVE:
            return
        if found.loses:
            self._switch(regime, found, on=False)
        elif found.pays:
            regime.steps = deque(examined, maxlen=MANY)  # what came before may have been another machine
            regime.examined, regime.wait = None, round(WINDOW / RATE)

    def _try(self, regime: _Regime, trial: list[Sample]) -> None:
        """After a step of a trial: end it, go on with it, or switch speculation on again."""
        usual = [sample for sample in regime.steps if sample.arm is Arm.TARGET_ONLY]
        found = Compared(Rate.of(trial), Rate.of(usual))
        rate = found.target_only.value
        lost = sum(sample.ms - sample.tokens / rate for sample in trial) if rate else 0.0
        if found.speculative.value > rate:
            if len(trial) >= LONG_TRIAL:
                regime.steps = deque([*usual, *trial], maxlen=MANY)
                self._switch(regime, found, on=True)
            elif len(trial) >= TRIAL:
                regime.probing = max(regime.probing, 1)
        elif len(trial) >= TRIAL or lost * rate > STALL:
            regime.probing, regime.trial = 0, None
            regime.price_ms = max(0.0, lost) / len(trial)
            regime.spare_ms -= max(0.0, lost)
            regime.wait = regime.patience = min(2 * regime.patience, LATEST)

    def _switch(self, regime: _Regime, found: Compared, *, on: bool) -> None:
        relapse = regime.found is not None  # the trial was lucky
        regime.on, regime.found = on, found
        regime.since = regime.probing = 0
        regime.examined = regime.trial = None
        regime.spare_ms = 0.0
        self.switches["on" if on else "off"] += 1
        if on:
            regime.wait = BETWEEN  # whether it was lucky shows soon
            log.warning("speculation pays again at %s: %s; it is on again", regime.load, found)
            return
        if relapse:
            regime.patience = min(2 * regime.patience, LATEST)
        ms = [sample.ms for sample in list(regime.steps)[-FEW:] if sample.arm is Arm.SPECULATIVE]
        regime.price_ms = sum(ms) / max(1, len(ms)) * (1 - found.speculative.value / found.target_only.value)
        regime.wait = regime.patience
        log.warning(
            "speculation does not pay at %s: %s; it is off there, and tried again after %d steps",
            *(regime.load, found, regime.wait),
        )

    def _regime(self, requests: int, context: float) -> _Regime:
        load = Load.of(requests, context)
        if load not in self._regimes:
            # What was true of the load before is the best guess.
            self._regimes[load] = _Regime(load, on=self._now is None or self._now.on)
        self._now = self._regimes[load]
        return self._now

    @property
    def on(self) -> bool:
        """Whether speculation is on at the load of the last step."""
        return self._now is None or self._now.on

    def to_dict(self) -> dict[str, Any]:
        """What it has found, in plain JSON data."""
        return {
            "on": self.on,
            "switched_off": self.switches["off"],
            "switched_on": self.switches["on"],
            "window_steps": self.probes["window"],
            "trial_steps": self.probes["trial"],
            "loads": [
                {"load": str(regime.load), "on": regime.on, **(regime.found.to_dict() if regime.found else {})}
                for _, regime in sorted(self._regimes.items())
            ],
        }
