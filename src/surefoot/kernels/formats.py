"""Weight formats: how a matrix is quantised, stored in a checkpoint, packed for the kernels, and multiplied without them.

All that is particular to one format is its class here; targets, drafters and checkpoints ask the class. A new format is a
subclass of `WeightFormat` that is registered (`register`), and in C++ a panel struct with an operator that makes a `Product`
of it (`panels.hpp`). `tests/kernels/test_formats.py` adds one that way, from outside of this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.kernels import native


@dataclass(frozen=True)
class StoredWeight:
    """A matrix [N, K] as its format stores it."""

    format: WeightFormat
    tensors: Mapping[str, Tensor]
    """By suffix: a checkpoint names each tensor as the matrix, with its suffix appended."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        outputs, inputs = self.format.shape({suffix: tuple(t.shape) for suffix, t in self.tensors.items()})
        return outputs, inputs

    def dequantize(self) -> Tensor:
        """[N, K] float32 (of a dense matrix: its own dtype): exactly what the format means."""
        return self.format.dequantize(self)


class WeightFormat(ABC):
    """One way of storing a matrix [N, K] and of multiplying by it."""

    name: str
    """As users write it: `quantize="int8"`."""
    suffixes: tuple[str, ...] = ("",)
    """Of the tensors of a stored matrix. Rows [N, ...] are their first dimension."""
    dtype: torch.dtype | None = None
    """Of the tensor without a suffix; None: any floating one."""
    traceable = True
    """Whether the operators `linear` and `linear_argmax` read what `pack` makes; if not, `torch.compile` breaks its graph."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> StoredWeight:
        """Store [N, K] floating."""

    @abstractmethod
    def dequantize(self, stored: StoredWeight) -> Tensor:
        """See `StoredWeight.dequantize`."""

    @abstractmethod
    def pack(self, parts: Sequence[StoredWeight], kernel: native.Kernel) -> tuple[Tensor, Tensor | None]:
        """Matrices of the same inputs, one after the other along N, in the layout of `kernel`: weight, and scale [N] float32."""

    @abstractmethod
    def multiply(self, x: Tensor, stored: StoredWeight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias in x's dtype, without the native kernels: [..., K], bias [N] float32 -> [..., N]."""

    def product(
        self,
        kernel: native.Kernel,
        packed: tuple[Tensor, Tensor | None],
        inputs: int,
        outputs: int,
        bias: Tensor | None,
    ) -> Any:
        """The handle that the kernels multiply by (`product.hpp`), made once: methods `linear(x)` and `argmax(x)`."""
        return kernel.operations.product(packed[0], inputs, outputs, packed[1], bias)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """N and K from the shapes of the stored tensors, by suffix."""
        return shapes[""]

    def join(self, parts: Sequence[StoredWeight]) -> StoredWeight:
        """Matrices of the same inputs, one after the other along N."""
        if len(parts) == 1:
            return StoredWeight(self, {suffix: t.contiguous() for suffix, t in parts[0].tensors.items()})
        return StoredWeight(self, {suffix: torch.cat([p.tensors[suffix] for p in parts]) for suffix in self.suffixes})


class Dense(WeightFormat):
    """The weights as they are: bfloat16 or float32; other dtypes, and a mixture, are widened to float32."""

    name = "native"

    def quantize(self, weight: Tensor) -> StoredWeight:
        return StoredWeight(self, {"": weight})

    def dequantize(self, stored: StoredWeight) -> Tensor:
        return stored.tensors[""]

    def pack(self, parts: Sequence[StoredWeight], kernel: native.Kernel) -> tuple[Tensor, Tensor | None]:
        return kernel.operations.pack(self._of_one_dtype(parts), kernel.layout), None

    def multiply(self, x: Tensor, stored: StoredWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x, stored.tensors[""].to(x.dtype), None if bias is None else bias.to(x.dtype))

    def join(self, parts: Sequence[StoredWeight]) -> StoredWeight:
        return super().join([self.quantize(weight) for weight in self._of_one_dtype(parts)])

    def _of_one_dtype(self, parts: Sequence[StoredWeight]) -> list[Tensor]:
        weights = [part.tensors[""] for part in parts]
        same = all(w.dtype == weights[0].dtype and w.dtype in native.DTYPES for w in weights)
        return weights if same else [w.float() for w in weights]


class Int8(WeightFormat):
    """Symmetric int8 with one float32 scale a row: `values * scale`, values -127 … 127, right to half a scale."""

    name = "int8"
    suffixes = ("", "_scale")
    dtype = torch.int8

    def quantize(self, weight: Tensor) -> StoredWeight:
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], device=weight.device)
        for some, to, s in zip(
            *(t.split(4096) for t in (weight, values, scale)), strict=True
        ):  # little memory at a time
            exact = some.float()
            torch.div(exact.abs().amax(dim=1), 127, out=s).clamp_min_(torch.finfo(torch.float32).tiny)
            to.copy_((exact / s[:, None]).round_().clamp_(-127, 127))
        return StoredWeight(self, {"": values, "_scale": scale})

    def dequantize(self, stored: StoredWeight) -> Tensor:
        return stored.tensors[""] * stored.tensors["_scale"].unsqueeze(1)

    def pack(self, parts: Sequence[StoredWeight], kernel: native.Kernel) -> tuple[Tensor, Tensor | None]:
        scale = torch.cat([part.tensors["_scale"].float() for part in parts])
        return kernel.operations.pack([part.tensors[""] for part in parts], kernel.layout), scale

    def multiply(self, x: Tensor, stored: StoredWeight, bias: Tensor | None) -> Tensor:
        y = F.linear(x.float(), stored.tensors[""].float()) * stored.tensors["_scale"]
        return (y if bias is None else y + bias).to(x.dtype)


DENSE, INT8 = Dense(), Int8()
_REGISTERED: dict[str, WeightFormat] = {}


def register(format: WeightFormat) -> None:
    """Make a format known by its name: to `quantize=`, to `--quantize`'s check, and to checkpoints."""
    _REGISTERED[format.name] = format


register(INT8)


def names() -> tuple[str, ...]:
    """What `quantize` may be, besides None."""
    return tuple(_REGISTERED)


def find(name: str | None) -> WeightFormat:
    """The format of a name; None is the weights as they are.

    Raises:
        ConfigurationError: there is no such format.
    """
    if name is None:
        return DENSE
    if name not in _REGISTERED:
        allowed = ", ".join(repr(known) for known in names())
        raise ConfigurationError(
            f"quantize={name!r} is not supported: use {allowed}, or None for the weights as they are."
        )
    return _REGISTERED[name]


def stored_as(name: str, dtypes: Mapping[str, torch.dtype]) -> WeightFormat:
    """The format of a checkpoint's matrix `name`, given the dtypes of all tensors by name; `DENSE` where no other's fits."""
    for format in _REGISTERED.values():
        if dtypes[name] == format.dtype and all(name + suffix in dtypes for suffix in format.suffixes):
            return format
    return DENSE
