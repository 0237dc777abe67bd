"""One thread owns the engine: every client gets its own events, each once and in order, whatever the others do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from surefoot.engine.loop import EngineLoop
from surefoot.errors import EngineError, RequestError
from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import build

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[3, 1, 4, 1, 5], [5, 6] * 8, [7], [2, 7, 1, 8] * 3, [1, 2, 3, 1, 2, 3, 1]]


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return build(CheapTarget(), "none").run([prompt], params)[0].output.token_ids


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    with EngineLoop(lambda: build(CheapTarget(), "prompt-lookup", gamma=3, max_num_seqs=4)) as loop:
        yield loop
        loop.call(lambda engine: engine.assert_clean())  # type: ignore[attr-defined]


def tokens_of(events: Any) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_handle_gets_every_token_once_and_in_order(loop: EngineLoop) -> None:
    assert tokens_of(loop.submit(PROMPTS[0], GREEDY)) == alone(PROMPTS[0])


def test_interleaved_handles_do_not_take_each_others_events(loop: EngineLoop) -> None:
    handles = [loop.submit(prompt, GREEDY) for prompt in PROMPTS]
    got: list[list[int]] = [[] for _ in handles]
    left = dict(enumerate(handles))
    while left:
        for index, handle in list(left.items()):
            event = next(handle, None)
            if event is None:
                del left[index]
            else:
                got[index] += event.token_ids
    assert got == [alone(prompt) for prompt in PROMPTS]


def test_thirty_two_threads_share_one_loop(loop: EngineLoop) -> None:
    expected = {tuple(prompt): alone(prompt) for prompt in PROMPTS}
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(3):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            got = tokens_of(loop.submit(prompt, GREEDY))
            if got != expected[tuple(prompt)]:
                wrong.append((number, prompt, got))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_a_handle_that_is_dropped_cancels_its_request(loop: EngineLoop) -> None:
    long = SamplingParams(temperature=0, max_tokens=80)
    handle = loop.submit([1, 2], long)
    next(handle)
    other = loop.submit([5, 6] * 8, GREEDY)
    del handle
    assert loop.call(lambda engine: len(engine.requests)) <= 1
    assert tokens_of(other) == alone([5, 6] * 8)


def test_a_consumer_thread_that_dies_cancels_its_request(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def client() -> None:
        for _ in loop.submit([1, 2], SamplingParams(temperature=0, max_tokens=80)):
            raise ValueError("the consumer fails")

    thread = threading.Thread(target=client)
    thread.start()
    thread.join(60)
    assert loop.call(lambda engine: len(engine.requests)) == 0


def test_a_loop_faster_than_its_client_loses_nothing(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole answer is computed before the thread that queues it goes on; its request id is free again."""
    expected = alone(PROMPTS[0])
    commands = loop._commands

    class Waits:
        """After a command the client sleeps until the loop has nothing left to do."""

        def put(self, command: Any) -> None:
            commands.put(command)
            deadline = time.monotonic() + 5
            time.sleep(0.05)
            while loop.engine.has_work and time.monotonic() < deadline:
                time.sleep(0.01)

        def __getattr__(self, name: str) -> Any:
            return getattr(commands, name)

    monkeypatch.setattr(loop, "_commands", Waits())
    got: list[list[int]] = []
    client = threading.Thread(
        target=lambda: got.extend(tokens_of(loop.submit(PROMPTS[0], GREEDY, request_id="mine")) for _ in range(2)),
        daemon=True,
    )
    client.start()
    client.join(30)
    assert got == [expected, expected]


def test_cancel_from_another_thread_ends_the_iteration(loop: EngineLoop) -> None:
    handle = loop.submit([1, 2], SamplingParams(temperature=0, max_tokens=80))
    events = [next(handle)]
    threading.Thread(target=handle.cancel).start()
    events += handle
    assert events[-1].finish_reason == "abort"
    got = tokens_of(events)
    assert got == alone([1, 2], SamplingParams(temperature=0, max_tokens=80))[: len(got)]


def test_n_answers_compute_their_prompt_once(loop: EngineLoop) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    handle = loop.submit(prompt, SamplingParams(temperature=1, seed=3, max_tokens=9, n=4))
    got: dict[int, list[int]] = {index: [] for index in range(4)}
    for event in handle:
        got[event.index] += event.token_ids
    assert [request.cached_tokens for request in handle.requests] == [0, 8, 8, 8]
    assert all(len(tokens) == 9 for tokens in got.values())
    assert len({tuple(tokens) for tokens in got.values()}) > 1
    one = tokens_of(loop.submit(prompt, SamplingParams(temperature=1, seed=3, max_tokens=9)))
    assert len(one) == 9


@pytest.mark.parametrize("when", ["first", "held"])
def test_answers_that_wait_for_a_prompt_outlive_its_cancel(loop: EngineLoop, when: str) -> None:
    def begin(engine: Any) -> list[Any]:
        first, *held = (engine.make_request([1, 2, 3, 4, 5], GREEDY) for _ in range(3))
        engine.admit(first)
        for request in held:
            engine.admit(request, after=first)
        engine.cancel((first if when == "first" else held[0]).request_id)
        engine.run([], GREEDY)
        return [first, *held]

    got = [request.output.finish_reason for request in loop.call(begin)]
    assert sorted(got) == ["abort", "length", "length"]


