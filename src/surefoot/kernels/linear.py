"""Linear layers whose weights are packed once, so that a thin product reads them at the speed of memory.

On a CPU a decode pass is the reading of its weights. `PackedLinear` stores them in the order the kernel consumes them
and accumulates every output in float32, inputs ascending, whatever the number of rows: a row's result is bit-identical
in a batch of 1 and of 1,000. Weight-only int8 (one scale per output channel) halves the bytes under the same promise; the
results are then exact with respect to the quantised weights.

Without the native kernels the same modules compute with torch's products (no promise about bits, see `native.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import native

Quantization = Literal["int8"]


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel.

    Args:
        weight: [N, K] floating.

    Returns:
        values: [N, K] int8 in -127 … 127.
        scale: [N] float32; `values * scale` approximates `weight` to half a scale.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device)
    for some, to, s in zip(*(t.split(4096) for t in (weight, values, scale)), strict=True):  # little memory at a time
        exact = some.float()
        torch.div(exact.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny), 127, out=s)
        to.copy_((exact / s[:, None]).round_().clamp_(-127, 127))
    return values, scale


class PackedLinear(nn.Module):
    """y = x Wᵀ (+ bias) over a packed weight, for inference on the CPU.

    The packed tensors are plain attributes and not buffers: their layout belongs to this CPU, so `.to(...)` and
    `state_dict()` leave them alone.

    Args:
        weight: [N, K] bfloat16 or float32 (float16 is widened to float32), or several of them to be fused along N.
        bias: [N] or None.
        quantize: `"int8"` for weight-only int8, None for the weights as they are.
        kernel: how to compute; default `native.kernel()`, the best this CPU has.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        quantize: Quantization | None = None,
        kernel: native.Kernel | None = None,
    ) -> None:
        super().__init__()
        if quantize not in (None, "int8"):
            raise ConfigurationError(f"quantize={quantize!r} is not supported: use 'int8' or None.")
        weights = [w.detach() for w in ([weight] if isinstance(weight, Tensor) else weight)]
        for w in weights:
            if w.device.type != "cpu":
                raise ConfigurationError(
                    f"PackedLinear is a CPU layer, the weight is on {w.device}: keep nn.Linear there."
                )
        self.sizes = tuple(w.shape[0] for w in weights)  # of the fused layers, for `split`
        self.out_features, self.in_features = sum(self.sizes), weights[0].shape[1]
        self.quantize = quantize
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.scale: Tensor | None = None
        if quantize == "int8":
            weights, scales = zip(*(quantize_int8(w) for w in weights), strict=True)  # type: ignore[assignment]
            self.scale = torch.cat(scales)
        elif any(w.dtype != weights[0].dtype or w.dtype not in native.DTYPES for w in weights):
            weights = [w.float() for w in weights]
        self.native = native.available()
        self.kernel = (kernel or native.kernel()) if self.native else None
        if self.kernel:
            self.weight = self.kernel.operations.pack(list(weights), self.kernel.layout)
        else:
            self.weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(list(weights))

    @classmethod
    def from_linear(cls, linear: nn.Linear, quantize: Quantization | None = None) -> PackedLinear:
        """Packs one layer and takes the weight from it (a weight tied to an embedding stays with the embedding)."""
        return cls.from_linears([linear], quantize)

    @classmethod
    def from_linears(cls, linears: Sequence[nn.Linear], quantize: Quantization | None = None) -> PackedLinear:
        """Fuses layers of the same input along their outputs (q·k·v, gate·up); a missing bias counts as zeros."""
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [
                    torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
                    for linear in linears
                ]
            )
        packed = cls([linear.weight for linear in linears], bias, quantize=quantize)
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]
        return packed

    @property
    def num_bytes(self) -> int:
        """Bytes one pass reads."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.bias) if t is not None)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N] in x's dtype
        if x.shape[-1] != self.in_features:
            raise RuntimeError(f"this layer reads {self.in_features} features, x has {x.shape[-1]}")
        if self.kernel is None:
            return self._unpacked(x)
        if x.dtype not in native.DTYPES:
            return self.forward(x.float()).to(x.dtype)
        return self.kernel.operations.linear(x, self.weight, self.out_features, self.scale, self.bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of a result, one per fused layer."""
        return y.split(self.sizes, dim=-1)

    def _unpacked(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            y = F.linear(x.float(), self.weight.float()) * self.scale
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, quantize={self.quantize}"


def linear_argmax(x: Tensor, packed: PackedLinear) -> tuple[Tensor, Tensor]:
    """The largest output of every row, without materialising the outputs (greedy rows of an LM head).

    Args:
        x: [M, K].
        packed: the layer.

    Returns:
        index: [M] int64, equal to `packed(x).argmax(-1)`; ties go to the smallest index.
        value: [M] float32, the output there, rounded to x's dtype as `packed(x)` rounds it.
    """
    if packed.kernel and x.dtype in native.DTYPES:
        operations = packed.kernel.operations
        return operations.linear_argmax(x, packed.weight, packed.out_features, packed.scale, packed.bias)
    y = packed(x)
    value = y.amax(-1, keepdim=True)
    index = torch.where(y == value, torch.arange(y.shape[-1]), y.shape[-1]).amin(-1).clamp_max(y.shape[-1] - 1)
    return index, value[:, 0].float()
