"""Server-sent events: a response that ends its work when the client goes, and keeps quiet connections open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S = 15.0
"""Silence after which a comment is sent, so that no proxy takes the connection for dead."""

DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """One event without a name."""
    return b"data: " + dumped(value) + b"\n\n"


def named(name: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + dumped(value) + b"\n\n"


def dumped(value: Any) -> bytes:
    """Strict JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class EventStream(Response):
    """Sends what an asynchronous generator of bytes yields, and ends the work as soon as the client has gone.

    Args:
        close: ends the work that the generator reports, whether the generator has begun or not.
    """

    media_type = "text/event-stream"

    def __init__(
        self, body: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._body, self._close = body, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        turn = asyncio.Lock()  # an event and a keep-alive must not be sent at once
        quiet = asyncio.ensure_future(self._keep_alive(send, turn))
        try:
            async with aclosing(self._body) as body:  # type: ignore[type-var]
                async for chunk in body:
                    self._spoke = asyncio.get_running_loop().time()
                    async with turn:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            quiet.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send, turn: asyncio.Lock) -> None:
        loop = asyncio.get_running_loop()
        self._spoke = loop.time()
        while True:
            await asyncio.sleep(max(0.05, self._spoke + KEEP_ALIVE_S - loop.time()))
            if loop.time() - self._spoke >= KEEP_ALIVE_S:
                self._spoke = loop.time()
                async with turn:
                    await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
