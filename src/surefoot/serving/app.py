"""The application: its endpoints, its errors, and what every request passes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from surefoot.async_llm import AsyncLLM
from surefoot.serving import chat, completions, errors, live, messages, metrics, responses, tokens
from surefoot.serving.generation import ClientGone
from surefoot.serving.middleware import FrontDoor
from surefoot.serving.settings import ServeSettings
from surefoot.serving.state import ServerState
from surefoot.version import __version__

ROUTERS = (completions.router, chat.router, responses.router, messages.router, metrics.router, tokens.router)


def create_app(
    llm: AsyncLLM, settings: ServeSettings | None = None, *, on_lost: Callable[[], None] | None = None
) -> FastAPI:
    """The server as an ASGI application; `app.state.server` is its state. The engine stays the caller's.

    Args:
        on_lost: called on the event loop's thread once the engine can serve no more.

    Raises:
        ConfigurationError: settings that do not fit the model.
    """
    state = ServerState(llm, settings or ServeSettings())
    state.watchers.append(metrics.Metrics(state))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await state.warm_up()
        beside = [asyncio.ensure_future(_watch(state, on_lost)), asyncio.ensure_future(page.run())]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()

    app = FastAPI(title="surefoot", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    errors.install(app)

    @app.exception_handler(ClientGone)
    async def _gone(http: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    for router in ROUTERS:
        app.include_router(router, responses=errors.documented(anthropic=router is messages.router))
    errors.without_422(app)
    page = live.install(app, state)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(FrontDoor, settings=state.settings, answered=lambda *facts: state.tell("answered", *facts))
    return app


async def _watch(state: ServerState, on_lost: Callable[[], None] | None) -> None:
    await state.watch_engine()
    if on_lost is not None:
        on_lost()
