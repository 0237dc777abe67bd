"""The Python interface: one object that holds a target, a drafter and the engine that joins them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot.drafters.base import Drafter
from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine, EngineConfig
from surefoot.engine.graphs import GraphMode
from surefoot.engine.output import OutputEvent, TokenLogprobs
from surefoot.engine.policy import PlannerName
from surefoot.engine.request import Request
from surefoot.engine.trace import TraceWriter
from surefoot.errors import ConfigurationError, RequestError
from surefoot.profiling.profile import Profile, profile_and_save
from surefoot.prompts import Message, Prompt, as_prompt, as_prompts, conversation_tokens
from surefoot.sampling import SamplingParams
from surefoot.speculation.statistics import RequestStatistics
from surefoot.targets.target import Target


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


class LLM:
    """A target served with a drafter.

    Args:
        model: an alias (`qwen2.5-coder-0.5b`, `gemma3-270m`), a Hugging Face id, a local directory, a GGUF file, or a
            `Target` that is loaded already.
        drafter: `auto` (the one shipped for this target and prompt lookup in one; prompt lookup alone where none is), `none`,
            `prompt-lookup`, a checkpoint, `prompt-lookup+CHECKPOINT` (both in one), or a `Drafter`.
        gamma: drafts per block; None takes what the drafter was trained for.
        width: how many drafts are verified: None lets the planner decide, a number fixes it, a pattern such as `"0,3,1"`
            rotates through widths step by step.
        device: `cpu`, `cuda`, ...; None takes CUDA where there is one.
        dtype: of the target; None takes the checkpoint's own.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one step.
        max_model_len: longest prompt + answer; None takes what the target can, at most 8192.
        block_size: positions per cache block.
        quantize: `int8` stores the target's weights in 8 bits; the output is then exact for that quantised target.
        cost_table: `auto` finds the table `surefoot profile` saved for this engine, `none` goes without, a path loads it.
        calibration: a file written by `surefoot calibrate`; None takes the one beside the drafter, if any.
        threads: CPU threads; None takes the physical cores.
        seed: seeds the requests that bring none.
        trace: write every step as a line of JSON to this file; `surefoot simulate` replays it.
        planner: `stopping`, `causal` or `stale` (docs/planning.md); None takes the first on a CPU, the last on CUDA.
        min_width, max_width: bounds of every request's width; None is gamma.
        min_gain: least relative gain in tokens per ms for which the stale planner trims.
        breaker: acceptance below which a request rests from speculation (design: 0.6); None leaves the breaker out.
        prefix_reuse: share cached blocks between requests with the same beginning.
        graphs: `auto`, `eager`, or on a CPU `compiled`.

    Raises:
        SurefootError: a model, drafter, table or option that does not fit; the message says what to do.
    """

    def __init__(
        self,
        model: str | Path | Target = "qwen2.5-coder-0.5b",
        *,
        drafter: str | Path | Drafter | None = "auto",
        gamma: int | None = None,
        width: int | str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        block_size: int = 16,
        quantize: str | None = None,
        cost_table: str | Path = "auto",
        calibration: str | Path | None = None,
        threads: int | None = None,
        seed: int | None = None,
        trace: str | Path | None = None,
        planner: PlannerName | None = None,
        min_width: int = 0,
        max_width: int | None = None,
        min_gain: float = 0.0,
        breaker: float | None = None,
        prefix_reuse: bool = True,
        graphs: GraphMode = "auto",
    ) -> None:
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            prefix_reuse=prefix_reuse,
            graphs=graphs,
            seed=int.from_bytes(torch.randint(256, (7,)).to(torch.uint8).numpy().tobytes(), "little")
            if seed is None
            else seed,
        )
        self.engine: Engine = build_engine(
            model,
            drafter=drafter,
            gamma=gamma,
            width=width,
            device=device,
            dtype=dtype,
            quantize=quantize,
            cost_table=cost_table,
            calibration=calibration,
            threads=threads,
            config=config,
            planner=planner,
            min_width=min_width,
            max_width=max_width,
            min_gain=min_gain,
            breaker=breaker,
        )

        self._trace: TraceWriter | None = None
        if trace is not None:
            self._trace = TraceWriter(trace, self.engine.describe())
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
