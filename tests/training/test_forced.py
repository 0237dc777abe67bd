"""Drafts along known texts are the real loop's: the same blocks, and at any temperature the same chances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from surefoot.drafters.dspark import DSparkDrafter
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from surefoot.training.forced import TextBlocks, WrittenText, choose_sharpness, follow
from surefoot.training.measure import VerifiedBlocks, note_blocks
from surefoot.training.progress import StageProgress
from tests.engine.engines import EngineUnderTest, build, tiny_dspark
from tests.tiny_models import tiny_target

GAMMA = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "reduced": {"draft_vocab_size": 40},
    "rnn": {"markov_head_type": "rnn", "sample_from_anchor": False, "block_size": GAMMA + 1},
}


def written(
    engine: EngineUnderTest, drafter: DSparkDrafter, prompt: list[int], params: SamplingParams, count: int
) -> tuple[VerifiedBlocks, list[WrittenText]]:
    blocks = VerifiedBlocks(GAMMA)
    engine.add_observer(lambda report: note_blocks(report, params.temperature, lambda request: blocks))
    requests = engine.run([prompt] * count, params)
    drafter.draw_by(None)
    return blocks, [WrittenText(tuple(r.token_ids), len(prompt), params.temperature) for r in requests]


@pytest.mark.parametrize("copying", [None, [0.0, 0.3, *[0.8] * 15]], ids=["alone", "copying"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_blocks_of_a_greedy_text_are_those_of_the_loop(
    architecture: str, variant: str, copying: list[float] | None
) -> None:
    """Accepted lengths, and logits and signals up to the first rejection."""
    target = tiny_target(architecture)
    drafter = tiny_dspark(target, GAMMA, **VARIANTS[variant])
    engine = build(target, drafter, width=GAMMA)
    drafter.draw_by(Calibration([1.0] * GAMMA, copying=copying))
    params = SamplingParams(temperature=0, max_tokens=80)
    blocks, texts = written(engine, drafter, [3, 1, 4, 1, 5], params, 1)
    drafter.draw_by(Calibration([1.0] * GAMMA, copying=copying))
    seen = follow(target, drafter, [*texts, WrittenText((2, 7, 2), 1, 0.0)], StageProgress("test", False))
    mine = seen.text == 0
    assert mine.sum() == len(texts[0].tokens) - texts[0].start - 1
    chance = seen.chance[:, :, 0]
    assert set(np.unique(chance)) <= {0.0, 1.0}
    met = np.flatnonzero(seen.visits(chance) * mine)
    whole = np.array(blocks.verified) == GAMMA
    count = int(whole.sum())  # the last ones end with the text
    assert count >= 10
    assert chance[met].cumprod(1).sum(1)[:count].tolist() == np.array(blocks.accepted)[:count].tolist()
    rows, accepted, known = seen.met(chance, np.random.default_rng(0))
    of_mine = seen.text[rows] == 0
    assert rows[of_mine].tolist() == met.tolist()
    assert accepted[of_mine][:count].tolist() == blocks.accepted[:count]
    assert known[of_mine][:count].tolist() == [GAMMA] * count
    for row, accepted, logits, signal in zip(met[:count], blocks.accepted, blocks.logits, blocks.signal):  # noqa: B905
        reached = slice(0, accepted + 1)
        np.testing.assert_allclose(seen.logits[row, reached], logits[reached], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(seen.signal[row, reached], signal[reached], rtol=1e-4, atol=1e-5)


@pytest.mark.statistical
@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_sampled_texts_tell_the_loops_acceptance_at_any_sharpness(sharpness: float) -> None:
    """Blocks per text and acceptance by position, within 4.5 standard errors of a loop that draws that sharply."""
    target = tiny_target("llama", vocab_size=12, sharpness=3.0)
    drafter = tiny_dspark(target, GAMMA)
    params, count = SamplingParams(temperature=0.9, max_tokens=10), 1500
    engine = build(target, drafter, width=GAMMA, max_num_seqs=64, check_layout=False)
    _, texts = written(engine, drafter, [1, 2, 3], params, 300)
    seen = follow(target, drafter, texts, StageProgress("test", False), sharpness=(1.0, sharpness))
    chance, overlap = seen.chance[:, :, 1], seen.overlap[:, :, 1]
    reached = seen.reached(chance)
    engine = build(target, drafter, width=GAMMA, max_num_seqs=64, check_layout=False)
    drafter.draw_by(Calibration([1.0] * GAMMA, sharpness=[sharpness] * GAMMA))
    blocks, _ = written(engine, drafter, [1, 2, 3], params, count)
    rates, counts = blocks.conditional()
    for k in range(GAMMA):
        for expected in ((reached * overlap)[:, k].sum(), (reached * chance)[:, k].sum()):
            rate = expected / reached[:, k].sum()
            error = np.sqrt(rate * (1 - rate) * (1 / counts[k] + 1 / reached[:, k].sum()))
            assert abs(rates[k] - rate) < 4.5 * error


def blocks_of(overlap: np.ndarray, temperature: float, sharpness: tuple[float, ...]) -> TextBlocks:
    n, gamma, _ = overlap.shape
    return TextBlocks(
        np.arange(n), np.full(n, temperature), np.zeros((n, gamma)), np.zeros((n, gamma)), overlap, overlap,
        np.ones((n, gamma), bool), np.zeros((n, gamma)), np.zeros((n, gamma), int), np.zeros((n, gamma), bool), sharpness,
    )  # fmt: skip


def test_the_sharpness_chosen_accepts_most() -> None:
    accepted = np.array([[0.5, 0.6, 0.4], [0.5, 0.55, 0.58]])  # by position and sharpness
    seen = blocks_of(np.broadcast_to(accepted, (20, 2, 3)), 1.0, (1.0, 1.5, 2.0))
    assert choose_sharpness(seen) == 1
    assert choose_sharpness(blocks_of(seen.overlap, 0.0, (1.0, 1.5, 2.0))) == 0


def test_visits_follow_the_walk() -> None:
    """Three blocks of one text, gamma 2: what leads to each, by hand; another text begins anew."""
    chance = np.array([[0.5, 0.2], [0.9, 0.3], [1.0, 0.0], [0.4, 0.4]])
    seen = TextBlocks(
        np.array([4, 4, 4, 9]), np.ones(4), chance, chance, chance[..., None], chance[..., None],
        np.array([[True, True], [True, True], [True, False], [True, True]]), chance, np.zeros((4, 2), int),
        np.zeros((4, 2), bool), (1.0,),
    )  # fmt: skip
    second = 1 - 0.5
    third = 0.5 * (1 - 0.2) + second * (1 - 0.9)
    np.testing.assert_allclose(seen.visits(chance), [1, second, third, 1])
    np.testing.assert_allclose(seen.reached(chance)[:, 1], [0.5, second * 0.9, 0, 0.4])


def test_a_copy_outside_the_draft_vocabulary_does_not_count() -> None:
    """It could not be drafted: a share fitted to it would be too high."""
    target = tiny_target("llama")
    drafter = tiny_dspark(target, GAMMA, draft_vocab_size=40)
    vocabulary = set(drafter.vocabulary.tolist())
    known, unknown = min(vocabulary), min(set(range(target.vocab_size)) - vocabulary)
    text = WrittenText((known, unknown, known, unknown, known, unknown, known), 1, 0.0)
    seen = follow(target, drafter, [text], StageProgress("test", False))
    position = np.arange(2, 7)[:, None] + np.arange(GAMMA)  # in the text, of every block's drafts
    right = np.where(position < 7, position % 2 == 0, False)  # those after an unknown token are known
    assert (seen.match[right] > 0).sum() > 0
    assert seen.copied[right & (position > 2)].all()
    assert not seen.match[(position < 7) & ~right].any()


def test_a_drafter_with_the_whole_vocabulary() -> None:
    target = tiny_target("llama")
    drafter = tiny_dspark(target, GAMMA)
    seen = follow(target, drafter, [WrittenText((1, 2, 3, 4, 5), 2, 1.0)], StageProgress("test", False))
    assert seen.chance.shape == (2, GAMMA, len(seen.sharpness))
    assert seen.known.tolist() == [[True, True, False], [True, False, False]]
    assert torch.isfinite(torch.from_numpy(seen.logits)).all()
    assert seen.match[:, 0].tolist() == [0, 0]  # 3 and 4 have not been seen before
    assert not seen.copied.any()
    assert ((seen.overlap <= 1 + 1e-6) & (seen.chance <= 1) & (seen.chance >= 0)).all()
