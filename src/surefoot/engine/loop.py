"""The one thread that runs an engine; everybody else is its client.

    client threads ── commands ──▶ the loop's thread: Engine.step ── events ──▶ one mailbox per client

Commands (add, cancel, call, drain, stop) run between two steps, in the order they were given. After a step the loop puts
the events of each mailbox into it at once, so a client wakes at most once per step. Only this thread changes the engine,
and it also builds it: the OpenMP team of a thread that has computed once stays alive, and two teams slow each other down.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

from surefoot.engine.engine import Engine
from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request
from surefoot.engine.trace import ObserverError, StepObserver
from surefoot.errors import EngineError, RequestError
from surefoot.sampling import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
News = list[tuple[Request, OutputEvent]]
MOST_INTERRUPTS = 8
"""Steps in a row that may be interrupted on the loop's thread."""
EXIT_WAIT_S = 10.0
"""How long the interpreter waits at its exit for a loop to finish its step."""


class Mailbox(Protocol):
    """Where a client receives events."""

    def put(self, item: News, /) -> None:
        """Take the events of one step. Called on the loop's thread: must not block."""
        ...


class RequestHandle:
    """The answers to one prompt under way: iterate for their events, in order and each exactly once.

    One thread at a time may iterate. A handle that is dropped cancels what has not ended.
    """

    def __init__(self, loop: EngineLoop, requests: list[Request]) -> None:
        self.requests = requests  # one for each of the `n` answers
        self._loop = loop
        self.box: SimpleQueue[News] = SimpleQueue()
        self._received: deque[tuple[Request, OutputEvent]] = deque()
        self._open = len(requests)

    def __iter__(self) -> Iterator[OutputEvent]:
        return self

    def __next__(self) -> OutputEvent:
        """Wait for the next event.

        Raises:
            EngineError: every answer has ended because steps failed.
        """
        while not self._received:
            if not self._open:
                raise_failure(self.requests)
                raise StopIteration
            self._received.extend(self.box.get())
        _, event = self._received.popleft()
        self._open -= event.finish_reason is not None
        return event

    def cancel(self) -> None:
        """End what has not ended. Its slots and blocks are free before the next step; iteration ends with an "abort" event."""
        if self._open:
            self._loop.cancel(self.requests)

    def __del__(self) -> None:
        self.cancel()  # safe in any thread, also within a garbage collection: it only puts a command


