"""Confidence without a head: learned from censored outcomes, following drift; and a head recalibrated when it drifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.errors import ConfigurationError
from surefoot.speculation import Calibration, ConfidenceSource, HeadConfidence, LogisticEstimator, SignalConfidence

GAMMA = 4
INTERCEPT = np.array([-0.5, 0.0, 0.5, 1.0])
SLOPE = np.array([1.0, 0.6, 0.8, 0.4])


def truth(signal: np.ndarray, shift: float = 0.0) -> np.ndarray:
    return 1 / (1 + np.exp(-(INTERCEPT + shift + SLOPE * signal)))


def blocks(rng: np.random.Generator, count: int, width: int = GAMMA, shift: float = 0.0) -> tuple[np.ndarray, ...]:
    """Margins, and what a window of `width` accepted."""
    signal = rng.exponential(2.0, (count, GAMMA))
    full = (rng.random(signal.shape) < truth(signal, shift)).cumprod(1).sum(1)
    return signal, np.minimum(full, width), np.full(count, width)


def test_logistic_is_recovered_at_every_position() -> None:
    rng = np.random.default_rng(0)
    estimator = LogisticEstimator(GAMMA, half_life=1 << 30)
    for _ in range(100):
        estimator.observe(*blocks(rng, 400))
    signal = rng.exponential(2.0, (2000, GAMMA))
    estimated = estimator.estimate(torch.from_numpy(signal)).numpy()
    assert np.abs(estimated - truth(signal)).mean(0).max() < 0.015


def test_positions_behind_a_rejection_or_a_trim_carry_no_label() -> None:
    estimator = LogisticEstimator(GAMMA, half_life=1 << 30)
    signal = np.ones((3, GAMMA))
    estimator.observe(signal, np.array([0, 2, 1]), np.array([4, 2, 3]))
    # block 1 rejected x_1; block 2 accepted its whole window of 2; block 3 accepted one of 3 and rejected the second
    np.testing.assert_allclose(estimator._tried.sum(1), [3, 2, 0, 0])
    np.testing.assert_allclose(estimator._accepted.sum(1), [2, 1, 0, 0])


def test_rarely_reached_positions_borrow_from_the_others() -> None:
    rng = np.random.default_rng(0)
    estimator = LogisticEstimator(GAMMA)
    for _ in range(20):
        estimator.observe(*blocks(rng, 50, width=2))
    unseen = estimator.parameters[:, 3]
    assert float(unseen[1]) > 0.4  # the common slope, not a wild guess
    assert torch.isfinite(estimator.parameters).all()


def test_explored_blocks_are_the_first_that_have_a_signal() -> None:
    source = SignalConfidence(LogisticEstimator(GAMMA))
    signal = torch.tensor([0.0, 3.0, 0.0, 2.0, 4.0]).unsqueeze(1).expand(-1, GAMMA)
    for explored, certain in ((0, []), (1, [1]), (2, [1, 3]), (9, [1, 3, 4])):
        confidence = source.confidence(None, signal, explored)
        others = [row for row in range(5) if row not in certain]
        assert (confidence[certain] == 1).all()
        assert torch.equal(confidence[others], source.estimator.estimate(signal)[others])


def test_warm_up_asks_for_full_windows_and_comes_back_when_labels_dry_up() -> None:
    rng = np.random.default_rng(0)
    source = SignalConfidence(LogisticEstimator(GAMMA, half_life=256, warm_up=64))
    assert source.warming_up
    signal, accepted, widths = blocks(rng, 80)
    source.observe(None, torch.from_numpy(signal), accepted, widths)
    assert not source.warming_up
    assert (source.confidence(None, torch.rand(5, GAMMA)) < 1).all()
    steps = 0
    while not source.warming_up:  # the planner verifies nothing any more: its judgement must not live for ever
        signal, accepted, widths = blocks(rng, 16, width=0)
        source.observe(None, torch.from_numpy(signal), accepted, widths)
        steps += 1
        assert steps < 200


def test_estimates_follow_drift() -> None:
    rng = np.random.default_rng(0)
    estimator = LogisticEstimator(GAMMA, half_life=512)
    signal = rng.exponential(2.0, (4000, GAMMA))
    for shift in (0.0, -1.5, 1.0):
        for _ in range(100):
            estimator.observe(*blocks(rng, 32, shift=shift))
        error = estimator.estimate(torch.from_numpy(signal)).numpy().mean(0) - truth(signal, shift).mean(0)
        assert np.abs(error).max() < 0.06


def test_the_order_of_the_signal_is_never_reversed() -> None:
    rng = np.random.default_rng(0)
    estimator = LogisticEstimator(1)
    signal = rng.exponential(2.0, (500, 1))
    estimator.observe(signal, (rng.random(500) < np.exp(-signal[:, 0])).astype(np.int64), np.ones(500, np.int64))
    assert float(estimator.parameters[1, 0]) >= 0.0


def test_separable_and_extreme_labels_stay_finite() -> None:
    estimator = LogisticEstimator(2, refit_every=1)
    for accepted in (0, 2):
        for signal in (0.0, 1e6, -1e6, np.inf, np.nan):
            estimator.observe(np.full((50, 2), signal), np.full(50, accepted), np.full(50, 2))
    assert torch.isfinite(estimator.parameters).all()


def test_match_lengths_of_a_point_mass_drafter_are_a_signal_too() -> None:
    rng = np.random.default_rng(0)
    estimator = LogisticEstimator(1)
    length = rng.integers(1, 6, (3000, 1)).astype(float)
    estimator.observe(length, (rng.random(3000) < length[:, 0] / 6).astype(np.int64), np.ones(3000, np.int64))
    estimated = estimator.estimate(torch.arange(1.0, 6.0).unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(estimated, np.arange(1, 6) / 6, atol=0.06)


def test_parameters_change_in_place_and_confidence_needs_no_host_read() -> None:
    rng = np.random.default_rng(0)
    source = SignalConfidence(LogisticEstimator(GAMMA))
    buffer = source.estimator.parameters
    compiled = torch.compile(source.confidence, fullgraph=True, backend="eager")
    signal, accepted, widths = blocks(rng, 200)
    before = compiled(None, torch.ones(3, GAMMA))
    source.observe(None, torch.from_numpy(signal), accepted, widths)
    assert source.estimator.parameters is buffer
    assert not torch.equal(before, compiled(None, torch.ones(3, GAMMA)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert source.confidence(None, torch.rand(3, GAMMA)).shape == (3, GAMMA)


def head_logits(signal: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(INTERCEPT + SLOPE * signal)


def test_a_healthy_head_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    head = HeadConfidence(Calibration.identity(GAMMA), LogisticEstimator(GAMMA))
    for _ in range(300):
        signal, accepted, widths = blocks(rng, 16)
        head.observe(head_logits(signal), None, accepted, widths)
        assert not head.recalibrating
    logits = head_logits(blocks(rng, 5)[0])
    assert torch.equal(head.confidence(logits, None), torch.sigmoid(logits.float()))


def test_a_drifting_head_is_recalibrated_and_released_when_it_recovers() -> None:
    rng = np.random.default_rng(0)
    head = HeadConfidence(Calibration.identity(GAMMA), LogisticEstimator(GAMMA, half_life=512))
    for shift, expected in ((0.0, False), (-1.5, True), (0.0, False)):
        for _ in range(150):
            signal, accepted, widths = blocks(rng, 16, shift=shift)
            head.observe(head_logits(signal), None, accepted, widths)
        assert head.recalibrating is expected
        signal = rng.exponential(2.0, (4000, GAMMA))
        error = head.confidence(head_logits(signal), None).numpy().mean(0) - truth(signal, shift).mean(0)
        assert np.abs(error).max() < 0.06


def test_head_without_estimator_and_missing_inputs() -> None:
    head: ConfidenceSource = HeadConfidence(Calibration([2.0]))
    head.observe(torch.zeros(1, 1), None, torch.tensor([1]), torch.tensor([1]))
    assert head.confidence(torch.zeros(1, 1), None).item() == 0.5
    assert not head.warming_up
    with pytest.raises(ConfigurationError, match="confidence logits"):
        head.confidence(None, torch.zeros(1, 1))
    with pytest.raises(ConfigurationError, match="signal"):
        SignalConfidence(LogisticEstimator(1)).confidence(torch.zeros(1, 1), None)
    with pytest.raises(ConfigurationError, match=r"gamma=2.*gamma=3"):
        HeadConfidence(Calibration.identity(3), LogisticEstimator(2))
