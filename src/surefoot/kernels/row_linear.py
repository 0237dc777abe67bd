"""Linear layers on CUDA whose rows are the same bits in every batch: `PackedLinear`'s counterpart there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.kernels import triton_support

DTYPES = (torch.bfloat16, torch.float16)
"""Where a change of summation order shows: in float32 it moves a logit by a millionth, and cuBLAS keeps the products."""


class RowLinear(nn.Linear):
    """y = x Wᵀ (+ bias) for inference on CUDA, by a Triton kernel that adds every output's inputs in ascending order.

    Args:
        weight: [N, K]; not copied: a tied embedding keeps sharing it.
        bias: [N] or None.
        sizes: output sizes of the layers fused along N, for `split`; default one layer.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, sizes: Sequence[int] | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.sizes = tuple(sizes or (self.out_features,))
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> RowLinear:
        """The same layer over the same weight."""
        return cls(linear.weight, linear.bias)

    @classmethod
    def from_linears(cls, linears: Sequence[nn.Linear]) -> RowLinear:
        """Fuses layers of the same input along their outputs; takes their weights, and a missing bias counts as zeros."""
        weight, bias = torch.cat([linear.weight.detach() for linear in linears]), None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat([weight.new_zeros(n.out_features) if n.bias is None else n.bias.detach() for n in linears])
        sizes = [linear.out_features for linear in linears]
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]
        return cls(weight, bias, sizes=sizes)

    def forward(self, input: Tensor) -> Tensor:  # [..., K] -> [..., N] in the weight's dtype
        differentiated = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if not differentiated and input.dtype == self.weight.dtype and triton_support.usable(input, self.weight):
            try:
                from surefoot.kernels.triton_rows import linear_rows

                return linear_rows(input, self.weight, self.bias)
            except Exception as problem:
                triton_support.give_up(problem)
        return F.linear(input, self.weight, self.bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of a result, one per fused layer."""
        return y.split(self.sizes, dim=-1)
