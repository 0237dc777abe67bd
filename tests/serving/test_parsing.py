"""Parsers of answers: golden transcripts of every format, cut in every way."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.serving.parsing.pieces import OutputParser, Reasoning, Text, ToolCallDelta
from surefoot.serving.parsing.reasoning import ReasoningSplitter, ReasoningTokens
from surefoot.serving.parsing.scanner import JsonObject, JsonValue
from surefoot.serving.parsing.tools import TOOL_STAGES

NAMES = ("get_weather", "add", "no_arguments")
WEATHER = ("get_weather", {"city": 'Sao Paulo, "BR" }{', "days": [1, 2]})
ADD = ("add", {"a": -1.5e3, "b": {"c": None}})


def joined(parser: OutputParser, chunks: list[str]) -> dict[str, Any]:
    """What the pieces of a cut text join to."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    for piece in pieces:
        if isinstance(piece, Text):
            found["text"] += piece.text
        elif isinstance(piece, Reasoning):
            found["reasoning"] += piece.text
        else:
            assert isinstance(piece, ToolCallDelta)
            if piece.index == len(found["calls"]):
                assert piece.id
                assert piece.name
                found["calls"].append([piece.name, ""])
            else:
                assert piece.id is None
                assert piece.name is None
            found["calls"][piece.index][1] += piece.arguments
    return found


