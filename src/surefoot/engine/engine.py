"""The engine: requests in, one event per request and step out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.cache.blocks import BlockManager
from surefoot.drafters.base import Drafter
from surefoot.engine import collection
from surefoot.engine.admission import RequestFactory
from surefoot.engine.broadcast import send_step
from surefoot.engine.clock import laps_for
from surefoot.engine.device import Device, HostOutputs, InlineDevice, Pending
from surefoot.engine.distribution import SamplingFlags
from surefoot.engine.graphs import TargetRunner, runner_for
from surefoot.engine.masks import TokenMask
from surefoot.engine.messages import StepInputs
from surefoot.engine.options import EngineOptions
from surefoot.engine.output import OutputEvent
from surefoot.engine.plan import Plan
from surefoot.engine.policy import WidthPolicy
from surefoot.engine.request import Request, Status
from surefoot.engine.scheduler import Schedule, Scheduled, Scheduler
from surefoot.engine.sizes import make_cache, model_length
from surefoot.engine.state import DeviceState
from surefoot.engine.step import DecodeStep
from surefoot.engine.trace import ObserverError, StepObserver, StepReport
from surefoot.errors import ConfigurationError, RequestError
from surefoot.parallel.group import Alone, Group
from surefoot.sampling import SamplingParams
from surefoot.speculation.statistics import Statistics
from surefoot.speculation.uniforms import SeedStreams
from surefoot.targets.target import Target

log = logging.getLogger(__name__)

TRIALS = 3
"""Failed steps of a batch that a request may take part in while nobody who took part fails alone."""


@dataclass
class InFlight:
    """A submitted step and what it was made of."""

    pending: Pending
    inputs: StepInputs
    parts: list[Scheduled]
    plan: Plan
    reached: list[int]  # of every part: positions that are cached once a prompt chunk has run
    host_ms: float


class Engine:
    """Continuous batching over one target and one drafter. `step()` is the whole loop: schedule, launch, collect.

    With an overlapping device the step just launched is collected one call later, so the host works while the device runs.

    A step is a transaction. If it raises, every running request gives up its slot and its blocks, none of which is
    registered for reuse, and waits to compute its own tokens again; so it does not matter what the device had written by
    then. Then those that took part are tried alone, one after the other: who fails alone ends with an error, everybody
    else goes on (docs/architecture.md, "A step that fails").
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
        self.max_model_len = model_length(target, options)
        if options.max_num_batched_tokens < options.max_num_seqs * frontier:
            raise ConfigurationError(
                f"max_num_batched_tokens={options.max_num_batched_tokens} cannot hold one block of {frontier} rows for each of "
                f"max_num_seqs={options.max_num_seqs} requests: raise it to {options.max_num_seqs * frontier} or more"
            )
        # A step in flight and the next one may both grow a request by a whole block.
        room = 2 * frontier
        self.cache = make_cache(target, drafter, options, self.max_model_len + room, frontier)
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
        self._factory = RequestFactory(target, self.gamma, self.max_model_len, self.seed)
        self._streams = SeedStreams()
        self._followers: dict[str, list[Request]] = {}  # by the request whose prompt they wait for
        self._observers: list[StepObserver] = []
        self._observer_problem: ObserverError | None = None
        self._failed_lately = False
        self._events: list[tuple[Request, OutputEvent]] = []  # not returned by `step` yet

    @property
    def statistics(self) -> Statistics:
        return self.policy.learner.statistics

    def stats(self) -> dict[str, Any]:
        """Counters since the start, in plain JSON data."""
        return {
            **self.statistics.to_dict(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "guard": None if self.policy.guard is None else self.policy.guard.to_dict(),
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
        request = self._factory.make(list(prompt_token_ids), params, prompt, request_id, mask)
        request.breaker = self.policy.new_breaker()
        return request

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
        if after is None or not self.blocks.prefix_reuse or after.num_output or after.request_id not in self.requests:
            self.scheduler.add(request)
        else:
            request.status = Status.HELD
            self._followers.setdefault(after.request_id, []).append(request)

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

    def cancel(self, request_id: str) -> OutputEvent | None:
        """End a request now: its slot and blocks are free at once, and a step in flight emits nothing for it."""
        self._check_owner()
        request = self.requests.get(request_id)
        if request is None:
            return None
        event = self._end(request, request.output.abort())
        self._events = [(owner, other) for owner, other in self._events if owner is not request]
        return event

    def _end(self, request: Request, last: OutputEvent) -> OutputEvent:
        """`last`, or the event that has not been returned yet with the end of `last`: one event a request and step."""
        event = next((event for owner, event in self._events if owner is request), last)
        if event is not last:
            event.text += last.text
            event.finish_reason, event.stop_reason, event.error = last.finish_reason, last.stop_reason, last.error
        self._finish(request)
        return event

    def _finish(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        request.finished_at = time.monotonic()
        self.policy.leave(request)
        self.scheduler.finish(request)
        self._streams.close(request.stream)
        if self._followers:
            self._release_followers(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or bool(self._events)

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, OutputEvent]]:
        """Advance every scheduled request by one step; one event for each that emitted or ended.

        What a step raises ends requests with an error event; it is not raised here. Only an interrupt is (KeyboardInterrupt
        and its like), and what an observer raises. The engine is consistent then, and the next call returns the events.

        Raises:
            ObserverError: it is told no more.
        """
        self._check_owner()
        try:
            if not self._events:  # else those of a call that was interrupted
                self._advance()
        except BaseException:  # an interrupt, anywhere
            self._restart(forget=True)
            raise
        if (problem := self._observer_problem) is not None:
            self._observer_problem = None
            raise problem
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        schedule = None
        try:
            schedule = self.scheduler.schedule()
            launched = self._launch(schedule)
        except BaseException as problem:
            earlier, self._in_flight = self._in_flight, None
            self._collect_or_recover(earlier)  # it is not concerned
            if schedule is None:
                self._recover(problem, [r for r in self.requests.values() if r.status is not Status.HELD], forget=True)
            else:
                self._recover(problem, [part.request for part in schedule.scheduled], forget=False)
            return
        if self.overlap:
            launched, self._in_flight = self._in_flight, launched
        self._collect_or_recover(launched)

    def _launch(self, schedule: Schedule) -> InFlight | None:
        for request in schedule.preempted:
            self.policy.leave(request)
        if not schedule.scheduled:
            return None
        start = time.perf_counter()
        plan = self.policy.plan(schedule.scheduled)
        parts = [*plan.drafting, *plan.not_drafting, *(part for part in schedule.scheduled if not part.emits)]
        emitting = parts[: len(plan.drafting) + len(plan.not_drafting)]
        inputs = StepInputs(
            slots=[part.request.slot for part in parts],
            num_drafting=len(plan.drafting),
            num_emitting=len(emitting),
            context_rows=[part.context_rows for part in parts],
            steps=[part.request.num_launched for part in emitting],
            plan=plan.for_step(self.policy.min_width),
            flags=SamplingFlags.union((part.request.flags for part in emitting), self.device.reads_are_free),
            updates=schedule.updates,
            max_length=max(part.request.num_cached + part.request.in_flight for part in parts),
            prompt_logprobs=collection.prompt_rows(parts),
        )
        for part in parts:
            part.request.num_launched += int(part.emits)
            if part.emits:
                part.request.in_flight += part.context_rows + self.gamma + 1
            else:  # a prompt chunk has no surprises
                part.request.num_cached += part.context_rows
        reached = [part.request.num_cached for part in parts]
        host_ms = (time.perf_counter() - start) * 1e3
        pending = self.device.submit(self.decode_step, send_step(self.group, inputs))
        return InFlight(pending, inputs, parts, plan, reached, host_ms)

    def _collect(self, launched: InFlight, outputs: HostOutputs) -> None:
        """Give every request what the step has brought it."""
        start = time.perf_counter()
        kept: list[int] = []
        interrupt: BaseException | None = None
        collection.take_prompt_logprobs(launched.parts, launched.inputs, outputs)
        row = 0
        for index, part in enumerate(launched.parts[: launched.inputs.num_emitting]):
            request = part.request
            width = outputs.widths[index] if index < launched.inputs.num_drafting else 0
            before = request.num_output
            if request.status is Status.RUNNING:
                try:
                    if outputs.invalid[index]:
                        self._fail(request, collection.no_distribution(self.target.dtype, request.mask is not None))
                    else:
                        self._emit(part, index, row, outputs, launched)
                except BaseException as problem:  # its output, its tokenizer: nobody else is concerned
                    log.warning("the output of request %s failed", request.request_id, exc_info=problem)
                    self._fail(request, problem)
                    interrupt = interrupt or (None if isinstance(problem, Exception) else problem)
            kept.append(request.num_output - before)
            row += width + 1
        if interrupt is not None:
            raise interrupt
        for part, reached in zip(launched.parts, launched.reached, strict=True):
            if not part.emits and part.request.status is Status.RUNNING:
                self.blocks.commit(part.request.slot, part.request.token_ids, reached)
            elif part.may_draft:
                self.scheduler.acquit(part.request)
        if self._failed_lately and not self.scheduler.suspects:  # nobody to blame: the fault has passed
            self._forgive(part.request for part in launched.parts)
        launched.host_ms += (time.perf_counter() - start) * 1e3
        # With an overlapping device the host's time is hidden behind the next step.
        host_ms = 0.0 if self.overlap else launched.host_ms
        self.policy.learner.observe(launched.plan, outputs, kept, host_ms)
        self._report(launched, outputs, kept, host_ms)

    def _report(self, launched: InFlight, outputs: HostOutputs, kept: list[int], host_ms: float) -> None:
        if self._observers:
            names = [part.request.request_id for part in launched.parts[: launched.inputs.num_emitting]]
            report = StepReport(launched.plan, launched.inputs, outputs, names, kept, self.gamma, host_ms)
            for observer in list(self._observers):
                try:
                    observer(report)
                except Exception as problem:  # the requests are not concerned
                    self.remove_observer(observer)
                    self._observer_problem = ObserverError(
                        f"an observer of steps failed and is told no more: {problem!r}"
                    )
                    self._observer_problem.__cause__ = problem

    def _emit(self, part: Scheduled, index: int, row: int, outputs: HostOutputs, launched: InFlight) -> None:
        """Hand one ordered block to the output, and drop everywhere what comes after a stop."""
        request, accepted = part.request, outputs.accepted[index]
        tokens = [*(outputs.drafts[index][:accepted] if accepted else ()), outputs.next_token[index]]
        event = request.output.push(tokens, collection.token_logprobs(request.params, tokens, row, outputs))
        event.origins = collection.origins(index, accepted, outputs, self.drafter)[: event.num_kept]
        self._events.append((request, event))
        if request.first_token_at is None:
            request.first_token_at, request.first_block = time.monotonic(), event.num_kept
        request.token_ids.extend(tokens[: event.num_kept])
        request.num_cached += part.context_rows + accepted + 1
        request.in_flight = max(0, request.in_flight - part.context_rows - self.gamma - 1)
        collection.record_block(
            request, index if index < launched.inputs.num_drafting else None, accepted, event.num_kept, outputs
        )
        self.blocks.commit(request.slot, request.token_ids, min(request.num_cached, len(request.token_ids)))
        if event.finish_reason is not None:
            self._finish(request)
        elif self._followers:
            self._release_followers(request)

    # -- when a step fails -------------------------------------------------------------------------------------------------

    def _collect_or_recover(self, launched: InFlight | None) -> None:
        """Collect a step, or undo it."""
        if launched is None:
            return
        outputs = None
        try:
            outputs = launched.pending.result()
            self._collect(launched, outputs)
        except BaseException as problem:
            self._recover(problem, [part.request for part in launched.parts], forget=outputs is not None)

    def _recover(self, problem: BaseException, taking_part: list[Request], forget: bool) -> None:
        """Undo a step that raised, and find out whom to blame.

        Args:
            taking_part: the requests of the step.
            forget: the host's own bookkeeping was under way, and is made anew.
        """
        self._restart(forget)
        if not isinstance(problem, Exception):
            raise problem  # an interrupt is nobody's fault
        log.warning("a step of %d requests failed", len(taking_part), exc_info=problem)
        alone = len(taking_part) == 1
        if alone and taking_part[0] in self.scheduler.suspects:  # found: the others were only beside it
            self._forgive(self.requests.values())
        for request in taking_part:
            if request.finished_at is not None:
                continue
            request.failures += 1
            self._failed_lately = True
            # An assertion is a fault of the engine: to try again would hide it.
            if isinstance(problem, AssertionError) or request.failures > TRIALS or (alone and not request.gamma):
                self._fail(request, problem)
                continue
            if alone:  # perhaps only its drafts fail, which may cost no more than speed
                request.gamma = 0
            self.scheduler.suspect(request)

    def _forgive(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.failures = 0
        self._failed_lately = False

    def _restart(self, forget: bool) -> None:
        """Everybody who runs gives up slot and blocks, and waits. A step in flight is awaited and dropped."""
        dropped, self._in_flight = self._in_flight, None
        interrupt: BaseException | None = None
        if dropped is not None:
            # It ran after a step that may not have written its block tables: it may have used those of others.
            forget = True
            try:
                dropped.pending.result()  # from now on nothing writes any more
            except BaseException as problem:
                interrupt = None if isinstance(problem, Exception) else problem
        for request in self.scheduler.running:
            self.policy.leave(request)
        self.scheduler.restart(self.requests.values(), forget)
        if interrupt is not None:
            raise interrupt

    def _fail(self, request: Request, problem: BaseException | str) -> None:
        """End one request with an error."""
        if isinstance(problem, BaseException):
            request.failure = problem
            problem = " ".join(f"a step of the engine failed: {type(problem).__name__}: {problem}".split())
        last = request.output.fail(problem)
        if self._end(request, last) is last:
            self._events.append((request, last))
