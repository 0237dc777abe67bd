"""Every causal architecture of transformers is served exactly, or refused by its name in one line."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import CONFIG_MAPPING

from surefoot.targets.attention import PagedStep

from .architectures import Row, examine, examine_all, line, prompts, reference, tiny

SERVED = ("llama", "qwen3", "cohere2", "opt", "gptj", "gemma4_text", "minimax_m2")
NEVER = {"DIFFERS", "FAILED"}


@pytest.mark.parametrize("model_type", SERVED)
def test_an_architecture_answers_as_the_stock_model(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    assert line(examine(model_type)) == line(Row(model_type, type(tiny(model_type)).__name__, "equal"))


def test_a_wrong_answer_would_be_noticed(monkeypatch):
    """The comparison itself: a wrong token, and a model that forgets what it cached, are told from the right answer."""
    model = tiny("llama")
    prompt = prompts(64)[0]
    with torch.no_grad():
        answer: list[int] = []
        for _ in range(12):
            ids = torch.tensor([[*prompt, *answer]])
            answer.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    assert reference(model, prompt, answer) is None
    wrong = [*answer[:5], (answer[5] + 1) % 64, *answer[6:]]
    assert "answered token 5" in str(reference(model, prompt, wrong))
    original = PagedStep.update

    def without_history(self, key, value, layer_idx, *args, **kwargs):  # every row forgets what was cached before
        self.cache.target_kv[layer_idx][0].zero_()
        return original(self, key, value, layer_idx, *args, **kwargs)

    monkeypatch.setattr(PagedStep, "update", without_history)
    assert examine("gptj").outcome == "DIFFERS"


@pytest.mark.slow
def test_every_causal_architecture_is_served_exactly_or_refused(capsys):
    rows = list(examine_all())
    counts = Counter(row.outcome for row in rows)
    with capsys.disabled():
        print("\n" + "\n".join(map(line, rows)) + f"\n{dict(counts)}")
    assert [line(row) for row in rows if row.outcome in NEVER] == []
    assert counts["equal"] >= 60
    assert counts["refused"] >= 40
