"""Who runs in the next step: running requests first, oldest first, then prompts as slots, blocks and rows allow."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from surefoot.cache.blocks import BlockManager
from surefoot.engine.request import Request, Status
from surefoot.engine.state import SlotUpdate, StateUpdates, TableUpdate


class Scheduled(NamedTuple):
    """One request's part of a step."""

    request: Request
    context_rows: int  # prompt rows before the anchor
    emits: bool  # False for a prompt chunk that is not the last one
    may_draft: bool  # a pure decode: the drafter's context reaches up to the anchor


@dataclass
class Schedule:
    scheduled: list[Scheduled] = field(default_factory=list)
    updates: StateUpdates = field(default_factory=StateUpdates)
    preempted: list[Request] = field(default_factory=list)
    stalled: bool = False  # an older request waits for blocks that a step in flight still uses: nobody younger may run


class Scheduler:
    """Continuous batching with chunked prefill.

    Every running request owns the rows of one block in every step; what is left is shared by prompt chunks, oldest first. So
    decodes go on beside the longest prompt, and a prompt is read on beside any number of decodes.

    Args:
        blocks: the block manager.
        max_num_seqs: state slots.
        max_num_batched_tokens: rows one step may have, drafts included; at least max_num_seqs * frontier.
        frontier: positions reserved after a committed length (gamma + 1).
        prefill_chunk: prompt rows one request may have in a step (None: all there are).
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        frontier: int,
        prefill_chunk: int | None = None,
    ) -> None:
        self.blocks, self.frontier = blocks, frontier
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk = prefill_chunk or max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.suspects: list[Request] = []  # took part in a step that failed: each runs alone until it has decoded
        self._slots = range(max_num_seqs - 1, -1, -1)
        self._free_slots = list(self._slots)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.precedence)

    def schedule(self) -> Schedule:
        """Choose the next step's rows and reserve their blocks.

        With a step in flight (`request.in_flight`), lengths are upper bounds and nobody in it is preempted: the caller
        collects the step and asks again.
        """
        result = Schedule()
        if self.suspects:
            self._schedule_trial(self.suspects[0], result)
            return result
        rows = self.max_num_batched_tokens - len(self.running) * self.frontier  # shared ones
        for request in list(self.running):
            if result.stalled:
                break
            if request.is_running:  # else it was preempted just now, for an older one
                used = self._schedule_running(request, rows + self.frontier, result)
                rows -= max(0, used - self.frontier)
        # A waiting request enters only when nobody lacks blocks.
        while self.waiting and self._free_slots and rows >= self.frontier and not (result.preempted or result.stalled):
            used = self._enter(self.waiting[0], rows, result)
            if not used:
                break
            rows -= max(used, self.frontier)
        return result

    def _schedule_running(self, request: Request, rows: int, result: Schedule) -> int:
        """Rows used; 0 when the request has to sit this step out."""
        remaining = len(request.token_ids) - request.num_cached
        decoding = request.in_flight > 0 or remaining == 1
        assert request.params.max_tokens is not None  # the engine has filled it in
        if decoding and request.num_output + min(request.in_flight, 1) >= request.params.max_tokens:
            return 0  # the step in flight will finish it
        wanted = 1 if decoding else min(remaining, rows, self.prefill_chunk)
        length = request.num_cached + request.in_flight + wanted
        while (grown := self.blocks.reserve(request.slot, length + self.frontier)) is None:
            victim = max(self.running, key=lambda r: r.precedence)
            if victim.in_flight:
                result.stalled = True
                return 0
            self._preempt(victim, result)
            if victim is request:
                return 0
        self._place(request, wanted, decoding, grown, result)
        return wanted

    def _schedule_trial(self, request: Request, result: Schedule) -> None:
        """A step of one suspect alone; nobody else holds a block meanwhile."""
        for other in [other for other in self.running if other is not request]:
            if other.in_flight:
                return  # the caller collects its step first
            self._preempt(other, result)
        if request.is_running:
            self._schedule_running(request, self.max_num_batched_tokens, result)
        else:
            self._enter(request, self.max_num_batched_tokens, result)

    def _enter(self, request: Request, rows: int, result: Schedule) -> int:
        """Rows used; 0 when there are no blocks for it."""
        slot = self._free_slots[-1]
        cached = self.blocks.admit(slot, request.token_ids, reuse=not request.output.wants_prompt)
        remaining = len(request.token_ids) - cached
        wanted = min(remaining, rows, self.prefill_chunk)
        if self.blocks.reserve(slot, cached + wanted + self.frontier) is None:
            self.blocks.release(slot)
            return 0
        self._free_slots.pop()
        self.waiting.remove(request)
        request.slot, request.num_cached, request.status = slot, cached, Status.RUNNING
        if request.started_at is None:
            request.started_at, request.cached_tokens = time.monotonic(), cached
        insort(self.running, request, key=lambda r: r.precedence)
        result.updates.slots.append(
            SlotUpdate(
                slot,
                request.token_ids,
                cached,
                len(request.prompt_token_ids),
                request.params,
                request.stream,
                request.output.end_ids,
                request.mask,
            )
        )
        self._place(request, wanted, remaining == 1, self.blocks.table(slot), result)
        return wanted

    def _place(
        self, request: Request, wanted: int, decoding: bool, grown: list[tuple[int, int, list[int]]], result: Schedule
    ) -> None:
        for group, first, blocks in grown:
            result.updates.tables.append(TableUpdate(group, request.slot, first, blocks))
        emits = decoding or request.num_cached + wanted == len(request.token_ids)
        result.scheduled.append(Scheduled(request, wanted - emits, emits, decoding))

    def _preempt(self, request: Request, result: Schedule) -> None:
        """Free everything; the request will read its own tokens again, prompt and output alike."""
        self._leave(request)
        request.status = Status.WAITING
        request.preemptions += 1
        insort(self.waiting, request, key=lambda r: r.precedence)
        result.preempted.append(request)

    def _leave(self, request: Request) -> None:
        self.blocks.release(request.slot)
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.slot, request.num_cached, request.in_flight = -1, 0, 0

    def finish(self, request: Request) -> None:
        status, request.status = request.status, Status.FINISHED
        self.acquit(request)
        if status is Status.RUNNING:
            self._leave(request)
        elif status is Status.WAITING:
            self.waiting.remove(request)

    # -- after a failed step -----------------------------------------------------------------------------------------------

    def restart(self, requests: Iterable[Request], forget: bool) -> None:
        """Everybody who runs waits again, to read its own tokens from the first; whatever state the lists are in.

        Args:
            requests: all that have not ended.
            forget: forget cached prefixes too, for the bookkeeping of blocks may be half done.
        """
        self.blocks.clear(forget)
        self._free_slots = list(self._slots)
        self.running.clear()
        self.waiting.clear()
        for request in requests:
            if request.status is Status.RUNNING:
                request.status = Status.WAITING
                request.preemptions += 1
            request.slot, request.num_cached, request.in_flight = -1, 0, 0
            if request.status is Status.WAITING:
                insort(self.waiting, request, key=lambda r: r.precedence)

    def suspect(self, request: Request) -> None:
        """Run this request alone until it has decoded, or has failed."""
        if request not in self.suspects:
            self.suspects.append(request)

    def acquit(self, request: Request) -> None:
        if request in self.suspects:
            self.suspects.remove(request)
