"""Allocation: prefixes, optimal, monotone, equivariant, value-independent, and without a host read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.speculation import allocate


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    requests, gamma = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    level = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1, width=32)
    confidence = torch.tensor([[draw(level) for _ in range(gamma)] for _ in range(requests)], dtype=torch.float32)
    limits = torch.tensor([draw(st.integers(0, gamma)) for _ in range(requests)])
    return confidence.cumprod(-1), limits, draw(st.integers(0, requests * gamma + 1))


def captured(survival: torch.Tensor, widths: list[int] | torch.Tensor) -> float:
    return sum(float(row[: int(width)].double().sum()) for row, width in zip(survival, widths, strict=True))


@settings(max_examples=200, deadline=None)
@given(batches())
def test_widths_sum_to_the_budget_and_are_optimal(batch: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    survival, limits, budget = batch
    widths = allocate(survival, budget, limits)
    assert int(widths.sum()) == min(budget, int(limits.sum()))
    assert ((widths >= 0) & (widths <= limits)).all()
    choices = itertools.product(*(range(int(limit) + 1) for limit in limits))
    best = max(captured(survival, list(choice)) for choice in choices if sum(choice) == int(widths.sum()))
    assert captured(survival, widths) == pytest.approx(best, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_widths_grow_with_the_budget(batch: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    survival, limits, budget = batch
    assert (allocate(survival, budget + 1, limits) >= allocate(survival, budget, limits)).all()


@settings(max_examples=100, deadline=None)
@given(batches(), st.permutations(range(4)))
def test_permuting_requests_permutes_widths_when_no_survivals_tie(
    batch: tuple[torch.Tensor, torch.Tensor, int], permutation: list[int]
) -> None:
    survival, limits, budget = batch
    survival = 0.9 * survival + 0.05 - 1e-3 * torch.arange(survival.numel()).view_as(survival)
    assume(len(torch.unique(survival)) == survival.numel())
    order = torch.tensor([request for request in permutation if request < survival.shape[0]])
    assert torch.equal(allocate(survival[order], budget, limits[order]), allocate(survival, budget, limits)[order])


def test_ties_go_to_the_earlier_position_then_the_earlier_request() -> None:
    survival = torch.ones(3, 3)
    limits = torch.full((3,), 3)
    assert allocate(survival, 4, limits).tolist() == [2, 1, 1]
    assert allocate(survival, 7, limits).tolist() == [3, 2, 2]


def test_min_width_is_served_first_within_the_limit() -> None:
    survival = torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1], [0.2, 0.2, 0.2]])
    limits = torch.tensor([3, 3, 0])
    assert allocate(survival, 2, limits, min_width=1).tolist() == [1, 1, 0]
    assert allocate(survival, 4, limits, min_width=1).tolist() == [3, 1, 0]


def test_no_request_and_one_request() -> None:
    assert allocate(torch.ones(0, 5), 3, torch.zeros(0, dtype=torch.int64)).tolist() == []
    assert allocate(torch.rand(1, 5), 3, torch.tensor([2])).tolist() == [2]


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(allocate, fullgraph=True, backend="eager")
    rng = np.random.default_rng(0)
    for budget in (0, 3, 9, 40):
        survival = torch.tensor(rng.random((5, 7)), dtype=torch.float32).cumprod(-1)
        limits = torch.tensor(rng.integers(0, 8, 5))
        assert torch.equal(compiled(survival, budget, limits), allocate(survival, budget, limits))


def test_runs_on_fake_tensors_where_a_host_read_would_raise() -> None:
    with FakeTensorMode():
        survival, limits = torch.rand(6, 7), torch.randint(0, 8, (6,))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            int(limits.sum())  # what the mode forbids
        widths = allocate(survival, 11, limits, min_width=1)
    assert widths.shape == (6,)
