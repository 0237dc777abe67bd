"""The live page at `/` and its feed `/live`: what the server does now, and did in the last ten minutes.

The feed is a stream of server-sent events: `history` once, then a `snapshot` every second. Tokens are counted as they pass;
the engine is asked only while somebody watches, once a second for all who do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

from surefoot.engine.engine import Engine
from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request as EngineRequest
from surefoot.errors import EngineError
from surefoot.serving import sse
from surefoot.serving.errors import ApiError
from surefoot.serving.start_report import break_even
from surefoot.serving.state import ServerState, Watcher
from surefoot.speculation.cost import CostTable

log = logging.getLogger("surefoot.serving")

router = APIRouter(include_in_schema=False)

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked again, and answered 304 until a new version is installed
}
EVERY_S = 1.0
KEPT = 600
"""Samples of the history: ten minutes."""
WINDOW = 10
"""Snapshots that the operating point is an average of."""
RECENT = 24
"""Requests that are listed after they have ended."""
MOST_WATCHERS = 64
MOST_POINTS = 96
"""Points of the cost curve that are sent, about; the first `FINE` row counts are all among them."""
FINE = 32


class Sample(NamedTuple):
    """One second of the history."""

    time: float  # s since the epoch, at its end
    tokens_per_s: float
    tokens_per_step: float  # of the requests; 0 where no step ran
    answers: int  # under way

    def to_json(self) -> list[float]:
        return [round(self.time, 2), round(self.tokens_per_s, 2), round(self.tokens_per_step, 3), self.answers]


class StepSums(NamedTuple):
    """Sums over all steps so far; the difference of two is what happened between them."""

    steps: int = 0
    rows: int = 0  # anchors and verified drafts
    timed_steps: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0


class Live(Watcher):
    """Counts what passes, and tells whoever watches."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._slots = state, state.slots  # a lost engine cannot be asked any more
        self.history: deque[Sample] = deque(maxlen=KEPT)
        self.watchers = 0
        self.tokens = self.steps = self.requests = 0  # in total
        self._since = time.monotonic()
        self._before = (0, 0)  # tokens and steps at the last sample
        self._running: dict[str, tuple[str, EngineRequest]] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._sums: deque[StepSums] = deque(maxlen=WINDOW + 1)
        self._version = 0  # of `_event`
        self._event = b""
        self._news = asyncio.Event()

    # -- as a watcher ------------------------------------------------------------------------------------------------------

    def began(self, endpoint: str, request: EngineRequest) -> None:
        self.requests += 1
        self._running[request.request_id] = (endpoint, request)

    def event(self, endpoint: str, request: EngineRequest, event: OutputEvent, seconds: float, first: bool) -> None:
        self.tokens += len(event.token_ids)
        self.steps += 1

    def ended(self, endpoint: str, request: EngineRequest) -> None:
        if self._running.pop(request.request_id, None) is not None:
            told = describe_request(endpoint, request)
            told["finish"] = told["finish"] or "abort"  # its client has gone; the engine is yet to hear of it
            self._recent.appendleft(told)

    # -- once a second -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.sample()
                if self.watchers:
                    self._publish(await self.snapshot())
            except Exception:
                log.exception("the live page's feed has failed for a second")

    def sample(self) -> Sample:
        """Add what passed since the last sample to the history."""
        now = time.monotonic()
        tokens, steps = self.tokens - self._before[0], self.steps - self._before[1]
        rate = tokens / max(now - self._since, 1e-3)
        self._since, self._before = now, (self.tokens, self.steps)
        sample = Sample(time.time(), rate, tokens / steps if steps else 0.0, self._state.answers)
        self.history.append(sample)
        return sample

    def _publish(self, snapshot: dict[str, Any]) -> None:
        self._event = sse.named("snapshot", snapshot)
        self._version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def snapshot(self) -> dict[str, Any]:
        """Everything the page shows, as JSON data; the engine is asked between two steps."""
        state = self._state
        engine = None
        if state.lost is None:
            try:
                engine = await asyncio.to_thread(state.llm.llm.loop.call, engine_facts)
            except EngineError:  # closed or lost since
                engine = None
        if engine is not None:
            self._sums.append(StepSums(*engine.pop("sums")))
            engine["cost"] = self._operating(engine["cost"])
        sample = self.history[-1] if self.history else Sample(time.time(), 0.0, 0.0, state.answers)
        return {
            "state": self.phase,
            "message": state.lost,
            "sample": sample.to_json(),
            "server": {"model": state.model, "started": state.created, "slots": self._slots}
            | {"max_queue": state.settings.max_queue, "answers": state.answers},
            "totals": {"tokens": self.tokens, "requests": self.requests, "steps": self.steps},
            "engine": engine,
            "requests": [
                *(describe_request(endpoint, request) for endpoint, request in reversed(self._running.values())),
                *self._recent,
            ][:RECENT],
        }

    @property
    def phase(self) -> str:
        """What the server is doing, in one word."""
        state = self._state
        if state.lost is not None:
            return "lost"
        if state.draining:
            return "draining"
        return "ready" if state.ready else "starting"

    def _operating(self, cost: dict[str, Any] | None) -> dict[str, Any] | None:
        """Where on the curve the last seconds ran; nowhere without steps."""
        first, last = self._sums[0], self._sums[-1]
        steps, timed = last.steps - first.steps, last.timed_steps - first.timed_steps
        if cost is None or not steps:
            return cost
        point: dict[str, Any] = {"rows": round((last.rows - first.rows) / steps, 2)}
        if timed:
            point["predicted_ms"] = round((last.predicted_ms - first.predicted_ms) / timed, 3)
            point["measured_ms"] = round((last.measured_ms - first.measured_ms) / timed, 3)
        return {**cost, "point": point}

    # -- the stream --------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Somebody watches from now on, until `leave`."""
        if not self.watchers:
            self._sums.clear()  # nobody has asked for a while
        self.watchers += 1

    def leave(self) -> None:
        self.watchers -= 1

    async def stream(self) -> AsyncIterator[bytes]:
        """History, then snapshots until the server leaves; a slow reader misses some."""
        yield sse.named("history", {"every_s": EVERY_S, "samples": [sample.to_json() for sample in self.history]})
        yield sse.named("snapshot", await self.snapshot())
        seen = self._version
        while True:
            if seen != self._version:
                seen = self._version
                yield self._event
            if self._state.lost is not None or (self._state.draining and not self._state.answers):
                yield sse.named("snapshot", await self.snapshot())
                return  # an open page must not keep the server from leaving
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), 0.2)


