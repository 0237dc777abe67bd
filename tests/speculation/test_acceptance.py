"""The acceptance rule integrates to the target's distribution, whatever q is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.kernels.sampling import sample_rows, sample_rows_reference
from surefoot.speculation.acceptance import Proposal, accept_greedy, accept_sampled, draw
from surefoot.speculation.uniforms import Purpose, SeedStreams, uniforms


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
    probs = torch.stack([p, p])  # the row after an accepted draft is not looked at here
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


def test_a_draft_after_the_width_is_never_accepted() -> None:
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


EDGE_U = [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-53]
TINY = torch.tensor([1e-40, 1e-45, 0.0])  # below what float32 holds in full precision
EDGE_ROWS = {
    "all on the draft": torch.tensor([0.0, 1.0, 0.0]),
    "all elsewhere": torch.tensor([1.0, 0.0, 0.0]),
    "rounded down": torch.tensor([0.0, 1 - 2.0**-24, 0.0]),
    "rounded up": torch.tensor([0.0, 1 + 2.0**-23, 0.0]),
    "even": torch.tensor([1 / 3, 1 / 3, 1 / 3]),
    "tiny": TINY,
    "tiny on the draft": TINY.roll(1),
    "tiny beside the draft": TINY + torch.tensor([0.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("sample", [draw, sample_rows, sample_rows_reference])
@pytest.mark.parametrize("q_row", [None, *EDGE_ROWS])
@pytest.mark.parametrize("p_row", EDGE_ROWS)
def test_every_edge_emits_a_token_the_target_may_emit(p_row: str, q_row: str | None, sample: Any) -> None:
    """p = 1, p = q, no mass beside the draft, rows below 1e-38, uniforms at their ends, a point mass and a drawn draft."""
    p = EDGE_ROWS[p_row]
    probs = torch.stack([p, p])
    q = None if q_row is None else EDGE_ROWS[q_row]
    for token in range(3):
        if q is not None and q[token] == 0:
            continue  # never drafted
        proposal = Proposal(None) if q is None else Proposal(q.view(1, 1, 3), None, torch.tensor([[token]]))
        for accept, emit in itertools.product(EDGE_U, EDGE_U):
            verdict = accept_sampled(
                probs,
                torch.tensor([0]),
                torch.tensor([[token]]),
                torch.tensor([1]),
                proposal,
                torch.tensor([[accept]], dtype=torch.float64),
                torch.tensor([emit], dtype=torch.float64),
                sample,
            )
            accepted, emitted = verdict.accepted.item(), verdict.next_token.item()
            assert not verdict.invalid.any()
            assert p[emitted] > 0
            assert not accepted or p[token] > 0
            if q is not None and torch.equal(p, q):
                assert accepted == 1, "u < p / q = 1 for every u"
            if q is None and p[token] == 1:
                assert accepted == 1


def test_one_token_in_the_vocabulary() -> None:
    one = torch.ones(2, 1)
    for proposal in (Proposal(None), Proposal(torch.ones(1, 1, 1), None, torch.tensor([[0]]))):
        for u in EDGE_U:
            uniform = torch.tensor([u], dtype=torch.float64)
            verdict = accept_sampled(
                one, torch.tensor([0]), torch.tensor([[0]]), torch.tensor([1]), proposal, uniform[None], uniform
            )
            assert (verdict.accepted.item(), verdict.next_token.item(), verdict.invalid.item()) == (1, 0, False)


def test_a_target_row_without_a_distribution_is_invalid_and_the_rows_beside_it_are_not() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.0, 0.0]])
    anchors, drafts, widths = torch.tensor([0, 2, 4]), torch.tensor([[1], [1]]), torch.tensor([1, 1])
    low = torch.zeros(2, 1, dtype=torch.float64)
    for proposal in (Proposal(None), Proposal(torch.full((2, 1, 2), 0.5), None, drafts)):
        verdict = accept_sampled(probs, anchors, drafts, widths, proposal, low, torch.full((3,), 0.9).double())
        assert verdict.accepted.tolist() == [1, 1, 0]
        assert verdict.invalid.tolist() == [True, False, True]
        assert verdict.next_token.tolist() == [0, 1, 0]
    greedy = accept_greedy(torch.tensor([1, -1, 0, 1, -1]), anchors, drafts, widths)
    assert greedy.accepted.tolist() == [1, 0, 0]
    assert greedy.invalid.tolist() == [True, False, True]
    assert greedy.next_token.tolist() == [0, 0, 0]


# -- streams ---------------------------------------------------------------------------------------------------------------


def test_a_seed_reads_its_own_stream_and_no_two_open_requests_share_one() -> None:
    streams = SeedStreams()
    first = streams.open(7)
    assert first == 7
    copies = [streams.open(7) for _ in range(50)]
    assert len({first, *copies}) == 51
    streams.close(copies[3])
    assert streams.open(7) == copies[3], "the lowest free number"
    streams.close(first)
    assert streams.open(7) == 7
    assert [SeedStreams().open(seed) for seed in (-1, 2**63, 2**64 - 1)] == [-1, -(2**63), -1]


def test_the_same_arrivals_get_the_same_streams() -> None:
    seeds = [3, 3, 4, 3, 4, 4]
    one, other = SeedStreams(), SeedStreams()
    kept = [one.open(seed) for seed in seeds]
    assert kept == [other.open(seed) for seed in seeds]
    for stream in kept:
        one.close(stream)
    assert [one.open(seed) for seed in seeds] == kept, "nothing is remembered of requests that have ended"


def test_a_derived_stream_that_a_user_names_is_passed_over() -> None:
    derived = SeedStreams()
    derived.open(7)
    taken = derived.open(7)
    streams = SeedStreams()
    assert streams.open(taken) == taken
    assert streams.open(7) == 7
    other = streams.open(7)
    assert other not in (7, taken)
    streams.close(taken)
    assert streams.open(7) == taken


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_open_streams_are_distinct_whatever_comes_and_goes(steps: list[tuple[int, bool]]) -> None:
    streams, held = SeedStreams(), []
    for seed, leaves in steps:
        if leaves and held:
            streams.close(held.pop(seed % len(held)))
        else:
            held.append(streams.open(seed))
        assert len(set(held)) == len(held)
    for stream in held:
        streams.close(stream)
    assert not {**streams._open, **streams._freed, **streams._next}


@pytest.mark.statistical
@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["drawn", "point mass", "both"])
def test_a_window_shorter_than_the_block_has_the_law_of_its_rows(kind: str, width: int) -> None:
    """Accepted length and next token, jointly, of many windows side by side, against their exact law."""
    count, gamma, size = 60_000, 3, 4
    generator = torch.Generator().manual_seed(10 * width + len(kind))
    p = torch.rand(gamma + 1, size, generator=generator).softmax(-1)
    q = (torch.rand(gamma, size, generator=generator) * 4).softmax(-1)
    sampled = torch.full((count,), kind != "point mass")
    if kind == "both":
        sampled[1::2] = False
    drawn = torch.stack([q[k].multinomial(count, replacement=True, generator=generator) for k in range(gamma)], 1)
    drafts = torch.where(sampled.unsqueeze(1), drawn, torch.tensor([2, 0, 3]))
    rows = torch.where(sampled, sampled.cumsum(0) - 1, -1)
    proposal = Proposal(None)
    if kind != "point mass":
        proposal = Proposal(
            q.expand(int(sampled.sum()), -1, -1).contiguous(), None, drawn[sampled], rows if kind == "both" else None
        )
    verdict = accept_sampled(
        p[: width + 1].repeat(count, 1),  # the rows of the windows, one after the other
        torch.arange(count) * (width + 1),
        drafts,
        torch.full((count,), width),
        proposal,
        torch.rand(count, gamma, dtype=torch.float64, generator=generator),
        torch.rand(count, dtype=torch.float64, generator=generator),
    )
    for half in {bool(value) for value in sampled}:
        mine = sampled == half
        got = torch.zeros(gamma + 1, size, dtype=torch.float64)
        got.index_put_((verdict.accepted[mine], verdict.next_token[mine]), torch.ones((), dtype=torch.float64), True)
        expected, reached = torch.zeros_like(got), 1.0
        for k in range(width):
            row = q[k] if half else torch.nn.functional.one_hot(drafts[~sampled][0, k], size).float()
            residual = (p[k] - row).clamp(min=0).double()
            expected[k] = reached * residual
            reached *= float(torch.minimum(p[k], row).sum())
        expected[width] = reached * p[width].double()
        total = int(mine.sum())
        deviation = (got / total - expected).abs() / (expected * (1 - expected) / total + 1e-12).sqrt()
        assert deviation.max() < 4.5, f"a chance of one in a hundred thousand: {deviation}"
    assert not verdict.invalid.any()
