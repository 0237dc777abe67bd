"""Any value for any parameter: a one-line error where it is given, or an engine that serves it."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.engine.assembly import build_engine
from surefoot.engine.engine import Engine
from surefoot.engine.options import EngineOptions
from surefoot.errors import RequestError, SurefootError
from surefoot.sampling import SamplingParams
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.planner import CausalPlanner, ForcedWidths, StalePlanner
from surefoot.speculation.stopping import StoppingPlanner
from tests.engine.engines import build, tiny_drafter
from tests.tiny_models import tiny_target

VOCABULARY = 13
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max
POWERS = [sign * ((1 << bits) + off) for bits in (0, 1, 7, 31, 32, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)]
EXTREMES: list[Any] = [
    *POWERS,
    10**400,
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 1e-45, 1e-46, 1e-38, 1e38, 1e39, SMALLEST, LARGEST, 5e-324),
    *(math.nan, math.inf, -math.inf),
    *(
        True,
        False,
        None,
        "",
        "0",
        "auto",
        "none",
        "eager",
        "\0",
        "\ud800",
        b"x",
        [],
        [0],
        [1, 2],
        {},
        {0: 1.0},
        {1 << 70: 1},
    ),
    *(np.float32(0.7), np.float32(1e-45), np.int64(3), np.uint64(1 << 63), np.bool_(True), np.array([1, 2]), np.nan),
    *(torch.tensor(2), torch.tensor([1.0, 2.0]), 1j, object(), lambda: None, Path("nowhere") / "x"),
]
VALUES = st.one_of(
    st.sampled_from(EXTREMES),
    st.floats(),
    st.floats(width=32),
    st.floats(0, 1),
    st.integers(-4, 40),
    st.integers(),
    st.text(max_size=3),
)
LIMITS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def one_line(problem: SurefootError) -> None:
    message = str(problem)
    assert message
    assert "\n" not in message
    assert len(message) < 400
    event("refused")


def serves(engine: Engine, params: SamplingParams) -> None:
    """Beside a neighbour whose text must not change."""
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [engine.add_request([1, 2, 1, 2], params), engine.add_request([3, 4, 3], plain)]
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    tokens = requests[0].token_ids[4:]
    assert len(tokens) > 0
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert requests[0].output.finish_reason in ("stop", "length")
    assert requests[1].token_ids[3:] == alone()
    event("served")


NEIGHBOUR: list[int] = []


def alone() -> list[int]:
    if not NEIGHBOUR:
        engine = build(target(), "none", max_model_len=48, max_num_seqs=1)
        plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        NEIGHBOUR.extend(engine.run([[3, 4, 3]], plain)[0].token_ids[3:])
    return NEIGHBOUR


def target() -> Any:
    return tiny_target("llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {name: build(target(), name, max_model_len=48, max_num_seqs=2) for name in ("prompt-lookup", "dspark")}


@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
@given(
    chosen=st.dictionaries(st.sampled_from([f.name for f in fields(SamplingParams)]), VALUES, min_size=1, max_size=3)
)
@settings(max_examples=400, **LIMITS)
def test_any_sampling_parameter_is_refused_or_served(
    engines: dict[str, Engine], drafter: str, chosen: dict[str, Any]
) -> None:
    try:
        serves(engines[drafter], SamplingParams(**{"max_tokens": 12, **chosen}))
    except RequestError as problem:
        one_line(problem)


@example(chosen={"num_blocks": (1 << 31) - 1})
@example(chosen={"cache_bytes": (1 << 63) - 1, "max_num_seqs": 4096, "max_num_batched_tokens": 1 << 20})
@example(chosen={"max_num_seqs": 0})
@given(chosen=st.dictionaries(st.sampled_from([f.name for f in fields(EngineOptions)]), VALUES, min_size=1, max_size=2))
@settings(max_examples=300, **LIMITS)
def test_any_engine_option_is_refused_or_served(chosen: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    defaults = {"drafter": "prompt-lookup", "cost_table": "none", "max_model_len": 48, "max_num_seqs": 4}
    try:
        engine = build_engine(target(), EngineOptions(**{**defaults, **chosen}))
        serves(engine, SamplingParams(temperature=0.0, max_tokens=8))
    except SurefootError as problem:
        one_line(problem)
    finally:
        torch.set_num_threads(threads)


CONSTRUCTORS: dict[Any, dict[str, Any]] = {
    PromptLookupDrafter: {"gamma": 4, "max_match": 16, "min_match": 2},
    Breaker: {"min_acceptance": 0.6, "min_proposals": 32, "pause_steps": 64},
    StalePlanner: {"gamma": 4, "min_width": 0, "max_width": 4, "min_gain": 0.0},
    CausalPlanner: {"gamma": 4, "min_width": 0, "max_width": 4},
    StoppingPlanner: {"gamma": 4, "min_width": 0, "max_width": 4},
}


@pytest.mark.parametrize("made", CONSTRUCTORS)
@given(data=st.data())
@settings(max_examples=150, **LIMITS)
def test_any_argument_of_a_constructor_is_refused_or_kept_as_a_number(made: Any, data: st.DataObject) -> None:
    good = CONSTRUCTORS[made]
    name = data.draw(st.sampled_from(sorted(good)))
    value = data.draw(VALUES)
    try:
        kept = getattr(made(**{**good, name: value}), name)
    except SurefootError as problem:
        return one_line(problem)
    if value is None:
        assert name == "max_width"
    else:
        assert type(kept) is type(good[name])
        assert kept == type(kept)(value)
        assert 0 <= kept < math.inf
    event("kept")


@pytest.mark.parametrize("pattern", [[], [-1], [1.5], [math.nan], [True], ["1"], [None], [1 << 70]])
def test_forced_widths_are_whole_numbers(pattern: list[Any]) -> None:
    with pytest.raises(SurefootError, match="forced width"):
        ForcedWidths(pattern)


@pytest.mark.parametrize("gamma", [0, -1, 1.5, True, "2", 5, math.nan])
def test_a_drafters_gamma_is_checked(gamma: Any) -> None:
    model = tiny_drafter(target(), "dspark", 4).model  # type: ignore[union-attr]
    with pytest.raises(SurefootError, match="gamma"):
        DSparkDrafter(model, gamma)
