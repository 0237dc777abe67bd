"""What a step that emits several tokens must still get right, over HTTP, streamed and not, with drafts and without."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

import httpx
import pytest

from tests.serving.server import Live, engine, scripted, serve, tiny, tokenizer
from tests.serving.test_robustness import assert_free

SAID = "Hello 😀, la presidencia de la república: a stop is a STOP. €5 été"


def lines(response: Any) -> list[dict[str, Any]]:
    found = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


def complete(live: Live, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same completion, whole and streamed; both must say the same."""
    body = {"prompt": "x", "temperature": 0, "max_tokens": 200, **body}
    whole = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=streaming, timeout=60) as response:
        chunks = lines(response)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            own = joined.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert own["finish_reason"] is None, "something came after the end"
            own["text"] += choice["text"]
            if choice["logprobs"] is not None:
                parts = own["logprobs"] or {name: [] for name in choice["logprobs"]}
                own["logprobs"] = {name: parts[name] + choice["logprobs"][name] for name in parts}
            own["finish_reason"] = choice["finish_reason"]
            own["stop_reason"] = choice.get("stop_reason")
    for choice in whole["choices"]:
        mine = joined[choice["index"]]
        assert mine["text"] == choice["text"]
        assert mine["logprobs"] == choice["logprobs"]
        assert mine["finish_reason"] == choice["finish_reason"]
        assert mine["stop_reason"] == choice["stop_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    return whole["choices"][0], whole["usage"]


@pytest.fixture(scope="module", params=["prompt-lookup", "none"])
def saying(request: pytest.FixtureRequest) -> Any:
    with serve(engine(scripted(SAID), request.param, width=4 if request.param != "none" else None)) as live:
        yield live


BLOCKS = {"prediction": SAID}  # right drafts: blocks of five tokens lie across everything below
COUNT = len(tokenizer()(SAID)["input_ids"])


def test_text_of_many_bytes_a_character_arrives_whole(saying: Live) -> None:
    choice, usage = complete(saying, **BLOCKS)
    assert choice["text"] == SAID
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == COUNT + 1  # its end token


@pytest.mark.parametrize("stop", ["presidencia", "é", "a stop is", "STOP", "5", "😀", "Hello", "república: a"])
def test_stops_are_found_wherever_they_fall(saying: Live, stop: str) -> None:
    choice, usage = complete(saying, stop=[stop, "never said"], **BLOCKS)
    assert choice["text"] == SAID[: SAID.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = complete(saying, stop=stop, include_stop_str_in_output=True, **BLOCKS)[0]
    assert kept["text"] == SAID[: SAID.index(stop) + len(stop)]
    assert usage["completion_tokens"] <= COUNT
    told = complete(saying, stop=stop, logprobs=0, **BLOCKS)[0]["logprobs"]
    assert len(told["tokens"]) == usage["completion_tokens"], "tokens after the stop are told or counted"


def test_stop_ids_and_what_is_held_back(saying: Live) -> None:
    ids = tokenizer()(SAID)["input_ids"]
    stop = ids[9]
    first = ids.index(stop)
    choice, usage = complete(saying, stop_token_ids=[stop], **BLOCKS)
    assert usage["completion_tokens"] == first + 1
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    almost = complete(saying, stop=["été and more"], **BLOCKS)[0]  # the text ends inside what may become a stop
    assert almost["text"] == SAID


@pytest.mark.parametrize("most", range(1, 14))
def test_never_more_than_max_tokens_and_a_stop_inside_the_budget_wins(saying: Live, most: int) -> None:
    choice, usage = complete(saying, max_tokens=most, **BLOCKS)
    assert usage["completion_tokens"] == most
    assert choice["finish_reason"] == "length"
    ids = tokenizer()(SAID)["input_ids"]
    stopped, usage = complete(saying, max_tokens=most, stop_token_ids=[ids[6]], **BLOCKS)
    place = ids.index(ids[6]) + 1
    assert stopped["finish_reason"] == ("stop" if place <= most else "length")
    assert usage["completion_tokens"] == min(most, place)


def test_logprobs_are_the_targets_own_whatever_was_accepted() -> None:
    found = []
    body: dict[str, Any] = {"prompt": "a stop is a stop", "max_tokens": 30, "logprobs": 3, "ignore_eos": True}
    for drafter in ("prompt-lookup", "none"):
        with serve(engine(tiny(), drafter)) as live:
            found.append(
                [complete(live, **body, **more)[0] for more in ({}, {"logit_bias": {"70": 8}}, {"echo": True})]
            )
    for with_drafts, without in zip(*found, strict=True):
        assert with_drafts["text"] == without["text"]
        mine, theirs = with_drafts["logprobs"], without["logprobs"]
        assert mine["tokens"] == theirs["tokens"]
        for a, b in zip(mine["token_logprobs"], theirs["token_logprobs"], strict=True):
            assert (a is None) == (b is None)
            assert a is None or abs(a - b) < 1e-4


def test_a_seed_repeats_and_n_answers_differ(live: Live) -> None:
    body: dict[str, Any] = {"temperature": 1, "seed": 11, "n": 3, "max_tokens": 12, "prompt": "a stop is a"}
    ask = [httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    texts = [[choice["text"] for choice in each["choices"]] for each in ask]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert ask[0]["usage"]["completion_tokens"] == sum(12 for _ in range(3))


def test_echo_and_a_silent_answer(live: Live) -> None:
    body: dict[str, Any] = {"prompt": "a stop is", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice, usage = complete(live, **body)
    assert choice["text"] == "a stop is"
    assert usage["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"]
    assert "".join(choice["logprobs"]["tokens"]) == "a stop is"


def test_prompts_of_every_form_and_several_at_once(live: Live) -> None:
    ids = tokenizer()("a stop is")["input_ids"]
    expected = complete(live, prompt="a stop is", max_tokens=8)[0]["text"]
    for prompt in (ids, [ids, ids], ["a stop is", "a stop is"]):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "n": 2}
        choices = httpx.post(f"{live.url}/v1/completions", json=body).json()["choices"]
        assert [choice["text"] for choice in choices] == [expected] * (2 if prompt is ids else 4)
        assert [choice["index"] for choice in choices] == list(range(len(choices)))


def test_two_hundred_mixed_requests_with_cancels_are_their_target_only_answers() -> None:
    """Streams, whole answers, chats and disconnects at random, at temperature 0: nothing lost, repeated or mixed up."""
    random = Random(5)
    words = ["stop", "a", "ab", "presidencia", "def", "return"]
    prompts = [" ".join(random.choices(words, k=random.randint(2, 9))) for _ in range(40)]
    with serve(engine(tiny(), "none", max_num_seqs=4)) as live:
        expected = {}
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            expected[prompt] = httpx.post(f"{live.url}/v1/completions", json=body).json()["choices"][0]["text"]
    mismatches: list[str] = []
    outcomes = {"whole": 0, "streamed": 0, "cut": 0}
    with serve(engine(tiny(), "prompt-lookup", max_num_seqs=6)) as live:

        def client(seed: int) -> None:
            mine = Random(seed)
            with httpx.Client(base_url=live.url, timeout=120) as http:
                for _ in range(10):
                    prompt = mine.choice(prompts)
                    most = mine.randint(1, 24)
                    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
                    if mine.random() < 0.4:
                        answer = http.post("/v1/completions", json=body).json()
                        text, kind = answer["choices"][0]["text"], "whole"
                        if answer["usage"]["completion_tokens"] != most:
                            mismatches.append("count")
                    else:
                        text, kind, cut = "", "streamed", mine.choice([None, None, 1, 3])
                        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                            for count, line in enumerate(response.iter_lines()):
                                if line.startswith("data: {"):
                                    text += json.loads(line[6:])["choices"][0]["text"]
                                if cut is not None and count >= 2 * cut:
                                    kind = "cut"
                                    break
                    outcomes[kind] += 1
                    if not expected[prompt].startswith(text.rstrip("\ufffd")):
                        mismatches.append(f"{prompt!r}: {text!r}")

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert mismatches == []
        assert min(outcomes.values()) > 10, outcomes
        deadline = 200
        while live.state.answers and deadline:
            threading.Event().wait(0.05)
            deadline -= 1
        assert live.state.answers == live.state.streams == 0
        live.llm.loop.call(assert_free)
