"""Confidence without a head: learned from censored outcomes, following drift; and a head recalibrated when it drifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.speculation import (
    Calibration,
    ConfidenceSource,
    Evidence,
    HeadConfidence,
    LogisticEstimator,
    SignalConfidence,
)

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


def test_positions_after_a_rejection_or_a_trim_carry_no_label() -> None:
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
        confidence = source.confidence(Evidence(signal=signal), explored)
        others = [row for row in range(5) if row not in certain]
        assert (confidence[certain] == 1).all()
        assert torch.equal(confidence[others], source.estimator.estimate(signal)[others])


def test_warm_up_asks_for_full_windows_and_comes_back_when_labels_dry_up() -> None:
    rng = np.random.default_rng(0)
    source = SignalConfidence(LogisticEstimator(GAMMA, half_life=256, warm_up=64))
    assert source.warming_up
    signal, accepted, widths = blocks(rng, 80)
    source.observe(Evidence(signal=torch.from_numpy(signal)), accepted, widths)
    assert not source.warming_up
    assert (source.confidence(Evidence(signal=torch.rand(5, GAMMA))) < 1).all()
    steps = 0
    while not source.warming_up:  # the planner verifies nothing any more: its judgement must not live for ever
        signal, accepted, widths = blocks(rng, 16, width=0)
        source.observe(Evidence(signal=torch.from_numpy(signal)), accepted, widths)
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
    before = compiled(Evidence(signal=torch.ones(3, GAMMA)))
    source.observe(Evidence(signal=torch.from_numpy(signal)), accepted, widths)
    assert source.estimator.parameters is buffer
    assert not torch.equal(before, compiled(Evidence(signal=torch.ones(3, GAMMA))))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert source.confidence(Evidence(signal=torch.rand(3, GAMMA))).shape == (3, GAMMA)


def head_logits(signal: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(INTERCEPT + SLOPE * signal)


def test_a_healthy_head_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    head = HeadConfidence(Calibration.identity(GAMMA), LogisticEstimator(GAMMA))
    for _ in range(300):
        signal, accepted, widths = blocks(rng, 16)
        head.observe(Evidence(head_logits(signal)), accepted, widths)
        assert not head.recalibrating
    logits = head_logits(blocks(rng, 5)[0])
    assert torch.equal(head.confidence(Evidence(logits)), torch.sigmoid(logits.float()))


def test_a_drifting_head_is_recalibrated_and_released_when_it_recovers() -> None:
    rng = np.random.default_rng(0)
    head = HeadConfidence(Calibration.identity(GAMMA), LogisticEstimator(GAMMA, half_life=512))
    for shift, expected in ((0.0, False), (-1.5, True), (0.0, False)):
        for _ in range(150):
            signal, accepted, widths = blocks(rng, 16, shift=shift)
            head.observe(Evidence(head_logits(signal)), accepted, widths)
        assert head.recalibrating is expected
        signal = rng.exponential(2.0, (4000, GAMMA))
        error = head.confidence(Evidence(head_logits(signal))).numpy().mean(0) - truth(signal, shift).mean(0)
        assert np.abs(error).max() < 0.06


def test_head_without_estimator_and_missing_inputs() -> None:
    head: ConfidenceSource = HeadConfidence(Calibration([2.0]))
    head.observe(Evidence(torch.zeros(1, 1)), torch.tensor([1]), torch.tensor([1]))
    assert head.confidence(Evidence(torch.zeros(1, 1))).item() == 0.5
    assert not head.warming_up
    with pytest.raises(ConfigurationError, match="confidence logits"):
        head.confidence(Evidence(signal=torch.zeros(1, 1)))
    with pytest.raises(ConfigurationError, match="signal"):
        SignalConfidence(LogisticEstimator(1)).confidence(Evidence(torch.zeros(1, 1)))
    with pytest.raises(ConfigurationError, match=r"gamma=2.*gamma=3"):
        HeadConfidence(Calibration.identity(3), LogisticEstimator(2))


WEIGHTS = [
    [[0.9, 0.5, 1.2], [0.25, 0.0, 0.125], [-0.5, 0.25, 1.0]],
    [[0.7, 1.1, 0.4], [0.5, 0.75, 0.1], [0.3, -0.2, 0.0]],
]
LOGITS = torch.tensor([[1.5, -0.25, 3.0], [-2.0, 0.75, 0.1], [0.0, 4.0, -1.25]])
SIGNAL = torch.tensor([[2.0, 0.5, -1.0], [0.1, 3.0, 5.5], [-0.75, 1.0, 0.3]])
RECORDED = {  # when the drafter still calibrated its own logits
    "greedy": [
        [0.7941296, 0.5312094, 0.98873806],
        [0.093214735, 0.6513549, 0.85905945],
        [0.33458942, 0.9046505, 0.3863929],
    ],
    "mixed": [
        [0.7941296, 0.5312094, 0.98873806],
        [0.1950538, 0.90024954, 0.7221698],
        [0.48125878, 0.9929664, 0.38461626],
    ],
}


@pytest.mark.parametrize("kind", RECORDED)
def test_the_source_applies_the_calibration_once_and_with_the_recorded_numbers(kind: str) -> None:
    """From the raw logits, the signal and each request's temperature; the estimator learns from what comes out."""
    fitted = Calibration([1.5, 0.5, 2.0], weights=WEIGHTS)
    temperature = None if kind == "greedy" else torch.tensor([0.0, 0.7, 1.5])
    source = HeadConfidence(fitted, LogisticEstimator(3))
    evidence = Evidence(LOGITS, SIGNAL, temperature)
    torch.testing.assert_close(source.confidence(evidence), torch.tensor(RECORDED[kind]), rtol=2.5e-7, atol=0)
    learned = LogisticEstimator(3)
    outcomes = np.array([3, 1, 2]), np.array([3, 3, 2])
    for _ in range(16):
        source.observe(evidence, *outcomes)
        learned.observe(fitted.calibrated(LOGITS, SIGNAL, temperature).double().numpy(), *outcomes)
    assert source.estimator is not None
    assert np.array_equal(source.estimator.fit, learned.fit)
    assert not np.array_equal(learned.fit, LogisticEstimator(3).fit)


def test_evidence_of_several_steps_is_joined_row_by_row() -> None:
    one = Evidence(torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([0.5, 1.0]), torch.tensor([0, 4]))
    rested, greedy = (
        Evidence(match=torch.tensor([7])),
        Evidence(torch.ones(1, 3), torch.zeros(1, 3), match=torch.tensor([2])),
    )
    joined = Evidence.joined([one, rested, greedy], [2, 1, 1])
    assert joined.match is not None
    assert joined.temperature is not None
    assert joined.logits is not None
    assert joined.match.tolist() == [0, 4, 7, 2]
    assert joined.temperature.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert joined.logits[:, 0].isnan().tolist() == [False, False, True, False]
    assert Evidence.joined([Evidence(signal=torch.ones(1, 2))] * 2, [1, 1]).logits is None
    assert [part.shape for part in (joined.first(2).logits, joined.rows(torch.tensor([0, 3])).logits)] == [
        (4, 2),
        (2, 3),
    ]


def test_a_calibration_that_needs_a_signal_says_so() -> None:
    with pytest.raises(CalibrationError, match="signal"):
        HeadConfidence(Calibration([1.0] * 3, weights=WEIGHTS)).confidence(Evidence(LOGITS))
