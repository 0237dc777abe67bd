"""Copies: found by their definition, mixed in as a share of the distribution, by one native call or token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.drafters.base import DraftContext
from surefoot.drafters.copying import LONGEST, Copier, fit_shares, raise_copies
from surefoot.kernels import native
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from tests.engine.engines import build, tiny_dspark
from tests.tiny_models import tiny_target

SHARES = [0.0, 0.2, *[0.7] * (LONGEST - 1)]


def copy_of(text: list[int]) -> tuple[int, int]:
    """By the definition: the token after the longest earlier occurrence of the suffix, the latest of equals."""
    for length in range(min(LONGEST, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return text[end], length
    return -1, 0


def context_of(texts: list[list[int]]) -> DraftContext:
    history = torch.full((len(texts) + 1, 64), 77)  # what is not committed holds anything
    for slot, text in enumerate(texts, 1):
        history[slot, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) - 1 for text in texts])
    return DraftContext(torch.arange(1, len(texts) + 1), lengths, history, None, int(lengths.max()))


letters = st.integers(0, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(letters, min_size=1, max_size=40), st.lists(letters, min_size=4, max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_copies_are_what_the_definition_says(requests: list[tuple[list[int], list[int]]]) -> None:
    """Of several requests at once, before a block and inside it."""
    texts = [list(text) for text, _ in requests]
    copier = Copier(context_of(texts), 5)
    for k in range(5):
        tokens, matches = copier.copies()
        assert list(zip(tokens.tolist(), matches.tolist(), strict=True)) == [copy_of(text) for text in texts]
        if k < 4:
            drawn = [ahead[k] for _, ahead in requests]
            copier.append(torch.tensor(drawn))
            for text, token in zip(texts, drawn, strict=True):
                text.append(token)


def test_a_raised_logit_is_a_mixture() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) * 3
    logits[3, 2] = -200.0  # as good as impossible, and copied all the same
    columns, shares = torch.tensor([4, -1, 0, 2]), torch.tensor([0.3, 0.9, 0.0, 0.6])
    probs = logits.softmax(-1)
    mixed = raise_copies(logits, probs, columns, shares).softmax(-1)
    for row, (column, share) in enumerate(zip(columns.tolist(), shares.tolist(), strict=True)):
        expected = probs[row] * (1 if column < 0 else 1 - share)
        if column >= 0:
            expected[column] += share
        torch.testing.assert_close(mixed[row], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not native.available(), reason="one call draws a block with the native kernels only")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "changes", [{}, {"draft_vocab_size": 40}, {"markov_rank": 0, "confidence_head_with_markov": False}]
)
def test_a_block_in_one_call_copies_like_one_by_token(
    changes: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests of different lengths, texts that repeat: the same tokens, confidences and acceptance."""
    target = tiny_target("llama")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [7, 7, 7], [2, 7, 1, 8, 2, 8], [5, 50, 5, 50, 5]]
    found = []
    for at_once in (True, False):
        drafter = tiny_dspark(target, 4, **changes)
        assert drafter.model.pack()
        calls: list[Any] = []

        def draw(*arguments: Any, whole=drafter._draw_at_once, calls=calls, at_once=at_once) -> Any:  # type: ignore[no-untyped-def]
            calls.append(whole(*arguments) if at_once else None)
            return calls[-1]

        monkeypatch.setattr(drafter, "_draw_at_once", draw)
        engine = build(target, drafter, width=4)
        drafter.draw_by(Calibration([1.0] * 4, sharpness=[1.3] * 4, copying=SHARES))
        steps: list[tuple[Any, ...]] = []
        engine.add_observer(
            lambda r, steps=steps: steps.append((r.outputs.drafts, r.outputs.accepted, r.outputs.evidence.signal))
        )
        engine.run(prompts, SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True))
        assert calls
        assert all((call is not None) == at_once for call in calls)
        found.append(steps)
    assert len(found[0]) == len(found[1]) > 4
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0]
        assert one[1] == other[1]
        torch.testing.assert_close(one[2], other[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("native_draws", [True, False])
def test_copying_is_accepted_where_the_text_repeats(native_draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy tiny model ends in a loop; a random drafter knows nothing of it, its copies do. The text stays the same."""
    target = tiny_target("llama")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    texts, accepted = [], []
    for copying in (None, SHARES):
        drafter = tiny_dspark(target, 4)
        assert drafter.model.pack() or not native_draws
        if not native_draws:
            monkeypatch.setattr(drafter, "_draw_at_once", lambda *unused: None)
        engine = build(target, drafter, width=4)
        drafter.draw_by(Calibration([1.0] * 4, copying=copying))
        texts.append([request.token_ids for request in engine.run([[3, 1, 4, 1, 5]], params)])
        accepted.append(engine.statistics.blocks.accepted)
    assert texts[0] == texts[1]
    assert accepted[1] > accepted[0] + 10


def test_shares_are_found_again() -> None:
    generator = np.random.default_rng(0)
    truth = np.array([0.0, 0.1, 0.35, 0.5, *[0.8] * (LONGEST - 3)])
    match = generator.integers(0, LONGEST + 1, 60_000)
    match[match == LONGEST] = np.where(generator.random((match == LONGEST).sum()) < 0.999, 1, LONGEST)  # hardly any
    own = generator.uniform(0.05, 0.6, len(match))  # of the text's token; copies come on top
    # The text's token is drawn from the mixture: a copy with its share, or by the drafter's own distribution.
    from_copy = generator.random(len(match)) < truth[match]
    by_itself = generator.random(len(match)) < 0.2  # the drafter's own draw is the copy, too
    own_of_copy = np.where(from_copy | by_itself, 0.2, own)
    found = fit_shares(match, from_copy | by_itself, own_of_copy)
    assert found[0] == 0
    np.testing.assert_allclose(found[:LONGEST], truth[:LONGEST], atol=0.03)
    assert found[LONGEST] == pytest.approx(0.8, abs=0.15)  # what it has not seen it takes from shorter matches


def test_nothing_to_copy_is_no_share() -> None:
    assert fit_shares(np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0)) == [0.0] * (LONGEST + 1)
    assert max(fit_shares(np.full(900, 3), np.ones(900, bool), np.full(900, 0.01))) < 1
