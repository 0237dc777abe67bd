"""The acceptance rule integrates to the target's distribution, whatever q is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation.acceptance import Proposal, accept_greedy, accept_sampled, draw
from surefoot.speculation.uniforms import Purpose, uniforms


def breakpoints(decide, count: int) -> torch.Tensor:
    """For a monotone step function decide(u [N]) -> [N] int in 0 ... count - 1: the mass of u that gives each value."""
    low = torch.zeros(count, dtype=torch.float64)
    high = torch.ones(count, dtype=torch.float64)
    value = torch.arange(count)
    for _ in range(40):
        middle = (low + high) / 2
        below = decide(middle) <= value
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    edges = torch.where(decide(torch.full((count,), 1 - 2.0**-53, dtype=torch.float64)) <= value, 1.0, high)
    return torch.diff(edges, prepend=torch.zeros(1, dtype=torch.float64))


def emitted_law(p: torch.Tensor, q: torch.Tensor, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """Law of the first emitted token for one draft, by enumerating the draft and integrating both uniforms."""
    size = p.shape[-1]
    law = torch.zeros(size, dtype=torch.float64)
    probs = torch.stack([p, p])  # the row behind an accepted draft is not looked at here
    for index in range(q.shape[-1]):
        if q[index] == 0:
            continue
        token = index if vocabulary is None else int(vocabulary[index])

        def verdict(u_accept: torch.Tensor, u_draw: torch.Tensor, index: int = index, token: int = token):
            count = u_accept.shape[0]
            return accept_sampled(
                probs.repeat(count, 1),
                torch.arange(count) * 2,
                torch.full((count, 1), token),
                torch.ones(count, dtype=torch.int64),
                Proposal(q.expand(count, 1, -1).contiguous(), vocabulary, torch.full((count, 1), index)),
                u_accept.unsqueeze(1),
                u_draw,
            )

        accepted = breakpoints(lambda u: 1 - verdict(u, torch.zeros_like(u)).accepted, 2)[0]
        law[token] += q[index].double() * accepted
        if accepted < 1:
            rejecting = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
            recovered = breakpoints(lambda u, last=rejecting: verdict(last.expand(u.shape[0]), u).next_token, size)
            law += q[index].double() * (1 - accepted) * recovered
    return law


@st.composite
def distributions(draw_, size: int):
    weights = draw_(st.lists(st.integers(0, 12), min_size=size, max_size=size).filter(any))
    tensor = torch.tensor(weights, dtype=torch.float32)
    return tensor / tensor.sum()


@settings(max_examples=40, deadline=None)
@given(distributions(5), distributions(5))
def test_acceptance_integrates_to_p(p: torch.Tensor, q: torch.Tensor) -> None:
    torch.testing.assert_close(emitted_law(p, q), p.double(), atol=1e-6, rtol=0)


@settings(max_examples=20, deadline=None)
@given(distributions(6), distributions(3))
def test_acceptance_integrates_to_p_with_a_reduced_vocabulary(p: torch.Tensor, q: torch.Tensor) -> None:
    torch.testing.assert_close(emitted_law(p, q, torch.tensor([4, 0, 3])), p.double(), atol=1e-6, rtol=0)


@settings(max_examples=20, deadline=None)
@given(distributions(5), st.integers(0, 4))
def test_acceptance_integrates_to_p_with_a_point_mass(p: torch.Tensor, token: int) -> None:
    probs = torch.stack([p, p])

    def verdict(u_accept: torch.Tensor, u_draw: torch.Tensor):
        count = u_accept.shape[0]
        drafts, widths = torch.full((count, 1), token), torch.ones(count, dtype=torch.int64)
        rows = torch.arange(count) * 2
        return accept_sampled(
            probs.repeat(count, 1), rows, drafts, widths, Proposal(None), u_accept.unsqueeze(1), u_draw
        )

    accepted = breakpoints(lambda u: 1 - verdict(u, torch.zeros_like(u)).accepted, 2)[0]
    law = torch.zeros(5, dtype=torch.float64)
    law[token] = accepted
    if accepted < 1:
        last = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
        law += (1 - accepted) * breakpoints(lambda u: verdict(last.expand(u.shape[0]), u).next_token, 5)
    torch.testing.assert_close(law, p.double(), atol=1e-6, rtol=0)


def test_an_acceptance_without_the_residual_fails_the_same_check() -> None:
    """The check above can fail: drawing the recovered token from p itself is visibly not p."""
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8])
    accept = torch.minimum(p, q)
    wrong = accept + (1 - accept.sum()) * p
    assert (wrong - p).abs().max() > 0.05
    torch.testing.assert_close(emitted_law(p, q), p.double(), atol=1e-6, rtol=0)


def test_greedy_accepts_the_matching_prefix_and_emits_the_targets_token() -> None:
    argmax = torch.tensor([5, 6, 9, 8, 1, 2])
    drafts = torch.tensor([[5, 6, 7], [1, 9, 9]])
    verdict = accept_greedy(argmax, torch.tensor([0, 4, 3]), drafts, torch.tensor([3, 1]))
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.next_token.tolist() == [9, 2, 8]


def test_a_draft_behind_the_width_is_never_accepted() -> None:
    argmax = torch.tensor([1, 2, 3, 4])
    verdict = accept_greedy(argmax, torch.tensor([0]), torch.tensor([[1, 2, 3]]), torch.tensor([1]))
    assert (verdict.accepted.item(), verdict.next_token.item()) == (1, 2)


def test_a_residual_that_vanishes_in_float32_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[[0.5, torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))]]])
    last = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    proposal = Proposal(q, None, torch.tensor([[1]]))
    verdict = accept_sampled(p, torch.tensor([0]), torch.tensor([[1]]), torch.tensor([1]), proposal, last, last[0])
    assert verdict.accepted.item() == 0
    assert verdict.next_token.item() in (0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9).filter(any), st.floats(0, 1, exclude_max=True))
def test_draw_never_returns_a_weight_of_zero(weights: list[int], u: float) -> None:
    tensor = torch.tensor([weights], dtype=torch.float32)
    index = draw(tensor, torch.tensor([min(u, 1 - 2.0**-53)], dtype=torch.float64)).item()
    assert weights[index] > 0
    assert sum(weights[:index]) <= u * sum(weights) * (1 + 1e-12)


@pytest.mark.statistical
def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    seeds = torch.arange(400).unsqueeze(1)
    steps = torch.arange(250).unsqueeze(0)
    u = torch.stack([uniforms(seeds, steps, purpose, torch.tensor(3)) for purpose in Purpose])
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=50, min=0, max=1)
    expected = u.numel() / 50
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 90  # 49 degrees of freedom: p < 0.0004 above
    for other in (u.roll(1, 0), u.roll(1, 1), u.roll(1, 2)):
        correlation = torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.01  # 5.4 sigma at 300,000 samples


def test_every_part_of_the_address_changes_the_uniform() -> None:
    base = uniforms(torch.tensor(1), torch.tensor(2), Purpose.DRAFT, torch.tensor(3))
    others = [
        uniforms(torch.tensor(2), torch.tensor(2), Purpose.DRAFT, torch.tensor(3)),
        uniforms(torch.tensor(1), torch.tensor(3), Purpose.DRAFT, torch.tensor(3)),
        uniforms(torch.tensor(1), torch.tensor(2), Purpose.ACCEPT, torch.tensor(3)),
        uniforms(torch.tensor(1), torch.tensor(2), Purpose.DRAFT, torch.tensor(4)),
    ]
    assert len({base.item(), *(u.item() for u in others)}) == 5
