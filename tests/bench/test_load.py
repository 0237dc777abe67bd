"""`bench serve`: what is sent when, what the figures mean, and that a planted regression is found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot import LLM
from surefoot.bench.load import Answer, Arm, Load, Run
from surefoot.bench.load_report import Figures, changes, markdown, plots, read_report, report, within
from surefoot.bench.workloads import WORKLOADS, conversations
from surefoot.errors import ConfigurationError
from tests.cli.conftest import checkpoints, run, strict_json
from tests.serving.server import Live, serve

__all__ = ["checkpoints", "run"]


def test_every_workload_has_conversations_of_its_kind() -> None:
    for name in WORKLOADS:
        found = conversations(name)
        assert len(found) >= 2
        assert {one.kind for one in found} == {name}
        assert len({one.turns for one in found}) == len(found)
    assert all(len(one.turns[0]) > 12_000 for one in conversations("long"))
    assert len({one.system for one in conversations("shared-prefix")}) == 1
    assert all(len(one.turns) > 4 for one in conversations("agent"))
    assert all("response_format" in one.extra for one in conversations("structured"))


def test_a_trace_is_sent_at_its_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": "b", "arrival_s": 0.5}\n{"turns": ["a", "c"], "arrival_s": 0}\n')
    assert [(one.turns, one.arrival_s) for one in conversations(str(file))] == [(("a", "c"), 0.0), (("b",), 0.5)]
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "arrival_s": 1}\n')
    with pytest.raises(ConfigurationError, match=r"line 1: arrival_s is None; allowed: seconds"):
        conversations(str(file))
    with pytest.raises(ConfigurationError, match="workload is 'chess'; allowed: code, edit"):
        conversations("chess")


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(Load(rate=4.0).arrivals(4000, 1))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08)
    bursts = np.array(Load(rate=4.0, burst=5).arrivals(4000, 1))
    assert bursts[-1] == pytest.approx(1000, rel=0.12)
    assert (np.diff(bursts) == 0).sum() == 3200
    assert Load(rate=4.0).arrivals(9, 1) == Load(rate=4.0).arrivals(9, 1) != Load(rate=4.0).arrivals(9, 2)


def test_arms_are_fields_of_requests() -> None:
    assert Arm.parse("served").fields == {}
    assert Arm.parse("none").fields == {"speculative": False}
    assert Arm.parse("gamma:3").fields == {"gamma": 3}
    for wrong in ("fixed:2", "gamma:0", "gamma:", "gamma:x", ""):
        with pytest.raises(ConfigurationError, match="allowed: served, none, adaptive, gamma:K"):
            Arm.parse(wrong)


def answered(due: float, times: list[float], tokens: int, text: str = "x", place: int = 0) -> Answer:
    return Answer(due, (place, 0), times, times[-1], tokens, text)


def rows_of(speeds: list[float], arm: str = "adaptive", first_ms: float = 100.0, users: int = 1) -> Figures:
    runs = []
    for speed in speeds:
        end = 40 / speed
        runs.append(Run([answered(0.0, [first_ms / 1e3, end / 2, end], 40)], end, None))
    return Figures.of("code", Load(users=users), arm, runs)


def test_figures_by_their_definition() -> None:
    counters = {
        **{"emitted_tokens": 60.0, "answer_steps": 20.0, "drafted_tokens": 80.0, "verified_tokens": 50.0},
        **{"accepted_tokens": 40.0, "regretted_blocks": 1.0, "trimmed_blocks": 4.0, "widths:0": 5.0, "widths:3": 15.0},
        **{"step_predicted_seconds": 0.9, "step_measured_seconds": 1.0},
        **{"verified_by_position:1": 10.0, "accepted_by_position:1": 8.0, "verified_by_position:10": 4.0},
        **{"judged_blocks:1": 10.0, "predicted_survivals:1": 7.5, "observed_survivals:1": 8.0},
    }
    answers = [answered(0.0, [0.2, 0.3, 0.7], 20), answered(0.5, [0.6, 0.8, 1.0], 40, "y", 1)]
    broken = Answer(0.0, error="500")
    found = Figures.of("code", Load(users=2), "adaptive", [Run([*answers, broken], 2.0, counters)])
    assert (found.requests, found.failed, found.tokens_per_s) == (2, 1, 30.0)
    assert found.user_tokens_per_s == pytest.approx((20 / 0.7 + 40 / 0.5) / 2)
    assert found.first_ms_p50 == pytest.approx(150)
    assert found.gap_ms_p50 == pytest.approx(200)
    assert (found.emitted_per_step, found.trim_regret, found.predicted_over_measured) == (3.0, 0.25, 0.9)
    assert found.widths == {"0": 5.0, "3": 15.0}
    assert found.acceptance == [0.8, 0.0]
    assert (found.predicted_survival, found.observed_survival) == ([0.75], [0.8])


def test_texts_of_arms_are_compared_place_by_place() -> None:
    one, same = ([Run([answered(0, [1.0], 3, "a", 0), answered(0, [1.0], 3, "b", 1)], 1.0, None)] for _ in range(2))
    other = [Run([answered(0, [1.0], 3, "b", 1), answered(0, [1.0], 3, "c", 0)], 1.0, None)]
    assert Figures.of("code", Load(users=1), "x", one, same).identical is True
    assert Figures.of("code", Load(users=1), "x", one, other).identical is False
    assert Figures.of("code", Load(users=1), "x", one).identical is None


def test_a_planted_regression_is_found_and_reruns_are_not_flagged() -> None:
    random = np.random.default_rng(4)

    def speeds(mean: float) -> list[float]:
        return list(mean * (1 + 0.02 * random.standard_normal(5)))

    flagged = {1.0: 0, 0.9: 0, 1.1: 0}
    for _ in range(200):
        old = report([rows_of(speeds(100))], {})
        for factor in flagged:
            (change,) = changes(old, [rows_of(speeds(100 * factor))])
            flagged[factor] += change.regressed
    assert flagged[1.0] <= 6
    assert flagged[1.1] == 0
    assert flagged[0.9] >= 190
    assert changes(report([rows_of([100.0])], {}), [rows_of([100.0], arm="none")]) == []
    (alone,) = changes(report([rows_of([100.0])], {}), [rows_of([90.0])])
    assert not alone.regressed  # one run each says nothing about 10 %


def test_the_highest_load_within_bounds() -> None:
    rows = [rows_of([100.0], users=users, first_ms=100.0 * users) for users in (1, 4, 2)]
    (found,) = within(rows, 250.0, None)
    assert (found["load"], found["loop"]) == ("2 users", "closed")
    assert within(rows, 50.0, None)[0]["load"] is None


def test_reports_are_read_back_and_drawn(tmp_path: Path) -> None:
    rows = [rows_of([100.0, 110.0]), rows_of([200.0], users=4)]
    facts: dict[str, Any] = {"command": "surefoot bench serve", "environment": {"cpu": "x"}, "settings": {"repeats": 2}}
    data = report(rows, {**facts, "slo": within(rows, 1000.0, None)})
    file = tmp_path / "report.json"
    file.write_text(json.dumps(data))
    assert read_report(file)["rows"] == data["rows"]
    drawn = plots(rows, tmp_path / "plots")
    assert {"interactivity.png", "first-token.png"} <= set(drawn)
    assert all((tmp_path / "plots" / name).stat().st_size > 5000 for name in drawn)
    text = markdown(data, rows, drawn)
    assert "| code | 1 user | adaptive | 105.0 (100.0–110.0) |" in text
    assert "![interactivity.png](interactivity.png)" in text
    for wrong, message in (("{}", "is no report"), ("[", "cannot read")):
        file.write_text(wrong)
        with pytest.raises(ConfigurationError, match=message):
            read_report(file)


@pytest.fixture(scope="module")
def live(checkpoints: Path) -> Iterator[Live]:
    options: dict[str, Any] = {"gamma": 4, "cost_table": "none", "max_model_len": 2000, "max_num_seqs": 8}
    with serve(LLM(checkpoints / "target", drafter="prompt-lookup", **options)) as live:
        yield live


def test_a_server_under_every_kind_of_load(live: Live, run: Callable[..., Any], tmp_path: Path) -> None:
    trace, saved, told = tmp_path / "trace.jsonl", tmp_path / "a.json", tmp_path / "out" / "report.md"
    trace.write_text('{"prompt": "def a", "arrival_s": 0}\n{"prompt": "stop", "arrival_s": 0.05}\n')
    common = ("bench", "serve", "--url", live.url, "--requests", "4", "-n", "8")
    result = run(
        *(
            *common,
            "--workload",
            f"agent,structured,{trace}",
            "-c",
            "1,2",
            "--rate",
            "50",
            "--burst",
            "2",
            "--repeats",
            "2",
        ),
        *(
            "--arms",
            "none,adaptive,gamma:2",
            "-o",
            str(saved),
            "--report",
            str(told),
            "--slo-first-ms",
            "60000",
            "--json",
        ),
    )
    assert result.exit_code == 0, result.stderr
    data = strict_json(result.stdout)
    assert strict_json(saved.read_text()) == data
    found = {(row["workload"], row["load"], row["arm"]): row for row in data["rows"]}
    loads = {load for _, load, _ in found}
    assert loads == {"1 user", "2 users", "50/s in bursts of 2", "trace"}
    assert {name for name, load, _ in found if load == "trace"} == {str(trace)}
    for row in data["rows"]:
        assert row["identical"] is True
        assert row["failed"] == 0
        assert row["tokens_per_s"] > 0
        assert row["first_ms_p50"] <= row["first_ms_p95"] <= row["first_ms_p99"]
        assert len(row["repeats"]) == 2
        assert row["arm"] != "none" or row["drafted"] == 0
        assert row["workload"] != "structured" or row["arm"] == "none" or row["drafted"] > 0
        assert max(map(int, row["widths"])) <= {"none": 0, "adaptive": 4, "gamma:2": 2}[row["arm"]]
    assert found["agent", "1 user", "none"]["requests"] == 6  # the turns of one conversation
    assert all(entry["load"] is not None for entry in data["slo"])
    assert told.read_text().startswith("# surefoot bench serve")
    assert (told.parent / "widths.png").exists()

    again = run(*common, "--workload", "agent", "-c", "1", "--repeats", "1", "--arms", "none", "--against", str(saved))
    assert "agent, 1 user, none:" in again.stderr
    slower = json.loads(saved.read_text())
    for row in slower["rows"]:
        row["repeats"] = [1000 * speed for speed in row["repeats"]]
        row["tokens_per_s"] *= 1000
    saved.write_text(json.dumps(slower))
    failed = run(*common, "--workload", "agent", "-c", "1", "--repeats", "1", "--arms", "none", "--against", str(saved))
    assert failed.exit_code == 1
    assert "SLOWER agent, 1 user, none" in failed.stderr


def test_what_cannot_be_measured_is_refused_in_one_line(live: Live, run: Callable[..., Any]) -> None:
    def refused(*words: str) -> str:
        result = run("bench", "serve", "--url", live.url, *words)
        assert result.exit_code == 2, result.stderr
        return " ".join(result.stderr.split())

    assert "concurrency is '0'; allowed: numbers above 0" in refused("-c", "0")
    assert "rate is 'x'" in refused("--rate", "x")
    assert "nothing arrives at a rate: give --rate" in refused("--burst", "3")
    assert "workload is 'chess'" in refused("--workload", "chess")
    assert "arm is 'fixed:3'" in refused("--arms", "fixed:3")
    assert "requests failed under the load 1 user: 400" in refused(
        "--workload", "long"
    )  # longer than this server takes
    nobody = run("bench", "serve", "--url", "http://127.0.0.1:9")
    assert nobody.exit_code == 2
    assert "http://127.0.0.1:9 does not answer /v1/models" in " ".join(nobody.stderr.split())


class Other(BaseHTTPRequestHandler):
    """A server that is not surefoot: says three words, one event each."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "other", "owned_by": "somebody"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "other"
        assert "speculative" not in body
        chunks = [{"choices": [{"delta": {"content": word}}]} for word in ("one ", "two ", "three")]
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
        self._send(
            "text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        )

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())


