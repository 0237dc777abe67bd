"""The small operations between the products, fused: normalisation, rotary embedding, gated activation.

Each rounds to the tensor's dtype exactly where the transformers module it replaces does, so that replacing one changes
at most the last bit of a value whose float32 sum happened to be added in another order.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.kernels import native, triton_support

Activation = Literal["silu", "gelu_tanh"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Root-mean-square normalisation over the last dimension.

    Args:
        x: [..., H].
        weight: [H] in x's dtype.
        eps: added to the mean square.
        unit_offset: False for weight * round(x / rms) (Llama, Qwen); True for x / rms * (1 + weight) in float32
            (Gemma).
    """
    if native.usable(x, weight) and x.dtype == weight.dtype:
        return torch.ops.surefoot.rms_norm(x, weight, eps, unit_offset, None)[0]
    if triton_support.usable(x, weight):
        try:
            from surefoot.kernels.triton_rows import rms_norm_rows

            return rms_norm_rows(x, weight, eps, unit_offset=unit_offset)
        except Exception as problem:
            triton_support.give_up(problem)
    return rms_norm_reference(x, weight, eps, unit_offset=unit_offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and the sum itself (rounded to x's dtype before it is normalised)."""
    if native.usable(x, residual, weight) and x.dtype == residual.dtype == weight.dtype:
        return torch.ops.surefoot.rms_norm(x, weight, eps, unit_offset, residual)
    total = x + residual
    return rms_norm_reference(total, weight, eps, unit_offset=unit_offset), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """`rms_norm` in plain torch."""
    exact = x.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-rotation convention.

    Args:
        x: [T, H, D], any strides over T and H (a slice of a fused q·k·v result needs no copy).
        cos, sin: [T, R], the two halves repeated as transformers hands them out; features R … D-1 pass through.

    Returns:
        [T, H, D], contiguous.
    """
    if native.usable(x, cos, sin) and x.dtype == cos.dtype == sin.dtype:
        return torch.ops.surefoot.rotary(x, cos, sin)
    if (
        x.stride(-1) == 1
        and cos.stride() == sin.stride()
        and cos.stride(-1) == 1
        and triton_support.usable(x, cos, sin)
    ):
        try:
            from surefoot.kernels.triton_rows import rotary_rows

            return rotary_rows(x, cos, sin)
        except Exception as problem:
            triton_support.give_up(problem)
    return rotary_reference(x, cos, sin)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in plain torch."""
    rotated, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((rotated, kept), dim=-1)


def gated_activation(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """act(gate) * up of a fused product.

    Args:
        gate_up: [..., 2 I], gate first.
        activation: `"silu"` or `"gelu_tanh"`.

    Returns:
        [..., I].
    """
    if native.usable(gate_up):
        return torch.ops.surefoot.gated_activation(gate_up, activation == "gelu_tanh")
    if gate_up.stride(-1) == 1 and triton_support.usable(gate_up):
        try:
            from surefoot.kernels.triton_rows import gated_activation_rows

            return gated_activation_rows(gate_up, activation == "gelu_tanh")
        except Exception as problem:
            triton_support.give_up(problem)
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gated_activation` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
