"""The packed draft pass: products fused and packed, a whole block drawn in one call; the same drafts, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.drafters.base import BlockDraw, BlockwiseSampler
from surefoot.drafters.checkpoint import load_drafter, save_drafter
from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.model import DSparkModel
from surefoot.errors import DrafterError
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.sampling import argmax_rows, filter_rows, filter_rows_reference, sample_rows, softmax_rows
from surefoot.speculation.calibration import Calibration

pytestmark = pytest.mark.skipif(not native.available(), reason="one call draws a block with the native kernels only")

VOCABULARY, WIDTH, SLOTS = 90, 32, 5
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 5,
    "mask_token_id": 59,
    "target_layer_ids": (-1, 2, 5),
    "markov_rank": 6,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
VARIANTS = {
    "vanilla": {},
    "reduced": {"draft_vocab_size": 37, "feature_norm": True, "qk_norm": False, "attention_bias": True},
    "narrow": {"hidden_size": 16, "target_hidden_size": WIDTH, "draft_vocab_size": 20},
    "masks_only": {"sample_from_anchor": False, "confidence_head_with_markov": False},
    "softcap": {"final_logit_softcapping": 3.0, "sandwich_norms": True, "hidden_act": "gelu_pytorch_tanh"},
    "shared_key_value": {"attention_k_eq_v": True, "value_norm": True, "hidden_act": "gelu"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}
TEMPERATURE = torch.tensor([0.0, 0.6, 1.0, 1.4, 0.9])
STAGES = {
    "greedy": {},
    "temperature": {"temperature": TEMPERATURE},
    "filtered": {
        "temperature": TEMPERATURE,
        "top_k": torch.tensor([0, 3, 12, 0, 200]),
        "top_p": torch.tensor([1.0, 0.5, 0.9, 0.97, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.3, 0.01]),
    },
}


class TokenSampler:
    """Draws by token as the engine does, and keeps what it drew from."""

    def __init__(self, draw: BlockDraw, vocabulary: torch.Tensor | None) -> None:
        self.how, self.vocabulary, self.calls = draw, vocabulary, 0
        self.probs: list[torch.Tensor] = []

    def temperatures(self) -> torch.Tensor | None:
        return self.how.temperature

    def draw(self, k: int, logits: torch.Tensor, sharpness: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        how = self.how
        if how.temperature is None:
            index = argmax_rows(logits)
        else:
            probs = softmax_rows(logits, how.temperature if sharpness is None else how.temperature / sharpness)
            if how.top_k is not None:
                probs = filter_rows(probs, how.top_k, how.top_p, how.min_p)
            self.probs.append(probs.clone())
            index = sample_rows(probs, how.uniforms[:, k - 1])
        return index if self.vocabulary is None else self.vocabulary[index]

    def only(self, rows: torch.Tensor) -> None:
        raise AssertionError("a block drafter draws for all")


class WholeBlockSampler(TokenSampler):
    def block_draw(self) -> BlockDraw | None:
        return self.how

    def take(self, draft_ids: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
        self.probs = [] if probs is None else list(probs.unbind(1))
        return draft_ids if self.vocabulary is None else self.vocabulary[draft_ids]


class LookingBack(WholeBlockSampler):
    """One whose processing depends on the tokens drawn before, as with penalties."""

    def block_draw(self) -> BlockDraw | None:
        return None


def make(variant: str, worlds, dtype: torch.dtype = torch.bfloat16, **fields) -> DSparkDrafter:
    config = DSparkConfig(**(BASE | VARIANTS[variant] | fields))
    torch.manual_seed(0)
    words = torch.randperm(VOCABULARY)[: config.draft_vocab_size] if config.draft_vocab_size else None
    model = DSparkModel(config, vocabulary=words)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.3)
    drafter = DSparkDrafter(model.to(dtype).requires_grad_(False))
    target = worlds.lending_target(VOCABULARY, WIDTH)
    target.embed_tokens.to(dtype), target.lm_head.to(dtype)
    drafter.bind(target)
    return drafter


def scene(drafter: DSparkDrafter, worlds, dtype: torch.dtype = torch.bfloat16):
    world = worlds.Scene(drafter, slots=SLOTS, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    rows = [(s, torch.randn(4 + 3 * s, drafter.config.feature_size, generator=generator)) for s in range(SLOTS)]
    for s, given in rows:
        world.extend([(s, given)])
        world.history[s, len(given)] = 7 * s + 3
    return world


def block_draw(stage: str, gamma: int, rows: list[int] | None = None) -> BlockDraw:
    rows = list(range(SLOTS)) if rows is None else rows
    fields = {name: values[rows] for name, values in STAGES[stage].items()}
    uniforms = torch.rand(SLOTS, gamma, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return BlockDraw(**fields, uniforms=uniforms[rows] if fields else None)


def calibration(gamma: int) -> Calibration:
    weights = torch.randn(2, 3, gamma, generator=torch.Generator().manual_seed(3))
    return Calibration([1.0] * gamma, weights=weights, sharpness=SHARPNESS[:gamma])


def assert_identical(one, other) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.signal, other.signal)
    assert one.confidence_logits is other.confidence_logits is None or torch.equal(
        one.confidence_logits, other.confidence_logits
    )


SHARPNESS = (1.3, 1.0, 2.5, 0.7, 40.0)


@pytest.mark.parametrize("sharpness", [None, SHARPNESS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_draws_what_token_by_token_draws(worlds, variant, stage, dtype, sharpness) -> None:
    """Tokens, log-odds, confidences and the distributions drawn from, bit for bit."""
    drafter = make(variant, worlds, dtype)
    if sharpness is not None:
        drafter.draw_by(calibration(drafter.gamma))
    assert drafter.model.pack()
    world, slots = scene(drafter, worlds, dtype), list(range(SLOTS))
    draw = block_draw(stage, drafter.gamma)
    by_token, at_once = TokenSampler(draw, drafter.vocabulary), WholeBlockSampler(draw, drafter.vocabulary)
    one, other = (drafter.propose(world.context(slots), sampler) for sampler in (by_token, at_once))
    assert (by_token.calls, at_once.calls) == (drafter.gamma, 0)
    assert_identical(one, other)
    assert len(by_token.probs) == len(at_once.probs) == (0 if stage == "greedy" else drafter.gamma)
    assert all(torch.equal(p, q) for p, q in zip(by_token.probs, at_once.probs, strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", ["vanilla", "reduced"])
def test_a_request_drafts_the_same_alone_and_beside_others(worlds, variant, stage) -> None:
    drafter = make(variant, worlds)
    drafter.model.pack()
    world = scene(drafter, worlds)
    together = WholeBlockSampler(block_draw(stage, drafter.gamma), drafter.vocabulary)
    drafts = drafter.propose(world.context(list(range(SLOTS))), together)
    for slot in range(SLOTS):
        alone = WholeBlockSampler(block_draw(stage, drafter.gamma, [slot]), drafter.vocabulary)
        draft = drafter.propose(world.context([slot]), alone)
        assert torch.equal(draft.tokens[0], drafts.tokens[slot])
        assert torch.equal(draft.signal[0], drafts.signal[slot])
        assert torch.equal(draft.confidence_logits[0], drafts.confidence_logits[slot])
        assert all(torch.equal(q[0], p[slot]) for q, p in zip(alone.probs, together.probs, strict=True))


def test_a_calibration_sharpens_draws_and_changes_no_logits(worlds) -> None:
    """q_k is the softmax at T / s_k where T > 0; greedy rows, the signal and the head's own logits stay."""
    drafter = make("vanilla", worlds, torch.float32)
    draw, slots = block_draw("temperature", drafter.gamma), list(range(SLOTS))
    proposed = []
    for fitted in (None, Calibration([1.0] * drafter.gamma, sharpness=SHARPNESS)):
        drafter.draw_by(fitted)
        sampler = TokenSampler(draw, None)
        draft = drafter.propose(scene(drafter, worlds, torch.float32).context(slots), sampler)
        proposed.append((draft, sampler.probs[0]))
    (plain, q), (sharp, sharper) = proposed
    warm = draw.temperature > 0
    expected = q[warm] ** SHARPNESS[0]
    torch.testing.assert_close(sharper[warm], expected / expected.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7)
    assert torch.equal(plain.tokens[~warm], sharp.tokens[~warm])
    assert torch.equal(plain.signal[:, 0], sharp.signal[:, 0])
    assert torch.equal(plain.confidence_logits[:, 0], sharp.confidence_logits[:, 0])


