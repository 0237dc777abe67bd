"""Another executor of a mixture's experts: called through transformers' own dispatch, with the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.targets import experts
from surefoot.targets.experts import EXECUTORS, PackedExperts
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from tests.targets.flat import FlatRunner, random_model

needs_native = pytest.mark.skipif(
    not native.available(), reason="the optimisation pass does nothing without native kernels"
)
IDS = list(range(5, 25))


def logits(target: Target) -> Tensor:
    runner = FlatRunner(target)
    with torch.no_grad():
        return target.forward(runner.batch([(0, 0, IDS)]), runner.cache).logits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the executor."""
    rows: list[int] = []
    compute = PackedExperts.__call__

    def counted(self: PackedExperts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows.append(len(hidden))
        return compute(self, hidden, chosen, weights)

    monkeypatch.setattr(PackedExperts, "__call__", counted)
    return rows


@needs_native
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_the_executor_computes_what_transformers_computes(kind: str, calls: list[int]) -> None:
    """gpt-oss too: transposed weights with biases, gate and up interleaved."""
    model = random_model(kind)
    expected = logits(Target(copy.deepcopy(model)))
    assert not calls
    assert "experts" in optimise(model, experts="packed")
    target = Target(model)
    calls.clear()  # the probe's
    actual = logits(target)
    assert calls == [len(IDS)] * model.config.num_hidden_layers
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@needs_native
def test_experts_are_left_alone_unless_asked_for(calls: list[int]) -> None:
    model = random_model("qwen3-moe")
    assert "experts" not in optimise(model)
    logits(Target(model))
    assert not calls


@needs_native
def test_a_model_without_experts_has_none_to_replace() -> None:
    assert "experts" not in optimise(random_model("qwen3"), experts="packed")


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="experts 'fast': allowed are packed"):
        optimise(random_model("mixtral"), experts="fast")


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_row_does_not_notice_its_neighbours(dtype: torch.dtype, quantize: str | None) -> None:
    module = random_model("mixtral").to(dtype).model.layers[0].mlp.experts
    assert experts._is_replaceable(module)
    executor = PackedExperts(module, quantize)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, 32, generator=generator).to(dtype)
    chosen = torch.rand(33, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(33, 2, generator=generator).to(dtype)
    together = executor(hidden, chosen, weights)
    assert together.abs().max() > 0
    for rows in ([0], [5, 4], [32, 0, 7], list(range(20))):
        assert torch.equal(executor(hidden[rows], chosen[rows], weights[rows]), together[rows])


@needs_native
def test_a_choice_beyond_the_experts_adds_nothing() -> None:
    """What transformers writes where another rank has the expert."""
    executor = PackedExperts(random_model("mixtral").model.layers[0].mlp.experts)
    hidden, weights = torch.randn(3, 32), torch.ones(3, 2)
    alone = executor(hidden, torch.tensor([[1, 4]] * 3), weights)
    twice = executor(hidden, torch.tensor([[1, 1]] * 3), weights / 2)
    torch.testing.assert_close(alone, twice)


@needs_native
def test_another_executor_can_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam itself: an executor from outside, made with the experts module, gets every layer's rows."""
    seen: list[Any] = []

    def zeros(module: Any, quantize: str | None) -> Any:
        def execute(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            seen.append((module, hidden.shape, chosen.shape, weights.shape))
            return torch.zeros_like(hidden)

        return execute

    monkeypatch.setitem(EXECUTORS, "zeros", zeros)
    model = random_model("qwen3-moe")
    before = logits(Target(copy.deepcopy(model)))
    optimise(model, experts="zeros")
    target = Target(model)
    seen.clear()  # the probe's
    assert not torch.allclose(before, logits(target))
    assert [module for module, *_ in seen] == [layer.mlp.experts for layer in model.model.layers]
    assert {tuple(shapes) for _, *shapes in seen} == {((20, 32), (20, 2), (20, 2))}
