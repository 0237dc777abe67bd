"""`/metrics` for Prometheus: is speculation paying, and how are the users served?

Counters of the engine are read off its statistics at every scrape; what users see (waiting, latency) is observed as it
happens. Labels are bounded: positions, widths, sources, reasons, endpoints, statuses; never an id or a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request as EngineRequest
from surefoot.llm import LLM
from surefoot.serving.responding import state_of
from surefoot.serving.state import ServerState, Watcher
from surefoot.speculation.cost import CostTable
from surefoot.version import __version__

router = APIRouter(tags=["operation"])

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
KNOWN_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/metrics", "/version", "/"),
)
"""Paths that are counted under their own name; all others under `other`."""


class Metrics(Watcher):
    """Observes answers, and collects the engine's counters at every scrape."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, labels: Iterable[str], buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, tuple(labels), registry=self.registry, buckets=tuple(buckets))

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, tuple(labels), registry=self.registry)

        by = ("endpoint",)
        self._first = histogram(
            "surefoot_time_to_first_token_seconds", "From the arrival of a request to its first token.", by, SECONDS
        )
        self._between = histogram(
            "surefoot_inter_token_latency_seconds",
            "Between two tokens of an answer: the time between two steps, divided by the tokens of the later one.",
            by,
            (0.001, 0.002, *SECONDS),
        )
        self._queued = histogram("surefoot_queue_seconds", "From the arrival of a request to its slot.", by, SECONDS)
        self._whole = histogram("surefoot_request_seconds", "From the arrival of a request to its end.", by, SECONDS)
        self._prompt = histogram("surefoot_prompt_length_tokens", "Tokens of a prompt.", by, TOKENS)
        self._output = histogram("surefoot_output_length_tokens", "Tokens of an answer.", by, TOKENS)
        self._ended = counter("surefoot_answers_total", "Answers that have ended.", ("endpoint", "finish_reason"))
        self._prompt_tokens = counter("surefoot_prompt_tokens_total", "Tokens of prompts that were admitted.")
        self._cached = counter("surefoot_prompt_tokens_cached_total", "Of these, found in the prefix cache.")
        self._preempted = counter("surefoot_preemptions_total", "Times that an answer gave up its slot for a while.")
        self._http = counter("surefoot_http_requests_total", "HTTP requests answered.", ("path", "status"))
        self._http_seconds = histogram(
            "surefoot_http_request_seconds",
            "From an HTTP request's arrival to the end of its answer.",
            ("path",),
            SECONDS,
        )
        self.registry.register(EngineCollector(state))

    # -- what users see ----------------------------------------------------------------------------------------------------

    def event(self, endpoint: str, request: EngineRequest, event: OutputEvent, seconds: float, first: bool) -> None:
        if first:
            self._first.labels(endpoint).observe(seconds)
        else:
            share = seconds / len(event.token_ids)
            for _ in event.token_ids:
                self._between.labels(endpoint).observe(share)

    def ended(self, endpoint: str, request: EngineRequest) -> None:
        end = request.finished_at or time.monotonic()  # one that was cut off ends now
        if request.started_at is not None:
            self._queued.labels(endpoint).observe(request.started_at - request.arrived_at)
            self._cached.inc(request.cached_tokens)
        self._whole.labels(endpoint).observe(end - request.arrived_at)
        self._prompt.labels(endpoint).observe(len(request.prompt_token_ids))
        self._output.labels(endpoint).observe(request.num_output)
        self._prompt_tokens.inc(len(request.prompt_token_ids))
        self._preempted.inc(request.preemptions)
        self._ended.labels(endpoint, request.output.finish_reason or "abort").inc()

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        path = endpoint if endpoint in KNOWN_PATHS else "other"
        self._http.labels(path, str(status or 499)).inc()
        self._http_seconds.labels(path).observe(seconds)


