"""What every request passes first: its id, its key, the size of its body, and its line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.serving.errors import ApiError, is_anthropic
from surefoot.serving.settings import ServeSettings

log = logging.getLogger("surefoot.access")

OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""Paths that never ask for a key: probes, and the page itself, which is the same for everybody."""
OPEN_PREFIX = "/page/"
BODY_S = 60.0
"""Within this many seconds a body must have arrived."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Answered = Callable[[str, int, float], None]


class FrontDoor:
    """One pure ASGI middleware: in order, request id, key, body limit, access log.

    Args:
        answered: told the path, the status and the seconds of every request.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, answered: Answered) -> None:
        self.app, self.settings, self._answered = app, settings, answered
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"
        scope["surefoot.request_id"] = f"{request_id}.{uuid4().hex[:8]}" if given else request_id
        start, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(scope=message)
                own["X-Request-Id"] = request_id
                if self.settings.replica is not None:
                    own["X-Replica"] = self.settings.replica
            await send(message)

        try:
            try:
                self._check(scope, headers)
                reading = await self._read(receive)
            except ApiError as problem:
                body = problem.body(is_anthropic(scope["path"]), request_id)
                refusal = JSONResponse(body, problem.status, headers={**problem.headers, "Connection": "close"})
                await refusal(scope, receive, sending)
            else:
                await self.app(scope, reading, sending)
        finally:
            seconds = time.monotonic() - start
            self._answered(scope["path"], status, seconds)
            self._log(scope, request_id, status, seconds)

    def _check(self, scope: Scope, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.settings.max_body_bytes:
            raise self._too_large()
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or scope["method"] == "OPTIONS"
        if path in ("/metrics", "/live") and not self.settings.metrics_need_key:
            is_open = True
        if not self._keys or is_open or self._knows(headers):
            return
        raise ApiError(
            401,
            "the request brings no valid API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            type="authentication_error",
            code="invalid_api_key",
        )

    def _knows(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return any(matches)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.settings.max_body_bytes} bytes: shorten the request",
            code="body_too_large",
        )

    async def _read(self, receive: Receive) -> Receive:
        """Take the whole body, and return what the application reads it from: the body at once, then what comes later.

        Raises:
            ApiError: a body that grows beyond the limit, or does not arrive.
        """
        parts, size, more = [], 0, True
        deadline = time.monotonic() + BODY_S
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(
                    408, f"the body has not arrived within {BODY_S:.0f} s: send it again", code="slow_body"
                ) from None
            if message["type"] != "http.request":  # the client has gone already
                return _after([message], receive)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.settings.max_body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return _after([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "request_id": request_id,
            "client": (scope.get("client") or ("?",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status or 499,  # the client has gone before there was an answer
            "ms": round(1e3 * seconds, 1),
            **scope.get("surefoot.facts", {}),
        }
        if self.settings.log_format == "json":
            log.info(json.dumps(facts, default=str))
        else:
            log.info(" ".join(f"{name}={_word(value)}" for name, value in facts.items()))


def _after(messages: list[Message], receive: Receive) -> Receive:
    async def reading() -> Message:
        return messages.pop(0) if messages else await receive()

    return reading


def _word(value: object) -> str:
    """A value that keeps its log line one line of words, whatever a client sent."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def log_to_stderr() -> None:
    """Lines of requests as they are; everything else with its level and logger."""
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("surefoot.access")
    access.handlers, access.propagate = [plain], False
    access.setLevel(logging.INFO)
    for name in ("surefoot.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
