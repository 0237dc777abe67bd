"""A scripted `LLM` for the command line: no weights, no torch, and every call on record."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams

SOURCES = ("sources", "verified_by_source", "accepted_by_source")


def statistics(**counts: Any) -> Any:
    """Those of a request, as `RequestStatistics` has them (which imports torch)."""
    zero = dict.fromkeys(("steps", "drafted", "verified", "accepted", "emitted", "trimmed", "regretted"), 0)
    lists: dict[str, Any] = {"verified_by_position": [], "accepted_by_position": []}
    return SimpleNamespace(**{**zero, **lists, "widths": Counter(), **{name: Counter() for name in SOURCES}, **counts})


STATISTICS = statistics(
    steps=4,
    drafted=12,
    verified=10,
    accepted=6,
    emitted=10,
    verified_by_position=[4, 4, 2],
    accepted_by_position=[3, 2],
    widths=Counter({0: 1, 2: 3}),
)


@dataclass
class Script:
    """What the stub answers, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", ", ", "world"])
    chat_template: str | None = "a template"
    speed: dict[bool, float] = field(default_factory=lambda: {False: 20.0, True: 50.0})
    tokens: Callable[[Any, SamplingParams], list[int]] = lambda prompt, params: [1, 2, 3, 4]
    drafts: bool = True
    interrupt_after: int | None = None  # raise KeyboardInterrupt in place of this piece
    options: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed: int = 0
    lacks_cost_table: bool = False
    profiled: list[float] = field(default_factory=list)  # seconds asked for
    unsteady: float = 0.0  # share of points that a profile could not repeat
    logprobs: list[Any] | None = None
    error: str | None = None  # with which every answer ends
    refuse: Callable[[Any], str | None] = lambda prompt: None  # why a prompt cannot be served
    variables: list[Any] = field(default_factory=list)  # of the chat template
    pause: float = 0.0  # seconds before each piece


class StubStream:
    def __init__(self, script: Script, prompt: Any, params: SamplingParams) -> None:
        self.script, self.prompt, self.params = script, prompt, params
        self.text = ""

    def __iter__(self) -> Iterator[Any]:
        for index, piece in enumerate(self.script.pieces):
            if index == self.script.interrupt_after:
                raise KeyboardInterrupt
            time.sleep(self.script.pause)
            self.text += piece
            yield SimpleNamespace(text=piece, token_ids=[index], finish_reason=None, index=0)

    @property
    def result(self) -> Any:
        speculative = self.script.drafts and self.params.speculative
        answer = SimpleNamespace(
            index=0,
            text=self.text,
            token_ids=self.script.tokens(self.prompt, self.params),
            finish_reason="length" if self.script.error is None else "error",
            error=self.script.error,
            stop_reason=None,
            logprobs=None if self.params.logprobs is None else self.script.logprobs,
            timing=SimpleNamespace(
                prefill_s=0.1, decode_s=0.2, tokens_per_s=self.script.speed[self.params.speculative]
            ),
            statistics=STATISTICS if speculative else statistics(steps=4, emitted=4, widths=Counter({0: 4})),
        )
        others = [SimpleNamespace(**{**vars(answer), "index": index}) for index in range(1, self.params.n)]
        return SimpleNamespace(**vars(answer), prompt_token_ids=[7, 8], cached_tokens=0, completions=[answer, *others])


class StubLLM:
    script: Script

    def __init__(self, **options: Any) -> None:
        self.script.options.append(options)
        self.tokenizer = SimpleNamespace(
            chat_template=self.script.chat_template, decode=lambda ids: "".join(f"<{i}>" for i in ids)
        )

    @property
    def lacks_cost_table(self) -> bool:
        return self.script.lacks_cost_table

    def profile(
        self,
        seconds: float,
        progress: Callable[[float], None],
        path: Any = None,
        announce: Callable[[float], None] = lambda seconds: None,
    ) -> Any:
        announce(2 * seconds)
        progress(1.0)
        self.script.profiled.append(seconds)
        return SimpleNamespace(seconds=seconds, unsteady=self.script.unsteady, kept=None)

    def stream(self, prompt: Any, params: SamplingParams) -> StubStream:
        if (reason := self.script.refuse(prompt)) is not None:
            raise RequestError(reason)
        self.script.asked.append((prompt, params))
        return StubStream(self.script, prompt, params)

    def stream_chat(
        self, messages: list[dict[str, Any]], params: SamplingParams, *, chat_template_kwargs: Any = None
    ) -> StubStream:
        self.chat_tokens(messages, chat_template_kwargs)
        self.script.variables.append(chat_template_kwargs)
        return self.stream(list(messages), params)

    def chat_tokens(self, messages: list[dict[str, Any]], chat_template_kwargs: Any = None) -> list[int]:
        if self.script.chat_template is None:
            raise RequestError("stub has no chat template: use `surefoot generate`, or a model that was tuned for chat")
        return [1]

    def describe(self) -> dict[str, Any]:
        return {"target": "stub", "planner": "verifies everything: no cost table"}

    def stats(self) -> dict[str, Any]:
        return {"steps": 4, "rate": 0.5}

    def close(self) -> None:
        self.script.closed += 1


def main() -> None:
    """The command line in a process of its own, over a stub: `python -m tests.cli.stub FIELDS ARGUMENTS…`.

    FIELDS is JSON: fields of the `Script`. What was asked is written to the file $ASKED, a JSON line each, when it is asked.
    """
    fields, sys.argv[1:] = json.loads(sys.argv[1]), sys.argv[2:]
    StubLLM.script = Script(**fields)
    if log := os.environ.get("ASKED"):

        def asked(prompt: Any) -> None:
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps(prompt) + "\n")

        StubLLM.script.refuse = asked
    sys.modules["surefoot.llm"] = SimpleNamespace(LLM=StubLLM)  # type: ignore[assignment]
    from surefoot.cli.entry import main as surefoot

    surefoot()


if __name__ == "__main__":
    main()
