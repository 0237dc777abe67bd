"""What the endpoints share: the engine, the settings, and who may come in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from surefoot.async_llm import AsyncLLM
from surefoot.sampling import SamplingParams
from surefoot.serving.dialect import Dialect
from surefoot.serving.errors import ApiError
from surefoot.serving.logprobs import TokenTexts
from surefoot.serving.settings import ServeSettings

if TYPE_CHECKING:
    from surefoot.engine.output import OutputEvent
    from surefoot.engine.request import Request

log = logging.getLogger("surefoot.serving")

USUAL_SECONDS = 10.0
"""How long an answer takes before any has ended; afterwards an average of those that have."""


class Watcher:
    """Told about answers as they come; the base class does nothing. Metrics and the live page are watchers."""

    def began(self, endpoint: str, request: Request) -> None:
        """A request was queued."""

    def event(self, endpoint: str, request: Request, event: OutputEvent, seconds: float, first: bool) -> None:
        """Tokens came, `seconds` after those before them (after its arrival, if `first`)."""

    def ended(self, endpoint: str, request: Request) -> None:
        """The request's last event has come."""

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request was answered."""


class ServerState:
    """The state of a server, used on its event loop's thread only.

    Attributes:
        ready: the first real step has succeeded, and requests are taken.
        draining: no new request is taken; those under way may end.
        lost: why the engine can serve no more.
    """

    def __init__(self, llm: AsyncLLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        target = llm.llm.target  # what is asked of the engine must be known after it is lost, too
        self.model = settings.served_model_name or target.name
        """The name under which the model is served."""
        self.model_names = tuple(dict.fromkeys((self.model, target.name)))
        """The served name first; the target's own is understood, too."""
        self.slots = llm.llm.engine.options.max_num_seqs
        self.watchers: list[Watcher] = []
        self.created = int(time.time())
        self.ready = self.draining = False
        self.answers = 0  # under way
        self.streams = 0  # requests under way
        self._answer_seconds = USUAL_SECONDS
        self.token_texts: TokenTexts | None = None  # made when first wanted
        self.dialect = Dialect(llm.llm, settings.tool_parser, settings.reasoning_parser)
        self.dialect.check_variables(settings.chat_template_kwargs)

    @property
    def lost(self) -> str | None:
        failure = self.llm.llm.loop.failure
        return None if failure is None else f"the engine has failed: {type(failure).__name__}: {failure}"

    async def warm_up(self) -> None:
        """Run a first request of a few tokens: everything has been touched before anybody waits for it."""
        target = self.llm.llm.target
        tokens = [min(1, target.vocab_size - 1)] * min(8, self.llm.llm.engine.max_model_len - 2)
        await self.llm.generate(
            {"prompt_token_ids": tokens}, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )
        self.ready = True

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Holds places for the answers of one request while they are under way.

        Raises:
            ApiError: 503 where the server is leaving, 429 where the queue is full.
        """
        if self.lost is not None:
            raise ApiError(503, f"{self.lost}; the server is about to exit", code="engine_lost")
        if self.draining:
            raise ApiError(503, "the server is shutting down: try another one", code="shutting_down", retry_after=10)
        room = self.slots + self.settings.max_queue
        if answers > room:
            raise ApiError(
                400,
                f"the request wants {answers} answers; this server runs and queues at most {room}: ask for fewer",
                param="n",
            )
        if self.answers + answers > room or self.streams >= self.settings.max_streams:
            raise ApiError(
                429,
                f"{self.answers} answers are under way and the queue is full: try again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after=self._wait_s(),
            )
        self.answers += answers
        self.streams += 1
        start = time.monotonic()
        try:
            yield
        finally:
            self.answers -= answers
            self.streams -= 1
            self._answer_seconds += 0.1 * (time.monotonic() - start - self._answer_seconds)

    def _wait_s(self) -> int:
        """Seconds until a place should be free."""
        return max(1, round(self._answer_seconds * max(1, self.answers - self.slots) / self.slots))

    async def watch_engine(self) -> None:
        """Return when the engine is lost."""
        while self.lost is None:
            await asyncio.sleep(0.25)

    def prediction(self, text: str | None) -> dict[str, Any]:
        """A predicted text as an argument of `SamplingParams`."""
        if not text:
            return {}
        return {"prediction": self.llm.llm.prompt_tokens(text)}

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless the request names the model that is served, or none."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"model is {name!r}; this server serves {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method of every watcher; one that fails is logged and never fails a request."""
        for watcher in self.watchers:
            try:
                getattr(watcher, name)(*arguments)
            except Exception:
                log.exception("a watcher has failed")
