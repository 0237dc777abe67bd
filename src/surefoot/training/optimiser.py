"""Optimisers, learning rate, running average of the weights, and the precision of the products."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigurationError
from surefoot.training.options import TrainingOptions

_FLOOR = 0.05  # of the learning rate, at the end of the cosine
_FASTER = 1.2  # bfloat16 must be this much faster to be worth its rounding


def make_optimisers(model: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the hidden matrices of backbone and projections and AdamW for the rest.

    Muon orthogonalises the update of a matrix; its step is scaled to the size of AdamW's, so that both use the same
    learning rate. Embedding tables, head outputs and vectors do not map between hidden spaces and use AdamW.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.dim() < 2 or "norm" in name:
            vectors.append(parameter)
        elif options.optimizer == "muon" and "markov_w" not in name and "confidence" not in name:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=(0.9, 0.98))
    ]
    if hidden:
        optimisers.append(
            torch.optim.Muon(hidden, lr=options.lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimisers


def learning_rate(done: float, options: TrainingOptions) -> float:
    """Learning rate at the share `done` of all anchors: linear warm-up, then a cosine down to a twentieth."""
    if done < options.warmup:
        return options.lr * (done + 1e-3) / (options.warmup + 1e-3)
    rest = min(1.0, (done - options.warmup) / max(1e-9, 1 - options.warmup))
    return options.lr * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * rest)))


@torch.no_grad()
def update_average(average: Iterable[Tensor], parameters: Iterable[Tensor], decay: float, step: int) -> None:
    """Update an exponential running average in place; its window is short at first, so that the initial weights fade."""
    decay = min(decay, (1 + step) / (10 + step))
    for kept, parameter in zip(average, parameters, strict=True):
        kept.lerp_(parameter, 1 - decay)


def choose_precision(wanted: str, device: torch.device) -> torch.dtype:
    """Dtype of the products: as given, or for "auto" the faster of float32 and bfloat16 on this device.

    On a CPU without bfloat16 instructions such products are many times slower, so a CPU is measured briefly.

    Raises:
        ConfigurationError: `wanted` is none of auto, float32, bfloat16.
    """
    if wanted in ("float32", "bfloat16"):
        return getattr(torch, wanted)
    if wanted != "auto":
        raise ConfigurationError(f"precision is {wanted!r}; allowed: auto, float32, bfloat16")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if _seconds(torch.bfloat16) * _FASTER < _seconds(torch.float32) else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return best
