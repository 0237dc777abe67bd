"""Does speculation pay, and which policy chooses best? Replay of recorded or synthetic blocks against a cost table.

Every policy gets the same blocks (common random numbers): a policy decides how much of a block is verified, not what is
drafted next. It is credited with expected tokens: one per request and step, and the calibrated survival of every verified
position; where a trace has the outcome of all full windows, with the accepted tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.errors import ConfigurationError, CostTableError
from surefoot.speculation.cost import CostTable
from surefoot.speculation.json_files import read_object
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import CausalPlanner, StalePlanner, StepLoad
from surefoot.speculation.stopping import StoppingPlanner
from surefoot.speculation.survival import ConfidenceBoard

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ADAPTIVE = ("stale", "causal", "stopping")
EXAMPLES = Path(__file__).parents[1] / "profiling" / "examples"


@dataclass(frozen=True)
class DraftedBlocks:
    """Blocks of T steps in R lanes; a lane serves one request after the other.

    Attributes:
        survival: [T, R, gamma] float32, calibrated.
        accepted: [T, R] int64 accepted length of the full window, or None where survival is the truth.
        fresh: [T, R] bool, a new request starts in the lane.
    """

    survival: npt.NDArray[np.float32]
    accepted: Ints | None
    fresh: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Workload:
    """A synthetic text: confidences in log-odds, with a slow part per request and step and a fast part inside a block.

    The slow part is a mean-reverting walk from block to block, which makes a stale confidence informative; the fast part
    is another one inside the block, known from current confidences only.

    Attributes:
        easiness: mean log-odds of a confidence.
        spread: standard deviation of the slow part.
        persistence: its correlation from one block to the next.
        jitter: standard deviation of the fast part.
        cohesion: its correlation from one position to the next.
        length: blocks of a request, on average.
    """

    name: str
    easiness: float
    spread: float = 0.8
    persistence: float = 0.7
    jitter: float = 1.0
    cohesion: float = 0.6
    length: float = 64.0

    def blocks(self, steps: int, lanes: int, gamma: int, seed: int) -> DraftedBlocks:
        """Draw `steps` blocks in each of `lanes` lanes."""
        rng = np.random.default_rng(seed)
        fresh = rng.random((steps, lanes)) < 1.0 / self.length
        fresh[0] = True
        slow = np.zeros(lanes)
        fast_noise = rng.standard_normal((gamma, steps, lanes))
        slow_noise = rng.standard_normal((steps, lanes)) * self.spread
        log_odds = np.empty((steps, lanes, gamma))
        renewal = np.sqrt(1.0 - self.persistence**2)
        for t in range(steps):
            slow = np.where(fresh[t], slow_noise[t], self.persistence * slow + renewal * slow_noise[t])
            log_odds[t] = (self.easiness + slow)[:, None]
        fast = np.zeros((steps, lanes))
        for k in range(gamma):
            weight = self.cohesion if k else 0.0
            fast = weight * fast + np.sqrt(1.0 - weight**2) * self.jitter * fast_noise[k]
            log_odds[:, :, k] += fast
        confidence = 0.5 * (1.0 + np.tanh(0.5 * log_odds))
        return DraftedBlocks(np.cumprod(confidence, axis=2).astype(np.float32), None, fresh)

    def with_acceptance(self, acceptance: float, gamma: int) -> Workload:
        """The same text, as easy as it takes for this share of all drafted tokens to be accepted at full width."""
        if not 0.0 < acceptance < 1.0:
            raise ConfigurationError(f"acceptance must lie between 0 and 1, got {acceptance}")
        low, high = -12.0, 12.0
        for _ in range(24):
            middle = (low + high) / 2
            text = replace(self, easiness=middle)
            if text.blocks(64, 64, gamma, seed=0).survival.mean() < acceptance:
                low = middle
            else:
                high = middle
        return replace(self, easiness=(low + high) / 2)


WORKLOADS = {
    text.name: text
    for text in (
        Workload("structured code", 2.2),
        Workload("chat", 0.6),
        Workload("fast-moving", 1.0, persistence=0.1, spread=0.2, jitter=2.0, cohesion=0.9),
    )
}


@dataclass(frozen=True)
class Trace:
    """Recorded blocks, request by request.

    A file has one JSON object a line, one line a step: `{"blocks": [{"request": "r1", "survival": [...], "verified":
    7, "accepted": 3}, ...]}`. `verified` and `accepted` may be missing; the outcome of the full window is known where
    the whole window was verified or a token was rejected. A line may have the `cost_table` in use from then on.
    """

    requests: tuple[tuple[npt.NDArray[np.float32], Ints], ...]  # per request [n, gamma] survivals, [n] accepted or -1
    table: CostTable | None = None  # the last one of the file

    @property
    def gamma(self) -> int:
        return int(self.requests[0][0].shape[1])

    @classmethod
    def read(cls, lines: Iterable[str]) -> Trace:
        """Parse the lines of a trace file. Raises `ConfigurationError` naming the line."""
        sequences: dict[str, list[tuple[list[float], int]]] = {}
        gamma: int | None = None
        table: CostTable | None = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                step = json.loads(line)
                if step.get("cost_table") is not None:
                    table = CostTable.from_dict(step["cost_table"])
                for block in step["blocks"]:
                    survival = [float(value) for value in block["survival"]]
                    gamma = gamma or len(survival)
                    if len(survival) != gamma or not all(0.0 <= value <= 1.0 for value in survival):
                        raise ValueError(f"survival must be {gamma} numbers between 0 and 1, got {survival}")
                    accepted, verified = block.get("accepted"), block.get("verified", gamma)
                    drafted = block.get("drafted", gamma)  # a lookup miss, or the end of a request, drafts fewer
                    known = accepted is not None and (verified >= drafted or accepted < verified)
                    sequences.setdefault(str(block["request"]), []).append((survival, int(accepted) if known else -1))
            except CostTableError as problem:
                raise ConfigurationError(f"trace line {number}: {problem}") from problem
            except (AttributeError, KeyError, TypeError, ValueError) as problem:
                raise ConfigurationError(f"trace line {number}: {problem!r}") from problem
        if not sequences:
            raise ConfigurationError("the trace holds no block")
        return cls(
            tuple(
                (np.array([s for s, _ in blocks], dtype=np.float32), np.array([a for _, a in blocks], dtype=np.int64))
                for blocks in sequences.values()
            ),
            table,
        )

    def blocks(self, steps: int, lanes: int, gamma: int, seed: int) -> DraftedBlocks:
        """Fill `lanes` lanes with whole requests in random order, over again when the trace is short."""
        if gamma != self.gamma:
            raise ConfigurationError(f"the trace was recorded with gamma={self.gamma}, asked for gamma={gamma}")
        rng = np.random.default_rng(seed)
        survival = np.empty((steps, lanes, gamma), dtype=np.float32)
        accepted = np.empty((steps, lanes), dtype=np.int64)
        fresh = np.zeros((steps, lanes), dtype=bool)
        for lane in range(lanes):
            t = 0
            while t < steps:
                values, outcomes = self.requests[rng.integers(len(self.requests))]
                first = (
                    int(rng.integers(len(values))) if t == 0 else 0
                )  # lanes are at different points of their requests
                count = min(len(values) - first, steps - t)
                survival[t : t + count, lane] = values[first : first + count]
                accepted[t : t + count, lane] = outcomes[first : first + count]
                fresh[t, lane] = True
                t += count
        return DraftedBlocks(survival, accepted if (accepted >= 0).all() else None, fresh)


@dataclass(frozen=True)
class Outcome:
    """What one policy achieved at one concurrency."""

    policy: str
    concurrency: int
    tokens_per_ms: float
    mean_width: float  # draft tokens verified per request and step
    tokens_per_step: float  # emitted tokens per request and step


@dataclass(frozen=True)
class SimulationReport:
    """All policies over all concurrencies."""

    workload: str
    gamma: int
    outcomes: tuple[Outcome, ...] = field(repr=False)

    def rate(self, policy: str, concurrency: int) -> float:
        """Tokens per ms of one policy at one concurrency."""
        return next(
            entry.tokens_per_ms
            for entry in self.outcomes
            if entry.policy == policy and entry.concurrency == concurrency
        )

    def curve(self, policy: str) -> list[tuple[int, float]]:
        """(concurrency, tokens per ms) of one policy, in order: a line of the plot."""
        return [(entry.concurrency, entry.tokens_per_ms) for entry in self.outcomes if entry.policy == policy]

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(entry.policy for entry in self.outcomes))

    @property
    def concurrencies(self) -> list[int]:
        return list(dict.fromkeys(entry.concurrency for entry in self.outcomes))

    def speedup(self, policy: str, concurrency: int = 1) -> float:
        """Tokens per ms relative to decoding with the target alone."""
        return self.rate(policy, concurrency) / self.rate("target-only", concurrency)

    def pays_at(self, policy: str) -> list[int]:
        """The concurrencies at which the policy emits more tokens per ms than the target alone."""
        return [count for count in self.concurrencies if self.speedup(policy, count) > 1.0]

    def gains_over_fixed(self, policy: str) -> list[float]:
        """Relative gain over the best fixed width, by concurrency."""
        fixed = [other for other in self.policies if other.startswith("fixed-")]
        return [
            self.rate(policy, count) / max(self.rate(other, count) for other in fixed) - 1
            for count in self.concurrencies
        ]

    def verdict(self, policy: str) -> str:
        """Up to how many requests at once the policy beats the target alone, and by how much."""
        counts, pays = self.concurrencies, self.pays_at(policy)
        at = {count: f"{self.speedup(policy, count):.2f}" for count in counts}
        if not pays:
            best = max(counts, key=lambda count: self.speedup(policy, count))
            return f"does not pay: at best {at[best]} times target-only, at {best} requests at once"
        best = max(pays, key=lambda count: self.speedup(policy, count))
        gain = f"at best {at[best]} times target-only, at {best}"
        if pays == counts:
            return f"pays from {counts[0]} to {counts[-1]} requests at once: {gain}"
        losses = [count for count in counts if count not in pays]
        lost = "target-only is faster at " + ", ".join(f"{count} ({at[count]} times)" for count in losses)
        if pays == counts[: len(pays)]:
            return f"pays up to {pays[-1]} requests at once: {gain}; {lost}"
        return f"pays at {', '.join(map(str, pays))} requests at once: {gain}; {lost}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def simulate(
    table: CostTable,
    source: Workload | Trace,
    *,
    gamma: int,
    concurrency: Sequence[int] = CONCURRENCY,
    blocks: int = 4096,
    threshold: float = 0.5,
    target_only_ms: float | None = None,
    context: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SimulationReport:
    """Tokens per ms of every policy at every concurrency.

    Policies: `target-only` (no drafter at all), `verify-all`, `fixed-0` ... `fixed-gamma`, `threshold` (verify what
    survives with at least `threshold`), `stale`, `causal`, `stopping`, and `clairvoyant`, which knows every outcome
    before it decides and is what no causal rule can beat.

    Args:
        table: cost of steps.
        source: the blocks that are drafted.
        blocks: number of blocks to replay per concurrency, at least 48 steps; the first quarter only teaches the planners.
        target_only_ms: one decode step without a drafter, if it is not V(R) plus overhead (R = 1 only).
        progress: called with every concurrency when it is done.
    """
    outcomes: list[Outcome] = []
    for lanes in concurrency:
        steps = max(48, -(-blocks // lanes))
        played = _Played(table, source.blocks(steps, lanes, gamma, seed), gamma, context)
        outcomes += played.outcomes(threshold, target_only_ms if lanes == 1 else None)
        if progress is not None:
            progress(lanes)
    name = source.name if isinstance(source, Workload) else "trace"
    return SimulationReport(name, gamma, tuple(outcomes))


class _Played:
    """The blocks of one concurrency, and what every policy makes of them."""

    def __init__(self, table: CostTable, blocks: DraftedBlocks, gamma: int, context: float) -> None:
        self.table, self.blocks, self.gamma, self.context = table, blocks, gamma, context
        self.steps, self.lanes, _ = blocks.survival.shape
        self.full = self.lanes * gamma
        self.costs = table.step_costs(self.lanes, self.lanes, self.full + 1, context)
        self.scored = slice(self.steps // 4, None)
        credit = blocks.survival.astype(np.float64)
        if blocks.accepted is not None:
            credit = (blocks.accepted[:, :, None] > np.arange(gamma)).astype(np.float64)
        self.credit = credit  # [T, R, gamma] tokens a verified position brings
        # Slots go to the largest survivals, ties by (position, request): the order of `allocate`, whatever the budget.
        by_position = blocks.survival.transpose(0, 2, 1).reshape(self.steps, -1)
        order = np.argsort(-by_position, axis=1, kind="stable")
        gains = np.take_along_axis(credit.transpose(0, 2, 1).reshape(self.steps, -1), order, axis=1)
        self.earned = self.lanes + np.concatenate([np.zeros((self.steps, 1)), np.cumsum(gains, axis=1)], axis=1)

    def outcomes(self, threshold: float, target_only_ms: float | None) -> list[Outcome]:
        alone = target_only_ms or float(
            self.table.verify_costs(self.lanes, 1, self.context)[0] + self.table.overhead_ms_at(self.lanes)
        )
        fixed = {f"fixed-{width}": self._fixed(width) for width in range(self.gamma + 1)}
        result = [
            Outcome("target-only", self.lanes, self.lanes / alone, 0.0, 1.0),
            replace(fixed[f"fixed-{self.gamma}"], policy="verify-all"),
            *fixed.values(),
            self._budgets("threshold", (self.blocks.survival >= threshold).sum((1, 2))),
            self._budgets("stale", self._stale()),
        ]
        load = StepLoad(self.lanes, np.full(self.lanes, self.gamma), context=self.context)
        for name, planner in (
            ("causal", CausalPlanner(self.gamma, LiveCost(self.table))),
            ("stopping", StoppingPlanner(self.gamma, LiveCost(self.table))),
        ):
            budgets = [planner.decide(survival, load).budget for survival in self.blocks.survival]
            result.append(self._budgets(name, np.array(budgets)))
        return [*result, self._clairvoyant(max(entry.tokens_per_ms for entry in result[1:]))]

    def _stale(self) -> Ints:
        board = ConfidenceBoard(self.lanes, self.gamma)
        planner = StalePlanner(self.gamma, LiveCost(self.table))
        load = StepLoad(self.lanes, np.full(self.lanes, self.gamma), context=self.context)
        seats = [board.open(lane) for lane in range(self.lanes)]
        budgets = []
        for t in range(self.steps):
            if t:
                for lane in np.flatnonzero(self.blocks.fresh[t]).tolist():
                    seats[lane] = board.open(lane)
            budgets.append(planner.decide(board.read(t, seats), load).budget)
            board.publish(t, seats, self.blocks.survival[t])
        return np.array(budgets)

    def _fixed(self, width: int) -> Outcome:
        tokens = self.lanes + float(self.credit[self.scored, :, :width].sum((1, 2)).mean())
        return self._outcome(f"fixed-{width}", tokens, float(self.costs[width * self.lanes]), width * self.lanes)

    def _budgets(self, policy: str, budgets: Ints) -> Outcome:
        budgets = budgets[self.scored]
        tokens = np.take_along_axis(self.earned[self.scored], budgets[:, None], axis=1).mean()
        return self._outcome(policy, float(tokens), float(self.costs[budgets].mean()), float(budgets.mean()))

    def _clairvoyant(self, price: float) -> Outcome:
        """Knows how many tokens N all full windows together will accept, and pays for none that is rejected.

        The best rule for a ratio of sums maximises tokens - price * ms in every step, the price being the rate it
        attains (Dinkelbach); a few rounds find it, starting from the best rate of the others.
        """
        law = self._law_of_accepted()
        budget = np.arange(self.full + 1)
        for _ in range(8):
            worth = budget - price * self.costs
            best = np.maximum.accumulate(np.where(worth >= np.maximum.accumulate(worth), budget, 0))
            tokens, ms = self.lanes + float(law @ best), float(law @ self.costs[best])
            price = tokens / ms
        return self._outcome("clairvoyant", tokens, ms, float(law @ best))

    def _law_of_accepted(self) -> Floats:
        """Probability that the full windows of a step accept 0, 1, ... R * gamma tokens, averaged over the steps."""
        if self.blocks.accepted is not None:
            counts = np.bincount(self.blocks.accepted[self.scored].sum(1), minlength=self.full + 1)
            return counts / counts.sum()
        survival = self.blocks.survival[self.scored].astype(np.float64)
        ends = np.ones((*survival.shape[:2], 1))
        reach = np.concatenate([ends, survival, 0.0 * ends], axis=2)
        law = np.zeros(self.full + 1)
        for step in reach[:, :, :-1] - reach[:, :, 1:]:  # [R, gamma + 1] law of each accepted length
            spectrum = np.fft.rfft(step, n=1 << self.full.bit_length(), axis=1).prod(axis=0)
            law += np.fft.irfft(spectrum)[: self.full + 1].clip(min=0.0)
        return np.asarray(law / law.sum(), dtype=np.float64)

    def _outcome(self, policy: str, tokens: float, ms: float, budget: float) -> Outcome:
        return Outcome(policy, self.lanes, tokens / ms, budget / self.lanes, tokens / self.lanes)


def break_even_tokens(table: CostTable, width: int, target_only_ms: float | None = None, requests: int = 1) -> float:
    """Emitted tokens per request and step from which verifying `width` drafts beats the target alone."""
    alone = target_only_ms or table.verify_ms_at(requests) + table.overhead_ms_at(requests)
    return float(table.step_costs(requests, requests * (1 + width), 1)[0]) / alone


def verdict_of(speedup: float, margin: float = 0.03) -> str:
    """`gain`, `loss` or `break-even` (within `margin`)."""
    return "gain" if speedup > 1 + margin else "loss" if speedup < 1 - margin else "break-even"


@dataclass(frozen=True)
class ExampleWorkload:
    """One workload somebody measured: its acceptance, their tokens/s, and whether speculation paid."""

    name: str
    acceptance: float  # accepted share of the drafted tokens
    reported_tokens_per_second: tuple[float, float]  # with speculation, from ... to
    reported_verdict: str


@dataclass(frozen=True)
class Example:
    """A published machine: its cost curve, and what its owner measured on it."""

    name: str
    description: str
    gamma: int
    table: CostTable
    target_only_ms: float
    workloads: tuple[ExampleWorkload, ...]
    reported_break_even: tuple[float, float] | None = None  # emitted tokens at full width, from ... to

    @property
    def break_even(self) -> float:
        """Emitted tokens per step from which the full width pays."""
        return break_even_tokens(self.table, self.gamma, self.target_only_ms)

    def report(self, workload: ExampleWorkload, blocks: int = 1024, seed: int = 0) -> SimulationReport:
        """Simulate one request of a text with the reported acceptance on this machine."""
        text = replace(WORKLOADS["chat"], name=workload.name).with_acceptance(workload.acceptance, self.gamma)
        return simulate(
            self.table,
            text,
            gamma=self.gamma,
            concurrency=(1,),
            blocks=blocks,
            target_only_ms=self.target_only_ms,
            seed=seed,
        )


def example_names() -> list[str]:
    """Names `load_example` knows."""
    return sorted(path.stem for path in EXAMPLES.glob("*.json"))


def load_example(name: str) -> Example:
    """Read a shipped example. Raises `ConfigurationError` listing the names there are."""
    path = EXAMPLES / f"{name}.json"
    if not path.is_file():
        raise ConfigurationError(f"no example named {name!r}; there are: {', '.join(example_names())}")
    data: Mapping[str, Any] = read_object(path, ConfigurationError)
    return Example(
        name=name,
        description=data["description"],
        gamma=data["gamma"],
        table=CostTable.from_dict(data["table"]),
        target_only_ms=data["target_only_ms"],
        workloads=tuple(
            ExampleWorkload(
                entry["name"],
                entry["acceptance"],
                (entry["reported_tokens_per_second"][0], entry["reported_tokens_per_second"][1]),
                entry["reported_verdict"],
            )
            for entry in data["workloads"]
        ),
        reported_break_even=tuple(data["reported_break_even"]) if data.get("reported_break_even") else None,
    )


def synthetic_table(buckets: Sequence[int] | None = None) -> CostTable:
    """A plausible accelerator: memory-bound up to 64 tokens, compute-bound beyond, graphs captured every 8 tokens.

    It is invented, for `surefoot simulate --synthetic` and tests; a real engine is profiled.
    """
    sizes = tuple(buckets) if buckets is not None else (1, 2, 4, *range(8, 4097, 8))
    times = tuple(10.0 + 0.02 * size + 0.06 * max(0, size - 64) for size in sizes)
    return CostTable(sizes, (times,), draft_requests=(1, 512), draft_ms=(1.5, 6.0))
