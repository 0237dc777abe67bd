"""Checkpoints on disk: what loads, what is refused and with which words, what comes back."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.drafters import checkpoint
from surefoot.drafters.checkpoint import describe_checkpoint, load_drafter, save_drafter
from surefoot.drafters.config import DSparkConfig, fit_problems
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.layouts import read_config
from surefoot.drafters.model import DSparkModel
from surefoot.errors import DrafterError

FIELDS = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "block_size": 3,
    "mask_token_id": 49,
    "target_layer_ids": (0, 2),
    "num_target_layers": 4,
    "markov_rank": 4,
    "enable_confidence_head": True,
}
GEMMA = {
    "value_norm": True,
    "sandwich_norms": True,
    "layer_scalar": True,
    "attention_scaling": 1.0,
    "embedding_scale": 4.0,
    "hidden_act": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
}
NARROW = {"target_hidden_size": 24, "feature_norm": True, "draft_vocab_size": 12}


def make(**fields) -> DSparkDrafter:
    config = DSparkConfig(**(FIELDS | fields))
    torch.manual_seed(0)
    words = torch.randperm(50)[: config.draft_vocab_size].sort().values if config.draft_vocab_size else None
    return DSparkDrafter(DSparkModel(config, vocabulary=words))


@pytest.fixture
def saved(tmp_path):
    save_drafter(make(), tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_config(directory, **changes) -> None:
    file = directory / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def edit_tensors(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({}, "Qwen3DSparkModel"),
        ({"markov_head_type": "rnn", "confidence_head_with_markov": True}, "Qwen3DSparkModel"),
        ({"markov_rank": 0, "enable_confidence_head": False}, "Qwen3DSparkModel"),
        ({"layer_types": ("sliding_attention",), "sliding_window": 7}, "Qwen3DSparkModel"),
        (GEMMA, "Gemma4DSparkModel"),
        (GEMMA | {"attention_k_eq_v": True}, "Gemma4DSparkModel"),
        (GEMMA | {"layer_scalar": False}, "SurefootDSparkModel"),
        (NARROW, "SurefootDSparkModel"),
        ({"sample_from_anchor": False}, "SurefootDSparkModel"),
        ({"qk_norm": False, "attention_bias": True, "embedding_scale": 4.0}, "SurefootDSparkModel"),
    ],
)
def test_deepspec_round_trip(tmp_path, fields, architecture) -> None:
    """Whatever a drafter is comes back; what DeepSpec cannot say carries our architecture's name."""
    drafter = make(**fields)
    save_drafter(drafter, tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["architectures"] == [architecture]
    again = load_drafter(tmp_path / "d")
    assert again.config == drafter.config
    mine, theirs = drafter.model.own_tensors(), again.model.own_tensors()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    if drafter.vocabulary is not None:
        assert torch.equal(drafter.vocabulary, again.vocabulary)
    assert all(p.requires_grad for p in again.model.parameters())


@pytest.mark.parametrize("fields", [GEMMA, NARROW, {"qk_norm": False}, {"weight_storage": "int8"}])
def test_speculators_layout_refuses_what_it_cannot_say(tmp_path, fields) -> None:
    with pytest.raises(DrafterError, match=r"speculators layout cannot say .* deepspec layout"):
        save_drafter(make(**fields), tmp_path / "d", "speculators")
    assert list(tmp_path.iterdir()) == []


def test_speculators_layout_needs_the_reduced_head(tmp_path) -> None:
    with pytest.raises(DrafterError, match="bind the drafter to its target first"):
        save_drafter(make(draft_vocab_size=12), tmp_path / "d", "speculators")


def test_unknown_layout(tmp_path) -> None:
    with pytest.raises(DrafterError, match="layout 'gguf': allowed are deepspec, speculators"):
        save_drafter(make(), tmp_path / "d", "gguf")


def test_dtype_and_gamma_on_loading(tmp_path) -> None:
    drafter = make()
    drafter.model.to(torch.bfloat16)
    save_drafter(drafter, tmp_path / "d")
    assert load_drafter(tmp_path / "d").model.fc.weight.dtype == torch.bfloat16
    again = load_drafter(tmp_path / "d", dtype=torch.float32, gamma=2)
    assert again.model.fc.weight.dtype == torch.float32
    assert (again.gamma, again.block_slots) == (2, 3)
    with pytest.raises(DrafterError, match=r"gamma 4 .*allowed are 1 to 3"):
        load_drafter(tmp_path / "d", gamma=4)


def test_int8_storage_halves_the_file_and_keeps_the_weights(tmp_path) -> None:
    drafter = make(weight_storage="int8", hidden_size=64)
    save_drafter(drafter, tmp_path / "int8")
    save_drafter(make(hidden_size=64), tmp_path / "native")
    small, large = describe_checkpoint(tmp_path / "int8"), describe_checkpoint(tmp_path / "native")
    assert small.bytes < 0.4 * large.bytes
    assert small.parameters == large.parameters
    again = load_drafter(tmp_path / "int8")
    for name, tensor in drafter.model.own_tensors().items():
        step = tensor.abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 2 else torch.zeros(1)
        assert ((again.model.own_tensors()[name] - tensor).abs() <= 0.501 * step).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int8_weights_are_saved_again_as_they_lay_there(tmp_path, dtype) -> None:
    """Loaded in bfloat16 too, where quantising the rounded weights again would change values and scales."""
    save_drafter(make(weight_storage="int8", hidden_size=64), tmp_path / "first")
    loaded = load_drafter(tmp_path / "first", dtype=dtype)
    with torch.no_grad():
        loaded.model.fc.weight.mul_(1.5)  # trained since
    save_drafter(loaded, tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    changed = {name for name in first if first[name].dtype in (torch.int8, torch.float32)}
    changed = {name for name in changed if name + "_scale" in first or name.endswith("_scale")}
    changed = {name for name in changed if not torch.equal(first[name], second[name])}
    assert changed - {"fc.weight"} == {"fc.weight_scale"}
    torch.testing.assert_close(second["fc.weight_scale"], 1.5 * first["fc.weight_scale"], rtol=0.01, atol=0)


def test_shards(saved) -> None:
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, saved / file)
    (saved / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_drafter(saved).model.fc.weight, tensors["fc.weight"])
    (saved / "b.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"lacks b\.safetensors: download"):
        load_drafter(saved)
    (saved / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DrafterError, match=r"index\.json is damaged .*: download"):
        load_drafter(saved)


def test_embedding_and_head_may_be_in_the_checkpoint_or_not(deepspec, tmp_path) -> None:
    shutil.copytree(deepspec / "drafter_rnn", tmp_path / "d", copy_function=shutil.copyfile)
    whole = load_drafter(tmp_path / "d")
    assert whole.model.embed_tokens is not None
    assert describe_checkpoint(tmp_path / "d").shares == ()
    edit_tensors(tmp_path / "d", lambda t: [t.pop("embed_tokens.weight"), t.pop("lm_head.weight")])
    assert load_drafter(tmp_path / "d").model.embed_tokens is None
    assert describe_checkpoint(tmp_path / "d").shares == ("embed_tokens", "lm_head")


def test_description(deepspec) -> None:
    description = describe_checkpoint(deepspec / "drafter_gated")
    facts = description.as_dict()
    assert (description.kind, description.layout, description.gamma, description.head) == (
        "dspark",
        "deepspec",
        5,
        "gated, rank 8",
    )
    assert facts["target_layer_ids"] == [0, 2, 4]
    assert facts["bytes"] == (deepspec / "drafter_gated" / "model.safetensors").stat().st_size
    tensors = load_file(deepspec / "drafter_gated" / "model.safetensors")
    assert facts["parameters"] == sum(t.numel() for t in tensors.values())
    json.dumps(facts)
    assert asdict(description)["dtype"] == "float32"


# Damage


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_weights(saved, keep) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    for read in (load_drafter, describe_checkpoint):
        with pytest.raises(DrafterError, match=r"model\.safetensors is truncated or damaged .*: download or save") as e:
            read(saved)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"lacks fc\.weight: weights and config\.json do not belong together"),
        (lambda t: [t.pop(n) for n in list(t) if "mlp" in n or "attn" in n], r"lacks 9 tensors \(.*, …\)"),
        (lambda t: t.update(extra=torch.ones(1)), "has extra its configuration does not ask for"),
        (
            lambda t: t.update({"fc.weight": torch.ones(16, 48)}),
            r"has fc\.weight of shape \[16, 48\] where its configuration says \[16, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_match(saved, change, message) -> None:
    edit_tensors(saved, change)
    with pytest.raises(DrafterError, match=message):
        load_drafter(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": ...}, "config.json lacks 'block_size'"),
        ({"target_layer_ids": [2, 0]}, r"not valid: target_layer_ids \[2, 0\] must increase"),
        ({"markov_head_type": "lstm"}, "not valid: markov_head_type: Input should be 'vanilla'"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "is not a block drafter: LlamaForCausalLM is a language model .*--model",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "an EAGLE drafter .LlamaForCausalLMEagle3. drafts token by token",
        ),
        (
            {"architectures": ["Mystery"]},
            "it says 'Mystery', which this version does not know. Readable are .*DSparkDraft",
        ),
        ({"architectures": ...}, "is not a block drafter: its config.json names no architecture"),
        ({"architectures": 7}, "is not a block drafter"),
        ({"target_layer_ids": 3}, "a field of the wrong type"),
        ({"num_hidden_layers": [1]}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: Input should be less than or equal to 1024"),
        ({"head_dim": None, "hidden_size": "wide"}, "a field of the wrong type"),
        ({"rope_parameters": 5}, "rope_parameters: Input should be a valid dictionary"),
        ({"rope_parameters": {"rope_theta": "high"}}, "rope_theta above 0 for full_attention layers, got 'high'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_parameters .*'yarn'.* cannot be used"),
        ({"vocab_size": 2**62}, "sizes that cannot be"),
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh' of the drafter is not supported; allowed are silu"),
        (
            {"architectures": ["SurefootDSparkModel"], "surefoot": {"warp": 9}},
            "'warp' under 'surefoot', which this version does not know: upgrade",
        ),
    ],
)
def test_configurations_that_do_not_load(saved, changes, message) -> None:
    edit_config(saved, **changes)
    with pytest.raises(DrafterError, match=message):
        load_drafter(saved)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_unreadable_configuration(saved, text) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(DrafterError, match=r"config\.json (cannot be read|holds no JSON object).*download or save"):
        load_drafter(saved)


def test_missing_files(saved) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"lacks model\.safetensors: download"):
        load_drafter(saved)
    (saved / "config.json").unlink()
    with pytest.raises(DrafterError, match=r"has no config\.json: give the directory"):
        load_drafter(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "needs a tensor d2t of that length, found none"),
        (
            lambda t: t["d2t"].fill_(0).index_fill_(0, torch.tensor([3]), 60),
            "maps draft ids outside the 50 target tokens",
        ),
        (lambda t: t["d2t"].sub_(torch.arange(12)), "outside the 50 target tokens, or two to one"),
        (lambda t: t["t2d"].fill_(False), "t2d and d2t name different tokens"),
    ],
)
def test_damaged_vocabulary(tmp_path, change, message) -> None:
    save_drafter(make(draft_vocab_size=12), tmp_path / "d")
    edit_tensors(tmp_path / "d", change)
    with pytest.raises(DrafterError, match=message):
        load_drafter(tmp_path / "d")


