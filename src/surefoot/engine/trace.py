"""What an observer of the engine is told about a step, and the JSON-lines file made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigurationError
from surefoot.speculation.survival import prefix_survival

if TYPE_CHECKING:
    from surefoot.engine.device import HostOutputs
    from surefoot.engine.messages import StepInputs
    from surefoot.engine.plan import Plan
    from surefoot.speculation.live_cost import LiveCost


class ObserverError(RuntimeError):
    """An observer of steps has raised; the cause is chained."""


@dataclass(frozen=True)
class StepReport:
    """One collected step."""

    plan: Plan
    inputs: StepInputs
    outputs: HostOutputs  # with `laps`: ms by stage
    request_ids: list[str]  # [E] of the emitting requests, drafted ones first
    kept: list[int]  # [E] tokens each of them delivered
    gamma: int
    host_ms: float  # of the host's part that the device did not hide

    @property
    def measured_ms(self) -> float:
        """What the planner's prediction is compared with."""
        return self.outputs.device_ms + self.host_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: a line of the trace. `surefoot simulate` replays its `blocks`."""
        plan, inputs, outputs = self.plan, self.inputs, self.outputs
        decision, count = plan.decision, inputs.num_drafting
        assert decision is not None  # the step has asked
        proposed = outputs.proposed or [self.gamma] * count
        survival = (
            [[1.0] * self.gamma] * count if outputs.confidence is None else prefix_survival(outputs.confidence).tolist()
        )
        sources = outputs.sources
        blocks = [
            {
                "request": self.request_ids[i],
                **({} if sources is None else {"source": sources[i]}),
                "survival": [round(value, 6) if k < proposed[i] else 0.0 for k, value in enumerate(survival[i])],
                "drafted": proposed[i],
                "verified": outputs.widths[i],
                "accepted": outputs.accepted[i],
                "emitted": self.kept[i],
            }
            for i in range(count)
        ]
        return {
            "step": plan.load.step,
            "blocks": blocks,
            "undrafted": dict(zip(self.request_ids[count:], self.kept[count:], strict=True)),
            "rows": outputs.rows,
            "prefill_tokens": plan.load.prefill_tokens,
            "context": round(plan.load.context, 1),
            "budget": decision.budget,
            "full_budget": decision.full_budget,
            "reason": decision.reason.value,
            "suspended": plan.suspended,
            "explored": plan.explored,
            "depth": plan.depth,
            "stale_lag": decision.stale_lag,
            "expected_tokens": decision.expected_tokens,
            "predicted_ms": plan.predicted_ms,
            "measured_ms": round(self.measured_ms, 4),
            "host_ms": round(self.host_ms, 4),
            "stages_ms": {stage: round(ms, 4) for stage, ms in (outputs.laps or {}).items()},
        }


StepObserver = Callable[[StepReport], None]


class TraceWriter:
    """Appends every step to a file, one JSON object a line, each flushed: a trace survives the process that wrote it.

    The first line describes the engine and holds no block. It has the cost table in use (`cost_table`); a table that
    replaces it has a line of its own, before the first step that ran with it.

    Raises:
        ConfigurationError: the file cannot be written; its directory must exist.
    """

    def __init__(self, path: str | Path, engine: dict[str, Any], costs: LiveCost | None = None) -> None:
        self.path, self._costs = Path(path), costs
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"cannot write the trace {path}: there is no directory {self.path.parent}")
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as problem:
            raise ConfigurationError(f"cannot write the trace {path}: {problem.strerror or problem}") from problem
        self._write({"format": "surefoot-trace", "version": 1, "engine": engine, **self._table()})

    def _table(self) -> dict[str, Any]:
        """The cost table, as a line without a block has it."""
        table = self._costs.table if self._costs else None
        self._costs_version = self._costs.version if self._costs else 0
        return {"cost_table": None if table is None else table.to_dict(), "blocks": []}

    def __call__(self, report: StepReport) -> None:
        if self._costs is not None and self._costs.version != self._costs_version:
            self._write(self._table())
        self._write(report.to_dict())

    def _write(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
