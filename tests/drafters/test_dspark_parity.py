"""The serving path against the reference implementations' own outputs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from surefoot.drafters.checkpoint import load_drafter

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "no_markov", "no_confidence"])
def test_every_round_of_the_deepspec_reference(deepspec, worlds, name, block_size) -> None:
    """Hidden states, corrected logits, greedy tokens and confidence logits; 11, 3 and 1 new context rows."""
    directory = deepspec / f"drafter_{name}"
    golden, story = load_file(directory / "golden.safetensors"), json.loads((directory / "golden.json").read_text())
    drafter = load_drafter(directory)
    scene = worlds.Scene(drafter, block_size=block_size)
    slot = 2
    for record in story["rounds"]:
        now = {key.split(".")[1]: value[0] for key, value in golden.items() if key.startswith(f"r{record['round']}.")}
        scene.extend([(slot, now["context_features"])])
        assert scene.lengths[slot] == record["start"]
        scene.history[slot, record["start"]] = record["anchor"]

        draft, sampler = scene.propose([slot])
        context = scene.context([slot])
        with torch.no_grad():
            hidden = drafter.block_hidden(context, context.history[context.slots, context.lengths])
        torch.testing.assert_close(hidden[0], now["block_hidden"], **TOLERANCE)
        torch.testing.assert_close(torch.cat(sampler.logits), now["draft_logits"], **TOLERANCE)
        assert draft.tokens[0].tolist() == record["draft_tokens"]
        if "confidence_logits" in now:
            torch.testing.assert_close(draft.confidence_logits[0], now["confidence_logits"], **TOLERANCE)
        else:
            assert draft.confidence_logits is None
        largest = now["draft_logits"].softmax(-1).amax(-1)
        torch.testing.assert_close(draft.signal[0], torch.logit(largest), **TOLERANCE)
