"""Where tensors live, without a GPU: whole steps on fake tensors of a device that is not the CPU. An operation that mixes
devices fails, and so does any read of a device value and any copy between host and device but the prepared one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot.engine.messages
import surefoot.engine.state
import surefoot.engine.step
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.engine.device import HostOutputs, Ready
from surefoot.engine.distribution import DraftVocabulary
from surefoot.engine.graphs import CudaGraphRunner
from surefoot.kernels import attention
from surefoot.sampling import SamplingParams
from surefoot.speculation.estimator import LogisticEstimator
from tests.engine.engines import EngineUnderTest, build, tiny_drafter
from tests.tiny_models import tiny_target

registration = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch cannot pretend to have another device", allow_module_level=True)
registration._setup_privateuseone_for_python_backend("elsewhere")
ELSEWHERE = torch.device("elsewhere", 0)
GREEDY = SamplingParams(temperature=0, max_tokens=3)
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
    max_tokens=3,
)


class NoTransfers(TorchDispatchMode):
    """Fails on an operation between a tensor of the device and one of the host; numbers in tensors of no dimension may pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
        places = {t.device.type for t in flat if isinstance(t, torch.Tensor) and (t.dim() or "copy" in str(func))}
        if len(places) > 1:
            raise AssertionError(f"{func} moves data between {' and '.join(sorted(places))}")
        return out


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Where fake tensors are made; what crosses between host and device by design is stood in for."""

    def to_device(values: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.empty(np.shape(values), dtype=dtype, device=device)

    def attend(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: Any, **_: Any) -> Any:
        assert all(t.device == query.device for t in (key_cache, value_cache, *rest))
        return query.new_empty(*query.shape[:2], value_cache.shape[2])

    for module in (surefoot.engine.state, surefoot.engine.messages, surefoot.engine.step):
        monkeypatch.setattr(module, "to_device", to_device)
    monkeypatch.setattr(attention, "paged_attention_reference", attend)

    def confidence_source(drafter: Any, device: Any, calibration: Any = None) -> Any:
        with unset_fake_temporarily():  # it checks its numbers
            source = honest(drafter, "cpu", calibration)
        parts = (source, source.estimator, getattr(source, "calibration", None), drafter)
        for part in parts:
            for name, value in vars(part).items() if part is not None else ():
                if isinstance(value, torch.Tensor) and name != "host_weights":
                    setattr(part, name, torch.empty(value.shape, dtype=value.dtype, device=device))
        return source

    honest = DSparkDrafter.confidence_source
    monkeypatch.setattr(DSparkDrafter, "confidence_source", confidence_source)
    monkeypatch.setattr(LogisticEstimator, "refit", lambda self: None)
    return FakeTensorMode()


class FakeDevice:
    """Runs the step; what comes back are zeros of the right shapes."""

    overlaps, reads_are_free = True, False

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def submit(self, step: Any, inputs: Any) -> Ready:
        with self.mode, NoTransfers():
            outputs = step(inputs)

        def zeros(value: torch.Tensor) -> torch.Tensor:
            assert value.device == ELSEWHERE, f"an output of shape {list(value.shape)} is on {value.device}"
            return torch.zeros(value.shape, dtype=value.dtype)

        return Ready(HostOutputs(outputs.map_tensors(zeros), 1.0))


def move(module: Any) -> None:
    """Parameters and buffers become fake ones of the other device."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(
                    torch.empty(value.shape, dtype=value.dtype, device=ELSEWHERE)
                )
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=ELSEWHERE)


def engine_on(mode: FakeTensorMode, target: Any, drafter: str, **settings: Any) -> EngineUnderTest:
    chosen = tiny_drafter(target, drafter, 4)
    with mode:
        move(target.model)
        if hasattr(chosen, "model"):
            move(chosen.model)
        runner = CudaGraphRunner(target, (4, 16), capture=lambda run: (lambda: None, run()))
        vocabulary = getattr(chosen, "vocabulary", None)
        if vocabulary is not None:
            chosen.model.vocabulary = None  # the engine looks at it once, when it is built
        engine = build(target, chosen, device=FakeDevice(mode), runner=runner, check_layout=False, **settings)
        if vocabulary is not None:
            chosen.model.vocabulary = vocabulary
            engine.decode_step.vocabulary = DraftVocabulary(vocabulary, target.vocab_size)
        return engine


@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [
        ("llama", "none"),
        ("qwen3", "prompt-lookup"),
        ("gemma3", "dspark"),
        ("qwen3", "dspark-rnn"),
        ("llama", "dspark-reduced"),
        ("gemma3", "dflash"),
    ],
)
def test_a_step_stays_on_the_device(architecture: str, drafter: str, mode: FakeTensorMode) -> None:
    target = tiny_target.__wrapped__(architecture)
    engine = engine_on(mode, target, drafter, max_num_seqs=2, max_num_batched_tokens=20)
    got = engine.run([[1, 2, 3, 4] * 3] * 2, [GREEDY, EVERYTHING])
    assert all(len(request.output.token_ids) == 3 for request in got)
    engine.assert_clean()
