"""The Python interface: one object that holds a target, a drafter and the engine that joins them."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize

from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.loop import EngineLoop, News, RequestHandle, raise_failure
from surefoot.engine.options import EngineArguments, EngineOptions, takes_engine_options
from surefoot.engine.output import OutputEvent
from surefoot.engine.request import Request
from surefoot.engine.results import Completion, RequestOutput, Timing
from surefoot.engine.trace import TraceWriter
from surefoot.errors import ConfigurationError, RequestError
from surefoot.profiling.profile import Profile, profile_and_save
from surefoot.prompts import Message, Prompt, as_prompt, as_prompts, conversation_tokens
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LLM", "Completion", "RequestOutput", "Stream", "Timing"]

log = logging.getLogger(__name__)

PROGRESS_S = 0.1
"""Seconds between two looks of a progress bar at its batch."""


class Stream:
    """Iterate for events, in order and each once; `result` is the whole output once the iteration has ended.

    Leaving the iteration, or dropping the stream, cancels the request.
    """

    def __init__(self, handle: RequestHandle, llm: LLM) -> None:
        self._handle = handle
        self._events = _events(handle, llm)

    def __iter__(self) -> Iterator[OutputEvent]:
        return self._events

    def close(self) -> None:
        """Cancel what has not ended."""
        self._handle.cancel()

    @property
    def result(self) -> RequestOutput:
        """The answers as far as they have come."""
        return RequestOutput.of(self._handle.requests)


def _events(handle: RequestHandle, llm: LLM) -> Generator[OutputEvent, None, None]:
    """The events of a handle. `llm` is only kept: an LLM that nobody holds is closed."""
    try:
        yield from handle
    finally:
        handle.cancel()


class _Batch:
    """The mailbox of one `generate`: it only counts, so its client sleeps until the last answer has ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.ended = Event()
        self.unfinished = len(requests)
        self.tokens = self.progress = 0  # emitted; and the same with what an early end has saved
        self.expected = sum(request.params.max_tokens or 0 for request in requests)
        if not requests:
            self.ended.set()

    def put(self, news: News, /) -> None:
        for request, event in news:
            self.tokens += len(event.token_ids)
            self.progress += len(event.token_ids)
            if event.finish_reason is not None:
                self.unfinished -= 1
                self.progress += (request.params.max_tokens or 0) - request.num_output
        if not self.unfinished:
            self.ended.set()


class _Progress:
    """A bar over the tokens of a batch on standard error, where there is a terminal."""

    def __init__(self, batch: _Batch) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._batch, self._answers = batch, batch.unfinished
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("generating", total=batch.expected, note="")

    def __enter__(self) -> _Progress:
        self._began = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self) -> None:
        batch = self._batch
        rate = batch.tokens / max(time.monotonic() - self._began, 1e-9)
        note = f"{self._answers - batch.unfinished}/{self._answers} answers, {rate:.1f} tok/s"
        self._bar.update(self._task, completed=batch.progress, note=note)


