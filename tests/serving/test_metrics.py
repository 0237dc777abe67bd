"""`/metrics`: conventions of Prometheus, values against known traffic, and labels that stay few."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.server import Live, engine, serve, tiny

DEPLOY = Path(__file__).parents[2] / "deploy"


def scrape(url: str) -> dict[str, float]:
    """Sample name with its labels -> value."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def ask(live: Live, count: int, tokens: int, **more: object) -> list[dict[str, object]]:
    body = {
        "prompt": "a stop is a stop is a stop, abcd " * 3,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    return [httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json() for _ in range(count)]


def test_names_follow_the_conventions(live: Live) -> None:
    ask(live, 1, 4)
    text = httpx.get(f"{live.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len(families) > 35
    for family in families:
        assert family.documentation, family.name
        assert re.fullmatch(r"surefoot(_[a-z]+)+", family.name)
        assert not re.search(r"(_ms|_milliseconds|_count|_ratio_total)$", family.name)
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {
            *("endpoint", "finish_reason", "path", "status", "le", "width", "position", "source", "reason", "state"),
            *("group", "version", "model", "drafter", "planner", "kind"),
        }


def test_values_are_those_of_the_traffic_and_only_grow() -> None:
    with serve(engine(tiny(), width=3)) as live:
        before = scrape(live.url)
        answers = ask(live, 5, 20, logit_bias={"70": 100})
        httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "temperature": -1})
        httpx.get(f"{live.url}/v1/no/such/path/{'x' * 40}")
        after = scrape(live.url)

        def rose(name: str) -> float:
            return after[name] - before.get(name, 0.0)

        assert rose("surefoot_emitted_tokens_total") == 100
        assert rose("surefoot_answers_total{endpoint=completions,finish_reason=length}") == 5
        assert rose("surefoot_http_requests_total{path=/v1/completions,status=200}") == 5
        assert rose("surefoot_http_requests_total{path=/v1/completions,status=400}") == 1
        assert rose("surefoot_http_requests_total{path=other,status=404}") == 1
        prompt = sum(int(answer["usage"]["prompt_tokens"]) for answer in answers)  # type: ignore[index]
        assert rose("surefoot_prompt_tokens_total") == prompt
        assert rose("surefoot_prompt_tokens_cached_total") > 0, "nobody found the prompt of the first"
        assert rose("surefoot_time_to_first_token_seconds_count{endpoint=completions}") == 5
        assert rose("surefoot_inter_token_latency_seconds_count{endpoint=completions}") == 5 * 19
        assert rose("surefoot_output_length_tokens_sum{endpoint=completions}") == 100
        accepted = rose("surefoot_accepted_tokens_total")
        assert 0 < accepted <= rose("surefoot_verified_tokens_total") <= rose("surefoot_drafted_tokens_total")
        positions = [value for name, value in after.items() if name.startswith("surefoot_accepted_by_position_total{")]
        assert sum(positions) == after["surefoot_accepted_tokens_total"]
        widths = {name: value for name, value in after.items() if name.startswith("surefoot_widths_total{")}
        assert sum(widths.values()) == after["surefoot_answer_steps_total"]
        assert after["surefoot_running_answers"] == after["surefoot_waiting_answers"] == 0
        for name in set(before) & set(after):
            if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[name] >= before[name], name


def test_labels_do_not_grow_with_the_traffic(live: Live) -> None:
    ask(live, 3, 3)
    httpx.get(f"{live.url}/nowhere")
    few = set(scrape(live.url))
    for index in range(200):
        ask(live, 1, 3, user=f"user-{index}")
        httpx.get(f"{live.url}/nowhere/{index}")
    many = set(scrape(live.url))
    assert len(many - few) <= 8, many - few


def test_what_speculation_saves_is_counted_by_the_cost_table() -> None:
    """A table in which a step costs the same whatever its rows: the speedup is the tokens emitted per step."""
    from surefoot.speculation.cost import CostTable

    table = CostTable((1, 64), ((10.0, 10.0),), (1, 8), (0.0, 0.0))
    with serve(engine(tiny(), width=3, cost_table=table)) as live:
        ask(live, 3, 40)
        found = scrape(live.url)
        blocks = live.llm.stats()["blocks"]
        now = live.llm.engine.policy.costs.table  # which has followed this machine meanwhile
        assert now is not None
        expected = blocks["emitted"] * (now.verify_ms_at(1) + now.overhead_ms_at(1)) / 1e3
        assert found["surefoot_target_only_seconds_total"] == pytest.approx(expected, rel=0.02)
        assert found["surefoot_speculative_seconds_total"] > 0


def test_every_metric_of_the_dashboard_and_the_alerts_exists(live: Live) -> None:
    ask(live, 1, 30)
    known = {name.partition("{")[0] for name in scrape(live.url)}
    known |= set(
        re.findall(r"^# HELP (\S+)", httpx.get(f"{live.url}/metrics").text, re.M)
    )  # also those without a sample yet
    text = (DEPLOY / "grafana.json").read_text()
    dashboard = json.loads(text)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 15
    used = {name for query in queries for name in re.findall(r"surefoot_[a-z_]+", query)}
    used |= set(re.findall(r"surefoot_[a-z_]+", (DEPLOY / "alerts.yml").read_text()))
    assert len(used) >= 20
    assert used - known == set()


def test_answers_that_were_cut_off_are_counted() -> None:
    with serve(engine(tiny())) as live:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        for _ in range(3):
            with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        end = time.monotonic() + 20
        name = "surefoot_answers_total{endpoint=completions,finish_reason=abort}"
        while scrape(live.url).get(name, 0) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        found = scrape(live.url)
        assert found[name] == 3
        assert found["surefoot_request_seconds_count{endpoint=completions}"] == 3
        assert found["surefoot_prompt_tokens_total"] == 3


def test_scrapes_at_once_count_nothing_twice() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from surefoot.speculation.cost import CostTable

    table = CostTable((1, 64), ((10.0, 10.0),), (1, 8), (0.0, 0.0))
    with serve(engine(tiny(), width=3, cost_table=table)) as live:
        with ThreadPoolExecutor(8) as threads:
            work = [threads.submit(ask, live, 2, 40) for _ in range(3)]
            scrapes = [threads.submit(scrape, live.url) for _ in range(30)]
            for future in (*work, *scrapes):
                future.result()
        found = scrape(live.url)
        measured = found["surefoot_step_measured_seconds_total"]
        assert found["surefoot_speculative_seconds_total"] == pytest.approx(measured, rel=0.35)
