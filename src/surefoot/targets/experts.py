"""Who computes the experts of a mixture: the place where another executor can stand.

transformers' mixtures look up their experts' function by the name in their configuration. `install` puts an executor on every
experts module and registers surefoot's function under `EXPERTS_NAME`, which calls it. An executor is made from the experts
module and called with what the router chose; where the rows go, and on which device or rank, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from surefoot.kernels.linear import PackedLinear

EXPERTS_NAME = "surefoot"


class ExpertExecutor(Protocol):
    """Computes the experts of one layer."""

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' results by weight.

        Args:
            hidden: [T, H], inputs of the layer's experts.
            chosen: [T, k] int64, experts of every row; the number of experts (or more) names none.
            weights: [T, k], their weights.

        Returns:
            [T, H] in hidden's dtype.
        """
        ...


class PackedExperts:
    """One packed product of gate and up, and one of down, per expert; the rows that chose an expert share its reading.

    A row's bits do not depend on the other rows: its products do not (`PackedLinear`), and its k results are added in float32
    in the order of its own choices. The experts module gives its weights away.
    """

    def __init__(self, experts: Any, quantize: str | None = None) -> None:
        self.num_experts: int = experts.num_experts
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.activate: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        self.finish: Callable[[Tensor], Tensor] | None = getattr(experts, "post_expert_norm", None)
        self.first, self.second = (self._packed(experts, which, quantize) for which in (name, "down_proj"))

    @staticmethod
    def _packed(experts: Any, name: str, quantize: str | None) -> list[PackedLinear]:
        weights = getattr(experts, name).detach()  # [experts, N, K], or [experts, K, N]
        biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
        setattr(experts, name, None)
        transposed = weights.transpose(1, 2) if experts.is_transposed else weights
        return [PackedLinear(w, bias, quantize=quantize) for w, bias in zip(transposed, biases, strict=True)]

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, k = chosen.shape
        experts = chosen.flatten()
        results = hidden.new_zeros(rows * k, hidden.shape[1])
        for expert in experts.unique().tolist():
            if expert >= self.num_experts:
                continue
            here = (experts == expert).nonzero().squeeze(1)
            result = self.second[expert](self.activate(self.first[expert](hidden[here // k])))
            results[here] = result if self.finish is None else self.finish(result)
        weighted = results.view(rows, k, -1).float() * weights.float().unsqueeze(-1)
        total = weighted[:, 0]
        for i in range(1, k):
            total = total + weighted[:, i]
        return total.to(hidden.dtype)


EXECUTORS: dict[str, Callable[[Any, str | None], ExpertExecutor]] = {"packed": PackedExperts}
"""Made from an experts module and the name of a weight format."""


def surefoot_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The function registered with transformers."""
    return experts.executor(hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, surefoot_experts)


def install(model: Any, executor: str, quantize: str | None = None) -> bool:
    """Put an executor of `EXECUTORS` in the place of every mixture's experts.

    Returns:
        Whether the model has experts that can be replaced.
    """
    found = [module for module in model.modules() if _is_replaceable(module)]
    if not found or not model._can_set_experts_implementation():
        return False
    for experts in found:
        experts.executor = EXECUTORS[executor](experts, quantize)
    model.set_experts_implementation(EXPERTS_NAME)
    return True


def _is_replaceable(module: nn.Module) -> bool:
    """Whether a module's experts are dispatched by name and their weights are those of `PackedExperts`."""
    weight: Any = getattr(module, "down_proj", None)
    return hasattr(module, "is_transposed") and isinstance(weight, Tensor) and weight.dim() == 3
