"""From checked prompts to events: admission, time-out, and the end of whoever has gone away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from surefoot.engine.output import OutputEvent
from surefoot.engine.results import RequestOutput
from surefoot.sampling import SamplingParams
from surefoot.serving.errors import ApiError, request_id_of
from surefoot.serving.state import ServerState

T = TypeVar("T")

TOKENIZE_APART = 16_384
"""Prompts of more characters than this are tokenized on another thread, and so are grammars compiled."""


@dataclass(frozen=True)
class Job:
    """One prompt of a request."""

    prompt: str | list[int]
    params: SamplingParams


class Generation:
    """The answers to one HTTP request under way: iterate for `(index of the job, event)`.

    Leaving the iteration cancels what has not ended, and so does the time-out: its answers end with what they have. Nothing of
    a request outlives its `close`.
    """

    def __init__(self, state: ServerState, endpoint: str, jobs: Sequence[Job], request_id: str) -> None:
        self._state, self._endpoint, self._jobs = state, endpoint, jobs
        self.request_id = request_id
        self._places = ExitStack()

    async def start(self) -> None:
        """Check the prompts and queue them.

        Raises:
            ApiError, SurefootError: a request that is refused; nothing has been queued then.
        """
        state = self._state
        self._places.enter_context(state.admitted(sum(job.params.n for job in self._jobs)))
        try:
            large = sum(len(job.prompt) for job in self._jobs) > TOKENIZE_APART
            formed = any(job.params.structured is not None for job in self._jobs)
            apart = (
                large or formed or state.llm.llm.is_tokenizing
            )  # what takes long must not hold up everybody's events
            self._groups = await asyncio.to_thread(self._make) if apart else self._make()
            self._stream = state.llm.submit(self._groups)
        except BaseException:
            self._places.close()
            raise
        self._owner = {request.request_id: index for index, group in enumerate(self._groups) for request in group}
        self._requests = {request.request_id: request for group in self._groups for request in group}
        self._last = dict.fromkeys(self._requests, 0.0)
        self._unfinished = set(self._requests)  # of which the watchers have not heard the end
        timeout = state.settings.request_timeout_s
        self.timed_out = False
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, self._expire)
            self._places.callback(timer.cancel)
        for request in self._requests.values():
            state.tell("began", self._endpoint, request)

    def _make(self) -> list[Any]:
        llm, limits = self._state.llm.llm, self._state.settings
        groups = []
        for index, job in enumerate(self._jobs):
            tokens = llm.prompt_tokens(job.prompt)
            if limits.max_prompt_tokens is not None and len(tokens) > limits.max_prompt_tokens:
                raise ApiError(
                    400,
                    f"the prompt has {len(tokens)} tokens; this server takes at most {limits.max_prompt_tokens}: shorten it",
                    param="prompt",
                    code="context_length_exceeded",
                )
            params = job.params
            if limits.max_output_tokens is not None:
                most = min(params.max_tokens or limits.max_output_tokens, limits.max_output_tokens)
                params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
            name = self.request_id if len(self._jobs) == 1 else f"{self.request_id}-{index}"
            text = job.prompt if isinstance(job.prompt, str) else None
            groups.append(llm.loop.requests_of(tokens, params, prompt=text, request_id=name))
        return groups

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputEvent]]:
        state = self._state
        try:
            while not self._stream.ended:
                event = await self._stream.take()
                name = str(event.request_id)
                request, now = self._requests[name], time.monotonic()
                before = self._last[name]
                if event.token_ids:
                    first = not before
                    self._last[name] = now
                    since = request.arrived_at if first else before
                    state.tell("event", self._endpoint, request, event, now - since, first)
                if event.finish_reason is not None:
                    self._unfinished.discard(name)
                    state.tell("ended", self._endpoint, request)
                yield self._owner[name], event
        finally:
            self.close()

    def _expire(self) -> None:
        """The time is up: the request is cancelled, and its last events follow."""
        self.timed_out = True
        self._stream.cancel()

    def close(self) -> None:
        """Cancel what has not ended, and give the places back. Watchers hear the end of those that were cut off, too."""
        self._places.close()
        self._stream.cancel()
        for name in self._unfinished:
            self._state.tell("ended", self._endpoint, self._requests[name])
        self._unfinished.clear()

    @property
    def results(self) -> list[RequestOutput]:
        """The answers as far as they have come, by job."""
        return self._stream.results

    async def collect(self) -> list[RequestOutput]:
        """Wait for the whole answers.

        Raises:
            ApiError: an answer has ended because a step failed.
        """
        async for _ in self:
            pass
        for output in self.results:
            for answer in output.completions:
                if answer.finish_reason == "error":
                    raise ApiError(500, f"the answer could not go on: {answer.error}", code="engine_error")
        return self.results


async def start(
    state: ServerState, http: HttpRequest, endpoint: str, jobs: Sequence[Job], request_id: str | None = None
) -> Generation:
    """Queue the jobs of an HTTP request."""
    generation = Generation(state, endpoint, jobs, request_id or request_id_of(http))
    await generation.start()
    return generation


async def unless_gone(http: HttpRequest, work: Callable[[], Awaitable[T]]) -> T:
    """`work()`, cancelled as soon as the client has gone.

    Raises:
        ClientGone: nobody waits for the answer any more.
    """
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(http: HttpRequest) -> None:
    """Return when the client has gone. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client has closed its connection."""
