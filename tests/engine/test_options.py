"""`EngineOptions`: every wrong value is refused where it is given, in one line that says what is allowed."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from surefoot import LLM
from surefoot.engine.options import EngineArguments, EngineOptions
from surefoot.errors import ConfigurationError, DrafterError, SurefootError

NAMES = [field.name for field in fields(EngineOptions)]


def test_every_option_is_documented_and_shown_by_help() -> None:
    shown = inspect.getdoc(LLM)
    assert shown is not None
    own = EngineOptions.__doc__
    assert own is not None
    for name in NAMES:
        assert f"{name}: " in own or f"{name}, " in own
        assert f"{name}: " in shown or f"{name}, " in shown
    assert "model: an alias" in shown


def test_the_constructor_shows_the_options_with_their_defaults() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    assert parameters.pop("model").default == "qwen2.5-coder-0.5b"
    assert list(parameters) == NAMES
    for field in fields(EngineOptions):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY


def test_type_checkers_see_the_same_options() -> None:
    assert list(EngineArguments.__annotations__) == NAMES
    assert get_type_hints(EngineArguments) == get_type_hints(EngineOptions)


@pytest.mark.parametrize("name", ["no_such_option", "config", "max_seqs"])
def test_an_unknown_option_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        LLM("unused", **{name: 1})


def test_options_are_frozen_and_hold_plain_numbers() -> None:
    options = EngineOptions(max_num_seqs=np.int64(4), min_gain=np.float32(0.5), width=np.int32(3), gamma=np.uint8(5))
    assert [type(value) for value in (options.max_num_seqs, options.min_gain, options.width)] == [int, float, int]
    assert (options.max_num_seqs, options.min_gain, options.width, options.gamma) == (4, 0.5, 3, 5)
    with pytest.raises(FrozenInstanceError):
        options.gamma = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("width", "kept", "pattern"),
    [(None, None, None), ("auto", None, None), ("3", 3, (3,)), (0, 0, (0,)), ("0, 3,1", "0,3,1", (0, 3, 1))],
)
def test_widths(width: Any, kept: Any, pattern: tuple[int, ...] | None) -> None:
    options = EngineOptions(width=width)
    assert options.width == kept
    forced = options.forced_widths
    assert (None if forced is None else forced.pattern) == pattern


WHOLE_NUMBERS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_blocks",
    "cache_bytes",
    "threads",
)
WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in WHOLE_NUMBERS for value in (0, -1, 2.0, True, "4", math.nan, 1 << 64, np.float64(4))),
    *(("gamma", value) for value in (0, -1, 1.5, True, "3")),
    *(("width", value) for value in (-1, 1.5, True, "1,x", "", "1,,2", "-1", [1, 2], 10**9)),
    *((name, value) for name in ("min_width", "max_width") for value in (-1, 1.5, True, "1")),
    *(("min_gain", value) for value in (-0.1, math.nan, math.inf, True, "0", 1e39)),
    *(("breaker", value) for value in (0, 0.0, -0.5, 1.01, math.nan, True, "0.6", 1e-46)),
    *(("seed", value) for value in (1.0, True, "1", 1 << 64, -(1 << 63) - 1)),
    *(("planner", value) for value in ("psychic", 1, "")),
    *(("graphs", value) for value in ("cuda", None, 1)),
    *(("quantize", value) for value in ("int7", 8, "")),
    *(("device", value) for value in ("tpu", "cuda:99", 3.5, "")),
    *(("dtype", value) for value in (32, 1.0)),
    *((name, value) for name in ("prefix_reuse", "check_layout") for value in (1, 0, None, "yes")),
    *(("overlap", value) for value in (1, "yes")),
    *(("calibration", value) for value in (1, "", True)),
    *(("cost_table", value) for value in (1, "", None)),
    *(("trace", value) for value in (1, "", "/nonexistent-folder/steps.jsonl")),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_a_wrong_value_is_refused_in_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineOptions(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is ")
    assert "\n" not in message
    assert len(message) < 300


def test_more_threads_than_cores_are_refused() -> None:
    cores = os.cpu_count() or 1
    assert EngineOptions(threads=cores).threads == cores
    with pytest.raises(ConfigurationError, match=f"threads is {cores + 1}; allowed: a whole number, 1 … {cores};"):
        EngineOptions(threads=cores + 1)


def test_narrowest_and_widest_must_agree() -> None:
    with pytest.raises(ConfigurationError, match="max_width is 1; allowed: a whole number, 2 …"):
        EngineOptions(min_width=2, max_width=1)


@pytest.mark.parametrize(
    "drafter", ["psychic", "", "prompt-lookup+", "prompt-lookup+psychic", "a\0b", 7, True, b"auto"]
)
def test_a_drafter_that_cannot_be_is_refused(drafter: Any) -> None:
    with pytest.raises(DrafterError, match="allowed"):
        EngineOptions(drafter=drafter)


def test_a_trace_in_a_missing_folder_names_the_folder_and_makes_none(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(ConfigurationError, match=f"there is no directory {folder}"):
        EngineOptions(trace=folder / "steps.jsonl")
    assert not folder.exists()


def test_a_model_of_another_type_is_refused() -> None:
    for model in (None, 3, ["a"]):
        with pytest.raises(SurefootError, match=r"model is .*; allowed"):
            LLM(model)  # type: ignore[arg-type]
