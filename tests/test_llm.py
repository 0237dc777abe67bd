"""The Python interface on a tiny target: what goes in is checked, what comes out is complete."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot import LLM, SamplingParams
from surefoot.errors import ConfigurationError, EngineError, RequestError
from surefoot.llm import _Batch
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
    left = llm.stats()  # the loop answers after the cancel, which came first
    assert (left["running"], left["waiting"], left["blocks_used"]) == (0, 0, [0])
    assert not llm.engine.requests


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


def test_interleaved_streams_and_a_stream_beside_generate_lose_nothing(llm: LLM) -> None:
    prompts = [[1, 2, 1], [5, 6, 5, 6], [7]]
    alone = [output.token_ids for prompt in prompts for output in llm.generate([prompt], PARAMS, progress=False)]
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts[:2]]
    got: list[list[int]] = [[], []]
    events = [iter(stream) for stream in streams]
    for _ in range(9):
        for index, mine in enumerate(events):
            event = next(mine, None)
            got[index] += event.token_ids if event is not None else []
    assert got == alone[:2]
    stream = llm.stream(prompts[0], PARAMS)
    first = next(iter(stream)).token_ids
    beside = llm.generate(prompts[1:], PARAMS, progress=False)
    assert [output.token_ids for output in beside] == alone[1:]
    assert first + [token for event in stream for token in event.token_ids] == alone[0]
    assert stream.result.token_ids == alone[0]


def test_n_answers_to_every_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=4, max_tokens=6, n=3)
    outputs = llm.generate([[1, 2, 3], [4, 5]], params, progress=False)
    assert [[c.index for c in output.completions] for output in outputs] == [[0, 1, 2]] * 2
    for output in outputs:
        assert output.token_ids == output.completions[0].token_ids
        assert all(len(answer.token_ids) == 6 for answer in output.completions)
        assert len({tuple(answer.token_ids) for answer in output.completions}) > 1
    again = llm.generate([[1, 2, 3], [4, 5]], params, progress=False)
    assert [[a.finish_reason for a in o.completions] for o in again] == [["length"] * 3] * 2
    stream = llm.stream([1, 2, 3], params)
    by_index: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in stream:
        by_index[event.index] += event.token_ids
    assert [by_index[answer.index] for answer in stream.result.completions] == [
        answer.token_ids for answer in stream.result.completions
    ]
    for bad in (0, -1, 1.5, 2**70):
        with pytest.raises(RequestError, match="n is"):
            SamplingParams(n=bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"best_of is 3.*ask for n answers"):
        SamplingParams(best_of=3)  # type: ignore[arg-type]


def test_nothing_is_queued_if_one_prompt_of_several_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the target's vocabulary"):
        llm.generate([[1], [64]], PARAMS, progress=False)
    assert llm.stats()["waiting"] == llm.stats()["running"] == 0


def test_a_missing_cost_table_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("surefoot.engine.fingerprint.tables_directory", lambda: tmp_path)
    with LLM(tiny_target("llama"), drafter="prompt-lookup", max_model_len=64) as llm:
        for _ in range(2):
            llm.generate([[1, 2]], PARAMS, progress=False)
    assert [record.message.count("no cost table") for record in caplog.records] == [1]
    caplog.clear()
    with LLM(tiny_target("llama"), drafter="prompt-lookup", max_model_len=64, cost_table="none") as llm:
        llm.generate([[1, 2]], PARAMS, progress=False)
    assert not caplog.records, "who asks for none knows"


def test_a_closed_llm_gives_its_engine_back_and_says_that_it_is_closed(llm: LLM) -> None:
    with llm:
        stream = llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=50))
        next(iter(stream))
        engine = weakref.ref(llm.engine)
        cache = weakref.ref(llm.engine.cache)
    assert engine() is None
    assert cache() is None
    assert [event.finish_reason for event in stream][-1] == "abort"
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1]], PARAMS, progress=False)
    llm.close()


def test_an_llm_that_nobody_holds_is_closed_but_not_while_a_stream_runs() -> None:
    llm = LLM(tiny_target("llama"), drafter="none", max_model_len=64)
    loop, events = llm.loop, iter(llm.stream([1, 2, 1], PARAMS))
    first = next(events).token_ids
    del llm
    gc.collect()
    assert first + [token for event in events for token in event.token_ids]
    del events
    gc.collect()
    loop._thread.join(30)
    assert not loop._thread.is_alive()


def test_the_progress_bar_advances_by_tokens(llm: LLM) -> None:
    requests = [request for group in llm.requests_for([[1, 2], [3]], PARAMS) for request in group]
    box = _Batch(requests)
    assert box.expected == 18
    seen: list[tuple[int, int]] = []

    def watched(news: Any) -> None:
        box.put(news)
        seen.append((box.progress, box.unfinished))

    llm.loop.queue([[request] for request in requests], SimpleNamespace(put=watched))  # type: ignore[arg-type]
    box.ended.wait(60)
    assert any(progress and unfinished == 2 for progress, unfinished in seen), "it moves before any request has ended"
    assert seen[-1] == (18, 0)
    assert [p for p, _ in seen] == sorted(p for p, _ in seen)


def test_neither_pickled_nor_copied(llm: LLM) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(llm)


def test_bytes_that_are_no_text_are_a_request_error() -> None:
    assert checked_text("né \N{PILE OF POO}") == "né \N{PILE OF POO}"
    with pytest.raises(RequestError, match="character 2 stands for a byte that is not UTF-8"):
        checked_text("ok\udcff")
