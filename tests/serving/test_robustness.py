"""What clients and engines do wrong: every fault has an answer, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from surefoot.engine.engine import Engine
from surefoot.errors import ConfigurationError
from surefoot.serving.settings import ServeSettings, read_api_keys
from tests.serving.server import Live, engine, serve, tiny

SHORT = {"prompt": "a stop", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "a stop", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def assert_free(target: Engine) -> None:
    """Nobody holds a slot or a block."""
    assert not target.requests
    assert not target.blocks.sequences
    assert [pool.num_used for pool in target.blocks.pools] == [0] * len(target.blocks.pools)


def idle(live: Live) -> bool:
    return live.state.answers == 0 and live.llm.loop.call(lambda e: not e.has_work)


# -- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("completions", {"prompt": "a", "temperature": -1}, "temperature", "allowed: 0"),
        ("completions", {"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p", "allowed"),
        ("completions", {"prompt": "a", "max_tokens": -3}, "max_tokens", "1 …"),
        ("completions", {"prompt": "a", "n": 0}, "n", "1 …"),
        ("completions", {"prompt": "a", "n": 1000}, "n", "ask for fewer"),
        ("completions", {"prompt": "a", "logprobs": 99}, "logprobs", "20"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ("completions", {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias", "this target's ids"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        ("completions", {"prompt": "a", "best_of": 4}, "best_of", "does not rank"),
        ("completions", {"prompt": "a", "suffix": "z"}, "suffix", "only continues"),
        ("completions", {"prompt": []}, "prompt", "empty"),
        ("completions", {"prompt": [[99999]]}, "prompt", "vocabulary"),
        ("completions", {"prompt": "ab" * 2000}, "prompt", "serves at most 512"),
        ("completions", {}, "prompt", "required"),
        ("completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "raise max_tokens"),
        ("chat/completions", {"messages": []}, None, "empty"),
        ("chat/completions", {"messages": [{"role": "user"}]}, None, "no content"),
        ("chat/completions", {"messages": "hi"}, "messages", "list"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
            "cannot set",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text only"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3},
            "top_logprobs",
            "logprobs",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "functions": []},
            "functions",
            "use tools",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
            "tool_choice",
            "tools",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}},
            "response_format.type",
            "json_schema",
        ),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, path: str, body: Any, param: str | None, says: str
) -> None:
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param


def test_malformed_bodies(http: httpx.Client) -> None:
    for content in (b"{", b"", b"null", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"\x00" * 50):
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, content
        assert answer.json()["error"]["message"]
    deep = b"[" * 100_000 + b"]" * 100_000
    assert http.post("/v1/completions", content=deep, headers={"content-type": "application/json"}).status_code == 400
    odd = {"prompt": "\ud800 x\u0000\u202e\U0010ffff", "max_tokens": 2}
    answer = http.post(
        "/v1/completions", content=json.dumps(odd).encode(), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400)
    strange = {"prompt": "x\u0000\u202e\U0010ffff é ﷽ 👩‍👩‍👧", "max_tokens": 2}
    assert http.post("/v1/completions", json=strange).status_code == 200
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", json={**SHORT, "model": "gpt-9"}).status_code == 404
    assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_bodies_and_prompts_are_bounded() -> None:
    with serve(engine(tiny()), max_body_bytes=2000, max_prompt_tokens=20, max_output_tokens=5) as live:
        big = httpx.post(f"{live.url}/v1/completions", content=b"x" * 10_000_000)
        assert big.status_code == 413

        def endless() -> Any:
            while True:
                yield b"x" * 1000

        assert httpx.post(f"{live.url}/v1/completions", content=endless()).status_code == 413
        long = httpx.post(f"{live.url}/v1/completions", json={"prompt": "ab " * 200})
        assert long.status_code == 400
        assert "at most 20" in long.json()["error"]["message"]
        cut = httpx.post(f"{live.url}/v1/completions", json=LONG).json()
        assert cut["usage"]["completion_tokens"] == 5


def test_keys_are_asked_for_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = ("a-secret-key-1", "another-secret")
    settings = ServeSettings(api_keys=keys)
    assert "secret" not in repr(settings)
    with serve(engine(tiny()), api_keys=keys) as live:
        for headers in (
            {},
            {"authorization": "Bearer wrong-key"},
            {"authorization": "a-secret-key-1"},
            {"x-api-key": "é"},
        ):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in ("/v1/completions", "/tokenize", "/metrics", "/v1/models", "/openapi.json"):
                answer = httpx.request("POST" if "l" in path[-3:] else "GET", live.url + path, headers=encoded)
                assert answer.status_code == 401, (headers, path)
        for key in keys:
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert httpx.get(f"{live.url}/ready").status_code == 200
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "secret" not in logged


def test_key_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nfirst-key-1\n\n second-key-2 \n")
    assert read_api_keys(path) == ("first-key-1", "second-key-2")
    monkeypatch.setenv("SUREFOOT_API_KEY", "from-the-env-1, other-key-22")
    assert read_api_keys(None) == ("from-the-env-1", "other-key-22")
    path.write_text("# nothing\n")
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_api_keys(path)
    with pytest.raises(ConfigurationError, match="8 characters"):
        ServeSettings(api_keys=("short",))


def test_request_ids_come_back_and_log_lines_are_one_line(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "surefoot.access")
    answer = httpx.post(f"{live.url}/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    again = httpx.post(f"{live.url}/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert again.status_code == 200, "a client may repeat its id"
    made = httpx.get(f"{live.url}/v1/models%20%0a%22evil", headers={"x-request-id": 'a b"'})
    assert made.headers["x-request-id"].startswith("req-")
    wait_for(lambda: sum("mine-1" in record.getMessage() for record in caplog.records) == 2)
    text = [record.getMessage() for record in caplog.records if record.name == "surefoot.access"]
    assert any("completion_tokens=4" in line and "request_id=mine-1" in line for line in text)
    assert all("\n" not in line for line in text)


def test_cors_is_off_unless_asked_for(live: Live) -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    closed = httpx.options(f"{live.url}/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in closed.headers
    with serve(engine(tiny()), cors_origins=("https://page.example",), api_keys=("a-secret-key-1",)) as asked:
        opened = httpx.options(f"{asked.url}/v1/completions", headers=headers)
        assert opened.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(f"{asked.url}/v1/completions", headers={**headers, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


# -- clients that go -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_a_client_that_goes_frees_its_slot_within_a_step(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "stream": stream, "max_output_tokens": 400}
    asks: dict[str, Any] = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}
    body |= asks.get(path, {"messages": [{"role": "user", "content": "a"}]}) | {"ignore_eos": True}
    llm = engine(tiny(), "prompt-lookup")
    slow_down(llm.engine)
    with serve(llm) as live:
        payload = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", live.port)) as client:
            client.sendall(head.encode() + payload)
            wait_for(lambda: live.state.answers == 1)
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
            wait_for(lambda: live.llm.stats()["running"] == 1)
        wait_for(lambda: live.state.answers == 0)
        steps = live.llm.engine.statistics.steps
        wait_for(lambda: idle(live))
        assert live.llm.engine.statistics.steps <= steps + 2, "it was decoded for nobody"
        live.llm.loop.call(assert_free)
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=60).status_code == 200


def slow_down(target: Engine, seconds: float = 0.02) -> None:
    """Steps that take a while, as those of real models."""
    honest = target.step

    def step() -> Any:
        time.sleep(seconds)
        return honest()

    target.step = step  # type: ignore[method-assign]


def test_a_slow_reader_holds_nobody_up(live: Live) -> None:
    payload = json.dumps({**LONG, "stream": True, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\nContent-Type: application/json\r\n\r\n"
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", live.port))
    with slow:
        slow.sendall(head.encode() + payload)
        for _ in range(5):
            assert httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=30).status_code == 200
        read = b""
        while b"[DONE]" not in read:
            part = slow.recv(4096)
            assert part
            read += part
    assert read.count(b'"finish_reason":"length"') == 1
    wait_for(lambda: idle(live))


def test_two_hundred_connections_on_a_queue_of_32() -> None:
    llm = engine(tiny(), "prompt-lookup", max_num_seqs=4)
    slow_down(llm.engine, 0.005)
    with serve(llm, max_queue=32) as live:

        async def burst() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=live.url, timeout=120, limits=limits) as client:
                return list(await asyncio.gather(*[client.post("/v1/completions", json=SHORT) for _ in range(200)]))

        answers = asyncio.run(burst())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 36
        texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
        assert len(texts) == 1
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
        wait_for(lambda: idle(live))
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT).status_code == 200


def test_five_hundred_idle_connections_are_held(live: Live) -> None:
    connections = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(512)]
    try:
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT).status_code == 200
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for connection in connections[::64]:
            connection.sendall(request)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for connection in connections:
            connection.close()


def test_a_huge_conversation_holds_nobody_up(live: Live) -> None:
    """It is tokenized on another thread, and refused: the context cannot hold it."""
    payload = {"messages": [{"role": "user", "content": "a stop is " * 200_000}]}
    answers: list[int] = []

    def ask() -> None:
        answers.append(httpx.post(f"{live.url}/v1/chat/completions", json=payload, timeout=120).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    waits = []
    while thread.is_alive():
        begin = time.monotonic()
        assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200
        waits.append(time.monotonic() - begin)
    thread.join()
    assert answers == [400]
    assert len(waits) > 3
    assert sorted(waits)[len(waits) // 2] < 1.0, "the event loop stood still"


def test_a_request_that_takes_too_long_ends_with_what_it_has() -> None:
    llm = engine(tiny(), "prompt-lookup")
    slow_down(llm.engine, 0.05)
    with serve(llm, request_timeout_s=0.5) as live:
        answer = httpx.post(f"{live.url}/v1/completions", json=LONG, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 400
        wait_for(lambda: idle(live))


# -- engines that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_raises_is_a_500_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with serve(engine(tiny(), "prompt-lookup")) as live:
        expected = httpx.post(f"{live.url}/v1/completions", json=SHORT).json()["choices"][0]["text"]
        step = live.llm.engine.decode_step
        honest = type(step)._pack

        def broken(self: Any, *arguments: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(type(step), "_pack", broken)
        answer = httpx.post(f"{live.url}/v1/completions", json={**SHORT, "stream": stream}, timeout=60)
        if stream:
            assert answer.status_code == 200
            assert "out of memory" in answer.text
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 500
            assert "out of memory" in answer.json()["error"]["message"]
        monkeypatch.setattr(type(step), "_pack", honest)
        assert httpx.get(f"{live.url}/ready").status_code == 200
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT).json()["choices"][0]["text"] == expected


def test_a_drafter_that_raises_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.drafters.prompt_lookup import PromptLookupDrafter

    with serve(engine(tiny(), "prompt-lookup")) as live:
        body = {"prompt": "a stop is a stop is a", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        expected = httpx.post(f"{live.url}/v1/completions", json=body).json()["choices"][0]["text"]

        def broken(self: Any, *arguments: Any) -> Any:
            raise ValueError("the drafter is ill")

        monkeypatch.setattr(PromptLookupDrafter, "propose", broken)
        with ThreadPoolExecutor(4) as threads:
            answers = list(
                threads.map(lambda _: httpx.post(f"{live.url}/v1/completions", json=body, timeout=60), range(4))
            )
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected}


def test_an_engine_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    with serve(engine(tiny(), "prompt-lookup"), on_lost=told.set) as live:

        def broken() -> Any:
            raise SystemError("gone")

        monkeypatch.setattr(live.llm.engine, "step", broken)
        answer = httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=60)
        assert answer.status_code == 500
        assert told.wait(10)
        assert httpx.get(f"{live.url}/ready").status_code == 503
        assert httpx.get(f"{live.url}/ready").json()["status"] == "lost"
        assert httpx.get(f"{live.url}/health").status_code == 503
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT).status_code == 503


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_requests(live: Live) -> None:
    from tests.engine.test_soak import resident_bytes

    def some(count: int) -> None:
        with ThreadPoolExecutor(8) as threads, httpx.Client(base_url=live.url, timeout=60) as client:
            bodies = [{**SHORT, "prompt": f"a stop {i}", "stream": bool(i % 2)} for i in range(count)]
            answers = list(threads.map(lambda body: client.post("/v1/completions", json=body), bodies))
        assert all(answer.status_code == 200 for answer in answers)

    some(1000)
    before = resident_bytes()
    some(1000)
    growth = resident_bytes() - before
    print(f"{growth / 2**20:.1f} MiB growth over the second thousand")
    assert growth < 12 << 20
