"""The engine: requests in, one event per request and step out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from surefoot.cache.blocks import BlockManager
from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import Drafter
from surefoot.engine.broadcast import send_step
from surefoot.engine.clock import laps_for
from surefoot.engine.collection import prompt_rows, take_prompt_logprobs, token_logprobs
from surefoot.engine.device import Device, HostOutputs, InlineDevice, Pending
from surefoot.engine.distribution import SamplingFlags
from surefoot.engine.graphs import TargetRunner, runner_for
from surefoot.engine.masks import TokenMask
from surefoot.engine.messages import StepInputs
from surefoot.engine.options import EngineOptions
from surefoot.engine.output import OutputEvent, OutputProcessor, no_distribution
from surefoot.engine.plan import Plan
from surefoot.engine.policy import WidthPolicy
from surefoot.engine.request import Request, Status
from surefoot.engine.scheduler import Schedule, Scheduled, Scheduler
from surefoot.engine.state import DeviceState
from surefoot.engine.step import DecodeStep
from surefoot.engine.trace import StepObserver, StepReport
from surefoot.errors import ConfigurationError, RequestError
from surefoot.machine import total_memory
from surefoot.parallel.group import Alone, Group
from surefoot.sampling import SamplingParams
from surefoot.speculation.statistics import Statistics
from surefoot.speculation.uniforms import SeedStreams
from surefoot.targets.target import Target


@dataclass
class InFlight:
    """A submitted step and what it was made of."""

    pending: Pending
    inputs: StepInputs
    parts: list[Scheduled]
    plan: Plan
    host_ms: float


class Engine:
    """Continuous batching over one target and one drafter.

    `step()` is the whole loop: schedule, launch, collect. With an overlapping device the step just launched is collected one
    call later, so the host works while the device runs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: WidthPolicy,
        options: EngineOptions | None = None,
        *,
        runner: TargetRunner | None = None,
        device: Device | None = None,
        group: Group | None = None,
    ) -> None:
        options = options or EngineOptions()
        self.target, self.drafter, self.policy, self.options = target, drafter, policy, options
        self.seed = int(torch.randint(1 << 56, ())) if options.seed is None else options.seed
        self.gamma = drafter.gamma if drafter else 0
        # A drafter's block may be longer than the tokens it proposes; its slots lie in the frontier, too.
        frontier = max(self.gamma + 1, drafter.block_slots if drafter else 0)
        self.max_model_len = _model_length(target, options)
        if options.max_num_batched_tokens < options.max_num_seqs * frontier:
            raise ConfigurationError(
                f"max_num_batched_tokens={options.max_num_batched_tokens} cannot hold one block of {frontier} rows for each of "
                f"max_num_seqs={options.max_num_seqs} requests: raise it to {options.max_num_seqs * frontier} or more"
            )
        # A step in flight and the next one may both grow a request by a whole block.
        room = 2 * frontier
        num_blocks, window_blocks = _cache_blocks(target, drafter, options, self.max_model_len + room, frontier)
        make_cache = partial(
            PagedCache,
            target.layers,
            drafter.cache_layers if drafter else (),
            num_blocks=num_blocks,
            num_window_blocks=window_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_model_len + room,
            dtype=target.dtype,
            states=target.states,
            frontier=frontier,
        )
        _check_memory(make_cache(device="meta").num_bytes, target.device)
        self.cache = make_cache(device=target.device)
        self.blocks = BlockManager(
            self.cache.groups,
            self.cache.group_blocks,
            options.block_size,
            # A state is not kept for every block, so a prefix cannot be entered in its middle.
            prefix_reuse=options.prefix_reuse and not target.states,
        )
        self.scheduler = Scheduler(self.blocks, options.max_num_seqs, options.max_num_batched_tokens, frontier)
        self.state = DeviceState(options.max_num_seqs, self.max_model_len, room + 1, target.device)
        self.runner = runner or runner_for(target, options.graphs, options.max_num_batched_tokens)
        self.runner.prepare(self.cache, drafter.feature_layers if drafter else ())
        self.device = device or InlineDevice()
        self.group: Group = group or Alone()  # who runs the same steps
        self.overlap = self.device.overlaps if options.overlap is None else options.overlap
        if policy.current is not None and (self.overlap or not self.device.reads_are_free):
            raise ConfigurationError(
                f"planner {policy.planner_name!r} looks at confidences in the middle of a step, which an overlapped loop never "
                f"waits for: use planner 'stale' (the default there), or overlap=False on a CPU"
            )
        self.decode_step = DecodeStep(
            self.runner,
            drafter,
            self.cache,
            self.state,
            policy.confidence,
            self.gamma,
            check_layout=options.check_layout,
            reads_are_free=self.device.reads_are_free,
        )
        if drafter is not None:
            drafter.use_costs(policy.costs)
        self.requests: dict[str, Request] = {}
        self.owner: int | None = None  # the thread that alone may change the engine, once an `EngineLoop` has it
        self._in_flight: InFlight | None = None
        self._arrivals = count()
        self._streams = SeedStreams()
        self._followers: dict[str, list[Request]] = {}  # by the request whose prompt they wait for
        self._observers: list[StepObserver] = []

    @property
    def statistics(self) -> Statistics:
        return self.policy.learner.statistics

    def stats(self) -> dict[str, Any]:
        """Counters since the start, in plain JSON data."""
        return {
            **self.statistics.to_dict(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "blocks_used": [pool.num_used for pool in self.blocks.pools],
            "blocks_total": [pool.num_blocks - 1 for pool in self.blocks.pools],
        }

    def describe(self) -> dict[str, Any]:
        """What the engine was assembled from."""
        return {
            "target": self.target.name,
            "target_weights": self.target.weights,
            "drafter": self.drafter.name if self.drafter else "none",
            "gamma": self.gamma,
            "planner": self.policy.describe(),
            "cost_table": self.policy.costs.describe(),
            "max_num_seqs": self.options.max_num_seqs,
            "max_model_len": self.max_model_len,
            "cache_bytes": self.cache.num_bytes,
        }

    # -- observers ---------------------------------------------------------------------------------------------------------

    def add_observer(self, observer: StepObserver) -> None:
        """Tell `observer` about every step collected from now on; the stages of steps are timed from now on."""
        self._observers.append(observer)
        self.decode_step.laps = laps_for(self.target.device)

    def remove_observer(self, observer: StepObserver) -> None:
        self._observers.remove(observer)
        if not self._observers:
            self.decode_step.laps = None

    # -- requests ----------------------------------------------------------------------------------------------------------

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        mask: TokenMask | None = None,
    ) -> Request:
        """Check a prompt and make a request of it; `admit` queues it. Changes nothing, so any thread may call it.

        Args:
            mask: which tokens it may emit, beyond what the parameters say.

        Raises:
            RequestError: an empty or too long prompt, or a token id outside the vocabulary.
        """
        tokens = list(prompt_token_ids)
        self._check_prompt(tokens, params)
        room = self.max_model_len - len(tokens)
        if params.max_tokens is None or params.max_tokens > room:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        number = next(self._arrivals)
        request_id = request_id or f"request-{number}"
        gamma = self.gamma if params.gamma is None else min(params.gamma, self.gamma)
        return Request(
            request_id,
            tokens,
            params,
            seed=params.seed if params.seed is not None else (self.seed + 1) * 0x9E3779B1 + number,
            output=OutputProcessor(
                params, self.target.tokenizer, self.target.eos_token_ids, tokens, request_id=request_id
            ),
            gamma=gamma if params.speculative else 0,
            arrival=number,
            prompt=prompt,
            breaker=self.policy.new_breaker(),
            mask=mask,
        )

    def admit(self, request: Request, after: Request | None = None) -> None:
        """Queue a request.

        Args:
            after: a request with the same prompt. Where prefixes are reused, `request` waits until that prompt has been
                computed, and finds it in the cache.

        Raises:
            RequestError: the request id is in use.
        """
        self._check_owner()
        if request.request_id in self.requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use: choose another, or wait until that request has ended"
            )
        self.requests[request.request_id] = request
        request.stream = self._streams.open(request.seed)
        if (
            after is not None
            and self.blocks.prefix_reuse
            and after.request_id in self.requests
            and not after.num_output
        ):
            request.status = Status.HELD
            self._followers.setdefault(after.request_id, []).append(request)
        else:
            self.scheduler.add(request)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        mask: TokenMask | None = None,
    ) -> Request:
        """`make_request` and `admit` in one."""
        request = self.make_request(prompt_token_ids, params, prompt=prompt, request_id=request_id, mask=mask)
        self.admit(request)
        return request

    def _release_followers(self, request: Request) -> None:
        """The prompt of `request` has been computed, or never will be: whoever waited for it enters the queue."""
        for follower in self._followers.pop(request.request_id, ()):
            if follower.status is Status.HELD:
                follower.status = Status.WAITING
                self.scheduler.add(follower)

    def _check_owner(self) -> None:
        if self.owner is not None and self.owner != threading.get_ident():
            raise RuntimeError("this engine belongs to a loop: use its `submit`, `cancel` or `call` instead")

    def _check_prompt(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise RequestError("the prompt has no tokens: give at least one")
        if len(tokens) >= self.max_model_len:
            limit = self.target.max_model_len
            remedy = (
                f"shorten it, or raise max_model_len (--max-model-len) to at most {limit}"
                if self.max_model_len < limit
                else "shorten it; the model itself can address no more"
            )
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, this engine serves at most {self.max_model_len} with the answer: {remedy}"
            )
        vocab = self.target.vocab_size
        params.check_vocabulary(vocab)
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt token {bad} is outside the target's vocabulary (0 ... {vocab - 1})")

    def cancel(self, request_id: str) -> OutputEvent | None:
        """End a request now: its slot and blocks are free at once, and a step in flight emits nothing for it."""
        self._check_owner()
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        event = request.output.abort()
        self._finish(request)
        return event

    def _finish(self, request: Request) -> None:
        self.policy.leave(request)
        self.scheduler.finish(request)
        self._streams.close(request.stream)
        request.finished_at = time.monotonic()
        self.requests.pop(request.request_id, None)
        if self._followers:
            self._release_followers(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, OutputEvent]]:
        """Advance every scheduled request by one step; one event for each that emitted."""
        self._check_owner()
        return self._overlapped_step() if self.overlap else self._plain_step()

    def _plain_step(self) -> list[tuple[Request, OutputEvent]]:
        schedule = self.scheduler.schedule()
        launched = self._launch(schedule)
        return self._collect(launched)

    def _overlapped_step(self) -> list[tuple[Request, OutputEvent]]:
        schedule = self.scheduler.schedule()
        launched = self._launch(schedule)
        collected, self._in_flight = self._in_flight, launched
        return self._collect(collected)

    def _launch(self, schedule: Schedule) -> InFlight | None:
        for request in schedule.preempted:
            self.policy.leave(request)
        if not schedule.scheduled:
            return None
        start = time.perf_counter()
        plan = self.policy.plan(schedule.scheduled)
        parts = [*plan.drafted, *plan.undrafted, *(part for part in schedule.scheduled if not part.emits)]
        emitting = parts[: len(plan.drafted) + len(plan.undrafted)]
        inputs = StepInputs(
            slots=[part.request.slot for part in parts],
            num_drafted=len(plan.drafted),
            num_emitting=len(emitting),
            context_rows=[part.context_rows for part in parts],
            steps=[part.request.num_launched for part in emitting],
            plan=plan.for_step(self.policy.min_width),
            flags=SamplingFlags.union((part.request.flags for part in emitting), self.device.reads_are_free),
            updates=schedule.updates,
            max_length=max(part.request.num_cached + part.request.in_flight for part in parts),
            prompt_logprobs=prompt_rows(parts),
        )
        for part in parts:
            part.request.num_launched += int(part.emits)
            if part.emits:
                part.request.in_flight += part.context_rows + self.gamma + 1
            else:  # a prompt chunk has no surprises
                part.request.num_cached += part.context_rows
        host_ms = (time.perf_counter() - start) * 1e3
        return InFlight(
            self.device.submit(self.decode_step, send_step(self.group, inputs)), inputs, parts, plan, host_ms
        )

    def _collect(self, launched: InFlight | None) -> list[tuple[Request, OutputEvent]]:
        if launched is None:
            return []
        outputs = launched.pending.result()
        start = time.perf_counter()
        events: list[tuple[Request, OutputEvent]] = []
        kept: list[int] = []
        row = 0
        for index, part in enumerate(launched.parts[: launched.inputs.num_emitting]):
            request = part.request
            width = outputs.widths[index] if index < launched.inputs.num_drafted else 0
            if request.status is Status.RUNNING and outputs.invalid[index]:
                events.append(
                    (request, request.output.fail(no_distribution(self.target.dtype, request.mask is not None)))
                )
                self._finish(request)
                kept.append(0)
            elif request.status is Status.RUNNING:
                events.append((request, self._emit(part, index, row, width, outputs, launched)))
                kept.append(events[-1][1].num_kept)
            else:
                kept.append(0)
            row += width + 1
        take_prompt_logprobs(launched.parts, launched.inputs, outputs)
        for part in launched.parts[launched.inputs.num_emitting :]:
            request = part.request
            if request.status is Status.RUNNING:
                self.blocks.commit(request.slot, request.token_ids, request.num_cached)
        launched.host_ms += (time.perf_counter() - start) * 1e3
        # With an overlapping device the host's time is hidden behind the next step.
        host_ms = 0.0 if self.overlap else launched.host_ms
        self.policy.learner.observe(launched.plan, outputs, kept, host_ms)
        self._report(launched, outputs, kept, host_ms)
        return events

    def _report(self, launched: InFlight, outputs: HostOutputs, kept: list[int], host_ms: float) -> None:
        if self._observers:
            names = [part.request.request_id for part in launched.parts[: launched.inputs.num_emitting]]
            report = StepReport(launched.plan, launched.inputs, outputs, names, kept, self.gamma, host_ms)
            for observer in list(self._observers):
                observer(report)

    def _emit(
        self, part: Scheduled, index: int, row: int, width: int, outputs: HostOutputs, launched: InFlight
    ) -> OutputEvent:
        """Hand one ordered block to the output, and drop everywhere what lies behind a stop."""
        request, accepted = part.request, outputs.accepted[index]
        drafted = index < launched.inputs.num_drafted
        tokens = [*(outputs.drafts[index][:accepted] if accepted else ()), outputs.next_token[index]]
        event = request.output.push(tokens, token_logprobs(request.params, tokens, row, outputs))
        if request.first_token_at is None:
            request.first_token_at, request.first_block = time.monotonic(), event.num_kept
        request.token_ids.extend(tokens[: event.num_kept])
        request.num_cached += part.context_rows + accepted + 1
        request.in_flight = max(0, request.in_flight - part.context_rows - self.gamma - 1)
        if drafted:
            proposed = outputs.proposed[index] if outputs.proposed is not None else self.gamma
            source = outputs.sources[index] if outputs.sources is not None else None
            request.statistics.record(proposed, width, accepted, event.num_kept, source)
        else:
            request.statistics.record(0, 0, 0, event.num_kept)
        self.blocks.commit(request.slot, request.token_ids, min(request.num_cached, len(request.token_ids)))
        if event.finish_reason is not None:
            self._finish(request)
        elif self._followers:
            self._release_followers(request)
        return event


