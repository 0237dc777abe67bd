"""Times decode steps of an idle engine on inputs made for the purpose.

The steps are the engine's own: its target, drafter, cache, state slots and device. Requests, block tables and widths are made
here, so the engine's scheduler, planner and statistics neither see these steps nor learn from them. Prompts are not computed:
the cache is filled with noise, for the time of a pass depends on how much is cached, not on what. After every step the lengths
are set back, so all steps of a curve have the same context.
"""

from __future__ import annotations

import copy
import time
from collections import Counter

import numpy as np
import torch

from surefoot.cache.blocks import BlockManager
from surefoot.cache.paged import PagedCache
from surefoot.engine.clock import laps_for
from surefoot.engine.distribution import SamplingFlags
from surefoot.engine.engine import Engine
from surefoot.engine.messages import StepInputs, WidthPlan
from surefoot.engine.output import OutputProcessor
from surefoot.engine.policy import WidthPolicy
from surefoot.engine.scheduler import Scheduled
from surefoot.engine.state import SlotUpdate, StateUpdates, TableUpdate
from surefoot.errors import ConfigurationError
from surefoot.profiling.points import Point
from surefoot.profiling.samples import Samples
from surefoot.sampling import SamplingParams
from surefoot.speculation.planner import ForcedWidths

PERIOD = 16
"""Of the synthetic texts: a text that repeats itself gives a lookup drafter something to propose."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class StepTimer:
    """Context manager: every state slot of `engine` holds a synthetic request meanwhile.

    What the engine had cached for later requests is forgotten, at the start; so whatever happens meanwhile, nothing computed
    here is ever taken for a prefix. The engine can be used again as soon as this is left, by an error or an interrupt, too.

    Raises:
        ConfigurationError: the engine has requests.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.has_work:
            raise ConfigurationError("only an idle engine can be profiled: wait for its requests or cancel them")
        self._engine = engine
        self._step = copy.copy(engine.decode_step)  # with a clock of its own
        self._step.laps = laps_for(engine.target.device)
        self._policy = WidthPolicy(
            engine.gamma, num_slots=engine.options.max_num_seqs, forced=ForcedWidths([engine.gamma])
        )
        self._updates = StateUpdates()
        self._taken = self._filled = 0
        self.samples = Samples.empty()
        self.counts: Counter[Point] = Counter()

    def __enter__(self) -> StepTimer:
        engine, state = self._engine, self._engine.state
        engine.blocks.forget()
        if engine.drafter is not None:
            engine.drafter.draft_always(True)
        generator = np.random.default_rng(0)
        texts = [
            np.resize(generator.integers(0, engine.target.vocab_size, PERIOD), state.history.shape[1])
            for _ in range(engine.options.max_num_seqs)
        ]
        self._texts = torch.from_numpy(np.stack(texts)).to(state.history.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine.drafter is not None:
            self._engine.drafter.draft_always(False)

    def enter(self, context: int) -> None:
        """Give every slot a request of `context` cached tokens, in the next step, which is not worth measuring."""
        engine = self._engine
        cache, size = engine.cache, engine.options.block_size
        blocks = BlockManager(cache.groups, cache.group_blocks, size, prefix_reuse=False)
        self._updates = updates = StateUpdates()
        chunk = engine.options.max_num_batched_tokens
        for slot, text in enumerate(self._texts.tolist()):
            blocks.admit(slot, [])
            for length in (*range(chunk, context, chunk), context, context + 1):
                if blocks.reserve(slot, length + engine.scheduler.frontier) is None:
                    raise ConfigurationError(
                        f"the cache cannot hold {context} tokens in every slot: profile less context"
                    )
                blocks.commit(slot, [], min(length, context))  # frees what a sliding window no longer sees
            updates.tables += [TableUpdate(group, slot, first, held) for group, first, held in blocks.table(slot)]
            updates.slots.append(SlotUpdate(slot, text, context, context, PARAMS, seed=slot))
        if context > self._filled:
            used = [
                max(max(t.blocks) for t in updates.tables if t.group == group) for group in range(len(cache.groups))
            ]
            _fill_with_noise(cache, used)
            self._filled = context
        requests = [engine.make_request(text[:context], PARAMS) for text in self._texts.tolist()]
        for slot, request in enumerate(requests):
            request.slot, request.num_cached = slot, context
            request.output = OutputProcessor(PARAMS, engine.target.tokenizer, (), request.token_ids)  # that never ends
        self._parts = [Scheduled(request, 0, True, True) for request in requests]

    def time(self, point: Point, keep: bool = True) -> float:
        """One step at `point`; its milliseconds, the host's part included where the device does not hide it.

        Args:
            keep: whether it counts as a measurement.
        """
        engine, reads_are_free = self._engine, self._engine.device.reads_are_free
        updates, self._updates = self._updates, StateUpdates()
        parts, drafts = self._parts[: point.requests], point.rows - point.requests
        start = time.perf_counter()
        plan = self._policy.plan(parts)
        drafted = len(plan.drafting)
        widths = [drafts // point.requests + (index < drafts % point.requests) for index in range(drafted)]
        inputs = StepInputs(
            slots=list(range(point.requests)),
            context_rows=[0] * point.requests,
            steps=[self._taken] * point.requests,
            num_drafting=drafted,
            num_emitting=point.requests,
            plan=WidthPlan(plan.limits, drafts, widths=widths if drafted else None, depth=point.depth),
            flags=SamplingFlags.of(PARAMS)._replace(reads_are_free=reads_are_free),
            updates=updates,
            max_length=point.context,
        )
        submitted = time.perf_counter()
        found = engine.device.submit(self._step, inputs).result()
        arrived = time.perf_counter()
        for index, (accepted, token) in enumerate(zip(found.accepted, found.next_token, strict=True)):
            event = parts[index].request.output.push([*(found.drafts[index][:accepted] if accepted else ()), token])
            width = found.widths[index] if drafted else 0
            parts[index].request.statistics.record(engine.gamma, width, accepted, event.num_kept)
        host_ms = (submitted - start + time.perf_counter() - arrived) * 1e3
        self._taken += 1
        engine.state.lengths.fill_(point.context)
        engine.state.history.copy_(self._texts)
        step_ms = found.device_ms + (0.0 if engine.overlap else host_ms)
        if keep:
            assert found.laps is not None  # the clock runs
            self.counts[point] += 1
            rows = sum(found.widths) + point.requests
            self.samples.add(point.context, rows, point.requests, point.depth, found.laps, step_ms)
        return step_ms


def _fill_with_noise(cache: PagedCache, last: list[int]) -> None:
    """Give every block in use contents of its own pages: zeros that were never written all lie in the same one.

    Args:
        last: of each group, the last block in use.
    """
    groups = [*cache.target_group, *[cache.drafter_group] * len(cache.drafter_kv)]
    for stored, group in zip((*cache.target_kv, *cache.drafter_kv), groups, strict=True):
        for storage in stored:
            blocks = storage.view(-1, cache.block_size, *storage.shape[1:])[1 : last[group] + 1]
            blocks.copy_(torch.randn_like(storage[: cache.block_size]).expand_as(blocks))