class EngineLoop:
    """Owns an engine and the thread that runs it.

    Any number of threads may use one loop. Use it as a context manager, or call `stop`. It can neither be pickled nor used
    in a forked child.

    Args:
        engine: the engine, or a function that builds it on the loop's thread. A given engine belongs to the loop until
            `stop`, and to the caller again afterwards.

    Raises:
        whatever building raises.
    """

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        build = engine if callable(engine) else lambda: engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._boxes: dict[str, Mailbox] = {}
        self._interrupts = 0  # in a row
        self._drains: list[Future[None]] = []
        self._refusal: str | None = None  # why no new request is taken
        self.failure: BaseException | None = None
        """What ended the loop, if nobody asked it to end: whoever serves with it should leave."""
        self._closed = self._stopping = False
        # Between checking that the loop is open and sending to it; re-entrant, for a finaliser may stop the loop meanwhile.
        self._sending = threading.RLock()
        self._process = os.getpid()
        self._engine: Engine | None = None
        ready: Future[int] = Future()
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(build, threads, ready), name="surefoot-engine", daemon=True
        )
        self._thread.start()
        _LOOPS.add(self)
        try:
            threads = ready.result()
        except BaseException:  # an interrupt: the thread ends as soon as the engine stands
            self._commands.put(self._stop)
            raise
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)  # what the engine was built with counts for whoever asks here, too

    @property
    def engine(self) -> Engine:
        """For reading what never changes; everything else through `call`."""
        if self._engine is None:
            raise EngineError(f"{self._refusal or 'this engine is closed'}: build a new one")
        return self._engine

    @property
    def is_current_thread(self) -> bool:
        return self._thread.ident == threading.get_ident()

    # -- for clients -------------------------------------------------------------------------------------------------------

    def requests_of(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> list[Request]:
        """Check a prompt, and make its `params.n` requests; nothing is queued yet. Each draws from uniforms of its own.

        Raises:
            RequestError: see `Engine.make_request`.
        """
        tokens = list(prompt_token_ids)
        made = []
        for index in range(params.n):
            name = request_id if not index or request_id is None else f"{request_id}/{index}"
            wanted = params if not index else replace(params, prompt_logprobs=None)  # answer 0 has them
            request = self.engine.make_request(tokens, wanted, prompt=prompt, request_id=name)
            request.output.index = index
            made.append(request)
        return made

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> RequestHandle:
        """Queue a prompt; its `n` answers come through one handle.

        Raises:
            RequestError: a prompt or parameters that cannot be served, or a request id in use.
        """
        requests = self.requests_of(prompt_token_ids, params, prompt=prompt, request_id=request_id)
        handle = RequestHandle(self, requests)
        self.queue([requests], handle.box)
        return handle

    def queue(self, groups: Sequence[list[Request]], box: Mailbox) -> None:
        """Queue made requests, all of them before the same step; those of one group share a prompt.

        Raises:
            RequestError: a request id is in use.
            EngineError: the loop is draining or closed.
        """
        names = [request.request_id for group in groups for request in group]
        with self._sending:
            used = next((name for name, times in Counter(names).items() if times > 1 or name in self._boxes), None)
            if used is not None:
                raise RequestError(
                    f"request id {used!r} is in use: choose another, or wait until that request has ended"
                )
            self._check(new=True)
            self._boxes.update(dict.fromkeys(names, box))  # first: the loop may step before this thread goes on
            self._commands.put(lambda: self._admit(groups))

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests between this step and the next. Returns at once; those that have ended already are left alone."""
        leaving = list(requests)
        self._commands.put(lambda: self._cancel(leaving))  # without a lock: a finaliser may run anywhere

    def call(self, function: Callable[[Engine], T]) -> T:
        """`function(engine)` on the loop's thread, between two steps; its result, or what it raised."""
        if self.is_current_thread:
            return function(self.engine)
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(self.engine))
                except BaseException as problem:
                    answer.set_exception(problem)

        self._send(run)
        try:
            return answer.result()
        except BaseException:
            answer.cancel()  # if it has not begun
            raise

    def measure(
        self, function: Callable[[Engine, Callable[[float], None]], T], progress: Callable[[float], None] | None = None
    ) -> T:
        """`call` for what takes long: `function(engine, show)` calls `show` with the share that is done.

        Where the caller is interrupted meanwhile, the next `show` raises `EngineError`, which ends `function`.
        """
        left = threading.Event()

        def show(share: float) -> None:
            if left.is_set() or self._closed:
                raise EngineError("the measurement was interrupted")
            if progress is not None:
                progress(share)

        try:
            return self.call(lambda engine: function(engine, show))
        except BaseException:
            left.set()
            raise

    def add_observer(self, observer: StepObserver) -> None:
        self.call(lambda engine: engine.add_observer(observer))

    def remove_observer(self, observer: StepObserver) -> None:
        self.call(lambda engine: engine.remove_observer(observer))

    def drain(self) -> None:
        """Take no new requests from now on, and wait until those under way have ended."""
        done: Future[None] = Future()
        with self._sending:
            self._refusal = self._refusal or "this engine is shutting down"
        self._send(lambda: self._drains.append(done))
        done.result()

    def stop(self, timeout: float | None = None) -> None:
        """Cancel what still runs, end the thread, and let go of the engine. May be called again, and from any thread."""
        with self._sending:
            if not self._closed:
                self._closed, self._refusal = True, self._refusal or "this engine is closed"
                self._commands.put(self._stop)
        if not self.is_current_thread and os.getpid() == self._process:
            self._thread.join(timeout)

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __reduce__(self) -> Any:
        raise TypeError("an engine lives in one process and cannot be pickled: build one in each process")

    def _send(self, command: Callable[[], None]) -> None:
        with self._sending:
            self._check()
            self._commands.put(command)

    def _check(self, *, new: bool = False) -> None:
        """Raise if commands (`new`: new requests) are not taken any more."""
        if os.getpid() != self._process:
            raise EngineError("this engine was built before the process was forked: build one in the child")
        if self._closed or (new and self._refusal):
            raise EngineError(f"{self._refusal or 'this engine is closed'}: build a new one")

    # -- on the loop's thread ----------------------------------------------------------------------------------------------

    def _run(self, build: Callable[[], Engine], threads: int, ready: Future[int]) -> None:
        torch.set_num_threads(threads)
        try:
            engine = build()
        except BaseException as problem:
            self._closed = True
            ready.set_exception(problem)
            return
        del build
        engine.owner = threading.get_ident()
        self._engine = engine
        ready.set_result(torch.get_num_threads())
        try:
            while not self._stopping:
                if engine.has_work:
                    for _ in range(self._commands.qsize()):
                        self._commands.get()()
                    self._step(engine)
                else:
                    self._tell_drained()
                    self._commands.get()()
        except BaseException as problem:
            log.exception("the engine has failed")
            self.failure = problem
            self._end(engine, problem)
        else:
            self._end(engine, None)

    def _step(self, engine: Engine) -> None:
        try:
            events = engine.step()
        except ObserverError as problem:
            log.warning("%s", problem)
        except KeyboardInterrupt:  # raised on this thread by somebody's code: the engine has undone its step
            self._interrupts += 1
            if self._interrupts > MOST_INTERRUPTS:
                raise
            log.warning("a step was interrupted, and is run again")
        else:
            self._interrupts = 0
            self._deliver(events)

    def _admit(self, groups: Sequence[list[Request]]) -> None:
        for group in groups:
            for request in group:
                self.engine.admit(request, after=None if request is group[0] else group[0])

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            if self.engine.requests.get(request.request_id) is request:
                event = self.engine.cancel(request.request_id)
                assert event is not None
                self._deliver([(request, event)])

    def _deliver(self, events: News) -> None:
        """Put the events of a step into their mailboxes, those of one box at once."""
        by_box: dict[int, tuple[Mailbox, News]] = {}
        for request, event in events:
            name = request.request_id
            box = self._boxes.get(name) if event.finish_reason is None else self._boxes.pop(name, None)
            if box is None:  # a request of a `call`, which sees to it itself
                continue
            by_box.setdefault(id(box), (box, []))[1].append((request, event))
        for box, news in by_box.values():
            try:
                box.put(news)
            except Exception as problem:  # nobody can be told any more: an event loop that is closed, for example
                log.debug("a client has gone: %s", problem)
                self._cancel([request for request, event in news if event.finish_reason is None])

    def _tell_drained(self) -> None:
        for done in self._drains:
            done.set_result(None)
        self._drains.clear()

    def _stop(self) -> None:
        self._stopping = True

    def _end(self, engine: Engine, problem: BaseException | None) -> None:
        """Nothing steps any more: everybody who waits is told."""
        with self._sending:
            self._closed, self._refusal = True, self._refusal or "this engine has failed"
        while not self._commands.empty():
            self._commands.get()()
        for request in list(engine.requests.values()):
            if problem is None:
                self._cancel([request])
            else:
                request.failure = problem
                self._deliver([(request, request.output.fail(f"the engine has failed: {problem}"))])
        self._tell_drained()
        engine.owner, self._engine = None, None


_LOOPS: WeakSet[EngineLoop] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread must not compute while the interpreter takes its libraries down."""
    for loop in list(_LOOPS):
        loop.stop(EXIT_WAIT_S)


def raise_failure(requests: Sequence[Request]) -> None:
    """Raise `EngineError` if every one of them has ended because a step failed."""
    failures = [request.failure for request in requests]
    if failures and (first := failures[0]) is not None and None not in failures:
        raise EngineError(f"a step of the engine failed: {type(first).__name__}: {first}") from first
