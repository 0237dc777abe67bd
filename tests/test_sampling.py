"""`SamplingParams` refuses what cannot be served, and says what can."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest

from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_k", 1 << 63),
        ("top_k", True),
        ("top_p", 1e-46),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 101),
        ("logit_bias", {1 << 63: 0.0}),
        ("logit_bias", {True: 0.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {"x": 1.0}),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("max_tokens", 1 << 63),
        ("max_tokens", 2.0),
        ("stop", 3),
        ("stop", b"x"),
        ("stop_token_ids", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1 << 31]),
        ("stop_token_ids", [True]),
        ("logprobs", True),
        ("priority", 1 << 63),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 101}),
        ("logit_bias", [3]),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("gamma", -1),
        ("priority", 0.5),
        ("ignore_eos", 1),
        ("speculative", None),
    ],
)
def test_wrong_values_are_refused_with_the_name_the_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "allowed" in message
    assert "\n" not in message


def test_numpy_scalars_are_numbers_and_kept_as_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        top_p=np.float64(0.9),
        min_p=np.float16(0),
        repetition_penalty=np.float32(1.5),
        logit_bias={np.int64(3): np.float32(2.0)},
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int32(5),
        min_tokens=np.int8(2),
        stop_token_ids=np.array([3, 4]),
        logprobs=np.int64(1),
        priority=np.int16(-1),
        ignore_eos=np.True_,
    )
    plain = SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.0,
        repetition_penalty=1.5,
        logit_bias={3: 2.0},
        seed=2**64 - 1,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[3, 4],
        logprobs=1,
        priority=-1,
        ignore_eos=True,
    )
    assert params == plain
    for field in dataclasses.fields(SamplingParams):
        assert type(getattr(params, field.name)) is type(getattr(plain, field.name))
    assert all(type(token) is int for token in (*params.logit_bias, *(params.stop_token_ids or ())))


def test_help_shows_every_parameter() -> None:
    shown = inspect.getdoc(SamplingParams)
    assert shown is not None
    for field in dataclasses.fields(SamplingParams):
        assert f"    {field.name}: " in shown


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], logit_bias={"7": -100}, top_k=-1, temperature=1e-9)  # type: ignore[dict-item]
    assert params.stop_strings == ("x",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {7: -100.0}
    assert params.top_k == 0
    assert params.temperature == 0.0
    assert params.greedy
    assert SamplingParams(stop=None).stop_strings == ()
    assert dataclasses.replace(params, stop=["a", "b"]).stop_strings == ("a", "b")


def test_parameters_cannot_change_under_a_running_request() -> None:
    bias = {7: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[8] = 1.0
    assert params.logit_bias == {7: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_penalized_says_whether_the_history_matters() -> None:
    assert not SamplingParams().penalized
    assert SamplingParams(repetition_penalty=1.1).penalized
    assert SamplingParams(presence_penalty=0.1).penalized
    assert SamplingParams(frequency_penalty=-0.1).penalized


def test_token_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(RequestError, match="logit_bias names token 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(RequestError, match="stop_token_ids names token 10"):
        SamplingParams(stop_token_ids=[10]).check_vocabulary(10)
