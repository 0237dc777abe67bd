"""The draft pass benchmark runs, on a drafter small enough for a test."""

from __future__ import annotations

import sys

import pytest
import torch

from surefoot.bench import draft_pass as benchmark
from surefoot.kernels import native

TINY = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_target_layers": 6,
    "target_layer_ids": (1, 3),
}


@pytest.mark.skipif(not native.available(), reason="it compares two uses of the native kernels")
@pytest.mark.parametrize("int8", [False, True])
def test_it_prints_both_arms(monkeypatch, capsys, int8) -> None:
    monkeypatch.setitem(benchmark.SHAPES, "gemma3-270m", TINY)
    command = ["benchmark", "--model", "gemma3-270m", "--draft-vocabulary", "50", "--rank", "4", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", command + ["--requests", "2"] + ["--int8"] * int8)
    benchmark.main()
    printed = capsys.readouterr().out
    assert "2 requests" in printed
    assert printed.count(" / ") >= 10


@pytest.mark.skipif(not native.available(), reason="it compares two uses of the native kernels")
def test_both_arms_draft_the_same() -> None:
    drafts = []
    for packed in (False, True):
        torch.manual_seed(0)
        with torch.inference_mode():
            drafter = benchmark.random_drafter(TINY, draft_vocabulary=50, rank=4, int8=False)
            drafter.model.pack() if packed else benchmark.pack_one_by_one(drafter.model)
            torch.manual_seed(1)
            scene = benchmark.Scene(drafter, 3, benchmark.BlockSampler if packed else benchmark.TokenSampler)
            parts = scene.parts()
            parts["context of 3 rows each"]()
            drafts.append([parts[name]() for name in list(parts)[:2]])
    for one, other in zip(*drafts, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.confidence_logits, other.confidence_logits)
