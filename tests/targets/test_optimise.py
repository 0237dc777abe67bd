"""The optimisation pass changes the speed of a model, not what it computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear
from surefoot.targets.optimise import STEPS, optimise
from surefoot.targets.target import Target

from .flat import FlatRunner, random_model

KINDS = ["qwen2", "gemma3", "gpt-oss", "qwen3-moe", "phi3"]
needs_native = pytest.mark.skipif(not native.available(), reason="native kernels cannot be built here")


def logits(target: Target, ids: list[int]) -> Tensor:
    runner = FlatRunner(target)
    return target.forward(runner.batch([(0, 0, ids)]), runner.cache).logits


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", list(STEPS))
def test_each_step_keeps_the_logits(kind, step):
    model = random_model(kind)
    ids = list(range(5, 25))
    expected = logits(Target(copy.deepcopy(model)), ids)
    assert optimise(model, steps=[step]) == [step]
    actual = logits(Target(model), ids)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


@needs_native
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_rows_do_not_depend_on_their_batch(kind):
    """Packed: the same bits whether a row runs alone, in a block, or beside another request."""
    model = random_model(kind).to(torch.bfloat16)
    optimise(model)
    target, ids = Target(model), list(range(5, 25))
    whole = logits(target, ids)
    runner = FlatRunner(target)
    target.forward(runner.batch([(1, 0, ids[:13])]), runner.cache)
    alone = target.forward(runner.batch([(1, 13, ids[13:14])]), runner.cache).logits
    block = target.forward(runner.batch([(2, 0, [9, 8, 7]), (1, 13, ids[13:18])]), runner.cache).logits[3:]
    assert torch.equal(alone[0], whole[13])
    assert torch.equal(block, whole[13:18])


@needs_native
def test_a_tied_embedding_stays_for_look_ups():
    model = random_model("gemma3")
    embedding = model.get_input_embeddings().weight.clone()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    optimise(model, steps=["packed-head"])
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert isinstance(model.get_output_embeddings(), PackedLinear)


@needs_native
def test_int8_is_close_to_and_not_the_same_as_the_original():
    model = random_model("qwen3")
    expected = logits(Target(copy.deepcopy(model)), list(range(5, 25)))
    optimise(model, quantize="int8")
    actual = logits(Target(model), list(range(5, 25)))
    difference = float((actual - expected).abs().max() / expected.abs().max())
    assert 1e-6 < difference < 0.2


def test_without_native_kernels_nothing_changes(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    model = random_model("qwen2")
    assert optimise(model) == []
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_what_is_not_recognised_is_left_alone():
    model = random_model("gpt2")  # its projections are Conv1D
    if native.available():
        assert optimise(model) == ["packed-head"]
    assert not any(type(module) is nn.Linear for module in model.transformer.modules())


def test_unknown_step_is_refused():
    with pytest.raises(ConfigurationError, match=r"step 'fuse-everything': allowed are packed-projections"):
        optimise(random_model("llama"), steps=["fuse-everything"])
