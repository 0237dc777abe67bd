"""Linear layers whose weights are packed once, so that a thin product reads them at the speed of memory.

On a CPU a decode pass is the reading of its weights. `PackedLinear` stores them in the order the kernel consumes them
and accumulates every output in float32, inputs ascending, whatever the number of rows: a row's result is bit-identical
in a batch of 1 and of 1,000. Quantised formats (`formats.py`) read fewer bytes under the same promise; the results are then
exact with respect to the quantised weights.

Without the native kernels the same modules compute with torch's products (no promise about bits, see `native.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import formats, native
from surefoot.kernels.formats import StoredWeight


class PackedLinear(nn.Module):
    """y = x Wᵀ (+ bias) over a packed weight, for inference on the CPU.

    The packed tensors are plain attributes and not buffers: their layout belongs to this CPU, so `.to(...)` and
    `state_dict()` leave them alone.

    Args:
        weight: [N, K] bfloat16 or float32 (float16 is widened to float32), or as a format stores it, which is what is then
            served; or several of them to be fused along N.
        bias: [N] or None.
        quantize: name of the format for weights that are not stored in one yet, None for the weights as they are.
        kernel: how to compute; default `native.kernel()`, the best this CPU has.
    """

    def __init__(
        self,
        weight: Tensor | StoredWeight | Sequence[Tensor | StoredWeight],
        bias: Tensor | None = None,
        *,
        quantize: str | None = None,
        kernel: native.Kernel | None = None,
    ) -> None:
        super().__init__()
        given = [weight] if isinstance(weight, (Tensor, StoredWeight)) else list(weight)
        wanted = formats.find(quantize)
        for w in given:
            device = w.device if isinstance(w, Tensor) else w.tensors[""].device
            if device.type != "cpu":
                raise ConfigurationError(
                    f"PackedLinear is a CPU layer, the weight is on {device}: keep nn.Linear there."
                )
        parts = [w if isinstance(w, StoredWeight) else wanted.quantize(w.detach()) for w in given]
        if any(part.format is not parts[0].format for part in parts):
            parts = [formats.DENSE.quantize(part.dequantize()) for part in parts]
        self.format = parts[0].format
        self.quantize = None if self.format is formats.DENSE else self.format.name
        self.sizes = tuple(part.shape[0] for part in parts)  # of the fused layers, for `split`
        self.out_features, self.in_features = sum(self.sizes), parts[0].shape[1]
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.kernel = (kernel or native.kernel()) if native.available() else None
        self.scale: Tensor | None = None
        if self.kernel:
            self.weight, self.scale = self.format.pack(parts, self.kernel)
        else:
            self._stored = self.format.join(parts)
            self.weight, self.scale = self._stored.tensors[""], self._stored.tensors.get("_scale")
        self._product: Any = None
        self._linear: Any = self.product.linear if self.kernel else None

    @property
    def product(self) -> Any:
        """The handle that the native kernels multiply by (`WeightFormat.product`); None without them."""
        if self._product is None and self.kernel:
            self._product = self.format.product(
                self.kernel, (self.weight, self.scale), self.in_features, self.out_features, self.bias
            )
        return self._product

    def __getstate__(self) -> dict[str, Any]:  # a copy makes a handle of its own
        return {**self.__dict__, "_product": None, "_linear": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._linear = self.product.linear if self.kernel else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, quantize: str | None = None) -> PackedLinear:
        """Packs one layer and takes the weight from it (a weight tied to an embedding stays with the embedding)."""
        return cls.from_linears([linear], quantize)

    @classmethod
    def from_linears(cls, linears: Sequence[nn.Linear], quantize: str | None = None) -> PackedLinear:
        """Fuses layers of the same input along their outputs (q·k·v, gate·up); a missing bias counts as zeros."""
        packed = cls([linear.weight for linear in linears], joined_bias(linears), quantize=quantize)
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]
        return packed

    @property
    def num_bytes(self) -> int:
        """Bytes one pass reads."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.bias) if t is not None)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N] in x's dtype
        linear = self._linear
        if linear is not None and x.dtype in native.DTYPES and type(x) is Tensor and not torch.compiler.is_compiling():
            return linear(x)
        if self.kernel is None:
            return self.format.multiply(x, self._stored, self.bias)
        if x.dtype not in native.DTYPES:
            return self.forward(x.float()).to(x.dtype)
        if not self.format.traceable:
            return _untraced(self._linear, x)
        return self.kernel.operations.linear(x, self.weight, self.out_features, self.scale, self.bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of a result, one per fused layer."""
        return y.split(self.sizes, dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, quantize={self.quantize}"


@torch.compiler.disable
def _untraced(linear: Any, x: Tensor) -> Tensor:
    return linear(x)


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of layers, one after the other in float32, zeros for a missing one; None where there is none at all."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([torch.zeros(n.out_features) if n.bias is None else n.bias.detach().float() for n in linears])


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
        if type(x) is Tensor and not torch.compiler.is_compiling():
            return packed.product.argmax(x)
        if packed.format.traceable:
            return packed.kernel.operations.linear_argmax(
                x, packed.weight, packed.out_features, packed.scale, packed.bias
            )
    y = packed(x)
    value = y.amax(-1, keepdim=True)
    index = torch.where(y == value, torch.arange(y.shape[-1]), y.shape[-1]).amin(-1).clamp_max(y.shape[-1] - 1)
    return index, value[:, 0].float()
