"""What a block drafter promises beyond parity: batches, shorter gammas, confidences, training, every field."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.model import DSparkModel
from surefoot.errors import DrafterError
from tests.drafters.dense import block_mask, dense_hidden

VOCABULARY, WIDTH, TARGET_LAYERS = 60, 32, 6
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "mask_token_id": 59,
    "target_layer_ids": (-1, 2, 5),
    "num_target_layers": TARGET_LAYERS,
    "markov_rank": 6,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
GEMMA = {
    "value_norm": True,
    "sandwich_norms": True,
    "layer_scalar": True,
    "attention_scaling": 1.0,
    "embedding_scale": WIDTH**0.5,
    "hidden_act": "gelu_pytorch_tanh",
    "final_logit_softcapping": 3.0,
}
VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "masks_only": {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "window": SLIDING,
    "causal_window": SLIDING | {"sliding_window_non_causal": False},
    "rope_by_layer": SLIDING
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        }
    },
    "gemma": GEMMA,
    "gemma_shared_kv": GEMMA | {"attention_k_eq_v": True},
    "no_qk_norm": {"qk_norm": False, "attention_bias": True},
    "narrow": {"hidden_size": 16, "target_hidden_size": WIDTH, "feature_norm": True, "draft_vocab_size": 20},
}


def make(variant: str, *, seed: int = 0, gamma: int | None = None, **fields) -> DSparkDrafter:
    config = DSparkConfig(**(BASE | VARIANTS[variant] | fields))
    torch.manual_seed(seed)
    words = torch.randperm(VOCABULARY)[: config.draft_vocab_size] if config.draft_vocab_size else None
    model = DSparkModel(config, vocabulary=words)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return DSparkDrafter(model, gamma)


@pytest.fixture(params=VARIANTS)
def drafter(request, worlds) -> DSparkDrafter:
    drafter = make(request.param)
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    return drafter


def features(rows: int, drafter: DSparkDrafter, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, drafter.config.feature_size, generator=generator)


def assert_same_row(one, other, row: int, same: int = 0) -> None:
    assert one.tokens[row].tolist() == other.tokens[same].tolist()
    torch.testing.assert_close(one.signal[row], other.signal[same], rtol=1e-4, atol=1e-4)
    if one.confidence_logits is not None:
        torch.testing.assert_close(one.confidence_logits[row], other.confidence_logits[same], rtol=1e-4, atol=1e-4)


def test_a_batch_equals_one_at_a_time(drafter, worlds) -> None:
    scene = worlds.Scene(drafter)
    lengths = {1: 3, 3: 11, 0: 20}
    scene.extend([(s, features(n, drafter, s)) for s, n in lengths.items()], padding=2)
    for slot, n in lengths.items():
        scene.history[slot, n] = 10 + slot
    together, _ = scene.propose(list(lengths))
    for row, slot in enumerate(lengths):
        alone = worlds.Scene(drafter, block_size=8, seed=slot)
        alone.extend([(slot, features(lengths[slot], drafter, slot))])
        alone.history[slot, lengths[slot]] = 10 + slot
        assert_same_row(together, alone.propose([slot])[0], row)


def test_rejected_rows_and_old_blocks_leave_no_trace(drafter, worlds) -> None:
    """Rewinding is setting a length: features of rejected rows, and the block's own keys, are overwritten or unseen."""
    text = features(14, drafter)
    straight, winding = worlds.Scene(drafter), worlds.Scene(drafter, seed=5)
    straight.extend([(2, text)])
    winding.extend([(2, text[:8])])
    winding.propose([2])
    winding.extend([(2, torch.cat([text[8:10], features(3, drafter, 9)]))])  # two rows accepted, three rejected
    winding.lengths[2] -= 3
    winding.propose([2])
    winding.extend([(2, text[10:])])
    for scene in (straight, winding):
        scene.history[2, 14] = 7
    assert_same_row(straight.propose([2])[0], winding.propose([2])[0], 0)