def test_any_openai_compatible_server_can_be_measured(run: Callable[..., Any]) -> None:
    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        common = ("bench", "serve", "--url", url, "-c", "1", "--requests", "2", "--repeats", "1", "--json")
        result = run(*common)
        assert result.exit_code == 0, result.stderr
        for row in strict_json(result.stdout)["rows"]:
            assert row["arm"] == "served"
            assert row["tokens_per_s"] > 0
            assert row["drafted"] is row["identical"] is row["widths"] is None
        refused = run(*common, "--arms", "none,adaptive")
        assert refused.exit_code == 2
        assert "is no surefoot server" in " ".join(refused.stderr.split())
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_of_its_own_is_started_and_ended(run: Callable[..., Any], checkpoints: Path) -> None:
    common = (
        "bench",
        "serve",
        "-m",
        str(checkpoints / "target"),
        "-c",
        "1",
        "--requests",
        "2",
        "--repeats",
        "1",
        "-n",
        "4",
    )
    result = run(
        *common, "-d", "prompt-lookup", "-g", "2", "--cost-table", "none", "--workload", "code", "--threads", "1"
    )
    assert result.exit_code == 0, result.stderr
    assert "code" in result.stdout
    assert "adaptive" in result.stdout
    broken = run(*common, "-d", "prompt-lookup", "-g", "99")
    assert broken.exit_code == 2
    assert "the server has not started" in broken.stderr
    assert "gamma is 99" in broken.stderr
