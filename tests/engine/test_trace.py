"""The trace: every step a line, flushed, and a file that `simulate` replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.engine.trace import StepReport, TraceWriter
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.simulation import Trace, simulate, synthetic_table
from tests.engine.engines import build
from tests.tiny_models import tiny_target

PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
@pytest.mark.parametrize("width", [None, "0,3,1"])
def test_a_trace_replays(tmp_path: Path, drafter: str, width: str | None) -> None:
    engine = build(tiny_target(), drafter, width=width)
    with pytest.raises(ConfigurationError, match=f"there is no directory {tmp_path / 'new'}"):
        TraceWriter(tmp_path / "new" / "trace.jsonl", engine.describe())
    (tmp_path / "new").mkdir()
    writer = TraceWriter(tmp_path / "new" / "trace.jsonl", engine.describe())
    engine.add_observer(writer)
    requests = engine.run(PROMPTS, GREEDY)
    lines = writer.path.read_text().splitlines()  # flushed: nobody has closed it yet
    engine.remove_observer(writer)
    writer.close()
    assert engine.decode_step.laps is None
    head, *steps = map(json.loads, lines)
    assert head["engine"]["drafter"] == engine.describe()["drafter"]
    assert len(steps) == engine.statistics.steps
    for request in requests:
        blocks = [block for step in steps for block in step["blocks"] if block["request"] == request.request_id]
        assert sum(block["accepted"] for block in blocks) == request.statistics.accepted
        assert sum(block["verified"] for block in blocks) == request.statistics.verified
        others = sum(step["undrafted"].get(request.request_id, 0) for step in steps)
        assert sum(block["emitted"] for block in blocks) + others == request.num_output
    assert all(block["verified"] <= block["drafted"] <= engine.gamma for step in steps for block in step["blocks"])
    assert {step["reason"] for step in steps} == set(engine.statistics.reasons)
    assert all(0 < sum(step["stages_ms"].values()) <= step["measured_ms"] for step in steps)
    trace = Trace.read(lines)
    assert trace.gamma == engine.gamma
    assert len(trace.requests) == len(PROMPTS)
    report = simulate(synthetic_table(), trace, gamma=trace.gamma, concurrency=(1, 4), blocks=64)
    assert report.rate("clairvoyant", 4) > 0


def test_nobody_is_told_about_steps_that_nobody_watches() -> None:
    engine = build(tiny_target(), "dspark")
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    engine.run(PROMPTS[:1], GREEDY)
    seen = len(reports)
    assert seen == engine.statistics.steps
    assert reports[-1].outputs.laps is not None
    engine.remove_observer(reports.append)
    engine.run(PROMPTS[:1], GREEDY)
    assert len(reports) == seen


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="trace"):
        TraceWriter(tmp_path, {})