def test_training_equals_serving(drafter, worlds) -> None:
    """The dense forward over many anchors of a text, and one block at a time through the cache."""
    model, config = drafter.model, drafter.config
    text, length, anchors = torch.arange(24) % 50, 24, torch.tensor([[1, 6, 13, 20]])
    given, positions = features(length, drafter), torch.arange(length)[None]
    windows = {config.window(i) for i in range(config.num_hidden_layers)}
    masks = {w: block_mask(config, positions, anchors, w) for w in windows}
    hidden = dense_hidden(model, given[None], positions, text[anchors], anchors, masks)[0]
    for index, anchor in enumerate(anchors[0].tolist()):
        scene = worlds.Scene(drafter, block_size=1 + index)
        scene.extend([(1, given[:anchor])])
        scene.history[1, anchor] = text[anchor]
        context = scene.context([1])
        with torch.no_grad():
            served = drafter.block_hidden(context, text[anchor][None])[0]
        torch.testing.assert_close(served, hidden[index], rtol=1e-4, atol=1e-4)

        if model.markov_head is not None:  # teacher forcing gives the logits that drawing gives
            draft, sampler = scene.propose([1])
            first = config.first_slot
            previous = torch.cat([text[anchor][None], draft.tokens[0]])
            previous = torch.cat([text[anchor][None], previous])[1 - first :][: config.block_size][None]
            embedded = model.markov_head.embed(previous)
            latents = model.markov_head.latents(embedded, hidden[index][None])
            corrected = model.logits(hidden[index]) + model.markov_head.bias(latents[0])
            torch.testing.assert_close(torch.cat(sampler.logits), corrected[first:], rtol=1e-4, atol=1e-4)


def test_documents_packed_into_one_row_do_not_see_each_other() -> None:
    config = DSparkConfig(**BASE)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    owner = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    mask = block_mask(config, positions, torch.tensor([[2, 3]]), None, owner, torch.tensor([[0, 1]]))
    assert mask.shape == (1, 8, 7 + 8)
    assert mask[0, 0, :7].tolist() == [True, True, False, False, False, False, False]
    assert mask[0, 4, :7].tolist() == [False, False, False, True, True, True, False]
    assert torch.equal(mask[0, :, 7:], torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool())


def test_a_smaller_gamma_draws_a_prefix_of_the_same_block(worlds) -> None:
    target = worlds.lending_target(VOCABULARY, WIDTH)
    drafts = []
    for gamma in (None, 2):
        drafter = make("rnn", gamma=gamma)
        drafter.bind(target)
        scene = worlds.Scene(drafter)
        scene.extend([(0, features(9, drafter))])
        drafts.append(scene.propose([0])[0])
    whole, short = drafts
    assert short.tokens.shape == short.signal.shape == short.confidence_logits.shape == (1, 2)
    assert torch.equal(short.tokens, whole.tokens[:, :2])
    assert torch.equal(short.confidence_logits, whole.confidence_logits[:, :2])


@pytest.mark.parametrize("variant", ["vanilla", "masks_only", "causal_window", "window"])
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_depth_draws_the_first_tokens_and_says_how_many(worlds, variant, depth) -> None:
    drafter = make(variant)
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    scene = worlds.Scene(drafter)
    scene.extend([(0, features(9, drafter)), (1, features(6, drafter))])
    whole, shallow = scene.propose([0, 1])[0], scene.propose([0, 1], depth=depth)[0]
    count = min(depth, drafter.gamma)
    assert shallow.tokens.shape == shallow.signal.shape == (2, drafter.gamma)
    assert torch.equal(shallow.tokens[:, :count], whole.tokens[:, :count])
    assert torch.equal(shallow.confidence_logits[:, :count], whole.confidence_logits[:, :count])
    assert whole.lengths is None
    assert (drafter.gamma if shallow.lengths is None else shallow.lengths.tolist()) == (
        drafter.gamma if depth > drafter.gamma else [depth, depth]
    )


