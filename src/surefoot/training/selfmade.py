"""Prompts written by the target itself: the source `self`.

Given its chat template up to the start of the user's turn, a chat model continues as the user. This gives any number of
prompts of the kind that the model was tuned to answer. A model without a chat template continues from a few first words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from surefoot.targets.target import Target
from surefoot.training.progress import StageProgress
from surefoot.training.prompts import Prompt
from surefoot.training.sampler import BulkSampler, Continuation, SampledText

TEMPERATURE = 0.9
LONGEST, BASE_LONGEST = 112, 32  # tokens of a prompt; a base model writes only a beginning
_SHORTEST = 20  # characters
_PLACE = "<<the user speaks here>>"
_STUB = "```python\ndef"  # tokens begin with their space


@dataclass(frozen=True)
class Opening:
    """Beginnings of the prompts of one workload."""

    workload: str
    system: str | None  # system turn; None: the template's default
    starts: tuple[str, ...]
    endings: tuple[str, ...] = ("",)


CHAT = (
    Opening(
        "code",
        None,
        (
            "Write a function that", "Write a Python function to", "Write a python function to find",
            "Write a python function to check", "Write a function to", "Write a Python program that", "Implement a class",
            "Given a list of", "Given a string", "Implement", "How do I", "Create a Python", "Write a method",
            "Explain what this code does", "Write a regular expression", "Write a SQL query", "Write unit tests for",
            "Using Python,", "I have a list of", "Fix the bug in", "What is the difference between", "Write a script",
        ),
    ),
    Opening(
        "stub",
        None,
        (
            f"Complete the function:\n{_STUB}", f"Write the body of this function:\n{_STUB}",
            f"Implement this function so that its examples hold:\n{_STUB}",
            "Finish this:\n```python\nfrom typing import List\n\n\ndef", f"Solve this problem:\n{_STUB}",
        ),
    ),
    Opening(
        "math",
        "You are a maths tutor.",
        (
            "Find the", "What is the", "How many", "If", "Let $", "Solve", "Compute", "Simplify", "A train", "A shop",
            "A farmer", "A box", "Two", "Suppose", "In a triangle", "The sum of", "Evaluate", "What is the value of", "Determine",
            "Maria has", "Tom buys", "A school", "Each", "John is", "Sara works", "There are", "A bag contains",
            "Find all", "The number", "Express", "Factor", "A circle", "What is the probability", "For what value of",
        ),
        ("", "", " Think step by step.", "\nShow each step, then write the result inside \\boxed{}.",
         "\nReason in steps and end with the answer in \\boxed{}."),
    ),
    Opening(
        "chat",
        "You are a friendly assistant for everyday questions, writing and advice.",
        (
            "Write a", "Explain", "What are", "How can I", "Give me", "Describe", "Imagine you are", "Compose", "Why",
            "Can you", "Tell me", "Draft an email", "Summarize", "Compare", "Suggest", "Pretend", "What would", "I am",
            "My friend", "Help me", "Act as", "Write a short story", "Write a blog post", "Who", "Which", "Is it",
            "Rewrite the following", "Discuss", "Plan a", "Edit the following paragraph",
        ),
    ),
)  # fmt: skip
BASE = (
    Opening(
        "code",
        None,
        (
            "def", "class", "import", "from", "#!/usr/bin/env python\n", "```python\ndef", '"""', "#", "function",
            "async def", "@property\n    def", "    def __init__(self, ", "if __name__", "const", "#include <",
            "Write a function that", "Write a Python function to",
        ),
    ),
    Opening(
        "text",
        None,
        (
            "The", "In", "A", "How", "What", "Question:", "This", "When", "If", "I", "We", "There", "One",
            "Find the", "It was", "For", "Solve", "Let", "Explain", "Write a", "Why", "John", "According to", "To",
        ),
    ),
)  # fmt: skip


def make_up(target: Target, count: int, seed: int, progress: StageProgress, *, rows: int) -> Iterator[Prompt]:
    """Prompts from `count` attempts; unfinished and too short ones are dropped.

    Args:
        rows: concurrent texts.
    """
    tokenizer, rng = target.tokenizer, random.Random(seed)
    chat = bool(getattr(tokenizer, "chat_template", None))
    openings = CHAT if chat else BASE
    longest = LONGEST if chat else BASE_LONGEST
    begun: dict[int, tuple[Opening, str]] = {}
    jobs = []
    for index in range(count):
        opening = openings[index % len(openings)]
        start = rng.choice(opening.starts)
        text = _before_the_user(tokenizer, opening.system) + start if chat else start
        tokens = tokenizer.encode(text, add_special_tokens=not chat)
        begun[index] = (opening, start)
        jobs.append(Continuation(index, tuple(tokens), TEMPERATURE, longest, rng.getrandbits(62)))
    sampler = BulkSampler(target, rows=min(rows, count), max_len=longest + max(len(job.tokens) for job in jobs))
    finished = 0
    for texts in sampler.run(jobs):
        finished += len(texts)
        progress.update(finished / count, f"{finished} of {count} prompts made up")
        for written in texts:
            opening, start = begun[written.job.index]
            said = _trimmed(start + _spoken(tokenizer, written), written.ended, chat)
            if said is not None:
                ending = opening.endings[written.job.index // len(openings) % len(opening.endings)]
                yield Prompt(said + ending, "code" if opening.workload == "stub" else opening.workload, chat)


def _before_the_user(tokenizer: Any, system: str | None) -> str:
    turns = [{"role": "user", "content": _PLACE}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # some templates reject a system turn, each with its own type of error
        text = tokenizer.apply_chat_template(turns[-1:], tokenize=False, add_generation_prompt=True)
    return str(text).partition(_PLACE)[0]


def _spoken(tokenizer: Any, text: SampledText) -> str:
    return str(tokenizer.decode(text.tokens[len(text.job.tokens) :].tolist(), skip_special_tokens=True))


def _trimmed(said: str, ended: bool, chat: bool) -> str | None:
    """The prompt without an answer the model may have appended, or None if it is unusable.

    A function to complete ends with its docstring, any other prompt with its first paragraph.
    """
    if not chat:
        return said if len(said) >= _SHORTEST else None
    head, stub, body = said.partition("```python\n")
    if stub:
        parts = body.split('"""', 2)
        return f'{head}{stub}{parts[0]}"""{parts[1]}"""\n```' if len(parts) == 3 else None
    paragraph, rest, _ = said.strip().partition("\n\n")
    if not (ended or rest) or len(paragraph) < _SHORTEST or "```" in paragraph:
        return None
    return paragraph.strip()
