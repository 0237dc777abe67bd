"""The overlapped loop: same tokens, host time hidden, and no read inside a step but the published outputs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.engine.device import HostOutputs, InlineDevice, Ready, Step, ThreadDevice
from surefoot.engine.messages import StepInputs, StepOutputs
from surefoot.engine.step import DecodeStep
from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build
from tests.tiny_models import tiny_target

TABLE = CostTable((1, 2, 4, 8, 32), ((1.0, 1.1, 1.6, 3.0, 12.0),), (1, 8), (0.1, 0.2))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 6] * 9, [7], [2, 7, 1, 8] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5]]
GREEDY = SamplingParams(temperature=0, max_tokens=14)


@pytest.mark.parametrize("width", [None, 2, "0,3,1,4"])
@pytest.mark.parametrize(("name", "drafter"), [("cheap", "prompt-lookup"), ("gemma3", "dspark")])
def test_the_same_tokens_as_the_plain_loop(name: str, drafter: str, width: Any) -> None:
    target = CheapTarget() if name == "cheap" else tiny_target(name)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[1, 3]), GREEDY, GREEDY, GREEDY]
    settings = {"width": width, "max_num_seqs": 3, "max_num_batched_tokens": 18, "table": TABLE}
    plain = build(target, drafter, **settings).run(PROMPTS, params)
    for device in (ThreadDevice(latency_ms=1.0), QueueDevice(late=True), QueueDevice(late=False)):
        engine = build(target, drafter, device=device, **settings)
        got = engine.run(PROMPTS, params)
        assert [r.output.token_ids for r in got] == [r.output.token_ids for r in plain]
        assert [r.output.finish_reason for r in got] == [r.output.finish_reason for r in plain]
        engine.assert_clean()


def test_a_sampled_text_is_the_same_as_long_as_the_widths_are() -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=40, top_p=0.95)
    texts = []
    for device in (None, QueueDevice(late=True), ThreadDevice()):
        engine = build(CheapTarget(), "prompt-lookup", width=2, device=device)
        texts.append(engine.run([PROMPTS[1]], params)[0].output.token_ids)
    # Near its end the overlapped loop does not know yet how many tokens are left, and may verify more of them.
    assert texts[0][:-3] == texts[1][:-3]
    assert texts[1] == texts[2]


class SlowHost:
    """Adds host time to every step of an engine."""

    def __init__(self, engine: Any, seconds: float) -> None:
        honest = engine.scheduler.schedule

        def schedule() -> Any:
            time.sleep(seconds)
            return honest()

        engine.scheduler.schedule = schedule


def test_the_host_works_while_the_device_does() -> None:
    """N steps with device time L and host time H take N max(L, H), not N (L + H)."""
    latency, host, tokens = 0.03, 0.02, 24
    engine = build(CheapTarget(), "none", device=ThreadDevice(latency * 1e3), check_layout=False)
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
    SlowHost(engine, host)
    start = time.perf_counter()
    engine.run([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=tokens))
    wall = time.perf_counter() - start
    assert wall > tokens * latency
    assert wall < tokens * (latency + 0.75 * host), f"{wall:.3f} s: the loop waits for the device before it plans"


def test_the_loop_drains_and_a_request_that_left_is_silent() -> None:
    engine = build(CheapTarget(), "prompt-lookup", device=QueueDevice())
    leaver = engine.add_request([1, 2, 3], GREEDY)
    assert engine.step() == []  # launched, not collected
    assert engine.has_work
    engine.cancel(leaver.request_id)
    assert engine.has_work, "the step in flight has to be collected"
    newcomer = engine.add_request([4, 5, 6], GREEDY)  # takes the slot while a step still writes to it
    events = []
    while engine.has_work:
        events += engine.step()
    assert {request.request_id for request, _ in events} == {newcomer.request_id}
    assert newcomer.output.token_ids == build(CheapTarget(), "none").run([[4, 5, 6]], GREEDY)[0].output.token_ids
    assert leaver.output.token_ids == []
    engine.assert_clean()


@pytest.mark.parametrize("planner", ["causal", "stopping"])
def test_a_planner_that_reads_in_mid_step_is_refused(planner: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{planner}'.*'stale'"):
        build(CheapTarget(), "prompt-lookup", device=ThreadDevice(), policy={"planner": planner})
    with pytest.raises(ConfigurationError, match="stale"):
        build(CheapTarget(), "prompt-lookup", overlap=True, policy={"planner": planner})
    assert build(CheapTarget(), "prompt-lookup", device=ThreadDevice()).policy.planner_name == "stale"
    assert build(CheapTarget(), "prompt-lookup").policy.planner_name == "stopping"


# -- the sync detector -----------------------------------------------------------------------------------------------------

READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "cpu", "is_nonzero"}
DYNAMIC = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount")


class DeviceRead(AssertionError):
    """A step looked at a value of the device."""


class NoPythonReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise DeviceRead(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class NoDynamicShapes(TorchDispatchMode):
    """Operations whose result's shape, or whose result on the host, depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        repeats = (
            name == "repeat_interleave"
            and func._overloadname.endswith("Tensor")
            and not (kwargs or {}).get("output_size")
        )
        if name in DYNAMIC or masks or repeats:
            raise DeviceRead(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reads() -> Iterator[None]:
    with NoPythonReads(), NoDynamicShapes():
        yield


class WatchedDevice:
    """A step's own values may not be looked at while it runs; its outputs may, when it has."""

    overlaps = True
    reads_are_free = False

    def submit(self, step: Step, inputs: StepInputs) -> Ready:
        with no_reads():
            outputs = step(inputs)
        return Ready(HostOutputs(outputs, 1.0))


EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={3: 0.5},
    logprobs=2,
    max_tokens=10,
)


