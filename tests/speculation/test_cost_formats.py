"""Cost tables of other engines: read, written, and the same decisions from both."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ConfigurationError, CostTableError
from surefoot.speculation import ConfidenceBoard, CostTable, LiveCost, StalePlanner, StepLoad
from surefoot.speculation.cost_formats import (
    FOREIGN_FORMATS,
    export_table,
    from_sglang,
    from_tensorrt_llm,
    import_table,
    to_sglang_additive,
    to_sglang_simple,
    to_tensorrt_llm,
)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    buckets = sorted(draw(st.sets(st.integers(1, 40), min_size=2, max_size=8)))
    times = st.floats(0.5, 50.0)
    requests = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
    return CostTable(
        tuple(buckets),
        (tuple(draw(times) for _ in buckets),),
        draft_requests=tuple(requests),
        draft_ms=tuple(draw(times) for _ in requests),
        captured_tokens=draw(st.sampled_from([None, buckets[0], buckets[-1]])),
        fixed_overhead_ms=draw(st.floats(0.0, 5.0)),
        batch_sizes=(1, 3),
        batch_overhead_ms=(draw(times), draw(times)),
    )


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_every_foreign_form_decides_like_the_original(ours: CostTable, requests: int, gamma: int, seed: int) -> None:
    tokens = requests * (gamma + 1)
    # Through text, as another process would read them.
    forms = [
        from_sglang(json.loads(json.dumps(to_sglang_simple(ours, requests, tokens)))),
        from_sglang(json.loads(json.dumps(to_sglang_additive(ours, requests, tokens)))),
        from_tensorrt_llm(json.loads(json.dumps(to_tensorrt_llm(ours, requests, tokens)))),
    ]
    rng = np.random.default_rng(seed)
    board = ConfidenceBoard(requests, gamma)
    seats = [board.open(slot) for slot in range(requests)]
    expected = ours.step_costs(requests, requests, requests * gamma + 1)
    for step in range(5):
        board.publish(step, seats, rng.random((requests, gamma)).astype(np.float32).cumprod(1))
        published = board.read(step + 1, seats)
        load = StepLoad(requests, [gamma] * requests)
        decision = StalePlanner(gamma, LiveCost(ours)).decide(published, load)
        for form in forms:
            np.testing.assert_allclose(form.step_costs(requests, requests, requests * gamma + 1), expected, rtol=1e-9)
            theirs = StalePlanner(gamma, LiveCost(form)).decide(published, load)
            if form.is_flat == ours.is_flat:
                assert theirs.budget == decision.budget


def test_sglang_simple_is_a_floor_lookup() -> None:
    form = {"sample_batch_tokens": [2, 5], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 8}
    assert from_sglang(form).verify_costs(1, 9).tolist() == [10, 10, 10, 10, 20, 20, 20, 20, 20]


def test_sglang_additive_interpolates_and_clamps() -> None:
    form = {
        "bias_seconds": 0.001,
        "bs_probes": [1, 3],
        "alpha_seconds": [0.002, 0.004],
        "m_probes": [2, 6],
        "theta_seconds": [0.01, 0.03],
    }
    imported = from_sglang(form)
    np.testing.assert_allclose(imported.step_costs(2, 1, 8), 1 + 3 + np.array([10, 10, 15, 20, 25, 30, 30, 30]))
    np.testing.assert_allclose(imported.step_costs(9, 4, 1), [1 + 4 + 20])


def test_tensorrt_llm_counts_the_bonus_token_and_keeps_its_overheads() -> None:
    form = {"token_counts": [0, 4, 8], "step_time_ms": [2.0, 2.0, 4.0], "fixed_overhead_ms": 1.0}
    form |= {"batch_sizes": [1, 4], "batch_overhead_ms": [0.5, 2.0]}
    imported = from_tensorrt_llm(form)
    np.testing.assert_allclose(imported.step_costs(1, 1, 9), 1.5 + np.array([2, 2, 2, 2, 2.5, 3, 3.5, 4, 4]))
    assert imported.step_costs(5, 8, 1)[0] == 1 + 2 + 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]}, "2 sample_batch_tokens but 1"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "empty"),
        (
            {"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1.0, 1.0], "max_batch_tokens": 4},
            "strictly increasing",
        ),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]}, "positive"),
        ({"sample_batch_tokens": [4], "sample_steps_per_sec": [1.0], "max_batch_tokens": 2}, "max_batch_tokens"),
        ({"sample_batch_tokens": "x"}, "list of numbers"),
        ({"theta_seconds": [1.0], "m_probes": [1], "bias_seconds": None}, "bias_seconds"),
        (
            {"theta_seconds": [1.0], "m_probes": [1, 2], "bias_seconds": 0, "bs_probes": [1], "alpha_seconds": [0]},
            "2 entries",
        ),
    ],
)
def test_malformed_sglang_forms(form: dict[str, Any], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        from_sglang(form)


def test_malformed_tensorrt_llm_form() -> None:
    with pytest.raises(CostTableError, match="step_time_ms"):
        from_tensorrt_llm({"token_counts": [1]})


@pytest.mark.parametrize("form", FOREIGN_FORMATS)
def test_an_export_imports_as_the_same_costs(form: str) -> None:
    """At the context length that was asked for; D and the overheads stay with their batch sizes."""
    ours = CostTable(
        (1, 4, 8),
        ((1.0, 2.0, 4.0), (2.0, 4.0, 8.0)),
        context_lengths=(0, 100),
        draft_requests=(1, 3),
        draft_ms=(1.0, 3.0),
        fixed_overhead_ms=0.5,
        batch_sizes=(1, 2),
        batch_overhead_ms=(0.1, 0.2),
    )
    data = json.loads(json.dumps(export_table(ours, form, max_requests=3, max_batch_tokens=8, context=100.0)))
    read = import_table(data, form)
    for requests in (1, 2, 3):
        expected = ours.step_costs(requests, requests, 8 - requests + 1, 100.0)
        np.testing.assert_allclose(read.step_costs(requests, requests, 8 - requests + 1), expected, rtol=1e-9)


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="cost table format is 'vllm'; allowed: sglang, tensorrt-llm"):
        import_table({}, "vllm")


NUMBERS = {
    "sglang": to_sglang_additive(CostTable((1, 4), ((1.0, 2.0),)), 2, 4),
    "tensorrt-llm": to_tensorrt_llm(CostTable((1, 4), ((1.0, 2.0),)), 2, 4),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from([(form, name) for form, data in NUMBERS.items() for name in sorted(data)]), ANYTHING)
def test_any_value_in_any_field_is_read_or_refused(field: tuple[str, str], value: Any) -> None:
    form, name = field
    try:
        read = import_table({**NUMBERS[form], name: value}, form)
    except CostTableError:
        return
    assert np.isfinite(read.step_costs(2, 1, 16)).all()