@takes_engine_options
class LLM:
    """A target served with a drafter.

    Any number of threads may use one LLM: its engine runs on a thread of its own, and every request gets its own events.
    Use it in a `with` statement, or call `close`, to have its memory back. It can neither be pickled nor used after a fork.

    Args:
        model: an alias (`qwen2.5-coder-0.5b`, `gemma3-270m`), a Hugging Face id, a local directory, a GGUF file, or a
            `Target` that is loaded already.

    Raises:
        SurefootError: a model, drafter, table or option that does not fit; the message says what to do.
    """

    def __init__(self, model: str | Path | Target = "qwen2.5-coder-0.5b", **options: Unpack[EngineArguments]) -> None:
        chosen = EngineOptions(**options)
        self._trace: TraceWriter | None = None
        self.loop = EngineLoop(partial(build_engine, model, chosen))
        # Where nobody calls `close`. A finaliser may run anywhere, so this one does not wait; at exit the loop stops itself.
        finalize(self, self.loop.stop, timeout=0.0).atexit = False
        self._tokenizing = Lock()  # tokenizers are not made for several threads
        self.mentions_missing_table = chosen.cost_table == "auto"
        """Whether to log that there is no cost table; once it has been said, False."""
        if chosen.trace is not None:
            self._trace = TraceWriter(chosen.trace, self.describe(), self.engine.policy.costs)
            self.loop.add_observer(self._trace)

    @property
    def engine(self) -> Engine:
        """For reading what never changes; `llm.loop.call(function)` runs `function(engine)` between two steps."""
        return self.loop.engine

    @property
    def target(self) -> Target:
        return self.engine.target

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; all of them run together, as far as slots and cache allow.

        Args:
            prompts: one prompt or several, in any form that `surefoot.prompts.FORMS` names.
            params: one for all prompts, or one each.
            progress: show a progress bar when standard error is a terminal.

        Returns:
            One output per prompt, in order. A request that could not go on is returned as far as it came, with the finish
            reason "error" and the reason.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing has been queued then.
            EngineError: every request has ended because steps failed.
        """
        groups = self.requests_for(prompts, params)
        requests = [request for group in groups for request in group]
        box = _Batch(requests)
        try:
            self.loop.queue(groups, box)
            if progress:
                with _Progress(box) as bar:
                    while not box.ended.wait(PROGRESS_S):
                        bar.update()
            box.ended.wait()
        finally:
            if box.unfinished:
                self.loop.cancel(requests)
        raise_failure(requests)
        return [RequestOutput.of(group) for group in groups]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt step by step; leaving the iteration early cancels the request.

        Events of several answers (`SamplingParams.n`) come interleaved; `OutputEvent.index` tells them apart.

        Raises:
            EngineError: while iterating, if the request has ended because a step failed.
        """
        requests = self._requests(as_prompt(prompt), params or SamplingParams())
        handle = RequestHandle(self.loop, requests)
        self.loop.queue([requests], handle.box)
        return Stream(handle, self)

    def requests_for(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[Request]]:
        """Check prompts and make the `n` requests of each, for `EngineLoop.queue`.

        Raises:
            RequestError: a prompt or parameters that cannot be served.
        """
        batch = as_prompts(prompts)
        settings = _as_params(params, len(batch))
        return [self._requests(prompt, setting) for prompt, setting in zip(batch, settings, strict=True)]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> RequestOutput:
        """Answer a conversation, through the target's chat template."""
        return self.generate([self.chat_tokens(messages, chat_template_kwargs)], params, progress=progress)[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answer a conversation step by step."""
        return self.stream(self.chat_tokens(messages, chat_template_kwargs), params)

    def chat_tokens(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins.

        Args:
            messages: mappings with `role` and `content`.
            chat_template_kwargs: further variables of the chat template, such as `{"enable_thinking": False}`.
        """
        with self._tokenizing:
            return conversation_tokens(self.tokenizer, self.target.name, messages, chat_template_kwargs)

    @property
    def is_tokenizing(self) -> bool:
        """Whether somebody tokenizes right now, and whoever comes waits."""
        return self._tokenizing.locked()

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `generate` reads it.

        Raises:
            RequestError: a form that is not understood, or a text that no tokenizer can read.
            ConfigurationError: a text, and the target has no tokenizer.
        """
        read = as_prompt(prompt)
        if not isinstance(read, str):
            return read
        if self.tokenizer is None:
            raise ConfigurationError(f"{self.target.name} has no tokenizer: give prompts as token ids")
        with self._tokenizing:
            return list(self.tokenizer(read)["input_ids"])

    def stats(self) -> dict[str, Any]:
        """Counters since the start, in plain JSON data."""
        return self.loop.call(lambda engine: engine.stats())

    def describe(self) -> dict[str, Any]:
        """What this object was assembled from, and what the planner works with."""
        return self.loop.call(lambda engine: engine.describe())

    @property
    def lacks_cost_table(self) -> bool:
        """Whether widths would be planned, if only this machine's cost were known: see `profile`."""
        return self.engine.policy.lacks_table

    def profile(
        self,
        seconds: float = 14.0,
        progress: Callable[[float], None] | None = None,
        path: str | Path | None = None,
        announce: Callable[[float], None] | None = None,
    ) -> Profile:
        """`profile_and_save` of the engine: measure what a step costs, plan with that, and save it for later starts."""
        return self.loop.measure(lambda engine, show: profile_and_save(engine, seconds, show, path, announce), progress)

    def close(self) -> None:
        """Cancel what still runs, close the trace, and give the memory back. May be called again."""
        self.loop.stop()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        gc.collect()  # an engine's parts refer to each other

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM lives in one process and cannot be pickled: build one in each process")

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _requests(self, prompt: str | list[int], params: SamplingParams) -> list[Request]:
        """The `n` requests of a prompt, checked and not queued."""
        if self.mentions_missing_table and self.lacks_cost_table:
            self.mentions_missing_table = False
            log.warning(
                "no cost table for this engine: every draft is verified, whatever that costs; measure one with LLM.profile()"
            )
        text = prompt if isinstance(prompt, str) else None
        return self.loop.requests_of(self.prompt_tokens(prompt), params, prompt=text)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each")
    return list(params)
