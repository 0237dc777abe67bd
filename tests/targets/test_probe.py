"""What surefoot cannot serve is refused at load, with the reason; what it can serve is described without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, T5Config

from surefoot.errors import ModelError
from surefoot.targets.loading import describe_target, load_target
from surefoot.targets.probe import check_config, probe
from surefoot.targets.target import Target

from .architectures import tiny as tiny_model
from .flat import CONFIGS

_TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def tiny(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**{**_TINY, **changes})


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {"state_size": 4}, "recurrent state that surefoot cannot rewind yet"),
        ("rwkv", {"attention_hidden_size": 32}, "recurrent state that surefoot cannot rewind yet"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        ("lfm2", {"layer_types": ["full_attention", "conv"]}, r"recurrent state .*layers of type 'conv'"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "recurrent state"),
        ("llama4_text", {}, "no attention for layers of type 'chunked_attention'"),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
                         "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                         "v_head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "latent attention"),
        ("gemma3n_text", {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1,
                          "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
                          "activation_sparsity_pattern": None}, "shared keys and values"),
        ("gemma3_text", {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8}, "attends in both directions"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "takes no cache or no position ids"),
        ("xglm", {"num_layers": 2, "attention_heads": 4, "d_model": 32, "ffn_dim": 48}, "AttentionInterface"),
        ("stablelm", {}, "does not pass keyword arguments on"),
        ("doge", {"keep_window_size": 8}, "masks positions in a way surefoot does not know"),
        ("dory", {}, "surefoot's cache has no 'layers'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(kind, changes, reason):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    with pytest.raises(ModelError, match=reason) as caught:
        Target(AutoModelForCausalLM.from_config(tiny(kind, **changes)))
    assert "\n" not in str(caught.value)
    assert "choose" in str(caught.value)


def test_a_recurrent_cache_is_recognised_by_what_is_asked_of_it(monkeypatch):
    """No list of names: a layer that asks its cache for a convolution state gives itself away."""
    model = on_meta(CONFIGS["llama"]())
    original = model.model.layers[1].forward

    def stateful(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]  # transformers 5.20, of Python 3.10
        cache.update_conv_state(hidden_states, 1)
        return original(hidden_states, *args, **kwargs)

    monkeypatch.setattr(model.model.layers[1], "forward", stateful)
    with pytest.raises(ModelError, match=r"recurrent state .*'update_conv_state' of its cache"):
        probe(model)


def test_a_layer_that_asks_its_cache_for_positions_is_refused(monkeypatch):
    """Rows of one pass belong to several requests: one length is the wrong answer for all but one of them."""
    model = on_meta(CONFIGS["llama"]())
    layer = model.model.layers[1]
    original = layer.self_attn.forward

    def asks(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        (kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]).get_seq_length(1)
        return original(hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer.self_attn, "forward", asks)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .*LlamaAttention asks its cache for 'get_seq_length'"):
        probe(model)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_nothing_of_ours_stands_in_for_an_attribute_of_transformers_cache():
    """What a model finds on its cache is an answer of the protocol, or missing and refused: never a field of surefoot's."""
    from transformers import Cache, DynamicCache

    from surefoot.targets.attention import FlatCache, PagedStep
    from surefoot.targets.probe import _Recorder

    answered = {name for name in vars(FlatCache) if not name.startswith("_")}
    theirs = {name for name in {*dir(Cache), *dir(DynamicCache()), "layers"} if not name.startswith("__")}
    recorder = _Recorder("Test")
    ours = set(dir(recorder)) | set(dir(PagedStep)) | {"batch", "cache", "layer"}
    assert ours & theirs <= answered
    assert {name for name in vars(recorder) if not name.startswith("_")} == set()


def test_an_encoder_decoder_is_refused():
    with pytest.raises(ModelError, match="encoder-decoder"):
        check_config(T5Config())


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_probe_needs_no_weights(kind):
    """The same answer on the meta device as on the real model."""
    layers = probe(on_meta(CONFIGS[kind]())).layers
    real = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    assert layers == Target(real).layers


def test_windows_are_those_of_the_masks():
    """Some models hand their attention a window that their mask does not have, or the other way round."""
    olmoe = tiny("olmoe", num_experts=4, num_experts_per_tok=2, sliding_window=5)
    assert [spec.window for spec in probe(on_meta(olmoe)).layers] == [None, None]
    phimoe = tiny("phimoe", num_local_experts=4, sliding_window=5)
    assert [spec.window for spec in probe(on_meta(phimoe)).layers] == [5, 5]


def test_a_window_as_long_as_the_context_is_none():
    assert [spec.window for spec in probe(on_meta(tiny("mistral", sliding_window=128))).layers] == [None, None]
    assert [spec.window for spec in probe(on_meta(tiny("mistral", sliding_window=127))).layers] == [127, 127]


def test_a_description_carries_the_refusal(tmp_path):
    config = tiny("mamba", state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    described = describe_target(str(tmp_path))
    assert not described.servable
    assert described.reason is not None
    assert "recurrent state" in described.reason
    with pytest.raises(ModelError, match="recurrent state"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [
        ("stablelm", "StableLmForCausalLM", "does not pass keyword arguments on to its attention function"),
        ("nemotron", "NemotronForCausalLM", "does not pass keyword arguments on to its attention function"),
        ("falcon", "FalconForCausalLM", "AttentionInterface"),
        ("gpt_neo", "GPTNeoForCausalLM", "AttentionInterface"),
        ("bloom", "BloomForCausalLM", "takes no cache or no position ids"),
        ("mpt", "MptForCausalLM", "takes no cache or no position ids"),
    ],
)
def test_attention_that_does_not_go_through_the_interface_is_refused_by_architecture(
    tmp_path, kind, architecture, reason
):
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{architecture} .*{reason}.*; choose ") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)
    described = describe_target(str(tmp_path))
    assert not described.servable
    assert f"{architecture} " in str(described.reason)
    assert reason in str(described.reason)
