"""The engine's sampler hands over a whole block with the very law it draws by token."""

from __future__ import annotations

import pytest
import torch

from surefoot.drafters.base import BlockwiseSampler
from surefoot.engine.distribution import BlockSampler, DraftVocabulary, SamplingFlags, SamplingTensors, processed
from surefoot.kernels import native
from surefoot.kernels.sequential import draft_block
from surefoot.speculation.uniforms import Purpose, uniforms

SLOTS, GAMMA, TOKENS, LENGTH = 6, 4, 300, 24


def parameters() -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.tensor([0.0, 0.5, 1.0, 1.3, 0.8, 1.0]),
        top_k=torch.tensor([0, 5, 0, 40, 1000, 1]),
        top_p=torch.tensor([1.0, 0.9, 0.5, 1.0, 0.95, 0.7]),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.02, 0.0, 0.5]),
        repetition=torch.ones(SLOTS),
        presence=torch.zeros(SLOTS),
        frequency=torch.zeros(SLOTS),
        prompt_len=torch.zeros(SLOTS, dtype=torch.int64),
        seed=torch.arange(SLOTS) + 11,
        bias_ids=torch.zeros(SLOTS, 1, dtype=torch.int64),
        bias_values=torch.zeros(SLOTS, 1),
        min_tokens=torch.zeros(SLOTS, dtype=torch.int64),
        end_ids=torch.zeros(SLOTS, 1, dtype=torch.int64),
        end_values=torch.zeros(SLOTS, 1),
    )


def sampler(flags: SamplingFlags, vocabulary: torch.Tensor, slots: torch.Tensor, gamma: int = GAMMA) -> BlockSampler:
    lengths = torch.arange(len(slots)) + 2
    history = torch.zeros(SLOTS, LENGTH, dtype=torch.int64)
    return BlockSampler(
        parameters(), flags, history, slots, lengths, lengths + 1, gamma, DraftVocabulary(vocabulary, 2 * TOKENS)
    )


@pytest.mark.skipif(not native.available(), reason="one call draws a block with the native kernels only")
@pytest.mark.parametrize(
    "flags",
    [
        SamplingFlags(greedy=True),
        SamplingFlags(greedy=False),
        SamplingFlags(greedy=False, top_k=1000, top_p=True, min_p=True),
        SamplingFlags(greedy=False, top_p=True),
    ],
)
@pytest.mark.parametrize("gamma", [GAMMA, GAMMA + 2])
@pytest.mark.parametrize("sharp", [None, torch.tensor([1.5, 1.0, 2.5, 0.7])])
def test_a_block_handed_over_is_the_block_drawn_by_token(flags, gamma, sharp) -> None:
    """Tokens, the proposal the acceptance divides by, and the history; `gamma` beyond the block is another source's."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = torch.randperm(2 * TOKENS, generator=generator)[:TOKENS]
    slots = torch.tensor([3, 0, 5, 1, 4])
    base = torch.randn(len(slots), GAMMA, TOKENS, generator=generator) * 2
    by_token, at_once = (sampler(flags, vocabulary, slots, gamma) for _ in range(2))
    for either in (by_token, at_once):
        either.only(torch.tensor([0, 1, 3, 4]))
    base = base[[0, 1, 3, 4]]
    sharpness = [None] * GAMMA if sharp is None else list(sharp)
    tokens = torch.stack([by_token.draw(k + 1, base[:, k], sharpness[k]) for k in range(GAMMA)], 1)

    assert isinstance(at_once, BlockwiseSampler)
    draw = at_once.block_draw()
    assert draw is not None
    ids, _, probs = draft_block(base, slots[[0, 1, 3, 4]], vocabulary=vocabulary, sharpness=sharp, **vars(draw))
    assert torch.equal(at_once.take(ids, probs), tokens)
    one, other = by_token.proposal, at_once.proposal
    assert torch.equal(one.draft_ids, other.draft_ids)
    assert (one.probs is None) == (other.probs is None) == flags.greedy
    assert one.probs is None or torch.equal(one.probs, other.probs)
    assert torch.equal(by_token._history, at_once._history)


@pytest.mark.parametrize("flags", [SamplingFlags(greedy=False, penalties=True), SamplingFlags(greedy=False, bias=True)])
def test_processing_that_looks_at_drawn_tokens_is_not_handed_over(flags) -> None:
    assert sampler(flags, torch.arange(TOKENS), torch.arange(SLOTS)).block_draw() is None


def test_uniforms_are_those_of_the_address() -> None:
    at_once = sampler(SamplingFlags(greedy=False), torch.arange(TOKENS), torch.arange(SLOTS))
    draw = at_once.block_draw()
    assert draw is not None
    expected = uniforms(parameters().seed[2], torch.tensor(5), Purpose.DRAFT, torch.tensor(3))
    assert draw.uniforms[2, 2] == expected


def test_targets_and_drafters_rows_are_filtered_alike() -> None:
    """p and q of the same logits are the same bits: a perfect drafter is always accepted."""
    params, flags = parameters(), SamplingFlags(greedy=False, top_k=1000, top_p=True, min_p=True)
    logits = torch.randn(SLOTS, TOKENS, generator=torch.Generator().manual_seed(1)) * 3
    slots = torch.arange(SLOTS)
    whole = processed(logits, params, flags, torch.zeros(SLOTS, 8, dtype=torch.int64), slots, slots)
    for slot in range(SLOTS):
        alone = processed(logits[[slot]], params, flags, torch.zeros(SLOTS, 8, dtype=torch.int64), slots[[slot]], slots)
        assert torch.equal(alone[0], whole[slot])
