"""Every tensor of a checkpoint is accounted for: float8 with its scales, nothing missing, nothing left over, all finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.targets.loading import describe_target, load_target

from .flat import random_model

_F8 = torch.float8_e4m3fn
_PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    random_model("qwen3").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Write the checkpoint's tensors again as `change` left them."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def quantise(
    directory: Path,
    granularity: str,
    ending: str = "_scale",
    keep_scales: bool = True,
    config: dict[str, object] | None = None,
) -> dict[str, Tensor]:
    """Store every projection in float8 with scales, as the field's tools do. Returns what it stands for, in bfloat16."""
    expected: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            weight = tensors[name].float()
            if granularity == "tensor":
                scale = (weight.abs().max() / 448).reshape(())
                factor = scale
            elif granularity == "one":
                factor = scale = (weight.abs().max() / 448).reshape(1)
            elif granularity == "channel":
                factor = scale = weight.abs().amax(1, keepdim=True) / 448
            elif granularity == "flat-channel":
                factor = weight.abs().amax(1, keepdim=True) / 448
                scale = factor[:, 0]
            else:  # blocks of 16 x 16, the last ones cut off where a size is not a multiple
                rows, columns = -(-weight.shape[0] // 16), -(-weight.shape[1] // 16)
                scale = torch.rand(rows, columns) * 0.01 + 0.001
                grown = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
                factor = grown[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / factor).to(_F8)
            expected[name] = (tensors[name].float() * factor).to(torch.bfloat16)
            if keep_scales:
                tensors[name + ending] = scale
                tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)  # of activations
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)  # of a quantised cache

    edit(directory, change)
    if config is not None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return expected


@pytest.mark.parametrize(
    ("granularity", "ending", "config"),
    [
        ("tensor", "_scale", None),
        ("one", "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ("channel", "_scale", {"quant_method": "compressed-tensors"}),
        ("flat-channel", "_scale_inv", None),
        ("block", "_scale_inv", {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    ],
)
def test_float8_weights_are_multiplied_by_their_scales(checkpoint, granularity, ending, config):
    expected = quantise(checkpoint, granularity, ending, config=config)
    assert expected
    target = load_target(str(checkpoint), dtype="bfloat16")
    served = dict(target.model.named_parameters())
    for name, weight in expected.items():
        assert served[name].dtype == torch.bfloat16
        assert torch.equal(served[name], weight), name
    assert target.eos_token_ids == {2}  # the generation config is read on this path as well
    described = describe_target(str(checkpoint))
    assert described.servable
    assert described.weights == target.weights == "float8_e4m3fn safetensors, de-quantised"


def test_float8_in_float32_keeps_the_product(checkpoint):
    """Without rounding to bfloat16: value times scale to the last bit."""
    quantise(checkpoint, "tensor")
    stored = load_file(checkpoint / "model.safetensors")
    served = dict(load_target(str(checkpoint), dtype="float32").model.named_parameters())
    assert torch.equal(served[_PROJECTION], stored[_PROJECTION].float() * stored[_PROJECTION + "_scale"])


def test_a_float8_weight_without_a_scale_is_refused_by_name(checkpoint):
    quantise(checkpoint, "tensor", keep_scales=False)
    with pytest.raises(
        ModelError, match=r"model\.layers\.0\.mlp\.down_proj\.weight is float8_e4m3fn without a scale"
    ) as e:
        load_target(str(checkpoint))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", [None, "modelopt"])
def test_four_bit_weights_are_refused_by_name(checkpoint, method):
    """NVFP4: two values per byte, a float8 scale per group of 16, and one scale for those."""

    def pack(tensors: dict[str, Tensor]) -> None:
        rows, columns = tensors[_PROJECTION].shape
        tensors[_PROJECTION] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[_PROJECTION + "_scale"] = torch.ones(rows, columns // 16).to(_F8)
        tensors[_PROJECTION + "_scale_2"] = torch.ones(())

    edit(checkpoint, pack)
    if method is not None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=rf"{_PROJECTION} is packed into uint8 .*\({method or 'not stated'}\); choose"):
        load_target(str(checkpoint))


def test_a_scale_that_does_not_fit_is_refused_by_name(checkpoint):
    quantise(checkpoint, "tensor")
    edit(checkpoint, lambda tensors: tensors.update({_PROJECTION + "_scale": torch.ones(7)}))
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale has shape \[7\], which fits no scaling .*\[48, 32\]"):
        load_target(str(checkpoint))


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_2", "scales", "qzeros", "weight_zero_point", "g_idx"])
def test_a_scale_that_nothing_reads_is_refused_by_name(checkpoint, ending):
    name = f"model.layers.0.mlp.up_proj.{ending}"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=rf"holds {name}, the scale of a quantisation .*choose the unquantised"):
        load_target(str(checkpoint))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.c_attn.bias",
        "model.layers.0.vision_gate.weight",
        "model.layers.3.mlp.up_proj.weight",
        "lm_head.bias",
    ],
)
def test_a_weight_that_the_model_has_no_place_for_is_refused_by_name(checkpoint, name):
    edit(checkpoint, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(ModelError, match=rf"Qwen3ForCausalLM has no place for {name}"):
        load_target(str(checkpoint))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attn.masked_bias",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.up_proj.input_scale",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.visual.blocks.0.norm.weight",
        "vision_tower.encoder.weight",
    ],
)
def test_what_serving_does_not_need_is_left_out_silently(checkpoint, name, caplog):
    edit(checkpoint, lambda tensors: tensors.update({name: torch.ones(4)}))
    load_target(str(checkpoint))
    assert not caplog.records


