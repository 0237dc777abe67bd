"""Bulk sampling: the same texts as the engine's at temperature 0, the target's law at temperature 1, whoever is beside."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from surefoot.engine.assembly import build_engine
from surefoot.engine.options import EngineOptions
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target
from surefoot.training.sampler import LOOK, BulkSampler, Continuation, SampledText
from tests.tiny_models import tiny_target


def continue_all(target: Target, jobs: list[Continuation], rows: int, max_len: int = 64) -> dict[int, SampledText]:
    sampler = BulkSampler(target, rows=rows, max_len=max_len)
    found = {text.job.index: text for texts in sampler.run(jobs) for text in texts}
    assert sampler.generated == sum(len(text.tokens) - len(text.job.tokens) for text in found.values())
    return found


def some_jobs(target: Target, count: int, temperature: float, max_new: int = 24) -> list[Continuation]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, target.vocab_size, rng.integers(1, 20)).tolist()) for _ in range(count)]
    return [Continuation(i, prompt, temperature, max_new, seed=100 + i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_greedy_texts_are_those_of_the_engine(architecture: str) -> None:
    target = tiny_target(architecture)
    jobs = some_jobs(target, 7, 0.0)
    found = continue_all(target, jobs, rows=3)
    engine = build_engine(target, EngineOptions(drafter="none", cost_table="none", max_num_seqs=4, max_model_len=64))
    requests = [engine.add_request(list(job.tokens), SamplingParams(temperature=0, max_tokens=24)) for job in jobs]
    while engine.has_work:
        engine.step()
    for job, request in zip(jobs, requests, strict=True):
        expected = [*job.tokens, *request.output.token_ids]
        assert found[job.index].tokens.tolist() == expected


def test_a_text_depends_on_nobody_beside_it() -> None:
    target = tiny_target("llama")
    jobs = some_jobs(target, 9, 1.0)
    together, alone = continue_all(target, jobs, rows=9), continue_all(target, jobs, rows=1)
    few = continue_all(target, jobs[::-1], rows=2)
    for index in range(9):
        tokens = together[index].tokens.tolist()
        assert tokens == alone[index].tokens.tolist() == few[index].tokens.tolist()
    assert len({tuple(text.tokens.tolist()) for text in together.values()}) == 9


def test_end_tokens_stop_a_text_and_are_kept() -> None:
    target = tiny_target("llama")
    target.eos_token_ids = frozenset({5, 9})
    found = continue_all(target, some_jobs(target, 40, 1.0, max_new=40), rows=8)
    ended = [text for text in found.values() if text.ended]
    assert ended, "no text met an end token: the test says nothing"
    for text in found.values():
        emitted = text.tokens[len(text.job.tokens) :]
        inside = np.isin(emitted[:-1], [5, 9])
        assert not inside.any()
        assert text.ended == (emitted[-1] in (5, 9))
        assert text.ended or len(emitted) == 40


def test_first_tokens_follow_the_targets_law() -> None:
    target = tiny_target("llama")
    prompt, draws = (3, 1, 4), 4000
    jobs = [Continuation(i, prompt, 0.7, 1, seed=i) for i in range(draws)]
    found = continue_all(target, jobs, rows=500)
    counts = Counter(int(text.tokens[-1]) for text in found.values())
    with torch.no_grad():
        sampler = BulkSampler(target, rows=1, max_len=8)
        sampler.history[0, :3] = torch.tensor(prompt)
        logits = sampler._forward(torch.zeros(3, dtype=torch.int64), torch.arange(3))[-1].float()
    expected = (logits / 0.7).softmax(0).numpy() * draws
    top = np.argsort(expected)[::-1][:10]
    for token in top:
        assert abs(counts[int(token)] - expected[token]) < 5 * np.sqrt(expected[token] + 1)


def test_stopping_early_gives_what_is_there() -> None:
    target = tiny_target("llama")
    target.eos_token_ids = frozenset()
    sampler = BulkSampler(target, rows=4, max_len=200)
    texts = sampler.run(some_jobs(target, 4, 1.0, max_new=150))
    assert next(texts) == []
    left = sampler.unfinished()
    assert [len(text.tokens) - len(text.job.tokens) for text in left] == [LOOK] * 4
    assert not sampler.jobs
