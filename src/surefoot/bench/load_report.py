"""What a benchmark of a server found: figures by workload, load and arm, as JSON, Markdown and plots, and beside an older one.

The JSON, one object:

    format      "surefoot-bench-serve", and `version` 1
    command     to repeat it
    environment machine, versions, the server's model and address
    settings    requests, repeats, sampling
    rows        [{workload, load, users, rate, arm, tokens_per_s, repeats, …}]: the fields of `Figures`, medians over the repeats
    slo         the highest load of each arm that keeps the bounds, where bounds were given
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from surefoot.bench.load import Load, Run
from surefoot.errors import ConfigurationError

FORMAT, VERSION = "surefoot-bench-serve", 1
LEAST_DROP = 0.03
"""A smaller loss is no regression, however certain it is."""
CERTAIN = 3.0
"""Standard errors of the difference of two medians' logarithms."""
UNKNOWN_NOISE = 0.1
"""Relative noise of a run that was not repeated."""


@dataclass(frozen=True)
class Figures:
    """One arm under one load. Latencies in ms, rates in tokens per second, each the median over the repeats."""

    workload: str
    load: str
    users: int  # 0: an open loop
    rate: float  # requests per second; 0: a closed loop, or a trace
    arm: str
    requests: int  # answered, in one repeat
    failed: int  # in all repeats
    tokens_per_s: float
    repeats: list[float]  # tokens per second of every repeat
    identical: bool | None  # to the first arm's texts; only at temperature 0, on one surefoot server
    user_tokens_per_s: float  # median over the answers: from when it should have been sent to its end
    first_ms_p50: float
    first_ms_p95: float
    first_ms_p99: float
    gap_ms_p50: float  # between two events of an answer
    gap_ms_p95: float
    gap_ms_p99: float
    # Of a surefoot server; None of others.
    emitted_per_step: float | None = None
    drafted: float | None = None  # tokens, over all repeats
    verified: float | None = None
    accepted: float | None = None
    trim_regret: float | None = None
    predicted_over_measured: float | None = None
    widths: dict[str, float] | None = None  # width -> steps of answers
    acceptance: list[float] | None = None  # by position
    predicted_survival: list[float] | None = None  # by position, means of the blocks whose fate is known
    observed_survival: list[float] | None = None

    @classmethod
    def of(
        cls, workload: str, load: Load, arm: str, runs: Sequence[Run], others: Sequence[Run] | None = None
    ) -> Figures:
        """The figures of several repeats.

        Args:
            others: the same repeats of an arm whose texts must be the same.
        """
        rates = [sum(answer.tokens for answer in run.good) / run.seconds for run in runs]
        first, gaps, users = [], [], []
        for run in runs:
            first.append(np.quantile([answer.first_s for answer in run.good], [0.5, 0.95, 0.99]) * 1e3)
            between = [gap for answer in run.good for gap in answer.gaps_s] or [0.0]
            gaps.append(np.quantile(between, [0.5, 0.95, 0.99]) * 1e3)
            users.append(median(answer.tokens / (answer.ended - answer.due) for answer in run.good))
        first_ms, gap_ms = np.median(first, axis=0).tolist(), np.median(gaps, axis=0).tolist()
        return cls(
            workload=workload,
            load=load.name,
            users=load.users,
            rate=load.rate,
            arm=arm,
            requests=round(median(len(run.good) for run in runs)),
            failed=sum(len(run.answers) - len(run.good) for run in runs),
            tokens_per_s=median(rates),
            repeats=rates,
            identical=None if others is None else all(map(_same_texts, runs, others)),
            user_tokens_per_s=median(users),
            **{f"first_ms_p{p}": value for p, value in zip((50, 95, 99), first_ms, strict=True)},
            **{f"gap_ms_p{p}": value for p, value in zip((50, 95, 99), gap_ms, strict=True)},
            **_counted([run.counters for run in runs if run.counters is not None]),
        )


def _same_texts(one: Run, other: Run) -> bool:
    """Whether all requests that both have answered were answered alike."""
    mine, theirs = one.texts, other.texts
    return all(mine[place] == theirs[place] for place in mine.keys() & theirs.keys())