def cuts(text: str, count: int = 40) -> list[list[str]]:
    """A text at once, by characters, and cut at random."""
    found = [[text], list(text)]
    for seed in range(count):
        random = Random(seed)
        places = sorted(random.sample(range(len(text) + 1), min(len(text), random.randint(1, 9))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def check(make: Callable[[], OutputParser], text: str, calls: Any = (), said: str = "", reasoning: str = "") -> None:
    for chunks in cuts(text):
        found = joined(make(), chunks)
        assert found["text"] == said, chunks
        assert found["reasoning"] == reasoning, chunks
        assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == [tuple(c) for c in calls], (
            chunks
        )


def call(pair: Any, key: str = "arguments") -> str:
    return json.dumps({"name": pair[0], key: pair[1]})


def hermes(*pairs: Any) -> str:
    return "\n".join(f"<tool_call>\n{call(pair)}\n</tool_call>" for pair in pairs)


CALLS = {
    "hermes, one": ("hermes", hermes(WEATHER), [WEATHER], ""),
    "hermes, two": ("hermes", hermes(WEATHER, ADD), [WEATHER, ADD], ""),
    "hermes, text before": ("hermes", "Let me see: <b> " + hermes(ADD), [ADD], "Let me see: <b> "),
    "hermes, text after": ("hermes", hermes(ADD) + "\nDone.", [ADD], "\nDone."),
    "hermes, arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        [("add", {"a": 1})],
        "",
    ),
    "hermes, arguments as text": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
        [("add", {"a": "\n"})],
        "",
    ),
    "hermes, none": ("hermes", '<tool_call>{"name": "no_arguments"}</tool_call>', [("no_arguments", {})], ""),
    "hermes, unknown name": (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    "hermes, no JSON": ("hermes", "<tool_call>hm</tool_call> x", [], "<tool_call>hm</tool_call> x"),
    "hermes, a marker begun": ("hermes", "1 < 2 and <tool", [], "1 < 2 and <tool"),
    "hermes, cut off": ("hermes", '<tool_call>{"name": "ad', [], '<tool_call>{"name": "ad'),
    "llama3": ("llama3", call(WEATHER, "parameters"), [WEATHER], ""),
    "llama3, tag, two": (
        "llama3",
        f"<|python_tag|>{call(WEATHER, 'parameters')}; {call(ADD, 'parameters')}",
        [WEATHER, ADD],
        "",
    ),
    "llama3, JSON that is no call": ("llama3", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
    "llama3, text": ("llama3", "Hello {x}", [], "Hello {x}"),
    "pythonic": ("pythonic", "[add(a=-1500.0, b={'c': None})]", [ADD], ""),
    "pythonic, two": (
        "pythonic",
        '[add(a=1, b="]"), no_arguments()]',
        [("add", {"a": 1, "b": "]"}), ("no_arguments", {})],
        "",
    ),
    "pythonic, a list": ("pythonic", "[1, 2, 3] is a list", [], "[1, 2, 3] is a list"),
    "pythonic, no literal": ("pythonic", "[add(a=open('x'))]", [], "[add(a=open('x'))]"),
    "mistral": ("mistral", f"[TOOL_CALLS][{call(WEATHER)}, {call(ADD)}]", [WEATHER, ADD], ""),
    "mistral, named": ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD[1])}", [ADD], ""),
    "mistral, named twice": (
        "mistral",
        f"Well [TOOL_CALLS]add[ARGS]{json.dumps(ADD[1])}[TOOL_CALLS]get_weather{json.dumps(WEATHER[1])}",
        [ADD, WEATHER],
        "Well ",
    ),
    "deepseek 3.1": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        + json.dumps(ADD[1])
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        + json.dumps(WEATHER[1])
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [ADD, WEATHER],
        "",
    ),
    "deepseek 3": (
        "deepseek",
        "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        + json.dumps(ADD[1])
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [ADD],
        "So: ",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_come_out_whatever_the_pieces(name: str) -> None:
    style, text, calls, said = CALLS[name]
    check(lambda: OutputParser(None, TOOL_STAGES[style](NAMES)), text, calls, said)


@given(st.text('<tool_cal>/{}[]"\\nm: ,adx\n;', max_size=60), st.sampled_from(sorted(TOOL_STAGES)), st.randoms())
def test_text_without_calls_loses_no_character(text: str, style: str, random: Any) -> None:
    def make() -> OutputParser:
        return OutputParser(None, TOOL_STAGES[style](("f",)))

    place = random.randint(0, len(text))
    found = joined(make(), [text[:place], text[place:]])
    if not found["calls"]:
        assert found["text"] == text
    assert found == joined(make(), list(text))


def test_arguments_stream_as_they_come() -> None:
    parser = OutputParser(None, TOOL_STAGES["hermes"](NAMES))
    counts = [sum(isinstance(p, ToolCallDelta) for p in parser.feed(c)) for c in hermes(WEATHER)]
    assert sum(counts) > 20, "the arguments came at once"


REASONED = {
    "one": ("<think>\nSo, 1 < 2.\n</think>\n\nYes.", False, "So, 1 < 2.", "Yes."),
    "open": ("So.\n</think>Yes </think>.", True, "So.", "Yes </think>."),
    "none": ("  Yes <think> no", False, "", "  Yes <think> no"),
    "never ends": ("<think> hm </thi", False, "hm </thi", ""),
    "empty": ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
}


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_is_split_whatever_the_pieces(name: str) -> None:
    text, is_open, reasoning, said = REASONED[name]
    check(lambda: OutputParser(ReasoningSplitter(is_open=is_open)), text, (), said, reasoning)


def test_calls_after_reasoning_and_none_inside_it() -> None:
    def make() -> OutputParser:
        return OutputParser(ReasoningSplitter(), TOOL_STAGES["hermes"](NAMES))

    text = f"<think>I could say {hermes(ADD)} here</think>{hermes(WEATHER)}"
    check(make, text, [WEATHER], "", f"I could say {hermes(ADD)} here")


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [("<think>ab</think>cd", False, 17), ("ab</think>cd", True, 10), ("abcd", False, 0)],
)
def test_reasoning_tokens_are_counted_to_the_end_marker(text: str, is_open: bool, expected: int) -> None:
    """Tokens of one character: the count is that of the characters up to the marker's end."""
    for chunk in (1, 3, 100):
        counter = ReasoningTokens(chr, "<think>", "</think>", is_open=is_open)
        codes = [ord(character) for character in text]
        for place in range(0, len(codes), chunk):
            counter.feed(codes[place : place + chunk])
        assert counter.count == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
        max_leaves=8,
    )
)
def test_the_scanner_finds_the_end_of_every_value(value: Any) -> None:
    text = json.dumps(value)
    scanner = JsonValue()
    assert scanner.feed(text + " ,") == len(text)
    assert scanner.complete
    members: dict[str, str] = {}

    def take(key: str, piece: str, done: bool) -> None:
        members[key] = members.get(key, "") + piece

    whole = JsonObject(take)
    for character in json.dumps({"a": value, "b": 1}):
        assert whole.feed(character) <= 1
    assert whole.complete
    assert json.loads(members["a"]) == value
