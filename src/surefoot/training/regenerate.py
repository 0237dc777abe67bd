"""Stage *regenerate*: let the target continue the prompts, at the engine's full batch rate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine, EngineConfig
from surefoot.engine.request import Request
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target
from surefoot.training import builtin
from surefoot.training.corpus import Document, read_shard, write_shard
from surefoot.training.files import read_lines
from surefoot.training.options import DataOptions
from surefoot.training.progress import Progress
from surefoot.training.prompts import Prompt, read_prompts, shingles, tokenizer_of

SHARD = 256
"""Documents per file: what an interruption can cost."""
SHORTEST = 16
"""Tokens that a continuation must have to be kept when the time is up."""


def generation_engine(target: Target, options: DataOptions, drafter: Any = "none") -> Engine:
    """An engine that decodes `options.batch` requests at once."""
    config = EngineConfig(
        max_num_seqs=options.batch,
        max_num_batched_tokens=max(512, 2 * options.batch),
        max_model_len=min(target.max_model_len, options.max_prompt + options.max_new + 1),
        seed=options.seed,
        prefix_reuse=False,
    )
    return build_engine(target, drafter=drafter, config=config, cost_table="none")


def regenerate(
    engine: Engine,
    prompts: Path,
    folder: Path,
    options: DataOptions,
    progress: Progress,
    *,
    deadline: float | None = None,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Continue every prompt of a file that has no continuation in `folder` yet; returns counts for the record.

    A continuation depends on its prompt, the options and the target alone (its seed comes from the digest), so whether
    the run was interrupted does not show. Every prompt is continued at one of the temperatures, in turn.

    Args:
        deadline: `time.monotonic()` at which generation stops, in the middle of the running texts.
        share: (rank, ranks) of several processes that split the prompts.
    """
    rows = list(enumerate(read_lines(prompts)))[share[0] :: share[1]]
    names = folder.glob("*.safetensors") if folder.exists() else ()
    done = {document.index for shard in names for document in read_shard(shard)}
    waiting = iter([(index, row) for index, row in rows if index not in done])
    running: dict[str, int] = {}
    finished: list[Document] = []
    already, total, tokens, began = len(rows) - sum(i not in done for i, _ in rows), len(rows), 0, time.monotonic()
    complete = already

    def flush() -> None:
        if finished:
            write_shard(folder / f"{finished[0].index:08d}.safetensors", finished)
            finished.clear()

    def feed() -> None:
        for index, row in waiting:
            request = engine.add_request(row["tokens"], params_for(index, row["digest"], options))
            running[request.request_id] = index
            if len(running) >= 2 * options.batch:
                return

    def keep(index: int, request: Request) -> None:
        nonlocal complete
        whole = [*request.prompt_token_ids, *request.output.token_ids]
        finished.append(Document(index, len(request.prompt_token_ids), np.array(whole)))
        complete += 1

    try:
        feed()
        while running and (deadline is None or time.monotonic() < deadline):
            for request, event in engine.step():
                tokens += len(event.token_ids)
                if event.finish_reason is None:
                    continue
                keep(running.pop(request.request_id), request)
                if len(finished) >= SHARD:
                    flush()
            if len(running) < options.batch + options.batch // 2:
                feed()
            rate = tokens / max(time.monotonic() - began, 1e-9)
            spent = 0.0 if deadline is None else (time.monotonic() - began) / max(deadline - began, 1e-9)
            progress.update(
                max(complete / total, spent), f"{complete}/{total} prompts, {tokens} tokens, {rate:.0f} tok/s"
            )
        for request_id, index in running.items():  # out of time: a text that is cut short teaches as well
            request = engine.requests[request_id]
            if request.num_output >= SHORTEST:
                keep(index, request)
        flush()
    finally:
        for request_id in running:
            engine.cancel(request_id)
    seconds = time.monotonic() - began
    return {
        "documents": complete,
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": tokens / max(seconds, 1e-9),
    }


def params_for(index: int, digest: str, options: DataOptions) -> SamplingParams:
    """How the prompt with this number is continued."""
    return SamplingParams(
        temperature=options.temperatures[index % len(options.temperatures)],
        max_tokens=options.max_new,
        seed=(int(digest, 16) ^ options.seed) & (2**62 - 1),
    )


def read_existing(target: Target, options: DataOptions, length: int) -> Iterator[Document]:
    """Text that is on the machine already, in pieces of `length` tokens: the lever that needs no generation.

    Code and documentation of the built-in collectors and of the source trees alternate until `options.read_tokens`.
    """
    encode = tokenizer_of(target)
    forbidden: set[int] = set()
    for source in options.exclude:
        for prompt in read_prompts(Path(source)):
            forbidden |= shingles(prompt.text)
    left, index = options.read_tokens, 0
    for text in _texts(options.sources):
        if left <= 0:
            return
        if not forbidden.isdisjoint(shingles(text)):
            continue
        tokens = encode(Prompt(text))[: min(length, left)]
        if len(tokens) > 1:
            yield Document(index, 1, np.array(tokens))
            index, left = index + 1, left - len(tokens)


def _texts(sources: Sequence[str]) -> Iterator[str]:
    files = [file for source in sources if Path(source).exists() for file in _files(Path(source))]
    if any(source in ("builtin", "library", "documentation") for source in sources):
        files += builtin.library_files()
    # Neighbouring files resemble each other; a fixed shuffle mixes whatever part of them is used.
    order = np.random.default_rng(0).permutation(len(files))
    for position in order:
        yield from builtin.passages(builtin.read_text(files[position]), 1600)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in (".py", ".txt", ".md", ".rst") else []
    return [file for file in sorted(path.rglob("*")) if file.is_file() and _files(file)]