@pytest.mark.parametrize("name", ["no-such-drafter", "./missing", "/nowhere/at/all", "a/b/c", "~/missing-drafter"])
def test_unknown_places_are_not_asked_of_the_hub(name, monkeypatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(DrafterError, match=r"does not exist: give a directory .* or a Hugging Face id"):
        load_drafter(name)


def test_a_file_is_not_a_directory(saved) -> None:
    with pytest.raises(DrafterError, match="is a file: give a directory"):
        load_drafter(saved / "config.json")


def test_hub_ids(saved, monkeypatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(saved))
    drafter = load_drafter("someone/drafter")
    assert drafter.origin == "someone/drafter"

    def offline(name, **_):
        raise ConnectionError("the network is\nunreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DrafterError, match=r"could not be fetched .*\(the network is\): check the name") as caught:
        load_drafter("someone/drafter")
    assert "\n" not in str(caught.value)


# Writing


@pytest.mark.parametrize("fails", ["save_file", "_swap"])
def test_an_interrupted_save_leaves_the_old_checkpoint(saved, monkeypatch, fails) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, fails, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(make(markov_rank=2), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert load_drafter(saved).config.markov_rank == 4
    assert [path.name for path in saved.parent.iterdir()] == ["drafter"]


def test_saving_again_replaces_weights_and_keeps_companions(saved) -> None:
    (saved / "calibration.json").write_text("{}")
    (saved / "old-shard.safetensors").write_bytes(b"")
    save_drafter(make(markov_rank=2), saved)
    assert load_drafter(saved).config.markov_rank == 2
    assert sorted(path.name for path in saved.iterdir()) == ["calibration.json", "config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == ["drafter"]


def test_a_drafter_packed_for_serving_is_not_saved(tmp_path) -> None:
    drafter = make()
    drafter.model.fc = torch.nn.Identity()
    with pytest.raises(DrafterError, match="save it before it is optimised"):
        save_drafter(drafter, tmp_path / "d")


# Fit


def target_config(**fields) -> SimpleNamespace:
    return SimpleNamespace(**({"hidden_size": 16, "vocab_size": 50, "num_hidden_layers": 4} | fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": 32}, "drafter reads hidden size 16, target has 32"),
        ({"vocab_size": 64}, "drafter's vocabulary has 50 tokens, target's 64"),
        ({"num_hidden_layers": 2}, "drafter reads target layers [0, 2], target has layers 0 to 1"),
        ({"num_hidden_layers": 6}, "drafter was trained for 4 target layers, target has 6"),
    ],
)
def test_misfits_name_both_sides(saved, fields, problem) -> None:
    drafter = load_drafter(saved)
    assert fit_problems(drafter.config, target_config()) == []
    assert fit_problems(drafter.config, target_config(**fields)) == [problem]
    assert fit_problems(describe_checkpoint(saved).config, target_config(**fields)) == [problem]
    nested = SimpleNamespace(get_text_config=lambda: target_config(**fields))
    assert fit_problems(drafter.config, nested) == [problem]
    target = SimpleNamespace(name="other", config=target_config(**fields))
    with pytest.raises(
        DrafterError, match=r"drafter does not fit other: .*\. Use the target it was trained for"
    ) as caught:
        drafter.bind(target)
    assert problem in str(caught.value)


def test_all_misfits_are_named_at_once() -> None:
    assert len(fit_problems(make().config, target_config(hidden_size=1, vocab_size=1, num_hidden_layers=1))) == 3


def test_a_narrow_drafter_fits_by_its_targets_width() -> None:
    assert fit_problems(make(**NARROW).config, target_config(hidden_size=24)) == []


# -- SpecForge's layout ----------------------------------------------------------------------------------------------------


def as_specforge(directory, *, rename=lambda name: name, **nested) -> None:
    """Rewrite a saved drafter the way SpecForge publishes its own: fields nested, embedding and head left out."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    moved = {name: raw.pop(name) for name in ("mask_token_id", "target_layer_ids", *heads) if name in raw}
    theta = raw.pop("rope_parameters")["rope_theta"]
    raw |= {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "model_type": "qwen3",
        "rope_theta": theta,
        "rope_scaling": None,
        "use_sliding_window": False,
        "dflash_config": {"projector_type": "dspark", "confidence_head_alpha": 1.0, **moved, **nested},
    }
    raw["dflash_config"] = {name: value for name, value in raw["dflash_config"].items() if value is not ...}
    file.write_text(json.dumps(raw))
    edit_tensors(directory, lambda t: [t.__setitem__(rename(name), t.pop(name)) for name in list(t)])


@pytest.mark.parametrize(
    ("nested", "prefix"),
    [
        ({}, ""),
        ({"enable_confidence_head": ...}, "model."),  # then the tensors say so
        ({"enable_confidence_head": ..., "use_confidence_head": True, "shift_label": True}, ""),
        ({"confidence_head_with_markov": ..., "attention_mode": "gqa", "causal": False}, ""),
    ],
)
@pytest.mark.parametrize("with_markov", [True, False])
def test_specforge_drafters_are_the_same_drafters(saved, nested, prefix, with_markov) -> None:
    save_drafter(make(confidence_head_with_markov=with_markov), saved)
    reference = load_drafter(saved)
    as_specforge(saved, rename=lambda name: prefix + name, **nested)
    drafter, description = load_drafter(saved), describe_checkpoint(saved)
    assert drafter.config == reference.config
    assert (description.layout, description.kind, description.gamma) == ("specforge", "dspark", 3)
    assert description.shares == ("embed_tokens", "lm_head")
    state, wanted = drafter.model.own_tensors(), reference.model.own_tensors()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_early_specforge_files_wrap_their_heads(saved) -> None:
    reference = load_drafter(saved)
    as_specforge(saved, rename=lambda name: f"logit_head.{name}" if "head" in name else name)
    assert torch.equal(
        load_drafter(saved).model.markov_head.markov_w1.weight, reference.model.markov_head.markov_w1.weight
    )


def test_the_published_configuration_means_what_its_trainer_means(saved) -> None:
    """Numbers of a published drafter for Qwen3-8B: ids count decoder outputs, the anchor's slot predicts."""
    raw = {
        "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 16,
        "dflash_config": {
            "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "dspark", "markov_rank": 256,
            "markov_head_type": "vanilla", "confidence_head_alpha": 1.0, "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "num_attention_heads": 32,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    config, layout = read_config(raw, "somewhere")
    assert layout == "specforge"
    assert (config.gamma, config.first_slot, config.kind) == (16, 0, "dspark")
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.mask_token_id, config.markov_rank, config.enable_confidence_head) == (151669, 256, True)
    assert config.rope_parameters["rope_theta"] == 1000000
    spread = raw | {"dflash_config": {"mask_token_id": 151669}}
    assert read_config(spread, "somewhere")[0].target_layer_ids == (1, 9, 17, 25, 33)
    dflash = raw | {"architectures": ["DFlashDraftModel"]}
    config, _ = read_config(dflash, "somewhere")
    assert (config.gamma, config.first_slot, config.kind) == (15, 1, "dflash")


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"mask_token_id": ...}, "config.json lacks 'dflash_config.mask_token_id'"),
        ({"projector_type": "domino"}, "projector_type 'domino' under dflash_config, which this version cannot serve"),
        ({"attention_mode": "mla"}, "attention_mode 'mla'"),
        ({"causal": True}, "causal True"),
        ({"markov_rank": "many"}, "markov_rank: Input should be a valid integer"),
    ],
)
def test_what_is_not_read_of_specforge_is_refused_by_name(saved, nested, message) -> None:
    as_specforge(saved, **nested)
    with pytest.raises(DrafterError, match=message):
        describe_checkpoint(saved)


# -- damaged files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 7}',
     '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": null}'],
)  # fmt: skip
def test_a_damaged_index_is_one_line(saved, text) -> None:
    (saved / "model.safetensors.index.json").write_text(text)
    for read in (load_drafter, describe_checkpoint):
        with pytest.raises(
            DrafterError, match=r"index.json is damaged .*: download or save the checkpoint again"
        ) as caught:
            read(saved)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w2.weight", "norm.weight"])
def test_one_number_that_is_none_is_named_at_load(saved, name, value) -> None:
    edit_tensors(saved, lambda t: t[name].view(-1).__setitem__(-1, value))
    with pytest.raises(DrafterError, match=f"tensor {name} holds NaN or infinity: the checkpoint is damaged"):
        load_drafter(saved)


def test_a_damaged_scale_is_named_at_load(saved) -> None:
    save_drafter(make(weight_storage="int8"), saved)
    edit_tensors(saved, lambda t: t["fc.weight_scale"].__setitem__(0, float("nan")))
    with pytest.raises(DrafterError, match=r"tensor fc.weight_scale holds NaN"):
        load_drafter(saved)