@pytest.mark.parametrize("variant", ["vanilla", "masks_only", "causal_window", "window", "rnn"])
def test_shorter_block_is_the_block_of_a_smaller_drafter(worlds, variant) -> None:
    """Where the configuration allows it, the slots after the wanted tokens are not computed at all."""
    target, drafts, rows = worlds.lending_target(VOCABULARY, WIDTH), [], []
    for depth, size in ((2, 4), (None, 2 + (variant == "masks_only"))):
        drafter = make(variant)
        drafter.bind(target)
        drafter.model.config = drafter.config = drafter.config.model_copy(
            update={"shorter_blocks": True, "block_size": size}
        )
        drafter.gamma = drafter.config.gamma
        scene = worlds.Scene(drafter)
        scene.extend([(0, features(9, drafter)), (1, features(6, drafter))])
        drafter.model.norm.register_forward_hook(lambda module, given, out: rows.append(given[0].shape[:-1].numel()))
        drafts.append(scene.propose([0, 1], depth=depth)[0])
    shallow, small = drafts
    assert rows[0] == rows[1] == 2 * (2 + (variant == "masks_only"))
    assert torch.equal(shallow.tokens[:, :2], small.tokens)
    torch.testing.assert_close(shallow.confidence_logits[:, :2], small.confidence_logits)


@pytest.mark.parametrize("gamma", [-1, 0, 5, 100])
def test_gamma_out_of_range_names_what_is_allowed(gamma) -> None:
    with pytest.raises(DrafterError, match=rf"gamma {gamma} .*allowed are 1 to 4"):
        make("vanilla", gamma=gamma)


def test_masks_only_blocks_give_one_token_less() -> None:
    drafter = make("masks_only")
    assert (drafter.gamma, drafter.block_slots) == (3, 4)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_confidence_and_signal_at_k_do_not_depend_on_x_k(worlds, k) -> None:
    """The non-anticipating contract: forcing another x_k may change position k + 1 onwards only."""
    drafter = make("gated")
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    scene = worlds.Scene(drafter)
    scene.extend([(0, features(9, drafter))])
    honest, _ = scene.propose([0])
    other = worlds.RecordingSampler(forced={k: (honest.tokens[:, k - 1] + 1) % VOCABULARY})
    changed, _ = scene.propose([0], other)
    assert torch.equal(changed.confidence_logits[:, :k], honest.confidence_logits[:, :k])
    assert torch.equal(changed.signal[:, :k], honest.signal[:, :k])
    if k < drafter.gamma:  # the control: it does reach the next position
        assert not torch.equal(changed.confidence_logits[:, k], honest.confidence_logits[:, k])


def test_a_block_that_reaches_beyond_the_longest_request(worlds) -> None:
    """At the last positions a request can have there is no room for the whole block; nothing else may be touched."""
    drafter = make("causal_window")
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    scene = worlds.Scene(drafter, max_model_len=16, block_size=4)
    scene.extend([(0, features(15, drafter)), (1, features(15, drafter, 2))])
    before = [tensor[4:].clone() for storage in scene.cache.drafter_kv for tensor in storage]  # all but scratch
    draft, _ = scene.propose([0])
    assert draft.tokens.shape == (1, 4)
    own = scene.cache.cache_slots(0, torch.zeros(1, dtype=torch.int64), torch.tensor([15])) - 4
    after = [tensor[4:] for storage in scene.cache.drafter_kv for tensor in storage]
    for old, new in zip(before, after, strict=True):
        old[own] = new[own]
        assert torch.equal(old, new)


def test_tokens_are_target_ids_of_the_reduced_vocabulary(worlds) -> None:
    drafter = make("narrow")
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    scene = worlds.Scene(drafter)
    scene.extend([(0, features(9, drafter))])
    draft, sampler = scene.propose([0])
    assert sampler.logits[0].shape == (1, 20)
    assert set(draft.tokens.flatten().tolist()) <= set(drafter.vocabulary.tolist())


def test_the_reduced_head_is_the_targets_rows(worlds) -> None:
    drafter, target = make("narrow"), worlds.lending_target(VOCABULARY, WIDTH)
    drafter.bind(target)
    assert torch.equal(drafter.model.lm_head.weight, target.lm_head.weight[drafter.vocabulary])
    assert "lm_head.weight" not in drafter.model.own_tensors()
    other = worlds.lending_target(VOCABULARY, WIDTH, seed=8)
    drafter.bind(other)  # bound again: the rows follow
    assert torch.equal(drafter.model.lm_head.weight, other.lm_head.weight[drafter.vocabulary])


