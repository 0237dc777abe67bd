"""A block drafter's hidden states in one dense pass: the reference for the paged cache and for the trainer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.model import DSparkModel


def dense_hidden(
    model: DSparkModel,
    features: Tensor,
    context_positions: Tensor,
    anchors: Tensor,
    anchor_positions: Tensor,
    masks: Mapping[int | None, Tensor],
) -> Tensor:
    """Hidden states of many blocks over known contexts, with dense masks: what serving and training compute in parts.

    Args:
        features: [N, C, m * d_target] target hidden states of N sequences.
        context_positions: [N, C] int64.
        anchors: [N, A] int64 anchor tokens.
        anchor_positions: [N, A] int64.
        masks: by window (`config.window`), [N, A * block_size, C + A * block_size] bool, see `block_mask`.

    Returns:
        [N, A, block_size, d].
    """
    context, rotations = model.context(features), model.rotations(context_positions)

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = model.layers[index]
        past = layer.self_attn.key_value(context, rotations[layer.layer_type])
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(past, (key, value), strict=True))
        mask = masks[model.config.window(index)].unsqueeze(1)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, mask, scale=model.config.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    tokens, positions = model.block_tokens(anchors).flatten(1), model.block_positions(anchor_positions).flatten(1)
    return model.backbone(tokens, positions, attend).unflatten(1, (anchors.shape[1], -1))


def block_mask(
    config: DSparkConfig,
    context_positions: Tensor,
    anchor_positions: Tensor,
    window: int | None = None,
    context_owner: Tensor | None = None,
    anchor_owner: Tensor | None = None,
) -> Tensor:
    """Who sees whom: a slot sees the context before its anchor, and its own block.

    Args:
        context_positions: [N, C] int64.
        anchor_positions: [N, A] int64.
        window: of the layers the mask is for (`config.window`): positions seen before the anchor.
        context_owner, anchor_owner: [N, C] and [N, A] document ids where a row packs several documents.

    Returns:
        [N, A * block_size, C + A * block_size] bool.
    """
    distance = anchor_positions.unsqueeze(2) - context_positions.unsqueeze(1)  # [N, A, C]
    seen = distance > 0
    if window is not None:
        seen &= distance <= window
    if context_owner is not None and anchor_owner is not None:
        seen &= anchor_owner.unsqueeze(2) == context_owner.unsqueeze(1)
    slots = torch.arange(anchor_positions.shape[1] * config.block_size, device=anchor_positions.device)
    block = slots // config.block_size
    own = block.unsqueeze(1) == block.unsqueeze(0)
    if window is not None and not config.sliding_window_non_causal:
        own &= slots.unsqueeze(1) >= slots.unsqueeze(0)
    return torch.cat([seen[:, block], own.expand(seen.shape[0], -1, -1)], 2)
