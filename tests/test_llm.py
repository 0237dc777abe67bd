"""The Python interface on a tiny target: what goes in is checked, what comes out is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot import LLM, SamplingParams
from surefoot.errors import ConfigurationError, RequestError
from surefoot.prompts import checked_text
from tests.tiny_models import tiny_target

PARAMS = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny_target("llama"), drafter="prompt-lookup", gamma=3, cost_table="none", max_model_len=64, seed=1)


def test_every_prompt_gets_its_output_in_order(llm: LLM) -> None:
    prompts = [[i, i + 1, i] for i in range(1, 6)]
    outputs = llm.generate(prompts, PARAMS, progress=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    alone = [llm.generate([prompt], PARAMS, progress=False)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in outputs] == alone
    assert {output.finish_reason for output in outputs} == {"length"}
    assert all(output.statistics.emitted == 9 for output in outputs)
    assert all(output.timing.tokens_per_s >= 0 for output in outputs)


def test_a_stream_emits_what_generate_returns_and_leaving_it_cancels(llm: LLM) -> None:
    whole = llm.generate([[1, 2, 1]], PARAMS, progress=False)[0].token_ids
    stream = llm.stream([1, 2, 1], PARAMS)
    assert [token for event in stream for token in event.token_ids] == whole
    assert stream.result.finish_reason == "length"
    for _ in llm.stream([1, 2, 1], PARAMS):
        break
    assert not llm.engine.requests
    assert llm.engine.blocks.pools[0].num_used == 0


def test_profile_measures_saves_and_plans_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.engine.fingerprint.tables_directory", lambda: tmp_path)

    def started(**options: Any) -> LLM:
        return LLM(tiny_target("llama"), drafter="prompt-lookup", gamma=3, max_model_len=64, max_num_seqs=2, **options)

    first = started()
    assert first.lacks_cost_table
    before = first.generate([[1, 2, 1]], PARAMS, progress=False)[0]
    shares: list[float] = []
    found = first.profile(0.1, progress=shares.append)
    assert shares[-1] == 1.0
    assert not first.lacks_cost_table
    assert "no cost table" not in first.describe()["planner"]
    after = first.generate([[1, 2, 1]], PARAMS, progress=False)[0]
    assert after.token_ids == before.token_ids
    assert set(first.stats()["reasons"]) > {"no_table"}
    second = started()
    assert not second.lacks_cost_table
    assert second.engine.policy.costs.table == found.table
    assert not started(cost_table="none", width=2).lacks_cost_table  # nothing is planned
    assert started(cost_table="none").lacks_cost_table


def test_one_parameter_set_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 5)]
    assert [len(o.token_ids) for o in llm.generate([[1], [2]], each, progress=False)] == [2, 5]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[1]], each, progress=False)


def test_what_cannot_be_served_is_refused_in_words(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate([[]], PARAMS, progress=False)
    with pytest.raises(RequestError, match="at most 64"):
        llm.generate([[1] * 64], PARAMS, progress=False)
    with pytest.raises(RequestError, match="outside the target's vocabulary"):
        llm.generate([[64]], PARAMS, progress=False)
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        llm.generate("text", PARAMS, progress=False)
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], PARAMS)
    assert not llm.engine.has_work


def test_bytes_that_are_no_text_are_a_request_error() -> None:
    assert checked_text("né \N{PILE OF POO}") == "né \N{PILE OF POO}"
    with pytest.raises(RequestError, match="character 2 stands for a byte that is not UTF-8"):
        checked_text("ok\udcff")
