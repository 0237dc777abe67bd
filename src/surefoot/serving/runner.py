"""Runs the application until a signal asks it to leave, or the engine is lost."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from surefoot.async_llm import AsyncLLM
from surefoot.errors import ConfigurationError
from surefoot.llm import LLM
from surefoot.serving.app import create_app
from surefoot.serving.settings import ServeSettings
from surefoot.serving.state import ServerState

log = logging.getLogger("surefoot.serving")

BACKLOG = 2048
IDLE_S = 75
"""Seconds after which a connection without a request is closed."""


class _Server(uvicorn.Server):
    """Drains on the first signal and leaves at once on the second; ends with 0, whoever has asked."""

    def __init__(self, config: uvicorn.Config, state: ServerState, ready: Callable[[ServerState], None]) -> None:
        super().__init__(config)
        self._state, self._ready = state, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready(self._state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # tracebacks of what is cut off
            self.force_exit = True
            return
        self.should_exit = self._state.draining = True
        under_way = self._state.answers
        seconds = self._state.settings.drain_s
        sys.stderr.write(
            f"draining: {under_way} answers are under way and have {seconds:.0f} s; again to leave at once\n"
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        await super().shutdown(sockets)


def bind(settings: ServeSettings) -> socket.socket:
    """The listening socket, before seconds go into loading a model.

    Raises:
        ConfigurationError: an address that cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as problem:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {problem.strerror}; "
            "choose another --port (0 takes a free one), or stop what listens there"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the server is reached."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def run(llm: LLM, settings: ServeSettings, listener: socket.socket, ready: Callable[[ServerState], None]) -> int:
    """Serve until a signal; the engine stays the caller's.

    Args:
        ready: told once the first real step has succeeded and connections are taken.

    Returns:
        The exit code: 0 after a signal, 1 where the engine is lost.
    """
    lost = False

    def leave() -> None:
        nonlocal lost
        lost = True
        log.error("%s: leaving", state.lost)
        server.should_exit = True

    app = create_app(AsyncLLM(llm), settings, on_lost=leave)
    state: ServerState = app.state.server
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        server_header=False,
        ws="none",
    )
    server = _Server(config, state, ready)
    server.run([listener])
    return 1 if lost else 0
