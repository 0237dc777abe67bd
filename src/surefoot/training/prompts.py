"""Stage *prompts*: token ids from files, source trees and the built-in collectors, with a held-out part.

The digest of every prompt's text is kept, so that `surefoot evaluate` can check that it uses no training prompt.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError
from surefoot.training import builtin
from surefoot.training.files import Workplace, read_lines, write_lines
from surefoot.training.options import DataOptions

SELF = "self"
"""The source whose prompts the target writes (`selfmade.py`)."""
TEXT_SUFFIXES = (".txt", ".md", ".rst")
EVERYDAY = Path(__file__).parent / "everyday.jsonl"
"""Questions for calibration, of the kinds drafters are measured on (code, mathematics, chat); never trained on."""
SHINGLE = 13
"""Consecutive words that two texts must share to overlap; shorter texts overlap if they are equal."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for the target to continue."""

    text: str
    workload: str = "text"
    chat: bool = False  # rendered with the target's chat template, if it has one
    tokens: tuple[int, ...] = ()  # token ids instead of a text

    @property
    def digest(self) -> str:
        return digest(self.text) if self.text else digest(" ".join(map(str, self.tokens)))


def digest(text: str) -> str:
    """64 bits of SHA-256 over the lower-case words of a text, in hexadecimal; white space and case do not matter."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()[:16]


def shingles(text: str) -> set[int]:
    """Hashes of all runs of `SHINGLE` words (of the whole text when it is shorter)."""
    words = text.casefold().split()
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(max(1, len(words) - SHINGLE + 1))}


def read_prompts(path: Path, workload: str | None = None) -> Iterator[Prompt]:
    """Prompts of one file or folder.

    A JSON line holds `turns` (the first is the prompt, rendered with the chat template), `text` or `tokens`, and
    optionally `workload`. A text file gives its passages, a Python file a prompt per function, a folder all such files.

    Raises:
        ConfigurationError: another kind of file, or a line without a prompt; names file and line.
    """
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            if file.suffix == ".py":
                yield from _functions(file)
            elif file.suffix in (".jsonl", *TEXT_SUFFIXES):
                yield from read_prompts(file, workload)
    elif path.suffix == ".jsonl":
        for number, row in enumerate(read_lines(path), 1):
            kind = str(row.get("workload") or workload or path.stem)
            if row.get("turns"):
                yield Prompt(str(row["turns"][0]), kind, chat=True)
            elif row.get("text"):
                yield Prompt(str(row["text"]), kind)
            elif row.get("tokens"):
                yield Prompt("", kind, tokens=tuple(map(int, row["tokens"])))
            else:
                raise ConfigurationError(f"{path} line {number} has neither 'turns', 'text' nor 'tokens': give one")
    elif path.suffix == ".py":
        yield from _functions(path)
    elif path.suffix in TEXT_SUFFIXES:
        for passage in builtin.passages(builtin.read_text(path)):
            yield Prompt(passage, workload or "text")
    else:
        allowed = ", ".join((".jsonl", ".py", *TEXT_SUFFIXES))
        raise ConfigurationError(f"prompts {path}: allowed are folders and files ending in {allowed}")


def _functions(file: Path) -> Iterator[Prompt]:
    for text, chat in builtin.function_prompts(file, random.Random(file.name)):
        yield Prompt(text, "code", chat)


def gather(sources: Sequence[str]) -> Iterator[Prompt]:
    """All prompts of the sources, each a path or the name of a built-in collector (`builtin`: all collectors).

    Raises:
        ConfigurationError: a source is neither.
    """
    for source in sources:
        if source == "builtin" or source in builtin.COLLECTORS:
            for name in builtin.COLLECTORS if source == "builtin" else [source]:
                workload, collect = builtin.COLLECTORS[name]
                yield from (Prompt(text, workload, chat) for text, chat in collect())
        elif Path(source).exists():
            yield from read_prompts(Path(source))
        else:
            raise ConfigurationError(
                f"prompts {source!r}: no such file or folder; allowed are paths, {SELF}, builtin, {', '.join(builtin.COLLECTORS)}"
            )


def tokenizer_of(target: Any) -> Callable[[Prompt], list[int]]:
    """A function from prompts to token ids of the target.

    It raises `ConfigurationError` for a text if the target has no tokenizer.
    """
    tokenizer = target.tokenizer
    can_chat = bool(getattr(tokenizer, "chat_template", None))

    def encode(prompt: Prompt) -> list[int]:
        if prompt.tokens:
            return list(prompt.tokens)
        if tokenizer is None:
            raise ConfigurationError(f"{target.name} has no tokenizer: give prompts as 'tokens' in a JSON lines file")
        if prompt.chat and can_chat:
            messages = [{"role": "user", "content": prompt.text}]
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(encoded["input_ids"])
        return list(tokenizer(prompt.text)["input_ids"])

    return encode


def collect_prompts(
    target: Any, options: DataOptions, place: Workplace, made_up: Iterable[Prompt] = ()
) -> dict[str, Any]:
    """Write the training prompts and the held-out prompts. Returns counts for the record.

    Duplicates and prompts that overlap `options.exclude` are dropped. Which prompts are taken, and which are held out (the
    smallest digests), depends on the prompts alone.

    Args:
        made_up: prompts of the source `self` (`selfmade.make_up`).

    Raises:
        ConfigurationError: fewer than two prompts are left.
    """
    encode = tokenizer_of(target)
    forbidden: set[int] = set()
    for source in options.exclude:
        for prompt in read_prompts(Path(source)):
            forbidden |= shingles(prompt.text)
    found: dict[str, Prompt] = {}
    dropped = duplicates = 0
    for prompt in chain(gather([source for source in options.sources if source != SELF]), made_up):
        key = prompt.digest
        if key in found:
            duplicates += 1
        elif forbidden and not forbidden.isdisjoint(shingles(prompt.text)):
            dropped += 1
        else:
            found[key] = prompt
    if len(found) < 2:
        raise ConfigurationError(
            f"{len(found)} prompts in {list(options.sources)}: at least 2 are needed, add a source"
        )
    chosen = balanced(found.values(), options.max_prompts)
    count = min(max(1, round(options.held_out * len(chosen))), len(chosen) - 1)
    border = sorted(prompt.digest for prompt in chosen)[count]
    for file, part in (
        (place.prompts, [prompt for prompt in chosen if prompt.digest >= border]),
        (place.held_out_prompts, [prompt for prompt in chosen if prompt.digest < border]),
    ):
        write_lines(file, (_row(prompt, encode(prompt)[-options.max_prompt :]) for prompt in part))
    workloads: dict[str, int] = {}
    for prompt in chosen:
        workloads[prompt.workload] = workloads.get(prompt.workload, 0) + 1
    return {
        "prompts": len(chosen) - count,
        "held_out": count,
        "duplicates": duplicates,
        "excluded": dropped,
        "workloads": workloads,
    }


def _row(prompt: Prompt, tokens: list[int]) -> dict[str, Any]:
    return {"digest": prompt.digest, "workload": prompt.workload, "chat": prompt.chat, "tokens": tokens}


def balanced(prompts: Iterable[Prompt], most: int) -> list[Prompt]:
    """At most `most` prompts, alternating between workloads, each in the order of digests: any prefix has every workload."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.digest, reverse=True):
        queues.setdefault(prompt.workload, []).append(prompt)
    taken: list[Prompt] = []
    while len(taken) < most and queues:
        for name in sorted(queues):
            taken.append(queues[name].pop())
            if not queues[name]:
                del queues[name]
    return taken[:most]
