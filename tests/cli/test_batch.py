"""`surefoot generate --batch`: JSON lines in and out; one bad line costs no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.sampling import SamplingParams
from tests.cli.conftest import strict_json
from tests.cli.stub import Script


def objects(text: str) -> list[dict[str, Any]]:
    return [strict_json(line) for line in text.splitlines()]


@pytest.fixture
def batch(run: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Run a batch of these lines (objects, or text as it stands)."""

    def invoke(*lines: Any, options: tuple[str, ...] = ()) -> Any:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return run("generate", "--batch", str(path), *options)

    return invoke


def test_order_and_ids_are_kept_with_one_start(batch: Callable[..., Any], script: Script) -> None:
    result = batch(
        {"prompt": "one", "id": "a"},
        {"prompt_token_ids": [1, 2]},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "id": {"any": ["json", 1]}},
        {"prompt": "one", "id": None},
    )
    assert result.exit_code == 0, result.stderr
    found = objects(result.stdout)
    assert [line["id"] for line in found] == ["a", 2, {"any": ["json", 1]}, None]
    assert {line["text"] for line in found} == {"Hello, world"}
    assert found[0]["token_ids"] == [1, 2, 3, 4]
    assert found[0]["finish_reason"] == "length"
    assert [prompt for prompt, _ in script.asked] == ["one", [1, 2], [{"role": "user", "content": "Hi"}], "one"]
    assert len(script.options) == script.closed == 1
    assert script.options[0]["max_num_seqs"] == 16
    assert "4 of 4 lines answered" in result.stderr


def test_lines_bring_their_own_parameters(batch: Callable[..., Any], script: Script) -> None:
    own = {"temperature": 0.5, "max_tokens": 3, "stop": ["\n"], "seed": 4, "logit_bias": {"7": 1.0}, "min_p": 0.1}
    batch({"prompt": "x"}, {"prompt": "x", **own}, options=("-n", "9", "--top-k", "5"))
    base, mixed = (params for _, params in script.asked)
    assert base == SamplingParams(temperature=0.0, max_tokens=9, top_k=5)
    assert mixed == SamplingParams(
        temperature=0.5, max_tokens=3, top_k=5, stop=["\n"], seed=4, logit_bias={7: 1.0}, min_p=0.1
    )


def test_bad_lines_are_reported_and_lose_no_other(batch: Callable[..., Any], script: Script) -> None:
    script.refuse = lambda prompt: "the prompt has 9000 tokens: shorten it" if prompt == "long" else None
    bad = [
        ("{not json", "not JSON"),
        ("[1, 2]", "JSON list"),
        ({"id": "p"}, "no prompt"),
        ({"prompt": "x", "messages": []}, "prompt and messages"),
        ({"prompt": ["x"]}, "prompt is a JSON list"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids is a JSON str"),
        ({"prompt": "x", "temprature": 1}, "'temprature'; allowed: id,"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens is 'many'"),
        ({"prompt": "x", "stop": 5}, ""),
        ({"prompt": "x", "chat_template_kwargs": {}}, "without messages"),
        ({"prompt": "long"}, "9000 tokens"),
    ]
    lines: list[Any] = []
    for line, _ in bad:
        lines += [line, {"prompt": "good"}]
    result = batch(*lines)
    assert result.exit_code == 1
    found = objects(result.stdout)
    assert len(found) == len(lines)
    for index, (_, words) in enumerate(bad):
        assert words in found[2 * index]["error"], index
        assert found[2 * index]["error"]
        assert found[2 * index + 1]["text"] == "Hello, world"
        assert "error" not in found[2 * index + 1]
    assert found[4]["id"] == "p"
    assert "error: 12 of 24 lines failed" in result.stderr
    assert "line 1, 3, 5" in result.stderr


def test_an_answer_that_failed_is_an_error_with_what_there_is(batch: Callable[..., Any], script: Script) -> None:
    script.error = "the logits are NaN"
    result = batch({"prompt": "x"})
    assert result.exit_code == 1
    assert objects(result.stdout)[0]["error"] == "the logits are NaN"
    assert objects(result.stdout)[0]["text"] == "Hello, world"


def test_prompts_of_a_batch_may_be_questions(batch: Callable[..., Any], script: Script) -> None:
    variables = ("--chat-template-kwargs", '{"a": 1}')
    batch({"prompt": "Hi"}, options=("--chat", *variables))
    batch({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 2}}, options=variables)
    assert [prompt for prompt, _ in script.asked] == [[{"role": "user", "content": "Hi"}]] * 2
    assert script.variables == [{"a": 1}, {"a": 2}]


def test_answers_go_to_a_file_and_lines_come_from_standard_input(
    run: Callable[..., Any], script: Script, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("old\n")
    result = run("generate", "--batch", "-", "-o", str(output), stdin='{"prompt": "é"}\n')
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert script.asked[0][0] == "é"
    assert objects(output.read_text())[0]["text"] == "Hello, world"


def test_lines_that_are_not_utf8_are_reported(run: Callable[..., Any], script: Script, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n{"prompt": "\xff"}\n{"prompt": "\\udcff"}\n')
    found = objects(run("generate", "--batch", str(path)).stdout)
    assert "error" not in found[0]
    assert "not UTF-8" in found[1]["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of PROMPT and --batch"),
        (("x", "--batch", "-"), "one of PROMPT and --batch"),
        (("--batch", "no-such-file"), "cannot read no-such-file: No such file"),
        (("--batch", "."), "cannot read .: Is a directory"),
        (("--batch", "-"), "holds no line"),
        (("x", "-o", "file"), "--output is for --batch"),
        (("--batch", "a", "-o", "a"), "both a"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(
    run: Callable[..., Any], script: Script, arguments: tuple[str, ...], words: str
) -> None:
    result = run("generate", *arguments, stdin="\n")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert script.options == []


def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    batch: Callable[..., Any], script: Script, tmp_path: Path
) -> None:
    result = batch({"prompt": "x"}, options=("-o", str(tmp_path / "no" / "file")))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert script.options == []


def test_a_batch_that_is_interrupted_keeps_the_answers_so_far(batch: Callable[..., Any], script: Script) -> None:
    answers = iter([None, None, 1])

    def tokens(prompt: Any, params: SamplingParams) -> list[int]:
        script.interrupt_after = next(answers)
        return [1]

    script.tokens = tokens
    result = batch(*[{"prompt": "x"}] * 5)
    assert result.exit_code == 130
    assert len(objects(result.stdout)) == 3
    assert script.closed == 1
