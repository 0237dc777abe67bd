"""Softmax and draws over a vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from surefoot.kernels import native
from surefoot.kernels.sampling import (
    argmax_rows,
    argmax_rows_reference,
    filter_rows,
    filter_rows_reference,
    sample_rows,
    sample_rows_reference,
    softmax_rows,
    softmax_rows_reference,
)

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 6, 4096, 4097, 20011])
def test_softmax_equals_float64(size, dtype):
    torch.manual_seed(size)
    logits = (4 * torch.randn(5, size)).to(dtype)
    if size > 1:
        logits[:, 1::3] = -torch.inf
    temperatures = torch.tensor([0.3, 1.0, 2.5, 0.0, 1e-3])
    probs = softmax_rows(logits, temperatures)
    assert probs.dtype == torch.float32
    for row, t in enumerate(temperatures.tolist()):
        if t == 0:
            wanted = torch.zeros(size, dtype=torch.float64)
            best = logits[row].float()
            wanted[torch.where(best == best.max(), torch.arange(size), size).min()] = 1
        else:
            wanted = (logits[row].double() / t).softmax(0)
        torch.testing.assert_close(probs[row].double(), wanted, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(softmax_rows_reference(logits, temperatures), probs, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(softmax_rows(logits), softmax_rows(logits, torch.ones(5)), rtol=0, atol=0)
    assert bool((probs[logits == -torch.inf] == 0).all())


def test_temperature_zero_keeps_the_first_of_equals():
    logits = torch.zeros(2, 9000)
    logits[0, 5000:] = 1
    assert softmax_rows(logits, torch.zeros(2)).argmax(1).tolist() == [5000, 0]
    assert softmax_rows(logits, torch.zeros(2)).sum(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 4096, 4103, 9001])
def test_argmax_is_the_first_of_the_largest(size, dtype):
    torch.manual_seed(size)
    logits = torch.randn(6, size).to(dtype)
    logits[0] = 3  # all equal
    logits[1, size // 2 :] = 9
    logits[2] = -torch.inf
    wanted = [min(j for j in range(size) if row[j] == row.max()) for row in logits]
    wanted[2] = -1  # nothing is allowed
    assert argmax_rows(logits).tolist() == wanted


@needs_native
def test_softmax_rows_do_not_notice_neighbours_or_threads():
    logits = torch.randn(9, 9001)
    temperatures = torch.rand(9) + 0.1
    together, before = softmax_rows(logits, temperatures), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            alone = torch.cat([softmax_rows(logits[i : i + 1], temperatures[i : i + 1]) for i in range(9)])
            assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([1, 2, 6, 4096, 4099, 9000]), zeros=st.floats(0, 0.99))
def test_draw_is_the_first_index_beyond_the_goal(seed, size, zeros):
    g = torch.Generator().manual_seed(seed)
    probs = torch.rand(4, size, generator=g) * (torch.rand(4, size, generator=g) >= zeros)
    probs[:, seed % size] = 0.5
    u = torch.tensor([0.0, 1 - 2**-24, *torch.rand(2, generator=g).tolist()])
    index = sample_rows(probs, u)
    assert bool((probs.gather(1, index[:, None]) > 0).all())
    cumulative = probs.double().cumsum(1)
    goal = u.double() * cumulative[:, -1]
    slack = 1e-12 * cumulative[:, -1]
    at = cumulative.gather(1, index[:, None])[:, 0]
    before = at - probs.double().gather(1, index[:, None])[:, 0]
    assert bool((at > goal - slack).all())
    assert bool((before <= goal + slack).all())
    assert torch.equal(index, sample_rows_reference(probs, u))


def test_rows_without_mass_give_minus_one():
    probs = torch.zeros(2, 5000)
    probs[1, 4999] = 1e-30
    for draw in (sample_rows, sample_rows_reference):
        assert draw(probs, torch.tensor([0.5, 0.999])).tolist() == [-1, 4999]


@pytest.mark.statistical
def test_law_of_the_draws():
    """20,000 draws; a shift of 0.02 between two words fails with power > 0.99 at level 1e-6."""
    probs = torch.tensor([0.3, 0.0, 0.25, 0.2, 0.15, 0.1])
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    counts = sample_rows(probs.expand(20_000, -1), u).bincount(minlength=6)
    assert counts[1] == 0
    keep = probs > 0
    assert chisquare(counts[keep].numpy(), (probs[keep] * 20_000).double().numpy(), sum_check=False).pvalue > 1e-6


# -- rows without a distribution -------------------------------------------------------------------------------------------

BAD = {"nan": torch.nan, "infinity": torch.inf}
TWINS = [
    pytest.param(softmax_rows, argmax_rows, marks=needs_native, id="native"),
    pytest.param(softmax_rows_reference, argmax_rows_reference, id="reference"),
]


@pytest.mark.parametrize(("softmax", "argmax"), TWINS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 4096, 4103, 9001])
def test_a_row_that_holds_nan_or_infinity_has_no_distribution(softmax, argmax, bad, dtype, size):
    """Wherever it stands, whatever comes after it, hot or greedy; the rows beside it are as if it were not there."""
    torch.manual_seed(size)
    clean = torch.randn(4, size).to(dtype)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 0.0])
    for place in {0, size // 3, size // 2, max(0, size - 2), size - 1}:
        logits = clean.clone()
        logits[1, place] = logits[3, place] = BAD[bad]
        probs, index = softmax(logits, temperatures), argmax(logits)
        assert not probs[[1, 3]].any()
        assert index[[1, 3]].tolist() == [-1, -1]
        assert torch.equal(probs[[0, 2]], softmax(clean, temperatures)[[0, 2]])
        assert torch.equal(index[[0, 2]], argmax(clean)[[0, 2]])
        for draw in (sample_rows, sample_rows_reference):
            assert draw(probs, torch.full((4,), 0.5))[[1, 3]].tolist() == [-1, -1]


@pytest.mark.parametrize(("softmax", "argmax"), TWINS)
@pytest.mark.parametrize("size", [1, 17, 5000])
def test_a_row_that_allows_nothing_has_no_distribution(softmax, argmax, size):
    logits = torch.full((3, size), -torch.inf)
    logits[1, size - 1] = -1e30
    for temperatures in (0.0, 1.0):
        probs = softmax(logits, torch.full((3,), temperatures))
        assert probs.sum(1).tolist() == [0, 1, 0]
        assert probs[1, size - 1] == 1
    assert argmax(logits).tolist() == [-1, size - 1, -1]


# -- exact masses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [pytest.param(filter_rows, marks=needs_native), filter_rows_reference])
@pytest.mark.parametrize("size", [1, 2, 16, 300])
def test_a_lone_survivor_has_exactly_one(filters, size):
    """For thousands of masses, many of which times their rounded reciprocal are 1 - 2^-24."""
    masses = torch.linspace(0.001, 1, 4001)[:, None] if size > 1 else torch.ones(5, 1)
    probs = torch.cat([masses, (1 - masses).expand(-1, size - 1) / max(size - 1, 1)], 1)
    lone = torch.full((len(probs),), 1)
    largest = probs.argmax(1)
    for stages in (
        (lone, None, None),
        (None, lone * 1e-6, None),
        (None, None, lone * 1.0),
        (lone, lone * 0.5, lone * 0.3),
    ):
        kept = filters(probs.clone(), *stages)
        single = (kept > 0).sum(1) == 1  # the others tie
        assert single.sum() > len(probs) // 2
        assert bool((kept.gather(1, largest[:, None])[single] == 1).all())
    rounded = masses * (1 / masses)
    assert size == 1 or bool((rounded < 1).any()), "no mass of this test would notice the product with the reciprocal"


@pytest.mark.parametrize("filters", [pytest.param(filter_rows, marks=needs_native), filter_rows_reference])
def test_filters_leave_a_row_without_mass_as_it_is(filters):
    probs = torch.zeros(3, 700)
    probs[1, 5] = 1
    for stages in (
        (torch.tensor([1, 1, 0]), None, None),
        (None, torch.tensor([0.5, 0.5, 1.0]), None),
        (None, None, torch.ones(3) * 0.1),
    ):
        kept = filters(probs.clone(), *stages)
        assert torch.equal(kept, probs)


@pytest.mark.parametrize("draw", [pytest.param(sample_rows, marks=needs_native), sample_rows_reference])
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-44])
@pytest.mark.parametrize("size", [1, 3, 8, 4097])
def test_the_ends_of_the_uniform_draw_the_first_and_the_last_token_with_mass(draw, scale, size):
    """Also where a whole row lies below what float32 holds in full precision."""
    place = torch.arange(size)
    probs = torch.where((place % 2 == 0) & (place < max(size - 1, 1)), torch.rand(size) + 0.5, 0.0)[None] * scale
    has = probs[0].nonzero()
    assert len(has)
    low, high = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    assert draw(probs, low).item() == has[0]
    assert draw(probs, high).item() == has[-1]
