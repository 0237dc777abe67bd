"""Which tokens may come next: masks that follow the tokens of a block, for grammars and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class TokenMask(Protocol):
    """What one request may emit.

    The engine asks for every row it verifies and, left to right, for every position that is drafted by a distribution; p and
    q get the same answer. Where nothing is allowed for q, the block ends there; where nothing is allowed for p, the request
    ends with an error.
    """

    def allowed(self, token_ids: Sequence[int]) -> Tensor:
        """[V] bool, by target id, True where a token may follow.

        Args:
            token_ids: the output so far, drafts of the block included. A draft that breaks the rules is rejected, but the
                rows after it have been asked for already: any answer to such a text will do, an exception will not.
        """
        ...


def masked(
    logits: Tensor,
    masks: Mapping[int, TokenMask],
    history: Tensor,
    slots: Tensor,
    begins: Tensor,
    ends: Tensor,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """-inf at the logits of tokens that are not allowed. Reads the tokens: a device that is not the host waits here.

    Args:
        logits: [N, V] float32.
        masks: by state slot; rows of other slots stay as they are.
        history: [S, L] int64.
        slots: [N] int64, state slot of each row.
        begins, ends: [N] int64, where the output so far begins and ends in the history of the slot.
        vocabulary: [V] int64, target id of each column (None: identity).
    """
    logits = logits.clone()
    for row, (slot, begin, end) in enumerate(zip(slots.tolist(), begins.tolist(), ends.tolist(), strict=True)):
        if (mask := masks.get(slot)) is None:
            continue
        allowed = mask.allowed(history[slot, begin:end].tolist()).to(logits.device)
        if vocabulary is not None:
            allowed = allowed[vocabulary]
        elif (missing := logits.shape[1] - allowed.shape[0]) > 0:  # a head that is padded beyond the tokenizer
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        logits[row].masked_fill_(~allowed, -torch.inf)
    return logits