def test_the_signal_is_the_log_odds_of_the_likeliest_token(worlds) -> None:
    drafter = make("dflash", worlds, torch.float32)
    world, sampler = scene(drafter, worlds, torch.float32), worlds.RecordingSampler()
    draft = drafter.propose(world.context([0, 3]), sampler)
    largest = torch.stack(sampler.logits, 1).softmax(-1).amax(-1)
    torch.testing.assert_close(draft.signal, torch.log(largest / (1 - largest)), rtol=1e-4, atol=1e-4)


def test_drafts_carry_the_raw_logits_of_the_head(worlds, tmp_path) -> None:
    """Whatever its calibration says: the confidence source applies it, and nobody else."""
    drafter = make("vanilla", worlds, torch.float32)
    sampler = TokenSampler(block_draw("temperature", drafter.gamma), None)
    raw = drafter.propose(scene(drafter, worlds, torch.float32).context(list(range(SLOTS))), sampler)
    Calibration([2.0] * drafter.gamma, weights=calibration(drafter.gamma).weights).save(tmp_path / "calibration.json")
    source = drafter.confidence_source("cpu", tmp_path / "calibration.json")
    draft = drafter.propose(scene(drafter, worlds, torch.float32).context(list(range(SLOTS))), sampler)
    assert torch.equal(draft.confidence_logits, raw.confidence_logits)
    weights = calibration(drafter.gamma).weights
    inputs = torch.stack([raw.confidence_logits, raw.signal, torch.ones_like(raw.signal)], 1)
    confidence = source.confidence(draft.evidence._replace(temperature=torch.tensor([0.0, 0.6, 1.0, 1.4, 0.9])))
    for row, share in enumerate([0.0, 0.6, 1.0, 1.0, 0.9]):
        expected = torch.sigmoid((((1 - share) * weights[0] + share * weights[1]) * inputs[row]).sum(0))
        torch.testing.assert_close(confidence[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_with_more_than_a_table_are_drawn_by_token(worlds, kind) -> None:
    drafter = make("vanilla", worlds, markov_head_type=kind)
    drafter.model.pack()
    sampler = WholeBlockSampler(BlockDraw(), None)
    drafter.propose(scene(drafter, worlds).context([1, 2]), sampler)
    assert sampler.calls == drafter.gamma


def test_a_sampler_that_looks_back_is_asked_token_by_token(worlds) -> None:
    drafter = make("vanilla", worlds)
    drafter.model.pack()
    sampler = LookingBack(BlockDraw(), None)
    assert isinstance(sampler, BlockwiseSampler)
    drafter.propose(scene(drafter, worlds).context([1, 2]), sampler)
    assert sampler.calls == drafter.gamma


@pytest.mark.parametrize("variant", [*VARIANTS])
def test_packing_changes_nothing_but_rounding(worlds, variant) -> None:
    """Context rows, block and confidences of a float32 drafter before and after."""
    drafter, drafts, caches = make(variant, worlds, torch.float32), [], []
    for _ in range(2):
        world = scene(drafter, worlds, torch.float32)
        caches.append([t.clone() for storage in world.cache.drafter_kv for t in storage])
        drafts.append(drafter.propose(world.context([0, 3]), TokenSampler(BlockDraw(), drafter.vocabulary)))
        assert drafter.model.pack()
    assert not [name for name, module in drafter.model.named_modules() if type(module) is torch.nn.Linear]
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    torch.testing.assert_close(drafts[0].signal, drafts[1].signal, rtol=1e-3, atol=1e-4)
    if variant != "dflash":
        torch.testing.assert_close(drafts[0].confidence_logits, drafts[1].confidence_logits, rtol=1e-3, atol=1e-4)


def test_a_packed_drafter_cannot_be_saved(worlds, tmp_path: Path) -> None:
    drafter = make("vanilla", worlds)
    drafter.model.pack()
    with pytest.raises(DrafterError, match="replaced for serving"):
        save_drafter(drafter, tmp_path / "packed")


def test_matrices_stored_as_int8_are_served_as_int8(worlds, tmp_path: Path) -> None:
    """Exactly the stored values, though the model is bfloat16; the head's rows, which are the target's, stay as they are."""
    save_drafter(make("reduced", worlds, torch.float32, weight_storage="int8"), tmp_path / "int8")
    drafter = load_drafter(tmp_path / "int8", dtype=torch.bfloat16)
    target = worlds.lending_target(VOCABULARY, WIDTH)
    target.embed_tokens.to(torch.bfloat16), target.lm_head.to(torch.bfloat16)
    drafter.bind(target)
    values, scale = drafter.model.stored["layers.1.mlp.down_proj.weight"].tensors.values()
    drafter.model.pack()
    products = {name: m for name, m in drafter.model.named_modules() if isinstance(m, PackedLinear)}
    assert {name for name, m in products.items() if m.quantize is None} == {"lm_head"}
    x = torch.randn(3, values.shape[1])
    expected = x @ (values * scale.unsqueeze(1)).T
    torch.testing.assert_close(products["layers.1.mlp.down_proj"](x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(products["layers.1.mlp.down_proj"].scale, scale)  # the stored one, not one found again
    assert torch.equal(products["layers.1.mlp.down_proj"](torch.eye(values.shape[1])).T, values * scale.unsqueeze(1))
    assert not drafter.model.stored
    world = scene(drafter, worlds)
    draft = drafter.propose(world.context([0, 1]), WholeBlockSampler(BlockDraw(), drafter.vocabulary))
    assert set(draft.tokens.flatten().tolist()) <= set(drafter.vocabulary.tolist())


def test_weights_trained_after_loading_are_served_as_trained(worlds, tmp_path: Path) -> None:
    save_drafter(make("vanilla", worlds, torch.float32, weight_storage="int8"), tmp_path / "int8")
    model = load_drafter(tmp_path / "int8").model
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(2)
    trained = model.layers[0].mlp.down_proj.weight.clone()
    model.pack()
    down = model.layers[0].mlp.down_proj
    assert down.quantize is None
    assert model.layers[1].mlp.down_proj.quantize == "int8"
    x = torch.randn(2, trained.shape[1])
    torch.testing.assert_close(down(x), x @ trained.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 64, 500, 9000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_filters_keep_what_the_reference_keeps(size, spread) -> None:
    probs = torch.softmax(torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * spread, -1)
    top_k = torch.tensor([0, 1, 2, 40, 300, 10_000])
    top_p = torch.tensor([1.0, 0.1, 0.5, 0.9, 0.99, 0.7])
    min_p = torch.tensor([0.0, 0.01, 0.2, 0.5, 1.0, 0.9])
    for stages in ((top_k, None, None), (None, top_p, None), (None, None, min_p), (top_k, top_p, min_p)):
        kept, expected = filter_rows(probs.clone(), *stages), filter_rows_reference(probs, *stages)
        if spread == 0:  # equal probabilities: rounding decides where top-p ends, but ties stay together
            assert all(len(row[row > 0].unique()) == 1 for row in kept)
        else:
            torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(kept.sum(-1), torch.ones(6), rtol=1e-5, atol=0)


def test_top_p_is_the_smallest_set_that_holds_the_mass() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.2, 0.3]])
    kept = filter_rows(probs.clone(), None, torch.tensor([0.65, 0.3, 1.0]), None)
    torch.testing.assert_close(kept[0], torch.tensor([0, 4, 0, 3]) / 7)
    torch.testing.assert_close(kept[1], probs[1])  # what ties with the last one kept is kept
    assert torch.equal(kept[2], probs[2])
