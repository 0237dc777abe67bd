"""`surefoot generate`: text on standard output, figures on standard error, or one object."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.cli import options
from surefoot.cli.report import json_line
from tests.cli.conftest import strict_json
from tests.cli.stub import Script


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(run: Callable[..., Any], script: Script) -> None:
    result = run("generate", "Say hello")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world\n"
    assert result.stderr == (
        "4 tokens, 50.0 tok/s, 4 steps, accepted length 1.50, acceptance by position 75 50 0 %, finished: length\n"
        "planner verifies everything: no cost table\n"
    )
    assert script.asked[0][0] == "Say hello"
    assert script.closed == 1


def test_statistics_can_be_left_out(run: Callable[..., Any], script: Script) -> None:
    assert run("generate", "x", "--no-stats").stderr == ""


def test_without_speculation_the_line_says_so(run: Callable[..., Any], script: Script) -> None:
    script.drafts = False
    assert "4 steps, nothing drafted, finished: length" in run("generate", "x").stderr


def test_json_is_one_object_with_text_ids_reason_and_statistics(run: Callable[..., Any], script: Script) -> None:
    result = run("generate", "x", "--json")
    assert result.exit_code == 0
    found = strict_json(result.stdout)
    assert found["text"] == "Hello, world"
    assert found["token_ids"] == [1, 2, 3, 4]
    assert found["finish_reason"] == "length"
    assert (found["prompt_tokens"], found["completion_tokens"]) == (2, 4)
    assert found["statistics"] == {
        "steps": 4,
        "drafted": 12,
        "verified": 10,
        "accepted": 6,
        "emitted": 10,
        "accepted_length": 1.5,
        "verified_by_position": [4, 4, 2],
        "accepted_by_position": [3, 2],
        "acceptance_by_position": [0.75, 0.5, 0.0],
        "width_histogram": [1, 0, 3],
    }
    assert found["engine"]["planner"] == "verifies everything: no cost table"


def test_options_reach_the_engine_and_the_request(run: Callable[..., Any], script: Script) -> None:
    run(
        *("generate", "x", "-m", "gemma3-270m", "-d", "prompt-lookup", "-g", "5", "-w", "3"),
        *("--device", "cpu", "--dtype", "float32", "--threads", "2", "--quantize", "int8", "--cost-table", "none"),
        *("-t", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--repetition-penalty", "1.1"),
        *("--presence-penalty", "0.5", "--frequency-penalty", "0.25", "--seed", "3", "-n", "9"),
        *("--stop", r"\n\n", "--stop", "END"),
    )
    expected = {"model": "gemma3-270m", "drafter": "prompt-lookup", "gamma": 5, "width": 3, "device": "cpu"}
    expected |= {"dtype": "float32", "threads": 2, "quantize": "int8", "cost_table": "none", "seed": 3}
    assert expected.items() <= script.options[0].items()
    _, params = script.asked[0]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 40, 0.9, 0.05)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, 0.25)
    assert (params.seed, params.max_tokens, params.stop_strings) == (3, 9, ("\n\n", "END"))


@pytest.mark.parametrize(("typed", "meant"), [("auto", None), ("0", 0), ("7", 7), ("0,3,1", "0,3,1"), ("0, 3", "0,3")])
def test_width_is_auto_a_number_or_a_pattern(run: Callable[..., Any], script: Script, typed: str, meant: Any) -> None:
    run("generate", "x", "--width", typed)
    assert script.options[0]["width"] == meant


def test_defaults_are_the_default_target_greedy_and_planned(run: Callable[..., Any], script: Script) -> None:
    run("generate", "x")
    assert {"model": "qwen2.5-coder-0.5b", "drafter": "auto", "gamma": None, "width": None}.items() <= script.options[
        0
    ].items()
    assert script.asked[0][1].greedy


def test_dash_reads_standard_input(run: Callable[..., Any], script: Script) -> None:
    run("generate", "-", stdin="def f():\n")
    assert script.asked[0][0] == "def f():\n"
    assert run("generate", "-", stdin="").exit_code == 2


def test_chat_wraps_the_prompt_in_the_template(run: Callable[..., Any], script: Script) -> None:
    run("generate", "Hi", "--chat")
    assert script.asked[0][0] == [{"role": "user", "content": "Hi"}]
    script.chat_template = None
    result = run("generate", "Hi", "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_template_arguments_are_a_json_object_for_a_chat(run: Callable[..., Any], script: Script) -> None:
    run("generate", "Hi", "--chat", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert script.variables == [{"enable_thinking": False}]
    for value in ("enable_thinking=false", "[1]", "NaN"):
        result = run("generate", "Hi", "--chat", "--chat-template-kwargs", value)
        assert result.exit_code == 2
        assert "allowed: a JSON object" in result.stderr
    result = run("generate", "Hi", "--chat-template-kwargs", "{}")
    assert result.exit_code == 2
    assert "add --chat" in result.stderr


def test_logprobs_are_in_the_object_and_beside_the_text(run: Callable[..., Any], script: Script) -> None:
    script.logprobs = [SimpleNamespace(token_id=1, logprob=-0.25, top=[(1, -0.25), (5, -2.0)])]
    found = strict_json(run("generate", "x", "--logprobs", "2", "--json").stdout)
    assert script.asked[0][1].logprobs == 2
    assert found["logprobs"] == [
        {
            "token_id": 1,
            "token": "<1>",
            "logprob": -0.25,
            "top": [
                {"token_id": 1, "token": "<1>", "logprob": -0.25},
                {"token_id": 5, "token": "<5>", "logprob": -2.0},
            ],
        }
    ]
    beside = run("generate", "x", "--logprobs", "2")
    assert beside.stdout == "Hello, world\n"
    assert beside.stderr.splitlines()[0].split() == ["-0.250", "'<1>'", "|", "-0.250", "'<1>'", "|", "-2.000", "'<5>'"]
    assert "logprobs" not in strict_json(run("generate", "x", "--json").stdout)


def test_an_answer_that_failed_is_one_line_and_exit_code_1(run: Callable[..., Any], script: Script) -> None:
    script.error = "the logits are NaN: use --dtype bfloat16"
    result = run("generate", "x")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: the logits are NaN: use --dtype bfloat16\n")
    result = run("generate", "x", "--json")
    assert result.exit_code == 1
    assert strict_json(result.stdout)["error"] == script.error


def test_the_temperature_that_is_not_given_is_the_same_everywhere(run: Callable[..., Any], script: Script) -> None:
    run("generate", "x")
    run("chat", stdin="x\n")
    run("demo")
    assert {params.temperature for _, params in script.asked} == {options.DEFAULT_TEMPERATURE} == {0.0}


def test_numbers_that_json_does_not_have_are_null() -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf"), (float("-inf"), True)], 3: {"c": float("nan")}}
    assert strict_json(json_line(value)) == {"a": None, "b": [1.5, None, [None, True]], "3": {"c": None}}


def test_several_answers_come_one_after_the_other_and_in_the_object(run: Callable[..., Any], script: Script) -> None:
    result = run("generate", "x", "--n", "3", "-t", "1")
    assert script.asked[0][1].n == 3
    assert result.stdout == "Hello, world\n" * 3
    assert result.stderr.count("4 tokens") == 3
    found = strict_json(run("generate", "x", "--n", "3", "-t", "1", "--json").stdout)
    assert [answer["index"] for answer in found["completions"]] == [0, 1, 2]
    assert found["completions"][1]["text"] == found["text"]
    assert found["completion_tokens"] == 12
    assert "completions" not in strict_json(run("generate", "x", "--json").stdout)


def test_a_missing_cost_table_is_said_with_the_command_that_makes_this_engines(
    run: Callable[..., Any], script: Script
) -> None:
    script.lacks_cost_table = True
    given = ("-m", "my model", "-d", "prompt-lookup", "-g", "3", "--dtype", "float32", "--quantize", "int8")
    assert run("generate", "x", *given).stderr.endswith(
        "measure one, once, with: surefoot profile --model 'my model' --drafter prompt-lookup --gamma 3 --dtype float32 "
        "--quantize int8\n"
    )
    assert run("generate", "x").stderr.endswith("with: surefoot profile\n")
    assert "surefoot profile" not in run("generate", "x", "--cost-table", "none").stderr
