"""`python benchmarks/serving.py`: what HTTP costs beside the same requests through `LLM`.

One engine, and a server over it in the same process, as `surefoot serve` runs them; the HTTP client is a process of its own
(plain asyncio, no library). Two arms take turns on the same prompts, streaming, greedy: `LLM.stream` in threads, and
`/v1/completions`. Prints medians of tokens per second at `--concurrency` requests, and of the time to the first token of a short
prompt alone. Every answer over HTTP is compared with its answer through `LLM`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CLIENT = r"""
import asyncio, json, sys, time

async def ask(port, prompt, max_tokens):
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body = json.dumps(request).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    await writer.drain()
    first, text = None, []
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if first is None:
            first = time.perf_counter() - start
        text += [choice.get("text", "") for choice in chunk.get("choices", [])]
    writer.close()
    return first, "".join(text)

async def batch(port, prompts, max_tokens):
    start = time.perf_counter()
    answers = await asyncio.gather(*[ask(port, prompt, max_tokens) for prompt in prompts])
    return time.perf_counter() - start, answers

for line in sys.stdin:
    print(json.dumps(asyncio.run(batch(*json.loads(line)))), flush=True)
"""


def through_llm(llm: Any, prompts: list[str], max_tokens: int) -> tuple[float, list[tuple[float, str]]]:
    from surefoot import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def one(prompt: str) -> tuple[float, str]:
        start, first, text = time.perf_counter(), 0.0, []
        for event in llm.stream(prompt, params):
            first = first or time.perf_counter() - start
            text.append(event.text)
        return first, "".join(text)

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(one, prompts))
    return time.perf_counter() - start, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    import uvicorn

    from surefoot import AsyncLLM
    from surefoot.serving.app import create_app
    from surefoot.serving.settings import ServeSettings

    llm = AsyncLLM(options.model, drafter=options.drafter, max_num_seqs=options.concurrency)
    if llm.llm.lacks_cost_table:
        llm.llm.profile()
    config = uvicorn.Config(create_app(llm, ServeSettings()), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None

    def through_http(prompts: list[str], max_tokens: int) -> tuple[float, list[tuple[float, str]]]:
        client.stdin.write(json.dumps([port, prompts, max_tokens]) + "\n")
        client.stdin.flush()
        seconds, answers = json.loads(client.stdout.readline())
        return seconds, [(first, text) for first, text in answers]

    rates: dict[str, list[float]] = {"LLM": [], "HTTP": []}
    firsts: dict[str, list[float]] = {"LLM": [], "HTTP": []}
    arms = {"LLM": lambda *work: through_llm(llm.llm, *work), "HTTP": through_http}
    for repeat in range(-1, options.repeats):  # the first turn warms up
        prompts = [
            f"def task_{repeat}_{i}(values):\n    # sort, then count what is left of number {i}\n"
            for i in range(options.concurrency)
        ]
        texts: dict[str, list[str]] = {}
        for name in sorted(arms, reverse=repeat % 2 == 0):
            seconds, answers = arms[name](prompts, options.max_tokens)
            texts[name] = [text for _, text in answers]
            ttft = [arms[name]([f"# {name} {repeat} {i}: hello"], 2)[1][0][0] for i in range(4)]
            if repeat >= 0:
                rates[name].append(options.concurrency * options.max_tokens / seconds)
                firsts[name] += ttft
        assert texts["LLM"] == texts["HTTP"], "an answer over HTTP differs from its answer through LLM"
    client.stdin.close()
    server.should_exit = True
    report = {
        name: {
            "tokens_per_s": round(statistics.median(rates[name]), 2),
            "first_token_ms": round(1e3 * statistics.median(firsts[name]), 2),
        }
        for name in arms
    }
    pairs = [1 - http / own for http, own in zip(rates["HTTP"], rates["LLM"], strict=True)]
    if options.json:
        print(json.dumps({**report, "overhead": round(statistics.median(pairs), 4), "rates": rates}))
        return
    for name, numbers in report.items():
        print(f"{name:5} {numbers['tokens_per_s']:8.1f} tok/s   first token {numbers['first_token_ms']:6.1f} ms")
    print(f"overhead of HTTP: {100 * statistics.median(pairs):.1f} % of tok/s (median of {len(pairs)} pairs)")
    llm.llm.close()


if __name__ == "__main__":
    main()