def test_exact_copies_are_dropped_and_other_vocabularies_kept(worlds) -> None:
    target = worlds.lending_target(VOCABULARY, WIDTH)
    model = DSparkModel(DSparkConfig(**BASE), own_vocabulary=("embed_tokens", "lm_head"))
    model.embed_tokens.weight.data.copy_(target.embed_tokens.weight)
    DSparkDrafter(model).bind(target)
    assert model.embed_tokens is None
    assert model.lm_head is not None


def test_the_head_of_the_target_is_read_when_used(worlds) -> None:
    """Whoever replaces the target's head by a packed one replaces the drafter's too."""
    drafter, target = make("dflash"), worlds.lending_target(VOCABULARY, WIDTH)
    drafter.bind(target)
    target.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    hidden = torch.randn(3, WIDTH)
    assert torch.equal(drafter.model.logits(hidden), target.lm_head(hidden))


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_head_lends_the_same_rows(worlds, tied) -> None:
    """A target is optimised before a drafter is bound to it; the packed head still yields its words exactly."""
    from surefoot.kernels.linear import PackedLinear

    target = worlds.lending_target(VOCABULARY, WIDTH)
    matrix = target.lm_head.weight.detach().clone()
    if tied:
        target.config.tie_word_embeddings = True
        target.embed_tokens.weight.copy_(matrix)
    target.lm_head = PackedLinear.from_linear(target.lm_head)
    drafter = make("narrow")
    drafter.bind(target)
    assert torch.equal(drafter.model.lm_head.weight, matrix[drafter.vocabulary])


def test_projections_may_be_packed_for_serving(worlds) -> None:
    """Every Linear found by `named_modules` can be replaced by a PackedLinear; the draft stays the same."""
    from surefoot.kernels.linear import PackedLinear

    drafter = make("narrow")
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    drafts = []
    for _ in range(2):
        scene = worlds.Scene(drafter)
        scene.extend([(0, features(9, drafter))])
        drafts.append(scene.propose([0])[0])
        for name, module in list(drafter.model.named_modules()):
            if isinstance(module, nn.Linear):
                drafter.model.set_submodule(name, PackedLinear.from_linear(module))
    assert_same_row(*drafts, 0)


def test_unbound_drafter_says_so(worlds) -> None:
    scene = worlds.Scene(make("vanilla"))
    with pytest.raises(DrafterError, match="bind it to its target"):
        scene.propose([0])


def test_only_the_drafters_own_parameters_train(worlds) -> None:
    """Every parameter but embedding and head gets a gradient from the hidden states, the logits and the confidences."""
    drafter = make("gated", hidden_size=16, target_hidden_size=WIDTH, feature_norm=True)
    model = drafter.model
    model.share(worlds.lending_target(VOCABULARY, WIDTH))
    positions, anchors = torch.arange(9)[None], torch.tensor([[4, 7]])
    masks = {None: block_mask(model.config, positions, anchors)}
    hidden = dense_hidden(model, features(9, drafter)[None], positions, torch.tensor([[3, 4]]), anchors, masks)[0]
    embedded = model.markov_head.embed(torch.randint(VOCABULARY, (2, 4)))
    logits = model.logits(hidden) + model.markov_head.bias(model.markov_head.latents(embedded, hidden))
    (logits.square().mean() + model.confidence_head(hidden.detach(), embedded).mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name, _ in model.named_parameters())


def test_softcap_comes_before_the_correction(worlds) -> None:
    drafter = make("gemma")
    drafter.bind(worlds.lending_target(VOCABULARY, WIDTH))
    hidden = torch.randn(5, WIDTH) * 20
    assert drafter.model.logits(hidden).abs().max() <= 3.0


