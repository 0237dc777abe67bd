"""Drawing a whole block left to right in one call (`sequential.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels.linear import PackedLinear


def draft_block(
    base: Tensor,
    anchors: Tensor,
    correction: tuple[Tensor, PackedLinear] | None = None,
    vocabulary: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    sharpness: Tensor | None = None,
    copying: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw G tokens for each of R requests, where every token corrects the logits of the next one. Native kernels only.

    The same products, softmax and draws in the same order as position by position from Python: the same bits, and those
    of a request do not depend on the others.

    Args:
        base: [R, G, V] bfloat16 or float32, logits before the correction.
        anchors: [R] int64, target ids before the blocks.
        correction: W1 [V_target, r] and the packed W2: position k gets W2 W1[x_{k-1}] on top, rounded as the layer
            rounds it and added in float32. None: nothing.
        vocabulary: [V] int64, target id of each column (None: identity).
        temperature, uniforms: [R] float32 and [R, G] in [0, 1), for drawing; None takes the (first) largest logit.
        top_k, top_p, min_p: [R] each, see `filter_rows`; only with `temperature`.
        sharpness: [G] float32 > 0, position k is drawn at temperature / sharpness[k - 1] (None: 1 everywhere).
        copying: history [S, L], slots [R] and lengths [R] int64 (the anchor stands at history[slot, length]), shares of
            copies by match length, float32, and the column of every target id, int64 with -1 for none (None: the
            identity): logits are raised as by `drafters.copying`. None: nothing is copied.

    Returns:
        ids: [R, G] int64, drawn columns; -1 where the logits hold NaN or infinity: then token 0 stands for x_k.
        largest: [R, G] float32, largest probability of the corrected logits at temperature 1.
        probs: [R, G, V] float32, the very distributions that were drawn from; None without `temperature`.
    """
    table, product = (None, None) if correction is None else (correction[0], correction[1].product)
    ids, largest, probs = torch.ops.surefoot.draft_block(
        base, anchors, table, product, vocabulary, temperature, uniforms, top_k, top_p, min_p, sharpness,
        *(copying or (None,) * 5),
    )  # fmt: skip
    return ids, largest, None if temperature is None else probs
