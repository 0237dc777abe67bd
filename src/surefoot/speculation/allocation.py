"""Budget K to per-request widths: the K largest current survivals over all (request, position)."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(survival: Tensor, budget: int, limits: Tensor, min_width: int = 0) -> Tensor:
    """Give `budget` verification slots to the largest survivals, on the device and without a host read.

    Survival never rises along a request, so the chosen positions of a request are a prefix. Ties break on
    (position, request), never on a token value.

    Args:
        survival: [R, gamma] float32 in [0, 1], non-increasing along gamma.
        budget: K, known on the host. More than the limits allow is not given out.
        limits: [R] int64, largest width of each request (0 ... gamma).
        min_width: positions 1 ... min_width are served before all others, where the limit allows.

    Returns:
        [R] int64 widths; their sum is min(budget, limits.sum()).
    """
    requests, gamma = survival.shape
    if requests <= 1:
        return limits.clamp(max=budget)
    # Position-major, so that a stable sort leaves ties in the order (position, request).
    position = torch.arange(gamma, device=survival.device).unsqueeze(1)
    rank_key = survival.t() if not min_width else survival.t().masked_fill(position < min_width, 2.0)
    ordered, index = torch.where(position < limits, rank_key, -1.0).reshape(-1).sort(descending=True, stable=True)
    served = (ordered[:budget] >= 0).to(limits.dtype)
    return torch.zeros_like(limits).scatter_add(0, index[:budget] % requests, served)
