"""The flat axis of a step in one native call: the batch of the array operations, tensor for tensor."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from surefoot.engine import step
from surefoot.engine.graphs import EagerRunner
from surefoot.engine.packing import pack, pack_with_torch
from surefoot.kernels import native
from surefoot.sampling import SamplingParams
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import build


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("buckets", [(), (4, 16, 64)])
def test_both_ways_pack_the_same_batch(
    block_size: int, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = CheapTarget()  # has a sliding and a full group
    engine = build(
        target,
        "prompt-lookup",
        width="0,3,1,4,2",
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=32,  # prompts are read in chunks, beside decodes
        runner=EagerRunner(target, buckets),
    )
    packed = 0

    def both(inputs: Any, requests: Any, widths: Any, history: Any, cache: Any, bucket: Any, **how: Any) -> Any:
        nonlocal packed
        given = (inputs, requests, widths, history, cache, bucket)
        batch, anchors = pack(*given, **how)
        reference, wanted = pack_with_torch(*given, drafts=int(widths.sum()))
        assert torch.equal(anchors, wanted)
        for field in fields(batch):
            one, other = getattr(batch, field.name), getattr(reference, field.name)
            for got, expected in zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]:
                assert torch.equal(got, expected), field.name
        packed += 1
        return batch, anchors

    monkeypatch.setattr(step, "pack", both)
    prompts = [[3, 1, 4, 1, 5] * (1 + 3 * (i % 3)) + [i] for i in range(7)]
    engine.run(prompts, SamplingParams(temperature=0, max_tokens=12))
    assert packed > 12


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
def test_a_row_outside_the_tables_is_refused_before_anything_is_read() -> None:
    one, history, table = torch.tensor([1]), torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int64)
    for slots, lengths, blocks, rows in (
        (one + 1, none, 4, 1),
        (one, none + 8, 4, 1),
        (one, none + 4, 2, 1),
        (one, none, 4, 0),
    ):
        with pytest.raises(RuntimeError, match=r"outside|do not fit"):
            torch.ops.surefoot.pack_rows(slots, lengths, none, none, history, [table], [1], blocks, rows)
