"""`surefoot serve` as a process: what it says, and how it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest


class Process:
    def __init__(self, popen: Any) -> None:
        self.popen, self.lines = popen, []
        self._started = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.popen.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"serving .* at (http://\S+)", line):
                self.url = found[1]
                self._started.set()
        self._started.set()

    def wait_started(self) -> None:
        assert self._started.wait(120)
        assert self.url, self.lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def process(target: Path, *options: str, **environment: str) -> Iterator[Process]:
    command = [
        sys.executable,
        "-m",
        "surefoot",
        "serve",
        str(target),
        "--port",
        "0",
        "--drafter",
        "prompt-lookup",
        *options,
    ]
    popen = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    found = Process(popen)
    try:
        found.wait_started()
        yield found
    finally:
        popen.kill()
        popen.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_the_exit_code_is_0(checkpoints: Path, number: signal.Signals) -> None:
    with process(checkpoints / "target", "--threads", "1", "--max-model-len", "512") as server:
        for part in ("target ", "drafter ", "cache ", "planner ", "costs ", "chat ", "this machine only", "no API key"):
            assert part in server.text
        body: dict[str, Any] = {"prompt": "def stop(n):", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        while httpx.get(f"{server.url}/metrics").text.find("surefoot_open_requests 6.0") < 0:
            assert any(thread.is_alive() for thread in threads) or answers, "they never ran together"
            if len(answers) == 6:
                break
        server.popen.send_signal(number)
        assert server.popen.wait(60) == 0
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 6
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {400}
        assert "Traceback" not in server.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_keys_from_the_environment_and_json_logs(checkpoints: Path) -> None:
    options = ("--log-format", "json", "--served-model-name", "mine")
    with process(checkpoints / "target", *options, SUREFOOT_API_KEY="a-secret-key-1") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer a-secret-key-1"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        assert "1 API key" in server.text
        assert '"path": "/v1/models", "status": 401' in server.text
        assert "a-secret-key-1" not in server.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "{taken}"], "choose another --port"),
        (["--api-key-file", "/nonexistent"], "api-key-file is"),
        (["--tool-parser", "odd"], "allowed: auto"),
        (["--drain", "-1"], "drain_s is"),
        (["--chat-template-kwargs", '{"odd": 1}'], "does not read"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(checkpoints: Path, options: list[str], message: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = [option.format(taken=taken.getsockname()[1]) if "taken" in option else option for option in options]
        port = [] if "--port" in options else ["--port", "0"]
        command = [sys.executable, "-m", "surefoot", "serve", str(checkpoints / "target"), *port, *options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]


LOST = """
import sys, threading, time, urllib.request
from pathlib import Path
from surefoot.llm import LLM
from surefoot.serving.runner import bind, run, url_of
from surefoot.serving.settings import ServeSettings

settings = ServeSettings(port=0)
listener = bind(settings)
with LLM(sys.argv[1], drafter="none", max_model_len=64, threads=1) as llm:

    def ready(state):
        def ask():
            def broken():
                raise SystemError("gone")

            llm.engine.step = broken
            request = urllib.request.Request(
                url_of(listener) + "/v1/completions", b'{"prompt": "a"}', {"content-type": "application/json"}
            )
            try:
                urllib.request.urlopen(request, timeout=30)
            except urllib.error.HTTPError as error:
                print("status", error.code, flush=True)

        threading.Thread(target=ask, daemon=True).start()

    sys.exit(run(llm, settings, listener, ready))
"""


def test_the_process_leaves_with_1_when_its_engine_is_lost(checkpoints: Path) -> None:
    command = [sys.executable, "-c", LOST, str(checkpoints / "target")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    assert "status 500" in done.stdout
