"""Many requests at once: nobody notices the others, and nothing is lost, repeated, leaked or starved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from surefoot.cache.blocks import BlockManager
from surefoot.drafters.base import Draft, DraftContext
from surefoot.engine.layout import LayoutError
from surefoot.engine.layout import check_layout as honest_check
from surefoot.engine.output import OutputProcessor
from surefoot.engine.request import Request, Status
from surefoot.engine.scheduler import Scheduler
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build, tiny_dspark
from tests.tiny_models import tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=12)
STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
PROMPTS = [[3, 1, 4, 1, 5], [5, 6] * 8, [7], [2, 7, 1, 8] * 3, [1, 2, 3, 1, 2, 3, 1]]
TABLE = CostTable((1, 2, 4, 8, 32), ((1.0, 1.1, 1.6, 3.0, 12.0),), (1, 8), (0.1, 0.2))
LOOPS = ("plain", "late", "early")


def loop(name: str) -> dict[str, Any]:
    return {"device": None if name == "plain" else QueueDevice(late=name == "late")}


def alone(prompt: list[int], params: SamplingParams = GREEDY, **settings: Any) -> list[int]:
    return build(CheapTarget(), "none", **settings).run([prompt], params)[0].output.token_ids


def drain(engine: Any) -> list[Any]:
    events = []
    for _ in range(2000):
        if not engine.has_work:
            break
        events += engine.step()
    assert not engine.has_work
    return events


# -- independence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_text_does_not_depend_on_who_else_is_served(block_size: int, loop_name: str) -> None:
    expected = [alone(prompt) for prompt in PROMPTS]
    for others in ([], [PROMPTS[0]] * 3, list(reversed(PROMPTS))):
        engine = build(
            CheapTarget(), "prompt-lookup", block_size=block_size, table=TABLE, max_num_seqs=5, **loop(loop_name)
        )
        noise = SamplingParams(temperature=1.2, repetition_penalty=1.3, top_p=0.8, max_tokens=7)
        params = [*[noise] * len(others), *[GREEDY] * len(PROMPTS)]
        got = engine.run([*others, *PROMPTS], params)[len(others) :]
        assert [r.output.token_ids for r in got] == expected
        engine.assert_clean()


@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_seed_gives_one_text_alone_and_in_a_batch(drafter: str, loop_name: str) -> None:
    """With a fixed width: then the uniforms, which go by request and step, meet the same drafts."""
    params = SamplingParams(temperature=1, seed=11, max_tokens=20, top_k=12)
    settings = {"gamma": 3, "width": 2, **loop(loop_name)}
    one = build(CheapTarget(), drafter, **settings).run([STEM], params)[0].output.token_ids
    settings |= loop(loop_name)
    batch = build(CheapTarget(), drafter, **settings).run([*PROMPTS, STEM], [GREEDY] * 5 + [params])
    assert batch[-1].output.token_ids == one


# -- limits per request ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_name", LOOPS)
def test_limits_of_a_request_hold(loop_name: str) -> None:
    limits: list[Any] = [{}, {"gamma": 2}, {"gamma": 0}, {"speculative": False}, {"gamma": 99}]
    params = [SamplingParams(temperature=0, max_tokens=30, **limit) for limit in limits]
    got = build(CheapTarget(), "prompt-lookup", gamma=4, **loop(loop_name)).run([[5, 6] * 6] * 5, params)
    widest = [max(r.statistics.widths) for r in got]
    assert widest == [4, 2, 0, 0, 4]
    assert got[2].statistics.drafted == got[3].statistics.drafted == 0
    assert len({tuple(r.output.token_ids) for r in got}) == 1


def test_nobody_verifies_beyond_the_last_token() -> None:
    (request,) = build(CheapTarget(), "prompt-lookup", gamma=4).run(
        [[5, 6] * 8], SamplingParams(temperature=0, max_tokens=3)
    )
    assert request.output.token_ids == alone([5, 6] * 8)[:3]
    assert request.statistics.verified <= 2


# -- preemption ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_preempted_request_goes_on_without_loss_or_repetition(loop_name: str, prefix_reuse: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = [[*STEM, i] for i in range(5)]
    expected = [alone(prompt, params) for prompt in prompts]
    engine = build(
        CheapTarget(), "prompt-lookup", num_blocks=28, prefix_reuse=prefix_reuse, max_num_seqs=4, **loop(loop_name)
    )
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    streamed: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for request, event in drain(engine):
        streamed[request.request_id] += event.token_ids
    assert [streamed[r.request_id] for r in requests] == expected
    assert sum(r.preemptions for r in requests) > 1
    assert requests[0].preemptions == 0, "the oldest never has to leave"
    engine.assert_clean()


def test_nobody_younger_runs_while_an_older_request_waits_for_blocks_in_flight() -> None:
    """Else the younger one is in flight at every step, and can never be preempted for the older."""
    scheduler = Scheduler(BlockManager((None,), (3,), 4, prefix_reuse=False), 2, 8, frontier=1)

    def request(prompt: list[int], arrival: int) -> Request:
        output = OutputProcessor(GREEDY, None, (), prompt)
        return Request(str(arrival), prompt, GREEDY, 0, output, gamma=0, arrival=arrival)

    older, younger = request([1, 2, 3], 0), request([4], 1)
    scheduler.add(older)
    scheduler.add(younger)
    assert [part.request for part in scheduler.schedule().scheduled] == [older, younger]
    older.in_flight, younger.in_flight = 3, 1
    stalled = scheduler.schedule()  # the older one needs its second block, the younger one still has room
    assert stalled.stalled
    assert stalled.scheduled == stalled.preempted == []
    for entered in (older, younger):
        entered.num_cached, entered.in_flight = entered.in_flight, 0
        entered.token_ids.append(5)
    freed = scheduler.schedule()
    assert freed.preempted == [younger]
    assert [part.request for part in freed.scheduled] == [older]


@pytest.mark.parametrize("loop_name", LOOPS)
def test_the_older_request_is_not_overtaken_for_lack_of_blocks(loop_name: str) -> None:
    engine = build(
        CheapTarget(), "none", num_blocks=27, block_size=4, max_num_seqs=2, max_model_len=96, **loop(loop_name)
    )
    older = engine.add_request([1] * 40, SamplingParams(temperature=0, max_tokens=50))
    younger = engine.add_request([2] * 30, SamplingParams(temperature=0, max_tokens=60))
    order = [request.request_id for request, event in drain(engine) if event.finish_reason]
    assert order == [older.request_id, younger.request_id]
    assert older.preemptions == 0
    assert younger.preemptions > 0


def test_a_long_prompt_alone_fits_a_sliding_group_whatever_the_chunks() -> None:
    """One request, blocks of one position, chunks as large as a step, one of them in flight: the window's pool must hold it."""
    prompt = (STEM * 6)[:80]
    expected = alone(prompt, prefix_reuse=False)
    for device in (None, QueueDevice()):
        engine = build(
            CheapTarget(),
            "none",
            max_num_seqs=1,
            block_size=1,
            max_num_batched_tokens=16,
            prefix_reuse=False,
            device=device,
        )
        (request,) = engine.run([prompt], GREEDY)
        assert request.output.token_ids == expected
        assert request.preemptions == 0