def test_gemma_twin_against_the_modules_of_transformers(worlds) -> None:
    """One layer of the Gemma-4 family rebuilt from transformers' own norm, MLP and rotary modules."""
    from transformers.models.gemma4 import modeling_gemma4 as gemma4
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    drafter = make("gemma_shared_kv", num_hidden_layers=1, rope_parameters={"full_attention": rope})
    drafter.bind(target := worlds.lending_target(VOCABULARY, WIDTH))
    model, size, length = drafter.model, 4, 6
    theirs = Gemma4TextConfig(
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=8,
        global_head_dim=8,
        layer_types=["full_attention"],
        rope_parameters={"full_attention": rope},
        use_double_wide_mlp=False,
    )

    def norm(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        module = gemma4.Gemma4RMSNorm(x.shape[-1], eps=1e-6, with_scale=weight is not None)
        if weight is not None:
            module.weight.data = weight.data
        return module(x)

    layer = model.layers[0]
    attention, mlp = layer.self_attn, gemma4.Gemma4TextMLP(theirs, 0)
    mlp.load_state_dict(layer.mlp.state_dict())
    rotary = gemma4.Gemma4TextRotaryEmbedding(theirs)
    given = features(length, drafter)
    with torch.no_grad():
        context = norm(model.hidden_norm.weight, model.fc(given))
        hidden = target.embed_tokens(torch.tensor([5, 59, 59, 59])) * WIDTH**0.5
        block = norm(layer.input_layernorm.weight, hidden)
        cos, sin = rotary(hidden, torch.arange(length + size)[None], "full_attention")
        key = attention.k_proj(torch.cat([context, block])).view(1, length + size, 2, 8)
        value = norm(None, key)[0].repeat_interleave(2, 1)
        key = gemma4.apply_rotary_pos_emb(norm(attention.k_norm.weight, key), cos, sin, 2)[0].repeat_interleave(2, 1)
        query = norm(attention.q_norm.weight, attention.q_proj(block).view(1, size, 4, 8))
        query = gemma4.apply_rotary_pos_emb(query, cos[:, length:], sin[:, length:], 2)[0]
        weights = torch.einsum("qhd,khd->hqk", query, key).softmax(-1)
        mixed = attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        hidden = hidden + norm(layer.post_attention_layernorm.weight, mixed)
        mixed = mlp(norm(layer.pre_feedforward_layernorm.weight, hidden))
        hidden = (hidden + norm(layer.post_feedforward_layernorm.weight, mixed)) * 0.7
        expected = norm(model.norm.weight, hidden)

        scene = worlds.Scene(drafter)
        scene.extend([(0, given)])
        served = drafter.block_hidden(scene.context([0]), torch.tensor([5]))[0]
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close(worlds) -> None:
    """Weights, cache and features in bfloat16, as next to a bfloat16 target."""
    drafter, target = make("vanilla"), worlds.lending_target(VOCABULARY, WIDTH)
    drafter.bind(target)
    exact = worlds.Scene(drafter)
    exact.extend([(0, features(9, drafter))])
    reference, _ = exact.propose([0])
    drafter.model.to(torch.bfloat16)
    rough = worlds.Scene(drafter, dtype=torch.bfloat16)
    rough.extend([(0, features(9, drafter).to(torch.bfloat16))])
    draft, sampler = rough.propose([0])
    assert sampler.logits[0].dtype == torch.float32
    torch.testing.assert_close(draft.confidence_logits[:, 0], reference.confidence_logits[:, 0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "spiral"])
def test_rotary_types_that_depend_on_the_batch_are_refused(kind) -> None:
    with pytest.raises(DrafterError, match=f"rope_type '{kind}'.*allowed are default"):
        make("vanilla", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": (3, 3)}, "increase strictly"),
        ({"target_layer_ids": (-2, 1)}, "increase strictly"),
        ({"target_layer_ids": (1, 6)}, "beyond num_target_layers 6"),
        ({"mask_token_id": 60}, "outside vocab_size 60"),
        ({"block_size": 1, "sample_from_anchor": False}, "no draft token"),
        ({"markov_rank": 0}, "needs markov_rank"),
        ({"layer_types": ("full_attention",)}, "1 layer_types for num_hidden_layers 2"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window is not set"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"draft_vocab_size": 61}, "exceeds vocab_size"),
        ({"markov_head_type": "lstm"}, "vanilla"),
        ({"gamma": 3}, "Extra inputs"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "no rope_theta for full_attention"),
    ],
)
def test_contradictory_configurations(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**(BASE | fields))


def test_importing_the_package_is_cheap() -> None:
    """`import surefoot.drafters` and prompt lookup need no transformers; the names resolve on first use."""
    code = (
        "import sys, surefoot.drafters as d;"
        "assert d.PromptLookupDrafter(3).gamma == 3; assert 'transformers' not in sys.modules;"
        "assert callable(d.load_drafter) and d.DSparkDrafter"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import surefoot.drafters

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        surefoot.drafters.Nothing  # noqa: B018
