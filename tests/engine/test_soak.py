"""Thousands of requests through one engine: nothing leaks, nothing differs, memory stays flat. Run with `-m slow`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from random import Random

import pytest

from surefoot.engine.device import ThreadDevice
from tests.engine import test_fuzz as fuzz
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import build

REQUESTS, CONCURRENCY, PAGE = 2000, 16, 4096
GROWTH = 24 << 20
"""Bytes the process may grow by over the second half: oracle texts and allocator noise, not one kept request in ten."""


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for the process's size")
@pytest.mark.parametrize("overlapped", [False, True])
def test_two_thousand_requests_with_cancels(overlapped: bool) -> None:
    random = Random(2026)
    engine = build(
        CheapTarget(fuzz.VOCAB),
        "prompt-lookup",
        device=ThreadDevice() if overlapped else None,
        table=fuzz.STAIRCASE,
        max_num_seqs=CONCURRENCY,
        max_model_len=fuzz.MODEL_LEN,
        num_blocks=40,  # of the 240 that sixteen requests could want
        check_layout=False,
    )
    alive = {}
    started = finished = cancelled = mismatches = preemptions = 0
    halfway = 0
    while started < REQUESTS or engine.has_work:
        while started < REQUESTS and len(alive) < CONCURRENCY + 4:
            request = engine.add_request(*fuzz.some_request(random))
            alive[request.request_id] = request
            started += 1
            if started == REQUESTS // 2:
                halfway = resident_bytes()
        if alive and random.random() < 0.3:
            engine.cancel(alive.pop(random.choice(sorted(alive))).request_id)
            cancelled += 1
        for request, event in engine.step():
            if event.finish_reason is None:
                continue
            del alive[request.request_id]
            finished += 1
            preemptions += request.preemptions
            tokens, params = request.output.token_ids, request.params
            if params.temperature == 0:
                tokens = fuzz.oracle("cheap", request.prompt_token_ids, params)[0]
            mismatches += (request.output.token_ids, event.finish_reason) != fuzz.until_stop(tokens, params)
    growth = resident_bytes() - halfway
    print(f"{finished} finished, {cancelled} cancelled, {preemptions} preemptions, {growth / 2**20:.1f} MiB growth")
    assert finished + cancelled == REQUESTS
    assert cancelled > 100
    assert preemptions > 10
    assert mismatches == 0
    assert growth < GROWTH
    engine.assert_clean()