def _counted(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What a surefoot server has counted over the runs."""
    if not found:
        return {}
    total: dict[str, float] = {}
    for counters in found:
        for name, value in counters.items():
            total[name] = total.get(name, 0.0) + value

    def share(part: str, whole: str) -> float | None:
        return total.get(part, 0.0) / total[whole] if total.get(whole) else None

    def by(name: str) -> dict[str, float]:
        prefix = f"{name}:"
        return {key.removeprefix(prefix): value for key, value in total.items() if key.startswith(prefix)}

    def by_position(part: str, whole: str) -> list[float]:
        parts, wholes = by(part), by(whole)
        return [parts.get(key, 0.0) / wholes[key] for key in sorted(wholes, key=int) if wholes[key]]

    return {
        "emitted_per_step": share("emitted_tokens", "answer_steps"),
        "drafted": total.get("drafted_tokens"),
        "verified": total.get("verified_tokens"),
        "accepted": total.get("accepted_tokens"),
        "trim_regret": share("regretted_blocks", "trimmed_blocks"),
        "predicted_over_measured": share("step_predicted_seconds", "step_measured_seconds"),
        "widths": {width: steps for width, steps in sorted(by("widths").items(), key=lambda w: int(w[0])) if steps},
        "acceptance": by_position("accepted_by_position", "verified_by_position"),
        "predicted_survival": by_position("predicted_survivals", "judged_blocks"),
        "observed_survival": by_position("observed_survivals", "judged_blocks"),
    }


def within(rows: Sequence[Figures], first_ms: float | None, gap_ms: float | None) -> list[dict[str, Any]]:
    """Of every workload, arm and kind of loop: the highest load whose 95th percentiles stay within the bounds, or None."""
    best: dict[tuple[str, str, bool], Figures | None] = {}
    for row in rows:
        key = (row.workload, row.arm, row.users > 0)
        held = (first_ms is None or row.first_ms_p95 <= first_ms) and (gap_ms is None or row.gap_ms_p95 <= gap_ms)
        before = best.setdefault(key, None)
        if held and not row.failed and (before is None or (row.users, row.rate) > (before.users, before.rate)):
            best[key] = row
    return [
        {
            "workload": workload,
            "arm": arm,
            "loop": "closed" if closed else "open",
            "load": None if row is None else row.load,
            "tokens_per_s": None if row is None else row.tokens_per_s,
        }
        for (workload, arm, closed), row in best.items()
    ]


def environment() -> dict[str, Any]:
    """Machine and versions."""
    from importlib.metadata import PackageNotFoundError, version

    from surefoot.version import __version__

    found: dict[str, Any] = {
        "surefoot": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a client needs neither
            continue
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        found |= {"cpu": names[0], "logical_cores": len(names)}
    except (OSError, IndexError):
        pass
    return found


@dataclass(frozen=True)
class Change:
    """A row beside the same row of an older report."""

    workload: str
    load: str
    arm: str
    before: float  # tokens per second
    now: float
    certainty: float  # of the difference, in standard errors; positive is faster

    @property
    def regressed(self) -> bool:
        return self.now < (1 - LEAST_DROP) * self.before and self.certainty < -CERTAIN

    def __str__(self) -> str:
        return (
            f"{self.workload}, {self.load}, {self.arm}: {self.before:.1f} → {self.now:.1f} tok/s "
            f"({self.now / self.before - 1:+.1%}, {abs(self.certainty):.1f} standard errors)"
        )


def changes(old: Mapping[str, Any], rows: Sequence[Figures]) -> list[Change]:
    """Rows that both reports have, by the repeats of both."""
    known = {(row["workload"], row["load"], row["arm"]): row for row in old["rows"]}
    found = []
    for row in rows:
        before = known.get((row.workload, row.load, row.arm))
        if before is None:
            continue
        earlier, now = np.log(before["repeats"]), np.log(row.repeats)
        error = math.hypot(_error(earlier), _error(now))
        difference = float(np.median(now) - np.median(earlier))
        found.append(
            Change(*(row.workload, row.load, row.arm), before["tokens_per_s"], row.tokens_per_s, difference / error)
        )
    return found


def _error(logs: np.ndarray[Any, Any]) -> float:
    """Standard error of a median of few values; with fewer than three nothing is known of the noise."""
    if len(logs) < 3:
        return UNKNOWN_NOISE / math.sqrt(len(logs))
    # A median's error is 1.25 times a mean's; three values may happen to be close together.
    return max(1.25 * float(np.std(logs, ddof=1)), 0.01) / math.sqrt(len(logs))


def read_report(path: Path) -> dict[str, Any]:
    """An older report.

    Raises:
        ConfigurationError: no report of this kind.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"cannot read the report {path}: {problem}") from problem
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ConfigurationError(
            f"{path} is no report of 'surefoot bench serve' that this version reads: make a new one"
        )
    return data


