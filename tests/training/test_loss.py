"""The fused loss against the formulas written out, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.training.loss import _CHUNK, CE, TV, confidence_loss, vocabulary_loss
from tests.training.stage import trainer

VOCABULARY, ROWS, WIDTH, RANK = 50, 37, 6, 3


def inputs(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    double = {"dtype": torch.float64}
    full = torch.softmax(3 * torch.randn(11, VOCABULARY + 9, **double), 1)
    return {
        "hidden": torch.randn(ROWS, WIDTH, **double),
        "head": torch.randn(VOCABULARY, WIDTH, **double),
        "latent": torch.randn(ROWS, RANK, **double),
        "markov": torch.randn(VOCABULARY, RANK, **double),
        "labels": full[:, :VOCABULARY].contiguous(),  # the last nine tokens are outside the draft vocabulary
        "label_rows": torch.randint(0, 11, (ROWS,)),
        "weight": torch.rand(ROWS, **double),
    }


def reference(data: dict[str, Tensor], softcap: float | None) -> tuple[Tensor, Tensor]:
    """Loss and acceptance over the target's whole vocabulary, q padded with exact zeros."""
    base = data["hidden"] @ data["head"].T
    if softcap is not None:
        base = softcap * torch.tanh(base / softcap)
    logits = base + data["latent"] @ data["markov"].T
    p = data["labels"][data["label_rows"]]
    whole_p = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)  # one column stands for all tokens outside
    whole_q = torch.nn.functional.pad(logits.softmax(1), (0, 1))
    tv = 0.5 * (whole_p - whole_q).abs().sum(1)
    ce = -(p * logits.log_softmax(1)).sum(1)
    return (data["weight"] * (CE * ce + TV * tv)).sum(), torch.minimum(whole_p, whole_q).sum(1)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_the_fused_loss_is_the_formula(softcap: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK, "cpu", chunk)  # 1: sixteen rows at a time
    data = inputs()
    scores = vocabulary_loss(**data, softcap=softcap)
    loss, acceptance = reference(data, softcap)
    torch.testing.assert_close(scores.loss, loss)
    torch.testing.assert_close(scores.acceptance, acceptance)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_autograd(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK, "cpu", 1)
    names = ("hidden", "head", "latent", "markov")
    data = inputs(1)
    for name in names:
        data[name].requires_grad_()
    (3 * vocabulary_loss(**data, softcap=softcap).loss).backward()
    found = [data[name].grad.clone() for name in names]
    for name in names:
        data[name].grad = None
    (3 * reference(data, softcap)[0]).backward()
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, data[name].grad, msg=name)


def test_gradients_are_finite_differences() -> None:
    data = inputs(2)
    names = ("hidden", "head", "latent", "markov")
    tensors = [data.pop(name).requires_grad_() for name in names]

    def loss(*values: Tensor) -> Tensor:
        return vocabulary_loss(**dict(zip(names, values, strict=True)), **data).loss

    assert torch.autograd.gradcheck(loss, tensors, eps=1e-6, atol=1e-6, fast_mode=True)


def test_a_frozen_head_gets_no_gradient_and_dflash_needs_no_markov_head() -> None:
    data = {name: t.float() if t.is_floating_point() else t for name, t in inputs().items()}
    data["hidden"].requires_grad_()
    data["latent"] = data["markov"] = None
    scores = vocabulary_loss(**data)
    scores.loss.backward()
    assert data["head"].grad is None
    assert float(data["hidden"].grad.abs().sum()) > 0


def test_acceptance_counts_the_mass_outside_the_vocabulary_as_lost() -> None:
    """A drafter that says exactly what the target says inside the vocabulary accepts the mass inside, no more."""
    p = torch.tensor([[0.5, 0.3, 0.05]])  # 0.15 outside
    q = p / p.sum()
    eye = torch.eye(3)
    scores = vocabulary_loss(q.log(), eye, None, None, p, torch.tensor([0]), torch.ones(1))
    assert float(scores.acceptance) == pytest.approx(0.85)
    assert bool(scores.agrees)


def test_confidence_gradients_do_not_reach_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the confidence term alone, only the confidence head learns; without it, everything else does."""
    one = trainer(row_anchors=4)
    only_confidence = {}

    def gradients() -> dict[str, Tensor]:
        one.model.zero_grad(set_to_none=True)
        with monkeypatch.context() as patch:
            patch.setattr("torch.nn.utils.clip_grad_norm_", lambda parameters, limit: torch.zeros(()))
            patch.setattr("surefoot.training.trainer.update_average", lambda *a: None)
            for optimiser in one.optimisers:
                patch.setattr(optimiser, "step", lambda: None)
                patch.setattr(optimiser, "zero_grad", lambda set_to_none: None)
            one.step()
        return {n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None and bool(p.grad.any())}

    with monkeypatch.context() as patch:
        patch.setattr("surefoot.training.loss.CE", 0.0)
        patch.setattr("surefoot.training.loss.TV", 0.0)
        only_confidence = gradients()
    assert set(only_confidence) == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert "layers.0.self_attn.q_proj.weight" in gradients()


def test_confidence_loss_is_binary_cross_entropy_with_soft_labels() -> None:
    logits, labels, weight = torch.tensor([0.3, -2.0]), torch.tensor([0.7, 0.1]), torch.tensor([1.0, 0.5])
    c = torch.sigmoid(logits)
    expected = -(weight * (labels * c.log() + (1 - labels) * (1 - c).log())).sum()
    torch.testing.assert_close(confidence_loss(logits, labels, weight), expected)
