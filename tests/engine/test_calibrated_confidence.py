"""Through the engine: the confidence of every draft is its raw evidence with the calibration applied once, request by request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.engine.trace import StepReport
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from tests.engine.engines import QueueDevice, build, combine_at, tiny_dspark
from tests.tiny_models import tiny_target

GAMMA, TEMPERATURES = 4, (0.0, 0.7, 1.3, 1.0)
WEIGHTS = torch.tensor(
    [
        [[0.9, 0.5, 1.2, 0.7], [0.25, 0.1, 0.125, 0.3], [-0.5, 0.25, 1.0, 0.2]],
        [[0.7, 1.1, 0.4, 0.9], [0.5, 0.75, 0.1, 0.2], [0.3, -0.2, 0.0, 0.6]],
    ]
)


def steps_of(drafter: Any, device: Any, path: Path | None) -> tuple[list[StepReport], Any]:
    engine = build(
        tiny_target("llama"), drafter, width=GAMMA, device=device, policy={} if path is None else {"calibration": path}
    )
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [3, 5, 8, 9, 7, 9], [1, 2, 1, 2, 1, 2]]
    engine.run(
        prompts,
        [SamplingParams(temperature=t, max_tokens=24, seed=i, ignore_eos=True) for i, t in enumerate(TEMPERATURES)],
    )
    return [report for report in reports if report.inputs.num_drafting == len(prompts)], engine.policy.confidence


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("kind", ["dspark", "combined"])
def test_confidences_are_the_raw_evidence_calibrated_once(kind: str, loop: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fitted = Calibration([1.0] * GAMMA, weights=WEIGHTS)
    fitted.save(path)

    def drafter() -> Any:
        trained = tiny_dspark(tiny_target("llama"), GAMMA)
        return trained if kind == "dspark" else combine_at(trained, GAMMA, threshold=3)

    def device() -> Any:
        return None if loop == "plain" else QueueDevice()

    calibrated, _ = steps_of(drafter(), device(), path)
    raw, _ = steps_of(drafter(), device(), None)
    assert len(calibrated) == len(raw) > 4
    modelled = 0
    for step, plain in zip(calibrated, raw, strict=True):
        evidence, confidence = step.outputs.evidence, step.outputs.confidence
        assert step.outputs.drafts == plain.outputs.drafts  # nothing but confidences was fitted
        assert evidence.temperature is not None
        torch.testing.assert_close(evidence.temperature, torch.tensor(TEMPERATURES))
        if evidence.logits is None:  # everything was looked up
            continue
        assert confidence is not None
        assert plain.outputs.evidence.logits is not None
        assert torch.equal(evidence.logits.nan_to_num(7.0), plain.outputs.evidence.logits.nan_to_num(7.0))
        drafted = ~evidence.logits[:, 0].isnan()
        share = evidence.temperature.clamp(0, 1).view(-1, 1, 1)
        head, odds, bias = ((1 - share) * WEIGHTS[0] + share * WEIGHTS[1]).unbind(1)
        assert evidence.signal is not None
        expected = torch.sigmoid(head * evidence.logits + odds * evidence.signal + bias)
        torch.testing.assert_close(confidence[drafted], expected[drafted], rtol=1e-5, atol=1e-6)
        modelled += int(drafted.sum())
        if kind == "combined":
            assert step.outputs.sources is not None
            assert [name == "dspark" for name in step.outputs.sources] == drafted.tolist()
            assert evidence.match is not None
            assert torch.equal(evidence.signal[:, 0].isnan(), ~drafted)
    assert modelled > 8


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_the_evidence_of_a_drafted_block_is_the_trained_drafters_own(loop: str) -> None:
    """Row for row, whoever drafts beside it; the match length is told apart from it."""
    trained, own = tiny_dspark(tiny_target("llama"), GAMMA), []
    honest = trained.propose

    def propose(*arguments: Any) -> Any:
        own.append(honest(*arguments))
        return own[-1]

    trained.propose = propose  # type: ignore[method-assign]
    engine = build(
        tiny_target("llama"),
        combine_at(trained, GAMMA, 3),
        width=GAMMA,
        device=None if loop == "plain" else QueueDevice(),
    )
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.run([[3, 1, 4, 1, 5], [9, 2, 6, 5], [1, 2, 1, 2, 1, 2]], params)
    ran = [report.outputs for report in reports if report.inputs.num_drafting and report.outputs.model_rows != 0]
    assert len(ran) == len(own) > 8
    mixed = 0
    for outputs, draft in zip(ran, own, strict=True):
        assert outputs.evidence.logits is not None
        assert outputs.evidence.signal is not None
        rows = ~outputs.evidence.logits[:, 0].isnan()
        mixed += bool(rows.any() and not rows.all())
        mine = slice(None) if len(draft.tokens) == int(rows.sum()) else rows
        assert torch.equal(outputs.evidence.logits[rows], draft.confidence_logits[mine])
        assert torch.equal(outputs.evidence.signal[rows], draft.signal[mine])
    assert mixed > 2


def test_a_network_that_overflows_costs_acceptance_and_nothing_else() -> None:
    """A NaN on the way through the drafter: every request ends as it would without one, at temperature 0 and above."""
    texts = []
    for broken in (True, False):
        target = tiny_target("llama")
        drafter = tiny_dspark(target, GAMMA)
        if broken:
            drafter.model.norm.weight.data[0] = torch.nan
        engine = build(target, drafter if broken else None, width=GAMMA if broken else None)
        prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5]]
        requests = engine.run(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        warm = engine.run(prompts, SamplingParams(temperature=1, max_tokens=20, seed=3, ignore_eos=True))
        texts.append([request.token_ids for request in requests])
        assert [request.num_output for request in (*requests, *warm)] == [20] * 4
        assert all(0 <= token < target.vocab_size for request in warm for token in request.token_ids)
        engine.assert_clean()
    assert texts[0] == texts[1]
