"""The serving path against the speculators package (golden data: see make_speculators_golden.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.drafters.checkpoint import load_drafter, save_drafter
from surefoot.drafters.model import DSparkModel
from tests.drafters.dense import block_mask, dense_hidden

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def test_all_cases_are_there() -> None:
    assert len(CASES) == 5


@pytest.fixture(params=CASES)
def case(request, worlds):
    golden = load_file(DATA / request.param / "golden.safetensors")
    drafter = load_drafter(DATA / request.param)
    target = worlds.lending_target(*golden["embedding"].shape)
    target.embed_tokens.weight.copy_(golden["embedding"])
    target.lm_head.weight.copy_(golden["head"])
    drafter.bind(target)
    return drafter, golden


def test_serving_equals_the_package(case, worlds) -> None:
    """Hidden states, corrected logits and confidences at three anchors of one text, drafted as one batch."""
    drafter, golden = case
    text, anchors, first = golden["text"], golden["anchors"].tolist(), drafter.config.first_slot
    scene = worlds.Scene(drafter, block_size=4)
    slots = [3, 0, 2]
    scene.extend([(s, golden["features"][:a]) for s, a in zip(slots, anchors, strict=True)], padding=3)
    scene.history[:, : len(text)] = text
    forced = {k: torch.stack([text[a + k] for a in anchors]) for k in range(1, drafter.gamma + 1)}
    draft, sampler = scene.propose(slots, worlds.RecordingSampler(drafter.vocabulary, forced))
    context = scene.context(slots)
    hidden = drafter.block_hidden(context, context.history[context.slots, context.lengths])
    for row, anchor in enumerate(anchors):
        torch.testing.assert_close(hidden[row], golden[f"{anchor}.hidden"], **TOLERANCE)
        logits = torch.stack([logits[row] for logits in sampler.logits])
        torch.testing.assert_close(logits, golden[f"{anchor}.logits"][first:], **TOLERANCE)
        if drafter.name == "dspark":
            torch.testing.assert_close(
                draft.confidence_logits[row], golden[f"{anchor}.confidence"][first:], **TOLERANCE
            )
        else:
            assert draft.confidence_logits is None


def test_training_forward_equals_the_package(case) -> None:
    drafter, golden = case
    model: DSparkModel = drafter.model
    anchors, context = golden["anchors"][None], torch.arange(len(golden["text"]))[None]
    config = model.config
    masks = {w: block_mask(config, context, anchors, w) for w in {config.window(i) for i in range(2)}}
    hidden = dense_hidden(model, golden["features"][None], context, golden["text"][anchors], anchors, masks)
    for row, anchor in enumerate(anchors[0].tolist()):
        torch.testing.assert_close(hidden[0, row], golden[f"{anchor}.hidden"], **TOLERANCE)


def test_feature_layers_are_outputs(case) -> None:
    """The package counts layer inputs: its [0, 3] is the embedding and the output of layer 2."""
    assert case[0].feature_layers == (-1, 2)


@pytest.mark.parametrize("layout", ["speculators", "deepspec"])
def test_round_trip(case, worlds, tmp_path, layout) -> None:
    drafter, _ = case
    save_drafter(drafter, tmp_path / "copy", layout)
    again = load_drafter(tmp_path / "copy")
    assert again.config == drafter.config
    assert (drafter.vocabulary is None) == (again.vocabulary is None)
    if drafter.vocabulary is not None:
        assert torch.equal(again.vocabulary, drafter.vocabulary)
    mine, theirs = drafter.model.own_tensors(), again.model.own_tensors()
    assert set(mine) <= set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