class EngineCollector(Collector):
    """Reads one snapshot of the engine per scrape. Called on a thread that may wait for the step under way."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._target_only, self._turn = TargetOnlyTime(), Lock()

    def describe(self) -> Iterable[Metric]:
        return []  # else the registry would ask the engine when the collector is registered

    def collect(self) -> Iterator[Metric]:
        state = self._state
        llm = state.llm.llm
        yield _gauge("surefoot_up", "1 while the engine can serve.", 0.0 if state.lost else 1.0)
        info = {"version": __version__, "model": state.model}
        if state.lost is not None:
            return
        with self._turn:  # scrapes must not overtake each other: the difference of two snapshots is counted
            stats = llm.stats()
            self._target_only.add(stats, llm.engine.policy.costs.table)
        facts = llm.describe()
        info |= {"drafter": str(facts["drafter"]), "planner": str(facts["planner"])}
        yield _gauge("surefoot_build_info", "1; the labels say what is served.", 1.0, info)
        yield from _speculation(stats, str(facts["drafter"]))
        yield from _time(stats, self._target_only)
        yield from _confidence(stats)
        yield from _capacity(stats, llm, state)


class TargetOnlyTime:
    """How long the tokens so far would have taken without speculation, by the measured cost table.

    Between two scrapes, `steps` steps ran with `requests` answers on average; target-only each of them emits one token per
    answer and takes V(requests) and the host's part.
    """

    def __init__(self) -> None:
        self.seconds = self.measured_s = 0.0
        self._last = (0, 0, 0, 0.0, 0)

    def add(self, stats: Mapping[str, Any], table: CostTable | None) -> TargetOnlyTime:
        blocks = stats["blocks"]
        now = (stats["steps"], blocks["steps"], blocks["emitted"], stats["measured_ms"], stats["timed_steps"])
        steps, answers, emitted, measured_ms, timed = (a - b for a, b in zip(now, self._last, strict=True))
        if table is not None and steps > 0 and timed > 0 and answers > 0:
            requests = max(1, round(answers / steps))
            alone = float(table.verify_ms_at(requests) + table.overhead_ms_at(requests))
            self.seconds += emitted / (answers / steps) * alone / 1e3
            self.measured_s += measured_ms / timed * steps / 1e3
        self._last = now
        return self


def _speculation(stats: Mapping[str, Any], drafter: str) -> Iterator[Metric]:
    """What was drafted, verified, accepted and emitted."""
    blocks = stats["blocks"]
    for name, text in (
        ("drafted", "Tokens that drafters proposed."),
        ("verified", "Of these, verified by the target."),
        ("accepted", "Of these, accepted."),
        ("emitted", "Tokens emitted, whatever their origin. Its rate is the throughput."),
    ):
        yield _counter(f"surefoot_{name}_tokens", text, blocks[name])
    yield _counter("surefoot_decode_steps", "Steps of the engine that emitted tokens.", stats["steps"])
    yield _counter(
        "surefoot_answer_steps", "Steps of the engine, counted once for every answer in them.", blocks["steps"]
    )
    widths = CounterMetricFamily("surefoot_widths", "Steps of answers by drafts verified.", labels=["width"])
    for width, count in blocks["widths"].items():
        widths.add_metric([str(width)], count)
    yield widths
    for name, text in (
        ("verified", "Times that position k of a block was verified."),
        ("accepted", "Times that position k of a block was accepted."),
    ):
        family = CounterMetricFamily(f"surefoot_{name}_by_position", text, labels=["position"])
        for position, count in enumerate(blocks[f"{name}_by_position"], 1):
            family.add_metric([str(position)], count)
        yield family
    for name, text in (
        ("verified", "Drafts verified, by who drafted them."),
        ("accepted", "Drafts accepted, by who drafted them."),
    ):
        family = CounterMetricFamily(f"surefoot_{name}_by_source", text, labels=["source"])
        sources = blocks[f"{name}_by_source"] or {drafter: blocks[name]}  # a drafter with one source keeps no account
        for source, count in sources.items():
            family.add_metric([source], count)
        yield family
    yield _counter("surefoot_trimmed_blocks", "Blocks verified narrower than drafted.", blocks["trimmed"])
    yield _counter(
        "surefoot_regretted_blocks", "Of these, accepted to their end: the trim cost tokens.", blocks["regretted"]
    )
    reasons = CounterMetricFamily("surefoot_planner_steps", "Steps by the planner's reason.", labels=["reason"])
    for reason, count in stats["reasons"].items():
        reasons.add_metric([reason], count)
    yield reasons
    breakers = CounterMetricFamily(
        "surefoot_breaker_steps", "Steps of answers by their breaker's state.", labels=["state"]
    )
    for name, count in stats["breaker_states"].items():
        breakers.add_metric([name], count)
    yield breakers
    yield _counter("surefoot_breaker_trips", "Times that a breaker switched speculation off.", stats["breaker_trips"])
    if (guard := stats["guard"]) is not None:
        yield _gauge("surefoot_guard_on", "0 while the guard has speculation off at the current load.", guard["on"])
        switches = CounterMetricFamily(
            "surefoot_guard_switches", "Times that the guard switched speculation.", labels=["state"]
        )
        probes = CounterMetricFamily("surefoot_guard_probe_steps", "Steps run to compare.", labels=["kind"])
        for name in ("off", "on"):
            switches.add_metric([name], guard[f"switched_{name}"])
        for name in ("window", "trial"):
            probes.add_metric([name], guard[f"{name}_steps"])
        yield from (switches, probes)


def _time(stats: Mapping[str, Any], target_only: TargetOnlyTime) -> Iterator[Metric]:
    """Measured, predicted, and what it would have been without speculation."""
    yield _counter(
        "surefoot_step_measured_seconds", "Time of the steps that were predicted, measured.", stats["measured_ms"] / 1e3
    )
    yield _counter("surefoot_step_predicted_seconds", "The same steps by the cost table.", stats["predicted_ms"] / 1e3)
    yield _counter(
        "surefoot_step_error_seconds", "Sum of the differences of the two.", stats["absolute_error_ms"] / 1e3
    )
    yield _counter("surefoot_cost_rescales", "Times that measured steps changed the cost table.", stats["rescales"])
    yield _counter(
        "surefoot_target_only_seconds",
        "Time that the tokens emitted so far would have taken without speculation, by the cost table; 0 without one.",
        target_only.seconds,
    )
    yield _counter(
        "surefoot_speculative_seconds",
        "Time that they took. Rate of target_only by rate of this: the speedup; above 1 speculation pays.",
        target_only.measured_s,
    )


def _confidence(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What confidences said of blocks, and what came true of it."""
    for name, key, text in (
        (
            "predicted_survivals",
            "confidence_sum",
            "Sum of the survival predicted at position k, where its fate is known.",
        ),
        ("observed_survivals", "survived_sum", "Of these blocks, those that survived position k."),
        ("judged_blocks", "labelled", "Blocks in the two sums."),
    ):
        family = CounterMetricFamily(f"surefoot_{name}", text, labels=["position"])
        for position, value in enumerate(stats[key], 1):
            family.add_metric([str(position)], value)
        yield family