def test_another_head_is_left_out_and_said_once(checkpoint, caplog):
    edit(
        checkpoint, lambda tensors: tensors.update({"v_head.summary.weight": torch.ones(4), "v_head.b": torch.ones(1)})
    )
    with caplog.at_level(logging.WARNING):
        load_target(str(checkpoint))
    assert [record.getMessage() for record in caplog.records] == [
        f"target '{checkpoint}': 2 tensors of heads that serving does not need are left out (first: v_head.b)"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_that_is_not_finite_is_named(checkpoint, value, dtype):
    edit(checkpoint, lambda tensors: tensors[_PROJECTION].view(-1)[5].fill_(value))
    with pytest.raises(ModelError, match=rf"{_PROJECTION} holds 1 values that are not finite in {dtype}; download"):
        load_target(str(checkpoint), dtype=dtype)


def test_infinities_of_both_signs_do_not_hide_each_other(checkpoint):
    edit(
        checkpoint, lambda tensors: tensors[_PROJECTION].view(-1)[:2].copy_(torch.tensor([float("inf"), -float("inf")]))
    )
    with pytest.raises(ModelError, match="holds 2 values that are not finite"):
        load_target(str(checkpoint))


def test_a_weight_beyond_float16_is_named_with_the_remedy(checkpoint):
    edit(checkpoint, lambda tensors: tensors[_PROJECTION].view(-1)[5].fill_(1e6))
    load_target(str(checkpoint), dtype="bfloat16")
    with pytest.raises(
        ModelError, match=r"1 values that are not finite in float16; .*--dtype bfloat16, if they overflowed"
    ):
        load_target(str(checkpoint), dtype="float16")


def test_a_sum_that_overflows_is_no_alarm(checkpoint):
    edit(checkpoint, lambda tensors: tensors[_PROJECTION].fill_(60000.0))
    assert load_target(str(checkpoint), dtype="float16").dtype == torch.float16


@pytest.mark.parametrize(("kind", "dtype", "warned"), [
    ("gemma3", "float16", True), ("gemma2", "float16", True), ("gemma3", "bfloat16", False), ("qwen3", "float16", False),
])  # fmt: skip
def test_families_that_overflow_in_float16_are_warned_of(tmp_path, caplog, kind, dtype, warned):
    random_model(kind).save_pretrained(tmp_path)
    load_target(str(tmp_path), dtype=dtype)
    said = [record.getMessage() for record in caplog.records if "overflows in float16" in record.getMessage()]
    assert len(said) == int(warned)
    assert all("65,504" in line and "--dtype bfloat16" in line for line in said)
