"""Stage *regenerate*: the target continues the prompts, in large batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.loop import EngineLoop, News
from surefoot.engine.options import EngineOptions
from surefoot.engine.request import Request
from surefoot.sampling import SamplingParams
from surefoot.targets.target import Target
from surefoot.training import builtin
from surefoot.training.corpus import Document, read_shard, write_shard
from surefoot.training.files import read_lines
from surefoot.training.options import DataOptions
from surefoot.training.progress import StageProgress
from surefoot.training.prompts import Prompt, read_prompts, shingles, tokenizer_of
from surefoot.training.sampler import BulkSampler, Continuation, SampledText

SHARD = 256
"""Documents per file: the most that an interruption loses."""
SHORTEST = 16
"""Minimum tokens of a continuation that is kept although the time ran out."""


def bulk(target: Target) -> bool:
    """Whether to use `BulkSampler` instead of the engine: on devices where the engine's host work would dominate."""
    return target.device.type != "cpu"


def generation_engine(target: Target, options: DataOptions, drafter: Any = "none") -> Engine:
    """An engine that decodes `options.batch` requests at once."""
    settings = EngineOptions(
        drafter=drafter,
        cost_table="none",
        max_num_seqs=options.batch,
        max_num_batched_tokens=max(512, 2 * options.batch),
        max_model_len=_longest(target, options) + 1,
        seed=options.seed,
        prefix_reuse=False,
    )
    return build_engine(target, settings)


def bulk_sampler(target: Target, options: DataOptions) -> BulkSampler:
    """A sampler that decodes `options.batch` texts at once."""
    return BulkSampler(target, rows=options.batch, max_len=_longest(target, options))


def _longest(target: Target, options: DataOptions) -> int:
    return min(target.max_model_len - 1, options.max_prompt + options.max_new)


def regenerate(
    source: Engine | BulkSampler,
    prompts: Path,
    folder: Path,
    options: DataOptions,
    progress: StageProgress,
    *,
    deadline: float | None = None,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Continue every prompt of a file that has no continuation in `folder` yet; returns counts for the record.

    A continuation depends on its prompt, the options and the target alone (its seed comes from the digest), so an
    interrupted run gives the same text. Prompts are continued at the temperatures in turn.

    Args:
        deadline: `time.monotonic()` at which generation stops; running texts are cut.
        share: (rank, ranks) of processes that divide the prompts among them.
    """
    rows = list(enumerate(read_lines(prompts)))[share[0] :: share[1]]
    names = folder.glob("*.safetensors") if folder.exists() else ()
    done = {document.index for shard in names for document in read_shard(shard)}
    waiting = iter([(index, row) for index, row in rows if index not in done])
    if isinstance(source, BulkSampler):
        texts = _from_sampler(source, waiting, options, deadline)
    else:
        texts = _from_engine(source, waiting, options, deadline)
    finished: list[Document] = []
    total, tokens, began = len(rows), 0, time.monotonic()
    complete = total - sum(i not in done for i, _ in rows)
    try:
        for documents, tokens in texts:
            finished += documents
            complete += len(documents)
            while len(finished) >= SHARD:
                _flush(folder, finished)
            rate = tokens / max(time.monotonic() - began, 1e-9)
            spent = 0.0 if deadline is None else (time.monotonic() - began) / max(deadline - began, 1e-9)
            note = f"{complete}/{total} prompts, {tokens} tokens, {rate:.0f} tok/s"
            progress.update(max(complete / max(total, 1), spent), note)
    finally:
        while finished:
            _flush(folder, finished)
    seconds = time.monotonic() - began
    return {
        "documents": complete,
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": tokens / max(seconds, 1e-9),
    }


def _flush(folder: Path, finished: list[Document]) -> None:
    write_shard(folder / f"{finished[0].index:08d}.safetensors", finished[:SHARD])
    del finished[:SHARD]


Progressed = Iterator[tuple[list[Document], int]]  # finished documents, and the tokens generated so far


def _from_engine(
    engine: Engine, waiting: Iterator[tuple[int, dict[str, Any]]], options: DataOptions, deadline: float | None
) -> Progressed:
    running: dict[Request, int] = {}
    box: SimpleQueue[News] = SimpleQueue()
    tokens = 0

    def feed(loop: EngineLoop) -> None:
        for index, row in waiting:
            requests = loop.requests_of(row["tokens"], params_for(index, row["digest"], options))
            running[requests[0]] = index
            loop.queue([requests], box)
            if len(running) >= 2 * options.batch:
                return

    def document(index: int, request: Request) -> Document:
        whole = [*request.prompt_token_ids, *request.output.token_ids]
        return Document(index, len(request.prompt_token_ids), np.array(whole))

    with EngineLoop(engine) as loop:
        feed(loop)
        while running and (deadline is None or time.monotonic() < deadline):
            documents = []
            for request, event in box.get():
                tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    request.raise_error()
                    documents.append(document(running.pop(request), request))
            if len(running) < options.batch + options.batch // 2:
                feed(loop)
            yield documents, tokens
        # Out of time: a text that is cut is as good to train on. `call` runs between two steps, so every text is consistent.
        left = loop.call(
            lambda _: [document(index, request) for request, index in running.items() if request.num_output >= SHORTEST]
        )
        yield left, tokens


def _from_sampler(
    sampler: BulkSampler, waiting: Iterator[tuple[int, dict[str, Any]]], options: DataOptions, deadline: float | None
) -> Progressed:
    def jobs() -> Iterator[Continuation]:
        for index, row in waiting:
            params = params_for(index, row["digest"], options)
            assert params.seed is not None
            assert params.max_tokens is not None
            yield Continuation(index, tuple(row["tokens"]), params.temperature, params.max_tokens, params.seed)

    def document(text: SampledText) -> Document:
        return Document(text.job.index, len(text.job.tokens), text.tokens)

    before = sampler.generated
    for texts in sampler.run(jobs()):
        yield [document(text) for text in texts], sampler.generated - before
        if deadline is not None and time.monotonic() >= deadline:
            break
    left = [text for text in sampler.unfinished() if len(text.tokens) - len(text.job.tokens) >= SHORTEST]
    yield [document(text) for text in left], sampler.generated - before


def params_for(index: int, digest: str, options: DataOptions) -> SamplingParams:
    """Sampling parameters for the prompt with this index."""
    return SamplingParams(
        temperature=options.temperatures[index % len(options.temperatures)],
        max_tokens=options.max_new,
        seed=(int(digest, 16) ^ options.seed) & (2**62 - 1),
    )


def read_existing(target: Target, options: DataOptions, length: int) -> Iterator[Document]:
    """Existing text in pieces of `length` tokens, without generation.

    Built-in text and the files of the source paths, in a fixed random order, until `options.read_tokens` tokens.
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
    # Neighbouring files are similar; a fixed shuffle mixes whatever part of them is used.
    order = np.random.default_rng(0).permutation(len(files))
    for position in order:
        yield from builtin.passages(builtin.read_text(files[position]), 1600)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in (".py", ".txt", ".md", ".rst") else []
    return [file for file in sorted(path.rglob("*")) if file.is_file() and _files(file)]
