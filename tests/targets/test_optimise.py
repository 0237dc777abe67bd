"""The optimisation pass changes the speed of a model, not what it computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3Config, Qwen3MoeConfig

from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear
from surefoot.targets import fused
from surefoot.targets.attention import PagedStep
from surefoot.targets.fused import FusedDecoder, FusedLayer, activation_of
from surefoot.targets.optimise import STEPS, optimise
from surefoot.targets.target import Target

from .flat import CONFIGS, FlatRunner, random_model

KINDS = ["llama", "qwen2", "qwen3", "gemma3", "mistral-window", "gpt-oss", "qwen3-moe", "phi3"]
FUSED = {"fused-norms", "fused-attention", "fused-feed-forward", "fused-layers", "fused-decoder"}
needs_native = pytest.mark.skipif(not native.available(), reason="native kernels cannot be built here")


def logits(target: Target, ids: list[int]) -> Tensor:
    runner = FlatRunner(target)
    return target.forward(runner.batch([(0, 0, ids)]), runner.cache).logits


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [*([step] for step in STEPS), list(STEPS)], ids=[*STEPS, "all"])
def test_steps_keep_the_logits(kind, steps):
    model = random_model(kind)
    ids = list(range(5, 25))
    expected = logits(Target(copy.deepcopy(model)), ids)
    applied = optimise(model, steps=steps)
    if kind in ("gpt-oss", "phi3"):
        assert not FUSED & set(applied)
    elif kind != "qwen3-moe" and len(steps) == 1:
        needs_parts = steps[0] in ("fused-layers", "fused-decoder")  # which have to be fused first
        assert applied == ([] if needs_parts else steps)
    elif kind != "qwen3-moe":
        assert set(applied) == set(steps) - {"packed-projections"}  # every projection is fused
    actual = logits(Target(model), ids)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


@needs_native
def test_a_target_may_be_optimised_after_it_was_wrapped():
    model = random_model("gemma3")
    target = Target(model)
    runner, ids = FlatRunner(target), list(range(5, 25))
    before = target.forward(runner.batch([(0, 0, ids)]), runner.cache, (-1, 1))
    optimise(target.model)
    after = target.forward(runner.batch([(0, 0, ids)]), runner.cache, (-1, 1))
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.features, before.features, rtol=1e-5, atol=1e-4)


@needs_native
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "mistral-window"])
def test_a_layer_in_one_call_has_the_bits_of_its_parts(kind, dtype, quantize, monkeypatch):
    """Prompt chunk, drafts and padding beside one another, after a first pass; what is cached is compared too."""
    model = random_model(kind).to(dtype)
    optimise(model, quantize=quantize)
    target, ids = Target(model), list(range(5, 25))
    layers = [layer for layer in target.decoder_layers if isinstance(layer, FusedLayer)]
    assert len(layers) == target.num_layers
    natively: list[int] = []

    def passes() -> list[Tensor]:
        runner = FlatRunner(target)
        first = target.forward(runner.batch([(1, 0, ids[:13])]), runner.cache, (-1, 0, 2))
        batch = runner.batch([(2, 0, [9, 8, 7]), (1, 13, ids[13:18])], padding=3)
        second = target.forward(batch, runner.cache, (-1, 0, 2))
        real = slice(0, 8)  # what padding holds is nobody's business
        cached = [t[runner.cache.block_size :] for pair in runner.cache.target_kv for t in pair]
        return [first.logits, first.features, second.logits, second.features[real], *cached]

    call = fused.in_one_call
    monkeypatch.setattr(fused, "in_one_call", lambda some, *rest: (natively.append(len(some)), call(some, *rest))[1])
    in_one_call = passes()
    assert sum(natively) == 2 * len(layers)
    natively.clear()
    monkeypatch.setattr(PagedStep, "stores", lambda *unused: False)
    in_parts = passes()
    assert not natively
    for one, other in zip(in_one_call, in_parts, strict=True):
        assert torch.equal(one, other)
        assert one.float().abs().max() > 0


@needs_native
def test_a_cache_of_another_dtype_is_served_by_the_parts():
    model = random_model("qwen2").to(torch.bfloat16)
    optimise(model)
    target = Target(model)
    runner = FlatRunner(target)
    batch = runner.batch([(0, 0, list(range(5, 25)))])
    expected = target.forward(batch, runner.cache).logits
    runner.cache.target_kv = [(key.float(), value.float()) for key, value in runner.cache.target_kv]
    with pytest.raises(RuntimeError, match=r"dtype"):
        fused.in_one_call(
            target.decoder_layers[:1],
            [[torch.zeros(1, 20, 8).bfloat16()] * 2],
            torch.zeros(1, 20, 32, dtype=torch.bfloat16),
            PagedStep(batch, runner.cache),
        )
    torch.testing.assert_close(target.forward(batch, runner.cache).logits, expected, rtol=2e-2, atol=2e-2)


@needs_native
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_norms_of_another_dtype_are_served_by_the_parts(kind):
    model = random_model(kind).to(torch.bfloat16)
    ids = list(range(5, 25))
    expected = logits(Target(copy.deepcopy(model)), ids)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    applied = optimise(model)
    assert "fused-attention" in applied
    actual = logits(Target(model), ids)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=5e-2, atol=5e-2 * float(expected.abs().max()))


@needs_native
def test_half_precision_is_served_by_the_parts():
    model = random_model("qwen2")
    expected = logits(Target(copy.deepcopy(model)), list(range(5, 25)))
    model.half()
    assert "fused-layers" in optimise(model)
    actual = logits(Target(model), list(range(5, 25)))
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@needs_native
def test_layers_with_unknown_parts_are_left_alone():
    model = random_model("qwen2")
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    applied = optimise(model)
    assert "fused-layers" in applied
    assert [isinstance(layer, FusedLayer) for layer in model.model.layers] == [True, False, True]
    assert "fused-decoder" not in applied


def _sees_pictures() -> Gemma3Config:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        **{"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
    )


def _dense_mixture() -> Qwen3MoeConfig:
    config = CONFIGS["qwen3-moe"]()
    config.mlp_only_layers = [0, 1, 2]
    return config


@needs_native
@pytest.mark.parametrize("config", [_sees_pictures, _dense_mixture])
def test_a_decoder_that_is_called_otherwise_keeps_its_loop(config, monkeypatch):
    """With embeddings in place of ids, or for more than a last hidden state."""
    monkeypatch.setitem(CONFIGS, "unusual", config)
    model, ids = random_model("unusual"), list(range(5, 25))
    expected = logits(Target(copy.deepcopy(model)), ids)
    applied = optimise(model)
    assert {"fused-layers", "packed-head"} <= set(applied)
    assert "fused-decoder" not in applied
    torch.testing.assert_close(logits(Target(model), ids), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_native
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "mistral-window"])
def test_a_pass_over_the_paged_cache_has_a_loop_of_its_own(kind, monkeypatch):
    """With the bits of transformers' loop, features included; copies and other caches work too."""
    model = random_model(kind).to(torch.bfloat16)
    for number, layer in enumerate(model.model.layers):  # so that one layer's is not another's
        layer.self_attn.scaling *= 1 + number
    assert "fused-decoder" in optimise(model)
    model = copy.deepcopy(model)
    decoder = model.model
    assert isinstance(decoder, FusedDecoder)
    assert all(decoder._stock[0].layers[i] is layer for i, layer in enumerate(decoder.layers))
    stock, passes = decoder._stock[0], []
    stock.register_forward_hook(lambda *unused: passes.append(1))
    target, ids = Target(model), list(range(5, 25))

    def run(features=(-1, 0, 2)):
        runner = FlatRunner(target)
        return target.forward(runner.batch([(0, 0, ids[:15]), (1, 0, ids[15:])]), runner.cache, features)

    passes.clear()  # the probe of a target's attention has a cache of its own
    alone = run()
    assert not passes
    model.model = stock
    expected = run()
    model.model = decoder
    assert passes
    assert torch.equal(alone.logits, expected.logits)
    assert torch.equal(alone.features, expected.features)
    calls, call = [], fused.in_one_call
    monkeypatch.setattr(fused, "in_one_call", lambda some, *rest: (calls.append(len(some)), call(some, *rest))[1])
    assert torch.equal(run(()).logits, expected.logits)
    assert calls == [target.num_layers], "layers that nobody listens to are one call"
    calls.clear()
    replaced, forward = [], decoder.layers[1].forward
    decoder.layers[1].forward = lambda *a, **o: (replaced.append(1), forward(*a, **o))[1]
    assert torch.equal(run(()).logits, expected.logits)
    assert replaced == [1], "a layer that was compiled is called as it is"


def test_only_activations_that_are_the_same_are_fused():
    assert activation_of(nn.SiLU()) == "silu"
    assert activation_of(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert activation_of(nn.GELU()) is None
    assert activation_of(nn.ReLU()) is None


@needs_native
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
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
        assert optimise(model) == ["unmapped-rest", "packed-head"]
    assert not any(type(module) is nn.Linear for module in model.transformer.modules())


def test_unknown_step_is_refused():
    with pytest.raises(ConfigurationError, match=r"step 'fuse-everything': allowed are fused-norms"):
        optimise(random_model("llama"), steps=["fuse-everything"])
