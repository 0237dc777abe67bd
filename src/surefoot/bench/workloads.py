"""What users ask of a server, by kind: conversations whose turns are sent one after the other.

Everything here is written for surefoot. A turn may bring fields of its own (a schema); the turns of an agent hold what its tools
are said to have returned, so a conversation grows as an agent's does, whatever the model answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.bench.prompts import BUILT_IN, read_prompts
from surefoot.errors import ConfigurationError

LONG_LINES = 330
"""Lines of the long documents: about 5,000 tokens of code-like text."""
HANDBOOK_LINES = 60


@dataclass(frozen=True)
class Conversation:
    """One user's requests.

    Attributes:
        kind: the workload.
        turns: what the user says; each turn is one request, whose conversation holds the answers before it.
        system: said before.
        extra: further fields of every request.
        arrival_s: when it comes, in a recorded trace.
    """

    kind: str
    turns: tuple[str, ...]
    system: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    arrival_s: float | None = None


def _built_in(kind: str) -> list[Conversation]:
    return [Conversation(kind, prompt.turns) for prompt in BUILT_IN if prompt.kind == kind]


def _prose() -> list[Conversation]:
    asked = (
        "Write the first page of a novel that begins at a ferry landing in the fog.",
        "Describe a kitchen after a long dinner, as somebody sees it who was not invited.",
        "Write a letter in which an old clockmaker explains to her apprentice why she closes the shop.",
        "Tell the story of a lost dog from the point of view of three neighbours.",
    )
    return [Conversation("prose", (text,)) for text in asked]


def _structured() -> list[Conversation]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "price_cents": {"type": "integer"},
            "in_stock": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
        },
        "required": ["name", "price_cents", "in_stock", "tags"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "product", "schema": schema, "strict": True}}
    asked = ("a garden hose of 20 metres", "a tin of green paint", "a children's bicycle", "a folding ladder")
    return [
        Conversation("structured", (f"Make up a shop's record of {what}, as JSON.",), extra={"response_format": form})
        for what in asked
    ]


def _log(seed: int, lines: int) -> str:
    """A log file that differs from line to line, and always in the same way."""
    rooms, states = ("boiler", "cellar", "workshop", "attic", "greenhouse"), ("ok", "late", "restarted", "offline")
    found = []
    for n in range(lines):
        mixed = (n + 1) * (2654435761 + 97 * seed) % (1 << 32)
        found.append(
            f"{6 + n // 60 % 18:02d}:{n % 60:02d} sensor {rooms[mixed % 5]}-{mixed // 5 % 40}: {mixed // 200 % 900 / 10:.1f} C, "
            f"{states[mixed // 7 % 4]}"
        )
    return "\n".join(found)


def _long() -> list[Conversation]:
    return [
        Conversation("long", (f"{_log(n, LONG_LINES)}\n\nWhich sensors of the {room} were offline? List their lines.",))
        for n, room in enumerate(("cellar", "attic", "boiler"))
    ]


def _agent() -> list[Conversation]:
    system = (
        "You repair a small Python project. Answer with one shell command at a time; the next message holds what it printed. "
        "Say DONE when the tests pass."
    )
    source = "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(value)\n"
    turns = (
        "The tests fail. Begin.",
        "$ ls\npyproject.toml  stats.py  test_stats.py",
        f"$ cat stats.py\n{source}",
        "$ pytest -q\nFAILED test_stats.py::test_mean - TypeError: object of type 'int' has no len()\n1 failed in 0.03s",
        f"$ sed -i 's/len(value)/len(values)/' stats.py && cat stats.py\n{source.replace('len(value)', 'len(values)')}",
        "$ pytest -q\n1 passed in 0.02s",
    )
    other = tuple(turn.replace("mean", "average").replace("stats", "numbers") for turn in turns)
    return [Conversation("agent", turns, system=system), Conversation("agent", other, system=system)]


def _shared() -> list[Conversation]:
    system = f"You answer questions about this morning's log, briefly.\n\n{_log(7, HANDBOOK_LINES)}"
    asked = (
        "Which room was warmest?",
        "Name a sensor that was late.",
        "How many rooms are there?",
        "What happened first?",
    )
    return [Conversation("shared-prefix", (text,), system=system) for text in asked]


WORKLOADS: dict[str, Callable[[], list[Conversation]]] = {
    "code": lambda: _built_in("code"),
    "edit": lambda: _built_in("edit"),
    "maths": lambda: _built_in("maths"),
    "chat": lambda: _built_in("chat"),
    "prose": _prose,
    "structured": _structured,
    "long": _long,
    "agent": _agent,
    "shared-prefix": _shared,
}


def conversations(workload: str) -> list[Conversation]:
    """Those of a workload by name, or of a file: JSON lines with `turns` or `prompt`, and `arrival_s` in a recorded trace.

    Raises:
        ConfigurationError: neither a workload nor a readable file; names the line.
    """
    if workload in WORKLOADS:
        return WORKLOADS[workload]()
    path = Path(workload)
    if not path.exists():
        raise ConfigurationError(
            f"workload is {workload!r}; allowed: {', '.join(WORKLOADS)}, or a file of JSON lines with 'turns' or 'prompt'"
        )
    found = [Conversation(path.stem, prompt.turns) for prompt in read_prompts(path)]
    return _with_arrivals(path, found)


def _with_arrivals(path: Path, found: Sequence[Conversation]) -> list[Conversation]:
    """The arrival times of a trace: of every line, or of none."""
    if path.suffix not in (".jsonl", ".json"):
        return list(found)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    times = [json.loads(line).get("arrival_s") for line in lines]
    if all(time is None for time in times):
        return list(found)
    for number, time in enumerate(times, 1):
        if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < 1e7:
            raise ConfigurationError(
                f"{path} line {number}: arrival_s is {time!r}; allowed: seconds from the start, on every line or on none"
            )
    made = [Conversation(one.kind, one.turns, arrival_s=float(time)) for one, time in zip(found, times, strict=True)]
    return sorted(made, key=lambda one: one.arrival_s or 0.0)