@pytest.mark.skipif(
    not native.available(), reason="torch's reference attention reads lengths; CUDA has a kernel of its own"
)
@pytest.mark.parametrize(
    "drafter", ["none", "prompt-lookup", "dspark", "dspark-rnn", "dspark-gated", "dspark-reduced", "dflash"]
)
def test_no_step_reads_the_device(drafter: str) -> None:
    """Prompt chunks, ragged widths, every sampling stage, log-probs; limits that cut widths are padding, not a read."""
    target = tiny_target("gemma3")
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 18, "check_layout": False}
    engine = build(target, drafter, device=WatchedDevice(), table=TABLE, **settings)
    params = [EVERYTHING, GREEDY, SamplingParams(temperature=0, max_tokens=8, gamma=1), EVERYTHING, GREEDY]
    got = engine.run(PROMPTS, params)
    engine.assert_clean()
    plain = build(target, "none", **settings).run(PROMPTS, params)
    for index in (1, 2, 4):
        assert got[index].output.token_ids == plain[index].output.token_ids


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: int(t.max()),
        lambda t: bool((t > 0).any()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: list(range(t.max())),
        lambda t: t.numpy(),
    ],
)
def test_the_detector_detects(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DecodeStep._commit

    def curious(self: DecodeStep, inputs: StepInputs, slots: Any, verdict: Any) -> None:
        honest(self, inputs, slots, verdict)
        read(verdict.accepted)

    monkeypatch.setattr(DecodeStep, "_commit", curious)
    engine = build(CheapTarget(), "prompt-lookup", device=WatchedDevice(), check_layout=False)
    with pytest.raises(DeviceRead):
        engine.run([[1, 2, 3]], GREEDY)


def test_a_device_on_which_reads_are_free_packs_without_padding() -> None:
    rows: dict[bool, list[int]] = {True: [], False: []}

    class Counting(InlineDevice):
        def __init__(self, free: bool) -> None:
            self.reads_are_free = free

        def submit(self, step: Step, inputs: StepInputs) -> Ready:
            def counted(inputs: StepInputs) -> StepOutputs:
                outputs = step(inputs)
                rows[self.reads_are_free].append(outputs.rows)
                return outputs

            return super().submit(counted, inputs)

    texts = [
        build(CheapTarget(), "prompt-lookup", device=Counting(free)).run(PROMPTS, GREEDY) for free in (True, False)
    ]
    assert [r.output.token_ids for r in texts[0]] == [r.output.token_ids for r in texts[1]]
    assert sum(rows[True]) < sum(rows[False])