def test_a_request_id_is_used_by_one_request_at_a_time(loop: EngineLoop) -> None:
    handle = loop.submit([1], GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="'mine' is in use"):
        loop.submit([2], GREEDY, request_id="mine")
    assert tokens_of(handle) == alone([1]), "the refused one must not cancel the other"
    assert tokens_of(loop.submit([2], GREEDY, request_id="mine")) == alone([2])


def test_what_cannot_be_served_is_refused_in_the_callers_thread(loop: EngineLoop) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        loop.submit([], GREEDY)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 // 0)


def test_only_the_loop_changes_its_engine(loop: EngineLoop) -> None:
    for forbidden in (loop.engine.step, lambda: loop.engine.add_request([1], GREEDY), lambda: loop.engine.cancel("x")):
        with pytest.raises(RuntimeError, match="belongs to a loop"):
            forbidden()


def test_an_idle_loop_sleeps(loop: EngineLoop) -> None:
    list(loop.submit([1], GREEDY))
    clock = time.pthread_getcpuclockid(loop._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.03


def test_the_threads_of_the_caller_hold_on_the_loops_thread() -> None:
    assert torch.get_num_threads() == 1
    with EngineLoop(build(CheapTarget(), "none")) as loop:
        assert loop.call(lambda engine: torch.get_num_threads()) == 1

    def with_three() -> Any:
        torch.set_num_threads(3)
        return build(CheapTarget(), "none")

    try:
        with EngineLoop(with_three) as loop:
            assert loop.call(lambda engine: torch.get_num_threads()) == 3
            assert torch.get_num_threads() == 3, "a fingerprint made here must name the threads of the engine"
    finally:
        torch.set_num_threads(1)


def test_building_fails_where_the_loop_is_made() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("no model")

    with pytest.raises(ZeroDivisionError, match="no model"):
        EngineLoop(broken)


def test_drain_lets_requests_end_and_takes_no_new_ones(loop: EngineLoop) -> None:
    handles = [loop.submit(prompt, GREEDY) for prompt in PROMPTS]
    loop.drain()
    assert [request.finished_at is not None for handle in handles for request in handle.requests] == [True] * 5
    with pytest.raises(EngineError, match="shutting down"):
        loop.submit([1], GREEDY)
    assert [tokens_of(handle) for handle in handles] == [alone(prompt) for prompt in PROMPTS]


def test_stop_tells_everybody_who_waits() -> None:
    loop = EngineLoop(build(CheapTarget(), "none", max_num_seqs=2))
    handles = [loop.submit(prompt, SamplingParams(temperature=0, max_tokens=80)) for prompt in PROMPTS]
    loop.stop()
    loop.stop()
    assert {list(handle)[-1].finish_reason for handle in handles} == {"abort"}
    with pytest.raises(EngineError, match="closed"):
        loop.submit([1], GREEDY)
    with pytest.raises(EngineError, match="closed"):
        loop.call(lambda engine: None)


def test_a_given_engine_belongs_to_its_maker_again_after_the_loop() -> None:
    engine = build(CheapTarget(), "none")
    with EngineLoop(engine) as loop:
        list(loop.submit([1], GREEDY))
    assert engine.run([[1]], GREEDY)[0].output.token_ids == alone([1])


def test_an_engine_that_breaks_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the engine's own bookkeeping, which no transaction covers."""
    engine = build(CheapTarget(), "none")
    loop = EngineLoop(engine)
    monkeypatch.setattr(engine, "step", lambda: 1 // 0)
    handle = loop.submit([1], GREEDY)
    (event,) = [next(handle)]
    assert event.finish_reason == "error"
    assert "division" in (event.error or "")
    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        next(handle)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="has failed"):
        loop.submit([1], GREEDY)
    loop.stop()


def test_neither_pickled_nor_forked(loop: EngineLoop) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(loop)
    monkey = loop._process
    try:
        loop._process = monkey + 1
        with pytest.raises(EngineError, match="forked"):
            loop.submit([1], GREEDY)
    finally:
        loop._process = monkey


INTERRUPTED = """
import os, signal, sys, threading
from surefoot.engine.loop import EngineLoop
from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import build

loop = EngineLoop(build(CheapTarget(), "prompt-lookup", max_model_len=600))
long = SamplingParams(temperature=0, max_tokens=500)
other, got = loop.submit([5, 6] * 4, long), []
thread = threading.Thread(target=lambda: got.extend(t for event in other for t in event.token_ids))
thread.start()
try:
    for number, event in enumerate(loop.submit([1, 2], long)):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
thread.join(60)
assert not thread.is_alive()
assert got == build(CheapTarget(), "none", max_model_len=600).run([[5, 6] * 4], long)[0].output.token_ids
loop.call(lambda engine: engine.assert_clean())
print("the other went on")
handle = loop.submit([1, 2], long)
next(handle)
sys.exit(0)  # with a request under way and nothing closed
"""


def test_an_interrupt_ends_its_own_consumer_only_and_the_exit_does_not_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.stdout.split("\n")[:2] == ["interrupted", "the other went on"], done.stderr
    assert done.returncode == 0, done.stderr
