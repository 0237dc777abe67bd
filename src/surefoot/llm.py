"""The Python interface: one object that holds a target, a drafter and the engine that joins them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.options import EngineArguments, EngineOptions, takes_engine_options
from surefoot.engine.output import OutputEvent, TokenLogprobs
from surefoot.engine.request import Request
from surefoot.engine.trace import TraceWriter
from surefoot.errors import ConfigurationError, RequestError
from surefoot.profiling.profile import Profile, profile_and_save
from surefoot.prompts import Message, Prompt, as_prompt, as_prompts, conversation_tokens
from surefoot.sampling import SamplingParams
from surefoot.speculation.statistics import RequestStatistics
from surefoot.targets.target import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Timing:
    """Wall-clock times of one request, in seconds."""

    queued_s: float
    prefill_s: float  # from arrival to the first token
    decode_s: float  # from the first to the last token
    tokens_per_s: float  # decode speed: tokens behind the first step, per second


@dataclass(frozen=True)
class RequestOutput:
    """Everything one request produced."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int
    statistics: RequestStatistics
    timing: Timing


class Stream:
    """Iterate for events; `result` is the whole output once the iteration has ended."""

    def __init__(self, events: Iterator[OutputEvent], request: Request) -> None:
        self._events, self._request = events, request

    def __iter__(self) -> Iterator[OutputEvent]:
        return self._events

    @property
    def result(self) -> RequestOutput:
        """The request as far as it has come."""
        return _request_output(self._request)


@dataclass
class _Progress:
    """A progress bar over requests, shown when it is wanted and there is a terminal."""

    total: int
    enabled: bool
    _bar: Any = field(default=None, init=False)

    def __enter__(self) -> _Progress:
        if self.enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                disable=not Console(stderr=True).is_terminal,
            )
            self._bar.start()
            self._task = self._bar.add_task("generating", total=self.total, rate="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, finished: int, tokens_per_s: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, rate=f"{tokens_per_s:.1f} tok/s")


@takes_engine_options
class LLM:
    """A target served with a drafter.

    Args:
        model: an alias (`qwen2.5-coder-0.5b`, `gemma3-270m`), a Hugging Face id, a local directory, a GGUF file, or a
            `Target` that is loaded already.

    Raises:
        SurefootError: a model, drafter, table or option that does not fit; the message says what to do.
    """

    def __init__(self, model: str | Path | Target = "qwen2.5-coder-0.5b", **options: Unpack[EngineArguments]) -> None:
        chosen = EngineOptions(**options)
        self.engine: Engine = build_engine(model, chosen)
        self._trace: TraceWriter | None = None
        if chosen.trace is not None:
            self._trace = TraceWriter(chosen.trace, self.engine.describe())
            self.engine.add_observer(self._trace)

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
            One output per prompt, in order.
        """
        batch = as_prompts(prompts)
        settings = _as_params(params, len(batch))
        requests = []
        try:
            for prompt, setting in zip(batch, settings, strict=True):
                requests.append(self._add(prompt, setting))
            self._drain(requests, progress)
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
        return [_request_output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt step by step; leaving the iteration early cancels the request."""
        request = self._add(as_prompt(prompt), params or SamplingParams())
        return Stream(self._events(request), request)

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
        return conversation_tokens(self.tokenizer, self.target.name, messages, chat_template_kwargs)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: design.md section 7."""
        return self.engine.stats()

    def describe(self) -> dict[str, Any]:
        """What this object was assembled from, and what the planner works with."""
        return self.engine.describe()

    @property
    def lacks_cost_table(self) -> bool:
        """Whether widths would be planned, if only this machine's cost were known: see `profile`."""
        return self.engine.policy.lacks_table

    def profile(
        self,
        seconds: float = 14.0,
        progress: Callable[[float], None] | None = None,
        path: str | Path | None = None,
    ) -> Profile:
        """`profile_and_save` of the engine: measure what a step costs, plan with that, and save it for later starts."""
        return profile_and_save(self.engine, seconds, progress, path)

    def close(self) -> None:
        """Cancel what still runs, and close the trace."""
        for request_id in list(self.engine.requests):
            self.engine.cancel(request_id)
        if self._trace is not None:
            self.engine.remove_observer(self._trace)
            self._trace.close()
            self._trace = None

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _add(self, prompt: str | list[int], params: SamplingParams) -> Request:
        if not isinstance(prompt, str):
            return self.engine.add_request(prompt, params)
        if self.tokenizer is None:
            raise ConfigurationError(f"{self.target.name} has no tokenizer: give prompts as token ids")
        return self.engine.add_request(self.tokenizer(prompt)["input_ids"], params, prompt=prompt)

    def _drain(self, requests: list[Request], progress: bool) -> None:
        start, tokens = time.monotonic(), 0
        unfinished = {request.request_id for request in requests}
        with _Progress(len(requests), progress) as bar:
            while unfinished:
                for request, event in self.engine.step():
                    tokens += len(event.token_ids)
                    if event.finish_reason is not None:
                        unfinished.discard(request.request_id)
                bar.update(len(requests) - len(unfinished), tokens / max(time.monotonic() - start, 1e-9))

    def _events(self, request: Request) -> Iterator[OutputEvent]:
        try:
            while request.finished_at is None:
                for owner, event in self.engine.step():
                    if owner is request:
                        yield event
        finally:
            self.engine.cancel(request.request_id)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each")
    return list(params)


def _request_output(request: Request) -> RequestOutput:
    end = request.finished_at or time.monotonic()
    first = request.first_token_at or end
    decode = end - first
    behind_first = max(0, request.num_output - request.first_block)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        text=request.output.text,
        token_ids=list(request.output.token_ids),
        logprobs=request.output.logprobs,
        finish_reason=request.output.finish_reason,
        stop_reason=request.output.stop_reason,
        cached_tokens=request.cached_tokens,
        statistics=request.statistics,
        timing=Timing(
            queued_s=(request.started_at or end) - request.arrived_at,
            prefill_s=first - (request.started_at or request.arrived_at),
            decode_s=decode,
            tokens_per_s=behind_first / decode if decode > 0 else 0.0,
        ),
    )
