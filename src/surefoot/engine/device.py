"""Where a step runs, and how its result comes back to the host.

`submit` may return before the step has run; `Pending.result` waits for it. Steps run in the order they were submitted, and
everything on the device (lengths, block tables, cache) is only touched by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from surefoot.engine.logprobs import Logprobs
from surefoot.engine.messages import StepInputs, StepOutputs

Step = Callable[[StepInputs], StepOutputs]


class HostOutputs:
    """A step's outputs as plain lists, with the time the device took."""

    def __init__(self, outputs: StepOutputs, device_ms: float) -> None:
        self.device_ms = device_ms
        self.rows = outputs.rows
        self.replayed = outputs.replayed
        self.laps = None if outputs.laps is None else outputs.laps.read()  # ms by stage

        def listed(value: torch.Tensor | None) -> Any:
            return None if value is None else value.tolist()

        draft, logprobs = outputs.draft, outputs.logprobs
        self.accepted: list[int] = listed(outputs.verdict.accepted)
        self.next_token: list[int] = listed(outputs.verdict.next_token)
        self.invalid: list[bool] = listed(outputs.verdict.invalid)
        self.drafts: list[list[int]] = listed(draft.tokens)
        self.widths: list[int] = listed(outputs.widths)
        self.proposed: list[int] | None = listed(draft.lengths)
        source: list[int] | None = listed(draft.source)
        self.sources: list[str | None] | None = (  # [D] who proposed each block, of a drafter with several sources
            None if source is None else [outputs.sources[index] if index >= 0 else None for index in source]
        )
        self.model_rows = draft.model_rows
        # The planner and the estimator read these as arrays.
        self.confidence = outputs.confidence
        self.evidence = draft.evidence
        self.logprobs: list[float] | None = None if logprobs is None else logprobs.chosen.tolist()
        self.top_logprobs: list[list[float]] | None = None if logprobs is None else logprobs.top.tolist()
        self.top_tokens: list[list[int]] | None = None if logprobs is None else logprobs.top_tokens.tolist()
        prompt = outputs.prompt_logprobs
        self.prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = (  # the token's own, and the likeliest
            [] if prompt is None else _entries(prompt)
        )


def _entries(logprobs: Logprobs) -> list[tuple[float, list[tuple[int, float]]]]:
    ranked = zip(logprobs.top_tokens.tolist(), logprobs.top.tolist(), strict=True)
    top = [list(zip(tokens, values, strict=True)) for tokens, values in ranked]
    return list(zip(logprobs.chosen.tolist(), top, strict=True))


class Pending(Protocol):
    def result(self) -> HostOutputs: ...


class Device(Protocol):
    overlaps: bool  # whether submit returns before the step has run
    reads_are_free: bool  # whether a step may look at its own values without waiting for anything

    def submit(self, step: Step, inputs: StepInputs) -> Pending: ...


class Ready:
    def __init__(self, outputs: HostOutputs) -> None:
        self._outputs = outputs

    def result(self) -> HostOutputs:
        return self._outputs


class InlineDevice:
    """The CPU: a step has run when `submit` returns."""

    overlaps = False
    reads_are_free = True

    def submit(self, step: Step, inputs: StepInputs) -> Pending:
        start = time.perf_counter()
        outputs = step(inputs)
        return Ready(HostOutputs(outputs, (time.perf_counter() - start) * 1e3))


class ThreadDevice:
    """A device simulated by one worker thread that adds latency, so that the overlapped loop can be tested on a CPU."""

    overlaps = True
    reads_are_free = False

    def __init__(self, latency_ms: float = 0.0) -> None:
        self.latency_ms = latency_ms
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="surefoot-device")

    def submit(self, step: Step, inputs: StepInputs) -> Pending:
        def run() -> HostOutputs:
            start = time.perf_counter()
            outputs = step(inputs)
            time.sleep(self.latency_ms / 1e3)
            return HostOutputs(outputs, (time.perf_counter() - start) * 1e3)

        future: Future[HostOutputs] = self._worker.submit(run)
        return future


class CudaDevice:
    """A CUDA stream: outputs travel to pinned memory after the step, an event says when they have arrived."""

    overlaps = True
    reads_are_free = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def submit(self, step: Step, inputs: StepInputs) -> Pending:
        with torch.cuda.device(self.device):
            start, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            outputs = step(inputs)
            done.record()
            pinned = outputs.map_tensors(_pinned_copy)
            arrived = torch.cuda.Event()
            arrived.record()
        return _CudaPending(pinned, start, done, arrived)


def _pinned_copy(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def device_for(device: torch.device) -> Device:
    """How an engine whose tensors live on `device` submits its steps."""
    return CudaDevice(device) if device.type == "cuda" else InlineDevice()


class _CudaPending:
    def __init__(self, outputs: StepOutputs, start: Any, done: Any, arrived: Any) -> None:
        self._outputs, self._start, self._done, self._arrived = outputs, start, done, arrived

    def result(self) -> HostOutputs:
        self._arrived.synchronize()
        return HostOutputs(self._outputs, self._start.elapsed_time(self._done))
