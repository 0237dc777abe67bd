"""Two engines behind one address, by Ray Serve: sessions stay, a dead replica costs no later request, nothing is left over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="ray is not installed: several replicas are NOT tested here")

from surefoot.serving.session_router import favourite
from tests.serving.test_shutdown import Process


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(process: int) -> dict[int, str]:
    """A process's descendants, with their names."""
    found: dict[int, str] = {}
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found |= family(child)
    return found


def replicas_of(process: int) -> list[int]:
    return [pid for pid, name in family(process).items() if name.startswith("ray::ServeReplica")]


def test_a_session_keeps_its_replica_when_another_one_leaves() -> None:
    replicas = [f"replica-{index}" for index in range(5)]
    before = {f"s{index}": favourite(f"s{index}", replicas, str) for index in range(300)}
    assert min(Counter(before.values()).values()) > 30
    after = {session: favourite(session, replicas[:-1], str) for session in before}
    assert all(after[session] == before[session] for session in before if before[session] != replicas[-1])


def test_two_replicas(checkpoints: Path) -> None:
    port = free_port()
    options = ["--replicas", "2", "--threads", "1", "--port", str(port), "--drafter", "prompt-lookup", "--drain", "10"]
    command = [sys.executable, "-m", "surefoot", "serve", str(checkpoints / "target"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    server = Process(popen)
    try:
        server.wait_started()
        url = f"http://127.0.0.1:{port}"
        assert len(replicas_of(popen.pid)) == 2
        body: dict[str, Any] = {"prompt": "def stop(n):", "max_tokens": 8, "temperature": 0}

        def ask(session: str | None = None) -> tuple[str, str]:
            headers = {} if session is None else {"x-session-id": session}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-replica"], answer.json()["choices"][0]["text"]

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: ask(), range(60)))
        assert {name for name, _ in found} == {"0", "1"}, "one replica does everything"
        assert len({text for _, text in found}) == 1
        homes = {session: {ask(session)[0] for _ in range(6)} for session in ("a", "b", "c", "d", "e", "f")}
        assert all(len(names) == 1 for names in homes.values()), homes
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 3
        samples = [httpx.get(f"http://127.0.0.1:{port + 1 + rank}/metrics").text for rank in (0, 1)]
        totals = [float(re.findall(r"^surefoot_emitted_tokens_total (\S+)", text, re.M)[0]) for text in samples]
        assert min(totals) > 0

        os.kill(replicas_of(popen.pid)[0], signal.SIGKILL)
        end = time.monotonic() + 60
        answered = 0
        while time.monotonic() < end and (answered < 20 or len(replicas_of(popen.pid)) < 2):
            try:
                ask()
            except (AssertionError, httpx.HTTPError):  # a request that was there when it died
                time.sleep(0.2)
                continue
            answered += 1
        assert answered >= 20
        assert [ask()[1] for _ in range(10)] == [found[0][1]] * 10
        old = set(replicas_of(popen.pid))
        popen.send_signal(signal.SIGHUP)  # one after the other: somebody answers all the time
        end = time.monotonic() + 60
        while time.monotonic() < end and set(replicas_of(popen.pid)) & old:
            assert ask()[1] == found[0][1]
        assert not set(replicas_of(popen.pid)) & old, "the replicas were not restarted"
        everybody = family(popen.pid)
        assert any("raylet" in name for name in everybody.values())
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(90) == 0
        end = time.monotonic() + 15
        while (left := [pid for pid in everybody if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, [everybody[pid] for pid in left]
        assert "path=/v1/completions status=200" in server.text, "the lines of requests are lost"
    finally:
        for pid in (popen.pid, *family(popen.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        popen.wait()
