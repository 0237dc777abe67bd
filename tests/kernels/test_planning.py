"""The stopping rule in one native call: the decisions of the one written in numpy, one and all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.engine.policy import fast_stopping_rule
from surefoot.kernels import native
from surefoot.speculation.continuation import ContinuationModel
from surefoot.speculation.stopping import StoppingProblem, stopping_rule

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")


@st.composite
def problems(draw: st.DrawFn) -> StoppingProblem:
    """Batches on both sides of `FEW`, with ties, free shelves, cliffs and short drafts; the model has learned something."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    requests, gamma = draw(st.integers(1, 20)), draw(st.integers(1, 7))
    level = draw(st.sampled_from([1, 4, 64, 1 << 20]))  # coarse confidences tie
    confidence = np.ceil(rng.beta(4, 1.2, (requests + 64, gamma)) * level).astype(np.float32) / np.float32(level)
    survival = confidence.cumprod(1, dtype=np.float32)
    limits = np.full(requests, gamma) if draw(st.booleans()) else rng.integers(0, gamma + 1, requests)
    rise = rng.exponential(draw(st.sampled_from([0.5, 5.0])), limits.sum() + 1)
    if draw(st.booleans()):
        rise *= rng.random(len(rise)) < 0.3  # a staircase
    model = ContinuationModel(gamma)
    if draw(st.booleans()):
        model.observe(survival[requests:])
    return StoppingProblem(
        survival[:requests],
        limits.astype(np.int64),
        20.0 + rise.cumsum(),
        requests + draw(st.integers(0, 2)),
        draw(st.integers(0, gamma)),
        draw(st.none() | st.floats(0.01, 1.0)),
        model,
    )


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_decision_is_that_of_the_reference(problem: StoppingProblem) -> None:
    assert fast_stopping_rule(problem) == stopping_rule(problem)


def test_without_native_kernels_the_reference_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    costs = 10.0 + np.arange(3.0)
    problem = StoppingProblem(np.float32([[0.9, 0.1]]), np.array([2]), costs, 1, 0, 0.1, ContinuationModel(2))
    assert fast_stopping_rule(problem) == stopping_rule(problem)
    assert fast_stopping_rule(problem).budget == 2