def _capacity(stats: Mapping[str, Any], llm: LLM, state: ServerState) -> Iterator[Metric]:
    """Slots, queue and cache."""
    yield _gauge("surefoot_running_answers", "Answers that have a slot.", stats["running"])
    yield _gauge("surefoot_waiting_answers", "Answers that wait for a slot.", stats["waiting"])
    yield _gauge("surefoot_slots", "Answers that may run at once.", llm.engine.options.max_num_seqs)
    yield _gauge("surefoot_open_requests", "HTTP requests under way.", state.streams)
    yield _gauge("surefoot_draining", "1 after the server was asked to leave.", float(state.draining))
    for name, key in (("used", "blocks_used"), ("total", "blocks_total")):
        text = f"Blocks of the cache, {name}, by group of layers."
        family = GaugeMetricFamily(f"surefoot_cache_{name}_blocks", text, labels=["group"])
        for group, count in enumerate(stats[key]):
            family.add_metric([str(group)], count)
        yield family
    yield _gauge("surefoot_cache_bytes", "Bytes that the cache takes.", llm.engine.cache.num_bytes)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    if labels is None:
        return GaugeMetricFamily(name, text, value=value)
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


@router.get("/metrics", response_class=Response)
async def metrics(http: Request) -> Response:
    """For Prometheus."""
    found = next(watcher for watcher in state_of(http).watchers if isinstance(watcher, Metrics))
    text = await asyncio.to_thread(generate_latest, found.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
