"""The interface for asyncio: the same engine, the same tokens, and a cancel that frees its slot within a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from surefoot import LLM, AsyncLLM, SamplingParams
from surefoot.errors import RequestError
from tests.tiny_models import tiny_target

PARAMS = SamplingParams(temperature=0, max_tokens=9)
LONG = SamplingParams(temperature=0, max_tokens=50)
PROMPTS = [[1, 2, 1], [5, 6, 5, 6], [7], [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"gamma": 3, "cost_table": "none", "max_model_len": 64, "max_num_seqs": 3, "seed": 1}
    with LLM(tiny_target("llama"), drafter="prompt-lookup", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [llm.generate([prompt], LONG, progress=False)[0].token_ids for prompt in PROMPTS]


async def tokens_of(stream: Any) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


def test_streams_and_generate_side_by_side(llm: LLM, alone: list[list[int]]) -> None:
    async def main() -> None:
        served = AsyncLLM(llm)
        streams = [served.stream(prompt, PARAMS) for prompt in PROMPTS]
        outputs, *got = await asyncio.gather(served.generate(PROMPTS, PARAMS), *map(tokens_of, streams))
        assert [output.token_ids for output in outputs] == [text[:9] for text in alone]
        assert got == [text[:9] for text in alone]
        assert {stream.result.finish_reason for stream in streams} == {"length"}
        with pytest.raises(RequestError, match="outside the target's vocabulary"):
            await served.generate([[1], [99]], PARAMS)
        assert not served._postmen[asyncio.get_running_loop()].receivers

    asyncio.run(main())


@pytest.mark.parametrize("how", ["task", "aclose", "dropped"])
def test_a_cancel_frees_the_slot_within_a_step(llm: LLM, how: str) -> None:
    steps: list[Any] = []
    llm.loop.add_observer(steps.append)

    async def main() -> None:
        served = AsyncLLM(llm)
        stream: Any = served.stream([1, 2], LONG)
        await stream.__anext__()
        if how == "task":
            waiting = asyncio.create_task(tokens_of(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif how == "aclose":
            await stream.aclose()
        else:
            del stream
        before = len(steps)
        left = await asyncio.to_thread(llm.stats)
        assert (left["running"], left["blocks_used"]) == (0, [0])
        assert len(steps) <= before + 1

    asyncio.run(main())
    llm.loop.remove_observer(steps.append)


def test_several_event_loops_and_threads_use_one_llm(llm: LLM, alone: list[list[int]]) -> None:
    served, wrong = AsyncLLM(llm), list[Any]()

    def event_loop(number: int) -> None:
        async def main() -> None:
            texts = await asyncio.gather(*(tokens_of(served.stream(prompt, PARAMS)) for prompt in PROMPTS))
            wrong.extend(text for text, own in zip(texts, alone, strict=True) if text != own[:9])

        asyncio.run(main())

    def plain_thread(number: int) -> None:
        outputs = llm.generate(PROMPTS, PARAMS, progress=False)
        wrong.extend(o.token_ids for o, own in zip(outputs, alone, strict=True) if o.token_ids != own[:9])

    threads = [threading.Thread(target=target, args=(n,)) for n in range(4) for target in (event_loop, plain_thread)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_an_event_loop_that_is_closed_takes_its_requests_along(llm: LLM) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = AsyncLLM(llm).stream([1, 2], LONG)
        await stream.__anext__()
        return stream

    stream = loop.run_until_complete(begin())
    loop.close()
    for _ in range(200):
        if llm.stats()["running"] == 0:
            break
    assert llm.stats()["running"] == 0
    assert stream.result.finish_reason in ("abort", "length")


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_of_async_requests(llm: LLM, alone: list[list[int]], seed: int) -> None:
    """Streams read to any depth, cancelled in any way, beside `generate`: what came is right, and nothing is held after."""

    async def client(served: AsyncLLM, random: Random) -> None:
        for _ in range(6):
            index, length = random.randrange(len(PROMPTS)), random.randint(1, 30)
            params = SamplingParams(temperature=0, max_tokens=length)
            how = random.choice(["whole", "part", "timeout", "generate"])
            if how == "generate":
                (output,) = await served.generate(PROMPTS[index], params)
                assert output.token_ids == alone[index][:length]
                continue
            stream, got = served.stream(PROMPTS[index], params), list[int]()

            async def read(stream: Any = stream, got: list[int] = got, leave: int | None = None) -> None:
                async for event in stream:
                    got += event.token_ids
                    if leave is not None and len(got) >= leave:
                        break

            if how == "timeout":
                try:
                    await asyncio.wait_for(read(), random.random() * 0.02)
                except asyncio.TimeoutError:
                    await stream.aclose()
            else:
                await read(leave=None if how == "whole" else random.randint(1, length))
            assert got == alone[index][: len(got)]
            if how == "whole":
                assert len(got) == length

    async def main() -> None:
        served = AsyncLLM(llm)
        await asyncio.gather(*(client(served, Random(seed * 100 + number)) for number in range(8)))

    asyncio.run(main())
    left = llm.stats()
    assert (left["running"], left["waiting"], left["blocks_used"]) == (0, 0, [0])


def test_it_loads_and_closes_without_blocking_the_event_loop() -> None:
    async def main() -> None:
        async with await AsyncLLM.load(tiny_target("llama"), drafter="none", max_model_len=64) as served:
            (output,) = await served.generate([1, 2, 1], PARAMS)
            assert len(output.token_ids) == 9
            loop = served.llm.loop
        assert not loop._thread.is_alive()

    asyncio.run(main())


def test_an_id_in_use_leaves_the_stream_that_has_it_alone(llm: LLM) -> None:
    async def main() -> None:
        served = AsyncLLM(llm)
        params = SamplingParams(temperature=0, max_tokens=12)
        first = served.submit([llm.loop.requests_of([1, 2, 3], params, request_id="mine")])
        with pytest.raises(RequestError, match="in use"):
            served.submit([llm.loop.requests_of([4, 5], params, request_id="mine")])
        tokens = [token async for event in first for token in event.token_ids]
        assert tokens == first.result.token_ids
        assert len(tokens) == 12

    asyncio.run(main())


def test_several_prompts_come_through_one_stream(llm: LLM) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=7)
        groups = [llm.loop.requests_of([i, 2, 3], params, request_id=f"p{i}") for i in range(1, 4)]
        stream = AsyncLLM(llm).submit(groups)
        heard: dict[str, list[int]] = {}
        async for event in stream:
            heard.setdefault(str(event.request_id), []).extend(event.token_ids)
        assert heard == {f"p{i}": stream.results[i - 1].token_ids for i in range(1, 4)}

    asyncio.run(main())
