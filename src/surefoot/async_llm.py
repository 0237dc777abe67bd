"""The same interface for asyncio: `async for event in llm.stream(prompt)`, `await llm.generate(prompts)`.

Requests run in the same engine as those of the `LLM` it stands on. Events reach an event loop by one
`call_soon_threadsafe` per step, whatever the number of its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

from surefoot.engine.loop import News, RequestHandle, raise_failure
from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request
from surefoot.engine.results import RequestOutput
from surefoot.llm import LLM
from surefoot.prompts import Message, Prompt
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target


class _Postman:
    """The mailbox of all requests of one event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = ref(event_loop)  # weak: this is the value of a dictionary whose key the event loop is
        self.receivers: dict[str, Callable[[OutputEvent], None]] = {}  # by request id; only on the event loop's thread

    def put(self, news: News, /) -> None:
        if (event_loop := self._event_loop()) is None:
            raise RuntimeError("the event loop has gone")
        event_loop.call_soon_threadsafe(self._hand_out, news)  # raises once the event loop is closed

    def _hand_out(self, news: News) -> None:
        for request, event in news:
            receiver = self.receivers.get(request.request_id)
            if event.finish_reason is not None:
                self.receivers.pop(request.request_id, None)
            if receiver is not None:
                receiver(event)


class AsyncStream:
    """Iterate for events, in order and each once; `result` is the whole output once the iteration has ended.

    The request is cancelled when the task that waits for an event is cancelled, on `aclose`, and when the stream is dropped.

    Args:
        groups: the `n` requests of each prompt.
    """

    def __init__(self, llm: LLM, groups: Sequence[list[Request]]) -> None:
        requests = [request for group in groups for request in group]
        self._llm, self._groups = llm, groups  # an LLM that nobody holds is closed
        self._handle = RequestHandle(llm.loop, requests)
        self._events: asyncio.Queue[OutputEvent] = asyncio.Queue()
        self._open = len(requests)

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        """Wait for the next event.

        Raises:
            EngineError: every answer has ended because steps failed.
        """
        if not self._open:
            raise_failure(self._handle.requests)
            raise StopAsyncIteration
        return await self.take()

    async def take(self) -> OutputEvent:
        """Wait for the next event, whatever it says; only while the stream has not `ended`."""
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._handle.cancel()
            raise
        self._open -= event.finish_reason is not None
        return event

    def cancel(self) -> None:
        """Cancel what has not ended: its slots and blocks are free before the next step, and its last events follow."""
        self._handle.cancel()

    async def aclose(self) -> None:
        """`cancel`, as the end of an asynchronous iterator."""
        self.cancel()

    @property
    def result(self) -> RequestOutput:
        """The answers to the first prompt as far as they have come."""
        return RequestOutput.of(self._groups[0])

    @property
    def results(self) -> list[RequestOutput]:
        """The answers to every prompt as far as they have come."""
        return [RequestOutput.of(group) for group in self._groups]

    @property
    def ended(self) -> bool:
        """Whether the last event has been taken."""
        return not self._open


class AsyncLLM:
    """`LLM` for asyncio, usable from several event loops and beside threads that use the same `LLM`.

    Args:
        model: what `LLM` takes, or an `LLM` that exists already (`close` closes it, too).
        options: those of `LLM`.

    Raises:
        SurefootError: a model, drafter, table or option that does not fit; the message says what to do.
    """

    def __init__(self, model: str | Path | Target | LLM = "qwen2.5-coder-0.5b", **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._postmen: WeakKeyDictionary[asyncio.AbstractEventLoop, _Postman] = WeakKeyDictionary()
        self._lock = Lock()

    @classmethod
    async def load(cls, model: str | Path | Target = "qwen2.5-coder-0.5b", **options: Any) -> AsyncLLM:
        """The constructor without blocking the event loop while the model loads."""
        return await asyncio.to_thread(lambda: cls(model, **options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncStream:
        """Complete one prompt step by step; call it where an event loop runs."""
        return self.submit(self.llm.requests_for([prompt], params))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncStream:
        """Answer a conversation step by step."""
        return self.stream(self.llm.chat_tokens(messages, chat_template_kwargs), params)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, as `LLM.generate` does; cancelling the task cancels its requests."""
        stream = self.submit(self.llm.requests_for(prompts, params))
        try:
            while not stream.ended:
                await stream.take()
        finally:
            await stream.aclose()
        raise_failure(stream._handle.requests)
        return stream.results

    def submit(self, groups: Sequence[list[Request]]) -> AsyncStream:
        """Queue made requests (`LLM.requests_for`, `EngineLoop.requests_of`), all of them before the same step.

        Their events come through one stream; `OutputEvent.request_id` and `index` tell them apart.

        Raises:
            RequestError: a request id is in use.
            EngineError: the engine is closed.
        """
        event_loop = asyncio.get_running_loop()
        with self._lock:
            postman = self._postmen.setdefault(event_loop, _Postman(event_loop))
        self.llm.loop.queue(groups, postman)
        stream = AsyncStream(self.llm, groups)
        for request in stream._handle.requests:  # no event can come before this function has returned
            postman.receivers[request.request_id] = stream._events.put_nowait
        return stream

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation, through the target's chat template."""
        return (await self.generate(self.llm.chat_tokens(messages, chat_template_kwargs), params))[0]

    async def close(self) -> None:
        """`LLM.close`, without blocking the event loop."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