def engine_facts(engine: Engine) -> dict[str, Any]:
    """What the page shows of an engine. Called on the engine's thread, between two steps."""
    statistics = engine.statistics
    blocks, table = statistics.blocks, engine.policy.costs.table
    labelled = statistics.labelled
    running = engine.scheduler.running
    context = sum(request.num_cached for request in running) / len(running) if running else 0.0
    sources = sorted(blocks.verified_by_source) or []
    if not sources and engine.drafter is not None and blocks.verified:
        by_source = {engine.drafter.name: [blocks.verified, blocks.accepted]}
    else:
        by_source = {name: [blocks.verified_by_source[name], blocks.accepted_by_source[name]] for name in sources}
    return {
        "running": len(running),
        "waiting": len(engine.scheduler.waiting),
        "cache_used": [pool.num_used for pool in engine.blocks.pools],
        "cache_total": [pool.num_blocks - 1 for pool in engine.blocks.pools],
        "target": engine.target.name,
        "drafter": engine.drafter.name if engine.drafter else "none",
        "gamma": engine.gamma,
        "max_model_len": engine.max_model_len,
        "planner": engine.policy.planner_name,
        "steps": statistics.steps,
        "widths": {str(width): steps for width, steps in sorted(blocks.widths.items())},
        "verified": blocks.verified,
        "accepted": blocks.accepted,
        "acceptance": [round(share, 4) for share in blocks.acceptance_by_position],
        "predicted": shares(statistics.confidence_sum, labelled),
        "observed": shares(statistics.survived_sum, labelled),
        "labelled": list(labelled),
        "reasons": dict(statistics.reasons.most_common()),
        "sources": by_source,
        "breakers": dict(statistics.breaker_states),
        "trim_regret": round(blocks.trim_regret_rate, 4),
        "cost": None if table is None else cost_facts(table, engine, context),
        "sums": (
            statistics.steps,
            blocks.steps + blocks.verified,
            *(statistics.timed_steps, statistics.predicted_ms, statistics.measured_ms),
        ),
    }


