"""Built-in prompt collectors that need no download. Code and documentation come from Python's standard library;
word problems and questions are generated from templates."""

from __future__ import annotations

import ast
import contextlib
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

Collected = tuple[str, bool]  # text, and whether it is a question for the chat template

_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
)
_LONGEST_FUNCTION, _SHORTEST_FUNCTION = 60, 4  # lines
_PASSAGE = 1200  # characters
_SEED = 2607


def library_files() -> list[Path]:
    """Source files of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in sorted(root.rglob("*.py")) if not _SKIPPED.intersection(file.relative_to(root).parts)]


def read_text(file: Path) -> str:
    """Text of a file; bytes that are not UTF-8 become replacement characters."""
    return file.read_text(encoding="utf-8", errors="replace")


def passages(text: str, size: int = _PASSAGE) -> Iterator[str]:
    """Pieces of about `size` characters, cut at paragraphs or else at lines where possible."""
    piece = ""
    for paragraph in text.split("\n\n"):
        while len(paragraph) > 2 * size:
            cut = paragraph.rfind("\n", 1, size) if "\n" in paragraph[1:size] else size
            piece, paragraph = piece + paragraph[:cut], paragraph[cut:]
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= size:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def library_code() -> Iterator[Collected]:
    for file in library_files():
        yield from function_prompts(file, random.Random(f"{_SEED} {file.name}"))


def function_prompts(file: Path, rng: random.Random) -> Iterator[Collected]:
    """One prompt per function of a Python file: to continue, write, explain, complete, test or change it."""
    source = read_text(file)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.end_lineno is None:
            continue
        body = lines[node.lineno - 1 : node.end_lineno]
        if not _SHORTEST_FUNCTION <= len(body) <= _LONGEST_FUNCTION:
            continue
        indent = len(body[0]) - len(body[0].lstrip())
        body = [line[indent:] if line[:indent].isspace() else line for line in body]
        yield _ask_about(node.name, ast.get_docstring(node), body, rng)


def _ask_about(name: str, docstring: str | None, body: list[str], rng: random.Random) -> Collected:
    whole, head = "\n".join(body), "\n".join(body[: max(2, len(body) // 3)])
    block, started = f"```python\n{whole}\n```", f"```python\n{head}\n```"
    summary = (docstring or "").split("\n\n")[0].strip().replace("\n", " ")
    asks = [
        (head + "\n", False),
        (head + "\n", False),
        (f"Complete this Python function:\n\n{started}", True),
        (f"Explain what this code does:\n\n{block}", True),
        (f"Write unit tests for `{name}`:\n\n{block}", True),
        (f"Add type hints and a docstring to this function:\n\n{block}", True),
        (f"Rewrite this function so that it is easier to read, and answer with the code only:\n\n{block}", True),
    ]
    if len(summary) > 20:
        words = name.strip("_").replace("_", " ")
        asks += [
            (f"Write a Python function `{name}`. {summary}", True),
            (f"Write a Python function for this: {summary}", True),
            (
                f"Implement `{name}` in Python ({words}). What it has to do: {summary}\nShow an example of its use.",
                True,
            ),
        ]
    return rng.choice(asks)


def documentation() -> Iterator[Collected]:
    """Passages of Python's language reference and of module docstrings; some as questions."""
    rng = random.Random(_SEED)
    for topic, text in _documents():
        for number, passage in enumerate(passages(text)):
            if len(passage) < 200:
                continue
            kind = rng.randrange(4)
            if kind == 0:
                yield passage[: _PASSAGE // 3], False
            elif kind == 1:
                yield f"Summarize this text in three sentences:\n\n{passage}", True
            elif kind == 2:
                yield f"Explain the following to someone who is new to programming:\n\n{passage}", True
            elif number == 0:
                yield f"What is `{topic}` in Python, and when would you use it? Give an example.", True


def _documents() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(ImportError):  # some distributions omit it
        from pydoc_data.topics import topics

        yield from sorted(topics.items())
    for file in library_files():
        try:
            text = ast.get_docstring(ast.parse(read_text(file)))
        except (SyntaxError, ValueError, RecursionError):
            continue
        if text:
            yield file.stem, text


_NAMES = (
    "Ana",
    "Ben",
    "Chloe",
    "Dmitri",
    "Elif",
    "Farah",
    "George",
    "Hana",
    "Ivan",
    "Jun",
    "Karim",
    "Lena",
    "Mateo",
    "Nora",
)
_THINGS = (
    "apples",
    "notebooks",
    "tickets",
    "marbles",
    "bricks",
    "candles",
    "stamps",
    "plants",
    "cups",
    "chairs",
    "bulbs",
)
_PLACES = ("shop", "farm", "school", "library", "bakery", "workshop", "museum", "garden", "factory")
_PROBLEMS = (
    "{n} buys {a} {t} for {b} dollars each and pays with a {c}00 dollar note. How much change does {n} get?",
    "A {p} has {a} boxes with {b} {t} in each box. It gives away {c} {t} and then doubles what is left. How many is that?",
    "{n} walks {a} km on Monday and {b} km more each following day. How far has {n} walked after {c} days?",
    "The price of the {t} at a {p} rises from {a} dollars by {b} percent and then falls by {c} percent. What is it now?",
    "{n} is {a} years old and {m} is {b} years older. In how many years will their ages add up to {c}0?",
    "A {p} needs {a} minutes to make {b} {t}. How many {t} does it make in {c} hours?",
    "Out of {a}0 {t}, {b} percent are broken, and a third of the rest is sold. How many whole {t} are left?",
    "{n} and {m} share {a}0 {t} in the ratio {b} to {c}. How many does each of them get?",
    "A tank holds {a}0 litres. One pipe fills {b} litres a minute, another drains {c} litres a minute. When is it full?",
    "Solve the equation {a}x + {b} = {c}x - 7.",
    "What are the solutions of x^2 - {a}x + {b} = 0?",
    "Find the derivative of f(x) = {a}x^3 - {b}x^2 + {c}x.",
    "What is the greatest common divisor of {a}{b} and {c}0?",
    "A rectangle has sides {a} and {b}. By what factor does its area change when both sides grow by {c}?",
    "What is the sum of the first {a} terms of the arithmetic sequence that starts with {b} and has difference {c}?",
    "A bag holds {a} red and {b} blue balls. Two are drawn without putting any back. How likely is it that both are red?",
    "Simplify the fraction {a}{b}/{c}0 as far as possible.",
    "How many ways are there to choose {d} people out of a group of {a}?",
    "A triangle has a base of {a} cm and an area of {b}{c} cm². What is its height?",
    "Convert {a}{b} in base 10 to base {d}.",
)
_HOW = ("", " Think step by step.", " Show your work.", " Explain each step, then give the result.")


def word_problems(count: int = 4000) -> Iterator[Collected]:
    rng = random.Random(_SEED + 1)
    for _ in range(count):
        first, second = rng.sample(_NAMES, 2)
        text = rng.choice(_PROBLEMS).format(
            n=first, m=second, t=rng.choice(_THINGS), p=rng.choice(_PLACES),
            a=rng.randint(12, 60), b=rng.randint(2, 11), c=rng.randint(3, 9), d=rng.randint(2, 7),
        )  # fmt: skip
        yield text + rng.choice(_HOW), True


_TOPICS = (
    "rain", "the ocean", "bicycles", "bread", "volcanoes", "photosynthesis", "inflation", "sleep", "chess", "bees", "bridges",
    "the moon", "vaccines", "public libraries", "electric cars", "the Roman Empire", "black holes", "coffee", "memory",
    "jazz", "gardening", "recycling", "databases", "encryption", "neural networks", "the stock market", "climate change",
    "the water cycle", "friendship", "time management", "job interviews", "cooking pasta", "learning a language", "hiking",
    "museums", "the French Revolution", "antibiotics", "solar panels", "poetry", "urban planning", "teamwork", "sorting",
    "recursion", "hash tables", "operating systems", "negotiation", "migration of birds", "earthquakes", "the printing press",
)  # fmt: skip
_QUESTIONS = (
    "Explain {x} to a child.",
    "Write a short story about {x}.",
    "Write a poem about {x} in four lines.",
    "What are the advantages and disadvantages of {x}?",
    "Give me five tips about {x}.",
    "Write an email about {x} to a colleague.",
    "What is the most common misunderstanding about {x}?",
    "Compare {x} with {y}.",
    "Write a dialogue about {x} between two friends.",
    "List ten facts about {x}.",
    "How did {x} change the world?",
    "Draft a short speech about {x}.",
    "What should a beginner know about {x}?",
    "Describe {x} without using the letter e.",
    "Write a product description that has to do with {x}.",
    "Why does {x} matter? Answer in one paragraph.",
    "Make a table of three aspects of {x}.",
    "Imagine you are an expert on {x}. What would you do differently from most people?",
    "Plan a weekend around {x}.",
    "Write a quiz with three questions about {x}, with answers.",
)


def questions() -> Iterator[Collected]:
    rng = random.Random(_SEED + 2)
    for topic in _TOPICS:
        for question in _QUESTIONS:
            yield question.format(x=topic, y=rng.choice([other for other in _TOPICS if other != topic])), True


COLLECTORS: dict[str, tuple[str, Callable[[], Iterator[Collected]]]] = {
    "library": ("code", library_code),
    "documentation": ("text", documentation),
    "problems": ("math", word_problems),
    "questions": ("chat", questions),
}
"""Collectors by name, each with the workload its prompts belong to."""
