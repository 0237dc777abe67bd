"""Log-probabilities of the prompt: the target's own, however the prompt is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.engine.graphs import EagerRunner
from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build, stock_logits
from tests.tiny_models import tiny_target

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [5, 6] * 9, [7], [2, 7, 1, 8] * 5]
WANTED = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=3)


def check(target: Any, request: Any, top: int = 3) -> None:
    """Against transformers' own logits over the whole prompt."""
    prompt, entries = request.prompt_token_ids, request.output.prompt_logprobs
    log_probs = torch.log_softmax(stock_logits(target, torch.tensor([prompt]))[0].float(), -1)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        own = log_probs[position - 1]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(own[prompt[position]]), abs=1e-4)
        assert [token for token, _ in entry.top] == own.topk(top).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(own.topk(top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
@pytest.mark.parametrize("rows", [64, 17])
@pytest.mark.parametrize("drafter", ["none", "dspark", "prompt-lookup"])
def test_they_are_the_targets_own_in_chunks_and_beside_decodes(drafter: str, rows: int, device: Any) -> None:
    target = tiny_target("gemma3")
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": rows, "block_size": 4}
    runner = EagerRunner(target, (4, 16, 64))  # padded, too
    params = [WANTED, WANTED, WANTED, SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1)]
    engine = build(target, drafter, runner=runner, device=device(), **settings)
    got = engine.run(PROMPTS, params)
    for request in got[:3]:
        check(target, request)
    check(target, got[3], top=1)
    plain = build(target, "none").run(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    assert [r.output.token_ids for r in got] == [r.output.token_ids for r in plain]
    assert all(len(entry.top) == 2 for entry in got[3].output.logprobs)
    engine.assert_clean()


def test_a_cached_prefix_is_not_taken_for_them_and_serves_the_others() -> None:
    target = tiny_target("llama")
    engine = build(target, "none", block_size=4)
    free = SamplingParams(temperature=0, max_tokens=4)
    engine.run([PROMPTS[0]], free)
    wanted, other = engine.run([PROMPTS[0]], WANTED)[0], engine.run([PROMPTS[0]], free)[0]
    assert wanted.cached_tokens == 0
    check(target, wanted)
    assert other.cached_tokens > 0
    assert other.output.prompt_logprobs is None
    assert wanted.output.token_ids[:4] == other.output.token_ids


def test_a_preemption_loses_and_repeats_none() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=0)
    prompts = [[3, 1, 4, 1, 5, i] for i in range(5)]
    engine = build(CheapTarget(), "prompt-lookup", num_blocks=28, max_num_seqs=4)
    got = engine.run(prompts, params)
    assert sum(r.preemptions for r in got) > 0
    for request, alone in zip(got, [build(CheapTarget(), "none").run([p], params)[0] for p in prompts], strict=True):
        assert [e and (e.token_id, e.top) for e in request.output.prompt_logprobs] == [
            e and (e.token_id, e.top) for e in alone.output.prompt_logprobs
        ]
        ours, theirs = ([e.logprob for e in r.output.prompt_logprobs[1:]] for r in (request, alone))
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_more_than_the_vocabulary_is_cut_to_it() -> None:
    target = CheapTarget(6)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=20, prompt_logprobs=20)
    for drafter in ("none", "dspark"):
        request = build(target, drafter).run([[1, 2, 3]], params)[0]
        assert request.output.finish_reason == "length"
        for entry in [*request.output.prompt_logprobs[1:], *request.output.logprobs]:
            assert sorted(token for token, _ in entry.top) == list(range(6))
            assert sum(torch.tensor([value for _, value in entry.top]).exp()) == pytest.approx(1, abs=1e-5)