# -- prefixes --------------------------------------------------------------------------------------------------------------


class Proposals:
    """Every block a drafter proposes, by the text it follows."""

    def __init__(self, drafter: Any) -> None:
        self.blocks: dict[tuple[int, ...], list[int]] = {}
        honest = drafter.propose

        def propose(context: DraftContext, sampler: Any) -> Draft:
            draft = honest(context, sampler)
            for row, slot in enumerate(context.slots.tolist()):
                text = tuple(context.history[slot, : int(context.lengths[row]) + 1].tolist())
                self.blocks[text] = draft.tokens[row].tolist()
            return draft

        drafter.propose = propose


@pytest.mark.parametrize("owner_stays", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("loop_name", ["plain", "late"])
def test_a_prefix_hit_brings_the_drafters_context_along(architecture: str, owner_stays: bool, loop_name: str) -> None:
    """The silent fault of the field: after a hit the target is right and the drafter blind."""
    target = tiny_target(architecture)
    prompt = [*STEM, *STEM[:9], 11]
    fresh, reused = tiny_dspark(target), tiny_dspark(target)
    without, after = Proposals(fresh), Proposals(reused)
    plain = build(target, fresh, width=2, prefix_reuse=False, **loop(loop_name)).run([prompt], GREEDY)[0]

    engine = build(target, reused, width=2, **loop(loop_name))
    first = engine.add_request([*prompt[:-1], 12], SamplingParams(temperature=0, max_tokens=12 if owner_stays else 1))
    for _ in range(3 if owner_stays else 6):
        engine.step()
    assert (first.status is Status.RUNNING) is owner_stays
    after.blocks.clear()
    second = engine.add_request(prompt, GREEDY)
    drain(engine)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 20  # 23 shared tokens, blocks of four
    assert second.output.token_ids == plain.output.token_ids
    assert second.statistics.accepted == plain.statistics.accepted
    assert second.statistics.steps == plain.statistics.steps
    compared = [text for text in without.blocks if text in after.blocks]
    assert len(compared) >= 4
    assert {text: after.blocks[text] for text in compared} == {text: without.blocks[text] for text in compared}


def test_a_hit_on_all_but_the_last_token_drafts_at_once() -> None:
    target = tiny_target("gemma3")
    drafter = tiny_dspark(target)
    engine = build(target, drafter, width=4)
    prompt = [*STEM, 1, 2, 3]  # 16 cached positions, then the anchor
    first = engine.run([prompt], GREEDY)[0]
    second = engine.run([prompt], GREEDY)[0]
    assert second.cached_tokens == 16
    assert second.output.token_ids == first.output.token_ids
    assert second.statistics.drafted == first.statistics.drafted + 4


@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_stop_inside_a_block_leaves_nothing_after_it(loop_name: str) -> None:
    """No token id, no registered block, no text of the dropped drafts: a later request must not find them."""
    inside = 0
    # Prompts that end with text of the target's own, so that what it goes on with, the stop included, is looked up there.
    prompts = [[*base, *alone(base)] for base in ([5, 6] * 8, [7] * 3, [1, 2, 3, 1, 2, 3, 1], STEM)]
    for prompt, stop, min_tokens in product(prompts, range(16), (0, 5)):
        params = SamplingParams(temperature=0, max_tokens=24, min_tokens=min_tokens, stop_token_ids=[stop])
        kept = alone(prompt, params)
        if stop not in kept:
            continue
        engine = build(CheapTarget(), "prompt-lookup", width=4, block_size=1, **loop(loop_name))
        (request,) = engine.run([prompt], params)
        assert request.output.token_ids == kept
        assert request.token_ids == [*prompt, *kept]
        assert request.output.finish_reason == "stop"
        inside += request.statistics.emitted < request.statistics.accepted + request.statistics.steps
        blocks: BlockManager = engine.blocks
        known = [key for pool in blocks.pools for key in pool._block_of]
        allowed = blocks._keys([*prompt, *kept])
        assert set(known) <= set(allowed)
        engine.assert_clean()
    assert inside, "no stop fell inside a block"


# -- leaving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_name", LOOPS)
@pytest.mark.parametrize("after", range(7))
def test_a_client_that_leaves_releases_everything_and_disturbs_nobody(loop_name: str, after: int) -> None:
    """Output contract 9, at every moment of a life: waiting, in the prompt's chunks, decoding, with a step in flight."""
    engine = build(CheapTarget(), "prompt-lookup", gamma=3, max_num_seqs=2, max_num_batched_tokens=8, **loop(loop_name))
    stays = engine.add_request([5, 6] * 4, GREEDY)
    leaves = engine.add_request(STEM, SamplingParams(temperature=0.8, max_tokens=20))
    waits = engine.add_request([7, 7], GREEDY)
    for _ in range(after):
        engine.step()
    for request in (leaves, waits):
        told = list(request.output.token_ids)
        event = engine.cancel(request.request_id)
        if event is None:  # it had ended by itself
            continue
        assert (event.finish_reason, event.token_ids) == ("abort", [])
        assert request.slot == -1
        assert request.output.token_ids == told
    gone = {leaves.request_id, waits.request_id}
    assert not gone & {request.request_id for request, _ in drain(engine)}
    assert stays.output.token_ids == alone([5, 6] * 4)
    engine.assert_clean()
    assert engine.cancel("nobody") is None


# -- order -----------------------------------------------------------------------------------------------------------------


def test_smaller_priorities_run_first_and_equal_ones_in_order() -> None:
    engine = build(CheapTarget(), "none", max_num_seqs=1)
    priorities = [1, 0, -1, 0]
    requests = [
        engine.add_request([i + 1], SamplingParams(temperature=0, max_tokens=2, priority=p))
        for i, p in enumerate(priorities)
    ]
    ended = [request.arrival for request, event in drain(engine) if event.finish_reason]
    assert ended == [2, 1, 3, 0]
    assert all(r.output.finish_reason == "length" for r in requests)


def test_lack_of_blocks_sends_the_least_urgent_away_first() -> None:
    engine = build(CheapTarget(), "none", num_blocks=27, max_num_seqs=3)
    settings = {"temperature": 0, "max_tokens": 40}
    relaxed = engine.add_request([1] * 20, SamplingParams(priority=5, **settings))
    urgent = [engine.add_request([i] * 20, SamplingParams(priority=0, **settings)) for i in (2, 3)]
    drain(engine)
    assert relaxed.preemptions > 0
    assert urgent[0].preemptions == 0
    assert relaxed.output.token_ids == alone([1] * 20, SamplingParams(**settings))


@pytest.mark.parametrize("loop_name", LOOPS)
def test_decodes_go_on_beside_a_long_prompt_and_the_prompt_beside_them(loop_name: str) -> None:
    """Whoever is older: a prompt never takes a decode's rows, and decodes leave a prompt at least a block's."""
    gamma = 3
    engine = build(
        CheapTarget(), "prompt-lookup", gamma=gamma, max_num_seqs=3, max_num_batched_tokens=13, **loop(loop_name)
    )
    chatty = SamplingParams(temperature=0, max_tokens=60)
    decoding = [engine.add_request([i, i + 1], chatty) for i in (1, 2)]
    for _ in range(3):
        engine.step()
    reader = engine.add_request((STEM * 6)[:70], SamplingParams(temperature=0, max_tokens=4, priority=-1))
    rows: list[int] = []
    honest = engine.scheduler.schedule

    def schedule() -> Any:
        result = honest()
        rows.append(sum(p.context_rows + int(p.emits) + (gamma if p.may_draft else 0) for p in result.scheduled))
        if reader.is_running and not reader.num_output and not reader.in_flight:
            here = {part.request for part in result.scheduled}
            assert here >= {r for r in decoding if r.is_running and r.num_output + min(r.in_flight, 1) < 60}
        return result

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    steps = 0
    while reader.first_token_at is None:
        engine.step()
        steps += 1
        assert steps <= 70 // (gamma + 1) + 3
    drain(engine)
    assert max(rows) <= 13, "more rows than max_num_batched_tokens"
    assert [r.output.token_ids for r in decoding] == [alone(r.prompt_token_ids, chatty) for r in decoding]


# -- layout assertions -----------------------------------------------------------------------------------------------------


def shifted(t: torch.Tensor, by: int = 1) -> torch.Tensor:
    return t.roll(by)


FAULTS: dict[str, Callable[..., tuple[Any, Any, Any, Any]]] = {
    "wrong stride": lambda i, b, w, a: (i, b, w, torch.arange(len(a)) * 5),
    "stale widths": lambda i, b, w, a: (i, b, shifted(w), a),
    "width beyond the limit": lambda i, b, w, a: (
        replace(i, plan=replace(i.plan, limits=[0] * len(i.plan.limits))),
        b,
        w,
        a,
    ),
    "rows of another request": lambda i, b, w, a: (i, replace(b, row_slot=b.row_slot.flip(0)), w, a),
    "positions one late": lambda i, b, w, a: (i, replace(b, positions=b.positions + 1), w, a),
    "sees the row after it": lambda i, b, w, a: (i, replace(b, kv_lens=b.kv_lens + 1), w, a),
    "tokens of another row": lambda i, b, w, a: (i, replace(b, token_ids=b.token_ids + 1), w, a),
    "writes to scratch": lambda i, b, w, a: (i, replace(b, cache_slots=tuple(c * 0 for c in b.cache_slots)), w, a),
    "writes twice": lambda i, b, w, a: (i, replace(b, cache_slots=tuple(c * 0 + 9 for c in b.cache_slots)), w, a),
    "logits of other rows": lambda i, b, w, a: (i, replace(b, logit_rows=shifted(b.logit_rows)), w, a),
    "padding that sees": lambda i, b, w, a: (
        i,
        replace(
            b,
            kv_lens=torch.cat([b.kv_lens, b.kv_lens[:1]]),
            token_ids=torch.cat([b.token_ids, b.token_ids[:1]]),
        ),
        w,
        a,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layout_fault_names_the_request(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.engine import step

    broken = 0

    def check(inputs: Any, state: Any, cache: Any, batch: Any, widths: Any, anchor_row: Any) -> None:
        nonlocal broken
        honest_check(inputs, state, cache, batch, widths, anchor_row)
        if len(set(widths.tolist())) > 1 and inputs.num_drafting > 1:
            broken += 1
            inputs, batch, widths, anchor_row = FAULTS[fault](inputs, batch, widths, anchor_row)
            honest_check(inputs, state, cache, batch, widths, anchor_row)

    monkeypatch.setattr(step, "check_layout", check)
    engine = build(CheapTarget(), "prompt-lookup", width="0,3,1,4", check_layout=True)
    expected = "padding row" if fault == "padding that sees" else r"request \d+ in slot \d+"
    with pytest.raises(LayoutError, match=expected):
        engine.run(PROMPTS, GREEDY)
    assert broken == 1
