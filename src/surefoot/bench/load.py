"""Load on an OpenAI-compatible server: who sends what when, and what the clients see.

A closed loop keeps a number of users busy: each sends its next request when its last answer has ended. An open loop sends
whenever a request arrives, whether or not the server keeps up: at times drawn from a Poisson process, in bursts, or from a
recorded trace. Times begin when a request should have been sent, so a client that is late itself hides nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any

from surefoot.bench.workloads import Conversation
from surefoot.errors import ConfigurationError

MOST_FAILED = 0.5
"""Share of failed requests beyond which a run says nothing."""


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        users: of a closed loop; 0: an open one.
        rate: requests per second of an open loop; 0: as a trace says.
        burst: requests that come at once.
    """

    users: int = 0
    rate: float = 0.0
    burst: int = 1

    @property
    def name(self) -> str:
        if self.users:
            return f"{self.users} user{'s' if self.users > 1 else ''}"
        if not self.rate:
            return "trace"
        return f"{self.rate:g}/s" + (f" in bursts of {self.burst}" if self.burst > 1 else "")

    def arrivals(self, requests: int, seed: int) -> list[float]:
        """Seconds from the start, of an open loop with a rate: exponential gaps between bursts."""
        draw, now, found = random.Random(seed), 0.0, list[float]()
        while len(found) < requests:
            found += [now] * self.burst
            now += draw.expovariate(self.rate / self.burst)
        return found[:requests]


@dataclass(frozen=True)
class Arm:
    """What is asked of the server for one side of the comparison: fields of every request."""

    name: str
    fields: dict[str, Any]

    @classmethod
    def parse(cls, name: str) -> Arm:
        """`served` (as the server is), `none` and `adaptive` (surefoot: without drafts, with them), `gamma:K` (at most K).

        Raises:
            ConfigurationError: anything else.
        """
        kind, _, number = name.partition(":")
        if kind == "gamma" and number.isdecimal() and int(number) > 0:
            return cls(name, {"gamma": int(number)})
        known = {"served": {}, "none": {"speculative": False}, "adaptive": {"speculative": True}}
        if name not in known:
            raise ConfigurationError(f"arm is {name!r}; allowed: served, none, adaptive, gamma:K such as gamma:3")
        return cls(name, dict(known[name]))


@dataclass
class Answer:
    """What a client has seen of one request; times in seconds."""

    due: float  # when it should have been sent
    place: tuple[int, int] = (0, 0)  # of its conversation in the run, and of its turn there
    times: list[float] = field(default_factory=list)  # of the events with text
    ended: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def first_s(self) -> float:
        return self.times[0] - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring events: what a reader waits for the next piece of text."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """One arm under one load, once."""

    answers: list[Answer]
    seconds: float
    counters: dict[str, float] | None  # of the server, over the run

    @property
    def texts(self) -> dict[tuple[int, int], str]:
        """What was answered where, of the requests that succeeded."""
        return {answer.place: answer.text for answer in self.good}

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None and answer.times]


class Server:
    """A server under load.

    Args:
        url: its address, without `/v1`.
        key: sent as a bearer token, never shown.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout_s: float = 600.0) -> None:
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s, limits=limits)
        self.is_surefoot = False

    async def look(self) -> None:
        """Ask which model is served, and whether it is surefoot that serves it.

        Raises:
            ConfigurationError: nobody answers there.
        """
        import httpx

        try:
            models = await self.http.get("/v1/models")
            models.raise_for_status()
        except httpx.HTTPError as problem:
            raise ConfigurationError(
                f"{self.url} does not answer /v1/models: {problem}. Start a server there, or leave --url out"
            ) from problem
        found = models.json()["data"][0]
        self.model = self.model or str(found["id"])
        self.is_surefoot = found.get("owned_by") == "surefoot"

    async def counters(self) -> dict[str, float] | None:
        """Counters of a surefoot server, summed over their labels; None of others."""
        if not self.is_surefoot:
            return None
        from prometheus_client.parser import text_string_to_metric_families

        answer = await self.http.get("/metrics")
        if answer.status_code != 200:
            return None
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    name, label = sample.name.removeprefix("surefoot_").removesuffix("_total"), _key(sample.labels)
                    name += "" if label is None else f":{sample.labels[label]}"
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    async def ask(self, body: dict[str, Any], due: float) -> Answer:
        """Send one streamed request, and read its answer to the end."""
        import httpx

        answer = Answer(due)
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code} {(await response.aread()).decode(errors='replace')[:200]}"
                async for chunk in _events(response):
                    _take(answer, chunk)
        except (httpx.HTTPError, ValueError) as problem:
            answer.error = f"{type(problem).__name__}: {problem}"
        answer.ended = time.perf_counter()
        return answer