def report(rows: Sequence[Figures], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **facts, "rows": [asdict(row) for row in rows]}


COLUMNS = {
    "tokens_per_s": "tok/s",
    "user_tokens_per_s": "tok/s a user",
    "first_ms_p50": "first p50",
    "first_ms_p95": "p95",
    "first_ms_p99": "p99 ms",
    "gap_ms_p50": "gap p50",
    "gap_ms_p95": "p95",
    "gap_ms_p99": "p99 ms",
    "emitted_per_step": "per step",
    "trim_regret": "regret",
    "predicted_over_measured": "predicted/ measured",
}


def cells(row: Figures) -> list[str]:
    """A row of a table: what it is, and its columns."""
    values = [getattr(row, name) for name in COLUMNS]
    spread = f"{row.tokens_per_s:.1f} ({min(row.repeats):.1f}–{max(row.repeats):.1f})"
    shown = ["–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in values]
    return [row.workload, row.load, row.arm, spread, *shown[1:]]


def markdown(data: Mapping[str, Any], rows: Sequence[Figures], plots: Sequence[str] = ()) -> str:
    """The report as text."""
    lines = ["# surefoot bench serve", "", f"`{data['command']}`", ""]
    lines += [f"* {name}: {value}" for name, value in {**data["environment"], **data["settings"]}.items()]
    header = ["workload", "load", "arm", *COLUMNS.values()]
    lines += ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += [
        "",
        "Medians over the repeats, with the smallest and the largest. Latencies begin when a request should have been sent.",
    ]
    for found in data.get("slo") or ():
        held = (
            "no load keeps the bounds"
            if found["load"] is None
            else f"{found['load']}, {found['tokens_per_s']:.1f} tok/s"
        )
        lines.append(f"* within the bounds, {found['workload']}, {found['arm']}, {found['loop']} loop: {held}")
    lines += [f"\n![{name}]({name})" for name in plots]
    return "\n".join(lines) + "\n"


def plots(rows: Sequence[Figures], folder: Path) -> list[str]:
    """PNG files; their names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made: list[str] = []

    def draw(name: str, x: str, y: str, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
        if not any(len(xs) for _, xs, _ in lines):
            return
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for label, xs, ys in lines:
            axes.plot(xs, ys, marker="o", label=label)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.png", dpi=120)
        made.append(f"{name}.png")

    groups: dict[str, list[Figures]] = {}
    for row in sorted(rows, key=lambda row: (row.users, row.rate)):
        loop = "" if row.users else ", open loop" if row.rate else ", trace"
        groups.setdefault(f"{row.workload}, {row.arm}{loop}", []).append(row)
    draw(
        *("interactivity", "tok/s a user", "tok/s in all"),
        [(name, [r.user_tokens_per_s for r in own], [r.tokens_per_s for r in own]) for name, own in groups.items()],
    )
    draw(
        *("first-token", "users, or requests per second", "first token, p95, ms"),
        [(name, [r.users or r.rate for r in own], [r.first_ms_p95 for r in own]) for name, own in groups.items()],
    )
    drafting = {name: [r for r in own if r.verified] for name, own in groups.items()}
    draw(
        *("widths", "users, or requests per second", "mean width verified"),
        [
            (name, [r.users or r.rate for r in own], [_mean_width(r) for r in own])
            for name, own in drafting.items()
            if own
        ],
    )
    draw(
        *("acceptance", "position", "accepted of those verified"),
        [(name, *_positions(own[-1].acceptance)) for name, own in drafting.items() if own],
    )
    draw(
        *("reliability", "predicted survival", "observed survival"),
        [
            (name, own[-1].predicted_survival or [], own[-1].observed_survival or [])
            for name, own in drafting.items()
            if own
        ],
    )
    return made


def _mean_width(row: Figures) -> float:
    widths = row.widths or {}
    steps = sum(widths.values())
    return sum(int(width) * count for width, count in widths.items()) / steps if steps else 0.0


def _positions(values: Sequence[float] | None) -> tuple[list[int], list[float]]:
    found = list(values or ())
    return list(range(1, len(found) + 1)), found