def _model_length(target: Target, options: EngineOptions) -> int:
    limit = target.max_model_len
    if options.max_model_len is None:
        return min(limit, 8192)
    if not 1 < options.max_model_len <= limit:
        raise ConfigurationError(
            f"max_model_len={options.max_model_len} is outside 2 ... {limit}, what {target.name} can address"
        )
    return options.max_model_len


def _check_memory(wanted: int, device: torch.device) -> None:
    """Refuse a cache that cannot fit, rather than let the system end this process when the cache fills."""
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else total_memory()
    if memory and wanted > memory:
        raise ConfigurationError(
            f"the cache takes {wanted / 2**30:.1f} GiB and there are {memory / 2**30:.1f} GiB of memory: lower num_blocks, "
            "cache_bytes, max_num_seqs or max_model_len"
        )


def _cache_blocks(
    target: Target, drafter: Drafter | None, options: EngineOptions, length: int, frontier: int
) -> tuple[int, int]:
    """Blocks of the full and of every sliding group.

    Every slot can reach the full length, unless that takes more than `cache_bytes`; one request always fits.
    """
    size = options.block_size
    per_sequence = -(-length // size)
    windows = {spec.window for spec in target.layers if spec.window is not None}
    window_blocks = 0
    if windows:
        # What a row sees, and behind it the chunk and the frontier of two steps: one in flight, one being prepared.
        reach = max(windows) + 2 * (options.max_num_batched_tokens + frontier)
        window_blocks = 1 + options.max_num_seqs * min(per_sequence, -(-reach // size) + 1)
    if options.num_blocks is not None:
        wanted = options.num_blocks
        if wanted < per_sequence + 1:
            raise ConfigurationError(
                f"num_blocks={wanted} cannot hold one request of {length} positions in blocks of {size}: "
                f"allow at least {per_sequence + 1}, or lower max_model_len"
            )
        return wanted, min(window_blocks, wanted)
    layers = [spec for spec in target.layers if spec.window is None]
    layers += list(drafter.cache_layers) if drafter else []
    block_bytes = sum(spec.entry_size / spec.stride for spec in layers) * target.dtype.itemsize * size
    affordable = int(options.cache_bytes // max(block_bytes, 1))
    return 1 + max(per_sequence, min(per_sequence * options.max_num_seqs, affordable)), window_blocks