def cost_facts(table: CostTable, engine: Engine, context: float) -> dict[str, Any]:
    """V over the rows that this engine can reach, in at most `MOST_POINTS` points, and where speculation breaks even."""
    most = max(2, min(engine.options.max_num_seqs * (engine.gamma + 1), engine.options.max_num_batched_tokens))
    curve = table.verify_costs(1, most, context)
    stride = -(-most // (MOST_POINTS - FINE))
    rows = sorted({*range(1, min(FINE, most) + 1), *range(FINE, most + 1, stride), most})
    facts: dict[str, Any] = {
        "rows": rows,
        "ms": [round(float(curve[row - 1]), 4) for row in rows],
        "context": round(context),
        "steadiness": table.steadiness,
        "point": None,
        "break_even": None,
    }
    if engine.gamma:
        width, acceptance = break_even(table, engine.gamma)
        facts["break_even"] = {"width": width, "acceptance": round(acceptance, 4)}
    return facts


def shares(sums: list[float], counts: list[int]) -> list[float | None]:
    """Means; None where nothing was counted."""
    return [round(total / count, 4) if count else None for total, count in zip(sums, counts, strict=True)]


def describe_request(endpoint: str, request: EngineRequest) -> dict[str, Any]:
    """A line of the list of requests: sizes and times, never a text."""
    statistics = request.statistics
    first, end = request.first_token_at, request.finished_at or time.monotonic()
    rest = request.num_output - request.first_block
    return {
        "id": request.request_id.removeprefix("req-")[:8],
        "endpoint": endpoint,
        "prompt": len(request.prompt_token_ids),
        "cached": request.cached_tokens,
        "tokens": request.num_output,
        "tokens_per_step": round(statistics.tokens_per_step, 2) if statistics.steps else None,
        "tokens_per_s": round(rest / (end - first), 1) if first is not None and rest > 0 and end > first else None,
        "ttft_ms": None if first is None else round(1e3 * (first - request.arrived_at), 1),
        "speculative": request.gamma > 0,
        "finish": request.output.finish_reason,
    }


# -- over HTTP -----------------------------------------------------------------------------------------------------------------


class PageFiles(StaticFiles):
    """The page's files, with its headers."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


FILES = PageFiles(directory=PAGE)


def install(app: FastAPI, state: ServerState) -> Live:
    """Serve the page and its feed; whoever runs the application lets `Live.run` run beside it."""
    live = Live(state)
    state.watchers.append(live)
    app.state.live = live
    app.include_router(router)
    app.mount("/page", FILES)
    return live


@router.get("/")
async def page(http: Request) -> Response:
    """The live page; the same for everybody, so it asks for no key."""
    return await FILES.get_response("index.html", http.scope)


@router.get("/live")
async def feed(http: Request) -> Response:
    """What the page shows, as server-sent events."""
    live: Live = http.app.state.live
    if live.watchers >= MOST_WATCHERS:
        raise ApiError(
            429,
            f"{live.watchers} pages watch this server already: close one",
            type="rate_limit_error",
            code="too_many_watchers",
            retry_after=10,
        )
    live.enter()
    return sse.EventStream(live.stream(), live.leave)
