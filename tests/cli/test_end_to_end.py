"""The commands over the real engine and a tiny target, from the command line to the text and back."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import strict_json

PROMPT = "def stop(n): return n\ndef stop(n):"


@pytest.fixture
def generate(run: Callable[..., Any], checkpoints: Path) -> Callable[..., dict[str, Any]]:
    """Run `surefoot generate --json` on the tiny target."""

    def invoke(*options: str) -> dict[str, Any]:
        result = run("generate", PROMPT, "-m", str(checkpoints / "target"), "-n", "24", "--json", *options)
        assert result.exit_code == 0, result.stderr
        return strict_json(result.stdout)

    return invoke


def test_every_drafter_and_width_generates_the_same_text(
    generate: Callable[..., dict[str, Any]], checkpoints: Path
) -> None:
    plain = generate("-d", "none")
    assert len(plain["token_ids"]) == plain["completion_tokens"] == 24
    assert plain["statistics"]["drafted"] == 0
    for drafter in ("prompt-lookup", str(checkpoints / "drafter")):
        for width in ("auto", "2", "0,3,1"):
            found = generate("-d", drafter, "-w", width, "-g", "3")
            assert found["token_ids"] == plain["token_ids"], (drafter, width)
            assert found["text"] == plain["text"]
            assert found["statistics"]["emitted"] == 24


def test_streamed_text_is_the_text_of_the_object(
    run: Callable[..., Any], generate: Callable[..., dict[str, Any]], checkpoints: Path
) -> None:
    streamed = run("generate", PROMPT, "-m", str(checkpoints / "target"), "-n", "24")
    assert streamed.exit_code == 0
    assert streamed.stdout == generate()["text"] + "\n"
    assert "24 tokens" in streamed.stderr


def test_a_seed_repeats_a_sampled_text(generate: Callable[..., dict[str, Any]]) -> None:
    sampled = [generate("-t", "1", "--seed", seed)["token_ids"] for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_stop_string_from_the_text_ends_it_there(generate: Callable[..., dict[str, Any]]) -> None:
    text = generate("-d", "none")["text"]
    stop = text[4:6]
    found = generate("--stop", stop)
    assert found["text"] == text[: text.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_chat_answers_piped_turns(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start measures the machine, the second finds what it has saved."""
    monkeypatch.setattr("surefoot.engine.fingerprint.tables_directory", lambda: tmp_path)
    monkeypatch.setattr("surefoot.cli.profile.QUICK_SECONDS", 0.1)
    for start in range(2):
        result = run("chat", "-m", str(checkpoints / "target"), "-n", "5", "--json", stdin="hello\nagain\n")
        assert result.exit_code == 0, result.stderr
        assert ("cost table measured" in result.stderr) == (start == 0)
        assert len(list(tmp_path.iterdir())) == 1
    found = strict_json(result.stdout)
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"] * 2
    assert [len(turn["token_ids"]) for turn in found["turns"]] == [5, 5]
    assert found["turns"][1]["prompt_tokens"] > found["turns"][0]["prompt_tokens"]


def test_the_command_that_is_printed_for_a_missing_cost_table_makes_it(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.engine.fingerprint.tables_directory", lambda: tmp_path)
    for given in (
        ("-m", str(checkpoints / "target")),
        ("-m", str(checkpoints / "target"), "-d", str(checkpoints / "drafter"), "-g", "2", "--quantize", "int8"),
    ):
        asked = ("generate", PROMPT, "-n", "2", *given)
        printed = re.search(r"with: surefoot (.*)", run(*asked).stderr)
        assert printed is not None
        assert run(*shlex.split(printed[1]), "--seconds", "0.1").exit_code == 0
        assert "no cost table" not in run(*asked).stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_a_batch_of_answers_is_what_each_prompt_gets_alone(
    run: Callable[..., Any], generate: Callable[..., dict[str, Any]], checkpoints: Path
) -> None:
    lines = [
        {"prompt": PROMPT},
        {"prompt": "x", "prompt_token_ids": [1]},
        {"prompt_token_ids": [1, 2, 99999]},
        {"prompt": PROMPT, "max_tokens": 5, "logprobs": 1},
        {"messages": [{"role": "user", "content": PROMPT}], "chat_template_kwargs": {"no_such": 1}},
        {"prompt": PROMPT, "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4},
    ]
    result = run(
        *("generate", "--batch", "-", "-m", str(checkpoints / "target"), "-n", "24"),
        stdin="\n".join(map(json.dumps, lines)),
    )
    assert result.exit_code == 1, result.stderr
    found = [strict_json(line) for line in result.stdout.splitlines()]
    alone = generate()
    assert found[0]["token_ids"] == alone["token_ids"]
    assert "prompt and prompt_token_ids" in found[1]["error"]
    assert "99999 is outside" in found[2]["error"]
    assert found[3]["token_ids"] == alone["token_ids"][:5]
    assert [entry["token_id"] for entry in found[3]["logprobs"]] == found[3]["token_ids"]
    assert all(entry["top"][0]["logprob"] == entry["logprob"] <= 0 for entry in found[3]["logprobs"])
    assert "'no_such', which this model's chat template does not read" in found[4]["error"]
    assert [len(answer["token_ids"]) for answer in found[5]["completions"]] == [4, 4]


def test_chat_without_a_template_is_refused(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run("chat", "-m", str(checkpoints / "base"), stdin="hello\n")
    assert result.exit_code == 2
    assert "chat template" in result.stderr
    assert result.stderr.count("\n") == 1


def test_demo_finds_identical_texts(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run(
        *("demo", "-m", str(checkpoints / "target"), "-d", str(checkpoints / "drafter"), "-n", "8", "-w", "0,3,1"),
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert found["identical"] is True
    assert found["complaints"] == []
    assert all(prompt["tokens"] == 8 for prompt in found["prompts"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-d", "{}/stranger"), ("hidden size 40", "32")),
        (("-d", "{}/nothing"), ("nothing", "directory")),
        (("-d", "lookup"), ("lookup", "prompt-lookup")),
        (("-d", "{}/drafter", "-g", "9"), ("9", "3")),
        (("-m", "./no-such-model"), ("no-such-model",)),
        (("-w", "9", "-g", "3"), ("9", "3")),
        (("--dtype", "float7"), ("float7", "bfloat16")),
        (("--device", "abacus"), ("abacus", "cpu")),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_remedy_and_exit_code_2(
    run: Callable[..., Any], checkpoints: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    model = () if "-m" in options else ("-m", str(checkpoints / "target"))
    result = run("generate", PROMPT, *model, *(option.format(checkpoints) for option in options))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
