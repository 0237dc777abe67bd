"""The comparison with transformers: same weights, same tokens, and it notices where they are not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from surefoot import LLM, SamplingParams
from surefoot.bench import decode
from surefoot.bench.decode import (
    INT8,
    SPECULATIVE,
    TARGET_ONLY,
    TRANSFORMERS,
    ArmAnswers,
    Decode,
    Difference,
    measure_decode,
)
from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.targets.loading import load_untouched
from tests.tiny_models import tiny_target

PROMPTS = [[1, 2, 3, 4] * 3, [5, 6, 5, 6, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_target("qwen3").model.save_pretrained(path)
    return path


def test_every_arm_answers_every_prompt_with_the_tokens_of_transformers(checkpoint: Path) -> None:
    shares: list[float] = []
    found = measure_decode(
        load_untouched(str(checkpoint)),
        LLM(str(checkpoint), drafter="prompt-lookup", max_num_seqs=1, cost_table="none"),
        LLM(str(checkpoint), drafter="none", quantize="int8", max_num_seqs=1),
        PROMPTS,
        12,
        shares.append,
    )
    assert [row.arm for row in found.rows] == [TRANSFORMERS, TARGET_ONLY, SPECULATIVE, INT8]
    assert all(len(row.speeds) == len(row.texts) == len(PROMPTS) for row in found.rows)
    assert found.differences == []  # float32: nothing ties
    assert found.identical
    assert found.drafted > 0
    assert [len(text) for text in found.row(TRANSFORMERS).texts] == [12, 12, 12]
    assert shares[-1] == 1.0
    figures = found.to_dict()
    assert figures["equal_to_transformers"] == figures["answers"] == 3
    assert figures["rows"][0]["of_transformers"] == 1.0
    if native.available():
        full, eight = (found.row(arm).weight_bytes for arm in (TARGET_ONLY, INT8))
        assert full is not None
        assert eight is not None
        assert full > 3 * eight  # float32 and int8
        assert 0 < (found.floor_share(TARGET_ONLY) or 0) < 1
    assert found.floor_share(SPECULATIVE) is None  # it reads the weights for several tokens at once


def test_where_texts_part_the_distance_of_the_candidates_is_said(checkpoint: Path) -> None:
    model = load_untouched(str(checkpoint))
    prompt, theirs = PROMPTS[0], [3, 1, 4, 1]
    assert decode.difference(model, 0, prompt, theirs, theirs) is None
    found = decode.difference(model, 7, prompt, theirs, [3, 1, 5, 9])
    assert found is not None
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, 3, 1]])).logits[0, -1]
    assert (found.prompt, found.token) == (7, 2)
    assert found.gap == pytest.approx(abs(logits[4] - logits[5]).item(), rel=1e-4)
    step = torch.finfo(torch.float32).eps * 2.0 ** math.floor(math.log2(abs(logits[4].item())))
    assert found.ulps == pytest.approx(found.gap / step, rel=1e-3)
    ended = decode.difference(model, 0, prompt, theirs, theirs[:2])
    assert ended == Difference(0, 2, math.inf, math.inf)


def test_ratios_are_those_of_the_same_prompts() -> None:
    rows = [
        ArmAnswers(TRANSFORMERS, [1.0, 10.0, 100.0], [[1], [2], [3]]),
        ArmAnswers(TARGET_ONLY, [3.0, 20.0, 200.0], [[1], [2], [3]], weight_bytes=10**9),
        ArmAnswers(SPECULATIVE, [6.0, 60.0, 200.0], [[1], [2], [4]]),
    ]
    found = Decode(rows, 40.0, [], drafted=9)
    assert found.ratio(TARGET_ONLY, TRANSFORMERS) == 2.0
    assert found.ratio(SPECULATIVE, TARGET_ONLY) == 2.0
    assert found.floor_share(TARGET_ONLY) == pytest.approx(20 / 40)
    assert not found.identical


def test_answers_of_one_token_have_no_speed(checkpoint: Path) -> None:
    plain = load_untouched(str(checkpoint))
    llm = LLM(str(checkpoint), drafter="prompt-lookup", max_num_seqs=1, cost_table="none")
    with pytest.raises(ConfigurationError, match="max_tokens is 1; allowed: 2 or more"):
        measure_decode(plain, llm, None, PROMPTS, 1, lambda share: None)
    first = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1), progress=False)[0].token_ids[0]
    llm.target.eos_token_ids = (first,)  # the first prompt's answer ends at once
    found = measure_decode(plain, llm, None, PROMPTS, 6, lambda share: None)
    assert found.row(TARGET_ONLY).texts[0] == found.row(TRANSFORMERS).texts[0] == [first]
    assert len(found.row(TARGET_ONLY).speeds) == len(found.row(TRANSFORMERS).speeds) < len(PROMPTS)
    with pytest.raises(ConfigurationError, match="ended at its first token"):
        measure_decode(plain, llm, None, PROMPTS[:1], 6, lambda share: None)