def _key(labels: dict[str, str]) -> str | None:
    """The label by which a counter of surefoot is told apart."""
    return next((name for name in ("width", "position", "reason") if name in labels), None)


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = "".join(delta.get(name) or "" for name in ("content", "reasoning_content"))
        if text:
            answer.times.append(time.perf_counter())
            answer.text += text
    if chunk.get("usage"):
        answer.tokens = int(chunk["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Job:
    """A conversation to be sent, and its number in the run."""

    conversation: Conversation
    number: int


async def run(
    server: Server,
    jobs: Sequence[Conversation],
    load: Load,
    arm: Arm,
    *,
    requests: int,
    params: dict[str, Any],
    seed: int,
    progress: Any = None,
) -> Run:
    """Send conversations until about `requests` requests have been answered; those of a trace once each.

    Every turn of a conversation is a request. In an open loop a conversation arrives as a whole, and its later turns follow
    their answers.
    """
    before = await server.counters()
    start, done, answers = time.perf_counter(), 0, list[Answer]()

    async def talk(job: Job, due: float) -> None:
        nonlocal done
        one = job.conversation
        messages = [] if one.system is None else [{"role": "system", "content": one.system}]
        for index, turn in enumerate(one.turns):
            messages.append({"role": "user", "content": turn})
            body = {
                "model": server.model,
                "messages": messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                "seed": seed + job.number,
                **params,
                **one.extra,
                **arm.fields,
            }
            answer = await server.ask(body, due)
            answer.place = (job.number, index)
            answers.append(answer)
            done += 1
            if progress is not None:
                progress(min(1.0, done / max(1, requests)))
            if answer.error is not None:
                return
            messages.append({"role": "assistant", "content": answer.text})
            due = time.perf_counter()

    if load.users:
        await _closed(jobs, load.users, requests, talk)
    else:
        await _open(jobs, load, requests, seed, start, talk)
    seconds = time.perf_counter() - start
    after = await server.counters()
    used = None if before is None or after is None else {name: after[name] - before.get(name, 0.0) for name in after}
    found = Run(answers, seconds, used)
    if len(found.good) < (1 - MOST_FAILED) * len(answers) or not found.good:
        reason = next((answer.error for answer in answers if answer.error), "no text came")
        raise ConfigurationError(
            f"{len(answers) - len(found.good)} of {len(answers)} requests failed under the load {load.name}: {reason}"
        )
    return found


async def _closed(jobs: Sequence[Conversation], users: int, requests: int, talk: Any) -> None:
    """Each user takes the next conversation until enough requests have been planned."""
    queue, planned, numbers = cycle(jobs), 0, count()

    async def user() -> None:
        nonlocal planned
        while planned < requests:
            one = next(queue)
            planned += len(one.turns)
            await talk(Job(one, next(numbers)), time.perf_counter())

    await asyncio.gather(*(user() for _ in range(users)))


async def _open(jobs: Sequence[Conversation], load: Load, requests: int, seed: int, start: float, talk: Any) -> None:
    if load.rate:
        chosen = list(islice(cycle(jobs), requests))
        times = load.arrivals(len(chosen), seed)
    else:
        chosen, times = list(jobs), [one.arrival_s or 0.0 for one in jobs]
    tasks = []
    for number, (one, due) in enumerate(zip(chosen, times, strict=True)):
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.create_task(talk(Job(one, number), start + due)))
    await asyncio.gather(*tasks)
