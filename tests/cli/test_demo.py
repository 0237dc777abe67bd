"""`surefoot demo`: both arms interleaved, texts compared, speeds tabulated."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich import console

from surefoot.cli import demo
from surefoot.cli.comparison import SPECULATIVE, RunUpdate, stream_of
from surefoot.cli.demo_prompts import DEMO_PROMPTS
from surefoot.errors import SurefootError
from surefoot.sampling import SamplingParams
from tests.cli.conftest import strict_json
from tests.cli.stub import Script, StubLLM


def arms(script: Script) -> list[tuple[Any, bool]]:
    """(prompt, speculative) of the measured runs, in order; the two warm-up runs left out."""
    return [(prompt, params.speculative) for prompt, params in script.asked[2:]]


def test_every_prompt_runs_in_both_arms_and_the_first_one_alternates(run: Callable[..., Any], script: Script) -> None:
    assert run("demo", "--repeats", "2").exit_code == 0
    measured = arms(script)
    count = len(DEMO_PROMPTS)
    assert len(measured) == 2 * 2 * count
    for index in range(0, len(measured), 2):
        (first, speculative), (second, other) = measured[index : index + 2]
        assert first == second
        assert speculative is not other
    firsts = [speculative for _, speculative in measured[::2]]
    assert firsts[:count] == [index % 2 == 1 for index in range(count)]
    assert firsts[count:] == [index % 2 == 0 for index in range(count)]


def test_table_verdict_and_memory_are_shown(run: Callable[..., Any], script: Script) -> None:
    result = run("demo")
    assert result.exit_code == 0
    assert "2.50×" in result.stdout
    assert "0×1 2×3" in result.stdout
    assert f"texts identical on {len(DEMO_PROMPTS)} of {len(DEMO_PROMPTS)} prompts" in result.stdout
    assert "peak memory" in result.stdout
    assert "planner verifies everything: no cost table" in result.stderr


def test_an_interrupted_demo_shows_what_was_done(
    run: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = StubLLM.stream

    def stream(self: StubLLM, prompt: Any, params: SamplingParams) -> Any:
        if len(script.asked) == 2 + 2 * 2 + 1:  # warm-up, two prompts in both arms, the first arm of the third
            script.interrupt_after = 1
        return asked(self, prompt, params)

    monkeypatch.setattr(StubLLM, "stream", stream)
    result = run("demo")
    assert result.exit_code == 130
    assert "texts identical on 2 of 2 prompts" in result.stdout
    assert "2.50×" in result.stdout
    assert f"interrupted: 2 of {len(DEMO_PROMPTS)} comparisons were done" in result.stderr
    assert script.closed == 1


def test_json_is_the_only_thing_on_stdout(run: Callable[..., Any], script: Script) -> None:
    result = run("demo", "--json")
    found = strict_json(result.stdout)
    assert found["identical"] is True
    assert found["speedup"] == pytest.approx(2.5)
    assert [prompt["name"] for prompt in found["prompts"]] == [prompt.name for prompt in DEMO_PROMPTS]
    assert found["prompts"][0]["width_histogram"] == [1, 0, 3]
    assert found["peak_bytes"] > 2**20
    assert result.stderr.count("tok/s") == 2 * len(DEMO_PROMPTS)


def test_different_texts_at_temperature_0_are_loud_and_fail(run: Callable[..., Any], script: Script) -> None:
    script.tokens = lambda prompt, params: [1, 2, 9, 4] if params.speculative else [1, 2, 3, 4]
    result = run("demo")
    assert result.exit_code == 1
    assert "TEXTS DIFFER" in result.stderr
    assert f"{DEMO_PROMPTS[0].name}: token 2 is" in result.stderr
    assert f"identical on 0 of {len(DEMO_PROMPTS)}" in result.stdout


def test_a_text_that_is_a_prefix_of_the_other_is_different_too(run: Callable[..., Any], script: Script) -> None:
    script.tokens = lambda prompt, params: [1, 2, 3] if params.speculative else [1, 2, 3, 4]
    result = run("demo")
    assert result.exit_code == 1
    assert "token 3 is" in result.stderr
    assert "missing" in result.stderr


def test_above_temperature_0_only_speeds_are_compared(run: Callable[..., Any], script: Script) -> None:
    script.tokens = lambda prompt, params: [int(params.speculative)]
    result = run("demo", "--temperature", "0.8")
    assert result.exit_code == 0
    assert "only speeds are compared" in " ".join(result.stdout.split())
    assert strict_json(run("demo", "-t", "0.8", "--json").stdout)["identical"] is None


def test_a_demo_in_which_nothing_is_drafted_fails(run: Callable[..., Any], script: Script) -> None:
    script.drafts = False
    result = run("demo")
    assert result.exit_code == 1
    assert "NOTHING WAS DRAFTED" in result.stderr


def test_questions_use_the_chat_template_where_there_is_one(run: Callable[..., Any], script: Script) -> None:
    run("demo")
    assert sum(isinstance(prompt, list) for prompt, _ in arms(script)) == 2 * sum(p.chat for p in DEMO_PROMPTS)
    script.asked.clear()
    script.chat_template = None
    run("demo")
    assert all(isinstance(prompt, str) for prompt, _ in arms(script))


def test_without_a_drafter_there_is_nothing_to_show(run: Callable[..., Any], script: Script) -> None:
    result = run("demo", "--drafter", "none")
    assert result.exit_code == 2
    assert "--drafter auto" in result.stderr


def test_live_screen_shows_text_and_finished_runs(
    run: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    original = console.Console

    def on_terminal(**options: Any) -> Any:
        return original(file=terminal, force_terminal=True, width=100, height=30, **options)

    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(console, "Console", on_terminal)
    output = stream_of(StubLLM(), DEMO_PROMPTS[0], SamplingParams(), SPECULATIVE).result
    with demo.screen(json=False) as show:
        show(RunUpdate(DEMO_PROMPTS[0], SPECULATIVE, "def half a fun", None))
        show(RunUpdate(DEMO_PROMPTS[0], SPECULATIVE, "def half a function", output))
    shown = terminal.getvalue()
    assert "half a function" in shown
    assert "50.0 tok/s" in shown


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_costs_are_measured_once_where_nobody_has(run: Callable[..., Any], script: Script, command: str) -> None:
    script.lacks_cost_table = True
    result = run(command, stdin="Hello\n")
    assert result.exit_code == 0
    assert len(script.profiled) == 1
    assert "cost table measured" in result.stderr
    assert run(command, "--cost-table", "none", stdin="Hello\n").exit_code == 0
    assert len(script.profiled) == 1, "asked to go without"
    script.lacks_cost_table = False
    assert run(command, stdin="Hello\n").exit_code == 0
    assert len(script.profiled) == 1, "there is one already"


def test_costs_that_cannot_be_saved_are_used_all_the_same(
    run: Callable[..., Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(self: StubLLM, seconds: float, progress: Callable[[float], None], **options: Any) -> Any:
        raise SurefootError("cannot write cost-tables/x.json: File exists")

    script.lacks_cost_table = True
    monkeypatch.setattr(StubLLM, "profile", profile)
    result = run("demo")
    assert result.exit_code == 0
    assert "texts identical" in result.stdout
    assert "cannot write cost-tables/x.json" in result.stderr


@pytest.mark.parametrize(("share", "measured"), [(0.1, [6.0]), (0.6, [6.0, 18.0])])
def test_on_a_busy_machine_costs_are_measured_again_and_not_passed_over_in_silence(
    run: Callable[..., Any], script: Script, share: float, measured: list[float]
) -> None:
    script.lacks_cost_table, script.unsteady = True, share
    said = run("demo").stderr
    assert script.profiled == measured
    for line in ("measuring again, longer", "Measure again on an idle machine"):
        assert (line in said) == (len(measured) > 1)
