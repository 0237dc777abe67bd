"""A step is a transaction: what it raises ends whom it concerns, everybody else goes on token for token."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from surefoot.engine.engine import TRIALS
from surefoot.engine.loop import EngineLoop
from surefoot.engine.trace import ObserverError
from surefoot.errors import EngineError
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build, tiny_dspark
from tests.engine.faults import ONE_REQUEST, STAGES, Faults

GREEDY = SamplingParams(temperature=0, max_tokens=9)
PENALISED = SamplingParams(temperature=0, max_tokens=30, presence_penalty=1.5, frequency_penalty=0.7)
STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
PROMPTS = [[3, 1, 4, 1, 5], [5, 6] * 8, [7], [*STEM, *STEM, 2], [1, 2, 3, 1, 2, 3, 1]]
TABLE = CostTable((1, 2, 4, 8, 32), ((1.0, 1.1, 1.6, 3.0, 12.0),), (1, 8), (0.1, 0.2))
LOOPS = ("plain", "late", "early")
TARGET = CheapTarget()


def engine_of(loop: str, drafter: Any = "dspark", **changes: Any) -> Any:
    chosen = tiny_dspark(TARGET, 3) if drafter == "dspark" else drafter
    device = None if loop == "plain" else QueueDevice(late=loop == "late")
    settings = {"gamma": 3, "max_num_seqs": 4, "max_num_batched_tokens": 20, "table": TABLE, **changes}
    return build(TARGET, chosen, device=device, **settings)


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return build(TARGET, "none").run([prompt], params)[0].output.token_ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [alone(prompt) for prompt in PROMPTS]


def drain(engine: Any, told: dict[str, list[int]]) -> int:
    """Step to the end, whatever is raised on the way; how often it was an interrupt."""
    interrupts = 0
    for _ in range(600):
        if not engine.has_work:
            return interrupts
        try:
            for request, event in engine.step():
                told[request.request_id] += event.token_ids
        except KeyboardInterrupt:
            interrupts += 1
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["exception", "interrupt", "out of memory"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_stage_costs_nobody_a_token(stage: str, kind: str, loop: str, expected: list[list[int]]) -> None:
    """One fault in a step of several requests, some of which read their prompts; before the stage, or after."""
    for after in (False, True):
        for steps in (0, 4):
            engine = engine_of(loop)
            faults, told = Faults(engine), defaultdict[str, list[int]](list)
            requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
            for _ in range(steps):
                for request, event in engine.step():
                    told[request.request_id] += event.token_ids
            faults.arm(stage, kind, after)
            interrupts = drain(engine, told)
            assert faults.fired[stage] == 1, "the fault has not happened"
            assert interrupts == (kind == "interrupt")
            failed = [r for r in requests if r.output.finish_reason == "error"]
            assert len(failed) <= (stage in ONE_REQUEST)
            for request, tokens in zip(requests, expected, strict=True):
                assert told[request.request_id] == request.output.token_ids == tokens[: request.num_output]
                assert request in failed or request.num_output == len(tokens)
            for request in failed:
                assert f"injected at {stage}" in (request.output.error or "")
            engine.assert_clean()
            again = engine.run(PROMPTS, GREEDY)  # what is cached by now must be right
            assert [request.output.token_ids for request in again] == expected
            engine.assert_clean()


class Poisoned:
    """Fails every step that a request takes part in, at a stage of the device."""

    def __init__(self, engine: Any, stage: str) -> None:
        self.engine, self.request, self.steps = engine, None, 0
        owner = engine.decode_step
        honest = getattr(owner, stage)

        def wrapped(inputs: Any, *args: Any) -> Any:
            self.steps += 1
            result = honest(inputs, *args)
            if self.request is not None and self.request.slot in inputs.slots and inputs.num_emitting:
                raise RuntimeError("poisoned")
            return result

        setattr(owner, stage, wrapped)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", ["_allocate", "_accept", "_commit"])
def test_the_request_that_is_to_blame_ends_and_its_neighbours_go_on(
    stage: str, loop: str, expected: list[list[int]]
) -> None:
    engine = engine_of(loop)
    poisoned, told = Poisoned(engine, stage), defaultdict[str, list[int]](list)
    neighbours = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for request, event in engine.step():
        told[request.request_id] += event.token_ids
    poisoned.request = engine.add_request(
        [*STEM, *STEM, 2, 2], SamplingParams(temperature=0, max_tokens=9, priority=-1)
    )
    drain(engine, told)
    assert poisoned.request.output.finish_reason == "error"
    assert poisoned.request.output.error == "a step of the engine failed: RuntimeError: poisoned"
    assert isinstance(poisoned.request.failure, RuntimeError)
    assert [told[request.request_id] for request in neighbours] == expected
    engine.assert_clean()
    poisoned.request = None
    assert [request.output.token_ids for request in engine.run([*PROMPTS, [*STEM, *STEM, 2, 2]], GREEDY)] == [
        *expected,
        alone([*STEM, *STEM, 2, 2]),
    ]


def test_many_bad_requests_do_not_wear_out_a_good_one() -> None:
    engine = engine_of("plain")
    poisoned = Poisoned(engine, "_accept")
    good = engine.add_request([5, 6] * 8, SamplingParams(temperature=0, max_tokens=60))
    for number in range(3 * TRIALS):
        for _ in range(3):
            engine.step()
        poisoned.request = engine.add_request([number + 1], GREEDY)
        while poisoned.request.finished_at is None:
            engine.step()
        assert poisoned.request.output.finish_reason == "error"
    drain(engine, defaultdict(list))
    assert good.output.token_ids == alone([5, 6] * 8, SamplingParams(temperature=0, max_tokens=60))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_drafter_that_fails_only_costs_speed(loop: str, expected: list[list[int]]) -> None:
    engine = engine_of(loop)

    def broken(*_: Any) -> Any:
        raise ValueError("the drafter is broken")

    engine.drafter.propose = broken
    got = engine.run(PROMPTS, GREEDY)
    assert [request.output.token_ids for request in got] == expected
    assert {request.output.finish_reason for request in got} == {"length"}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, AssertionError])
def test_a_device_that_is_broken_ends_everybody_soon(loop: str, error: Any, expected: list[list[int]]) -> None:
    engine = engine_of(loop)
    runner, calls = engine.decode_step.runner, 0
    honest = runner.run

    def broken(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise error("broken")

    runner.run = broken
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    drain(engine, defaultdict(list))
    assert {request.output.finish_reason for request in requests} == {"error"}
    assert calls <= 6 * len(PROMPTS)
    assert error is not AssertionError or calls <= 6, "a fault of the engine is not tried again"
    engine.assert_clean()
    runner.run = honest
    assert [request.output.token_ids for request in engine.run(PROMPTS, GREEDY)] == expected


def test_a_fault_that_only_a_batch_has_ends_after_a_few_trials() -> None:
    engine = engine_of("plain")
    honest, calls = engine.decode_step.runner.run, 0

    def run(batch: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if len(set(batch.row_slot.tolist())) > 1:
            raise RuntimeError("too many")
        return honest(batch, *args)

    engine.decode_step.runner.run = run
    requests = [engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in PROMPTS[:3]]
    drain(engine, defaultdict(list))
    ended = [request for request in requests if request.output.finish_reason == "error"]
    assert ended
    assert all(0 < request.num_output < 60 for request in ended), "each has gone on alone, a few times"
    for request in requests:
        own = alone(request.prompt_token_ids, SamplingParams(temperature=0, max_tokens=60))
        assert request.output.token_ids == own[: request.num_output]
    assert calls < 200


@pytest.mark.parametrize("loop", LOOPS)
def test_rows_without_a_number_end_their_request_only(loop: str, expected: list[list[int]]) -> None:
    engine = engine_of(loop)
    bad = None
    honest = engine._collect

    def collect(launched: Any, outputs: Any) -> None:
        outputs.invalid = [part.request is bad for part in launched.parts[: launched.inputs.num_emitting]]
        honest(launched, outputs)

    engine._collect = collect
    good = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    bad = engine.add_request([9, 9], GREEDY)
    drain(engine, defaultdict(list))
    assert [request.output.token_ids for request in good] == expected[:3]
    assert (bad.output.finish_reason, bad.output.token_ids, bad.failure) == ("error", [], None)
    assert "NaN" in (bad.output.error or "")
    assert "float32" in (bad.output.error or "")


@pytest.mark.parametrize("loop", LOOPS)
def test_blocks_of_a_chunk_are_registered_after_the_step_that_filled_them(loop: str) -> None:
    """With a step in flight, the chunk being launched must not be: it may still fail."""
    engine = engine_of(loop, "none", max_num_seqs=1, max_num_batched_tokens=8)
    prompt = (STEM * 4)[:40]
    engine.add_request(prompt, GREEDY)
    ran = 0
    honest = engine.decode_step.runner.run

    def run(batch: Any, *args: Any) -> Any:
        nonlocal ran
        result = honest(batch, *args)
        ran += len(batch.token_ids)
        return result

    engine.decode_step.runner.run = run
    for _ in range(4):
        engine.step()
        registered = max((len(held.keys) for held in engine.blocks.sequences.values()), default=0)
        assert registered * engine.blocks.block_size <= ran
    assert registered > 0


def test_an_observer_that_raises_is_told_no_more_and_loses_nobody_a_token(expected: list[list[int]]) -> None:
    engine, told = engine_of("plain"), defaultdict[str, list[int]](list)

    def observer(report: Any) -> None:
        raise OSError("no space left on device")

    engine.add_observer(observer)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(ObserverError, match="no space left"):
        engine.step()
    drain(engine, told)
    assert [told[request.request_id] for request in requests] == expected


# -- preemption and what is drawn --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["blocks", "fault"])
def test_after_a_preemption_penalties_still_know_output_from_prompt(loop: str, how: str) -> None:
    expected = [alone([*STEM, i], PENALISED) for i in range(4)]
    engine = engine_of(loop, num_blocks=31 if how == "blocks" else None)
    faults = Faults(engine)
    requests = [engine.add_request([*STEM, i], PENALISED) for i in range(4)]
    if how == "fault":
        for _ in range(12):
            engine.step()
        faults.arm("target", "exception", after=True)
    drain(engine, defaultdict(list))
    assert any(request.preemptions and request.num_output for request in requests)
    assert [request.output.token_ids for request in requests] == expected


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["blocks", "fault"])
def test_no_decode_step_is_numbered_twice(loop: str, how: str) -> None:
    """The number addresses the uniforms: a preempted request that began at 0 again would draw with the same ones."""
    engine = engine_of(loop, num_blocks=31 if how == "blocks" else None)
    faults, used = Faults(engine), defaultdict[str, list[int]](list)
    honest = engine.device.submit

    def submit(step: Any, inputs: Any) -> Any:
        slots = {request.slot: request.request_id for request in engine.scheduler.running}
        for slot, number in zip(inputs.slots, inputs.steps, strict=False):
            used[slots[slot]].append(number)
        return honest(step, inputs)

    engine.device.submit = submit
    params = SamplingParams(temperature=1, max_tokens=30, seed=4)
    requests = [engine.add_request([*STEM, i], params) for i in range(4)]
    if how == "fault":
        for _ in range(8):
            engine.step()
        faults.arm("commit", "exception", after=True)
    drain(engine, defaultdict(list))
    assert any(request.preemptions for request in requests)
    for request in requests:
        numbers = used[request.request_id]
        assert numbers == sorted(set(numbers))


# -- through the loop ----------------------------------------------------------------------------------------------------------


def test_the_loop_raises_what_ended_every_request_and_goes_on(expected: list[list[int]]) -> None:
    with EngineLoop(engine_of("plain")) as loop:
        runner = loop.engine.decode_step.runner
        honest = runner.run

        def broken(*_: Any) -> Any:
            raise RuntimeError("the device is broken")

        runner.run = broken
        handle = loop.submit(PROMPTS[0], GREEDY)
        event = next(handle)
        assert event.finish_reason == "error"
        assert event.error == "a step of the engine failed: RuntimeError: the device is broken"
        with pytest.raises(EngineError, match="the device is broken"):
            next(handle)
        runner.run = honest
        assert [token for event in loop.submit(PROMPTS[0], GREEDY) for token in event.token_ids] == expected[0]


def test_an_interrupt_on_the_loops_thread_costs_nobody_a_token(expected: list[list[int]]) -> None:
    with EngineLoop(engine_of("plain")) as loop:
        faults = Faults(loop.engine)
        handles = [loop.submit(prompt, GREEDY) for prompt in PROMPTS]
        for stage in ("target", "schedule", "commit"):
            faults.arm(stage, "interrupt", after=True)
        assert [[token for event in handle for token in event.token_ids] for handle in handles] == expected
        assert sum(faults.fired.values()) == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_cancelled_after_an_interrupted_step_gets_its_tokens_with_the_end(
    loop: str, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """The step had emitted when the interrupt came; its events wait for the next call, which must not speak for who has left."""
    engine = engine_of(loop)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    told: dict[str, list[int]] = defaultdict(list)
    observe, calls = engine.policy.learner.observe, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        observe(*arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.policy.learner, "observe", interrupted)

    def run() -> None:
        while True:
            for request, event in engine.step():
                told[request.request_id] += event.token_ids

    with pytest.raises(KeyboardInterrupt):
        run()
    leaving = next(request for request, _ in engine._events if request.finished_at is None)
    last = engine.cancel(leaving.request_id)
    assert last is not None
    assert last.finish_reason == "abort"
    assert last.token_ids
    told[leaving.request_id] += last.token_ids
    assert told[leaving.request_id] == leaving.output.token_ids
    before = list(told[leaving.request_id])
    drain(engine, told)
    assert told[leaving.request_id] == before, "an event for somebody who has left"
    for request, tokens in zip(requests, expected, strict=False):
        assert told[request.request_id] == tokens[: len(told[request.request_id])]
        assert request is leaving or told[request.request_id] == tokens
    engine.assert_clean()
