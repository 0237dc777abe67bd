"""Layout assertions (opt-in): windows, packed rows, acceptance rows and bucket must describe the same tokens.

A layout fault is silent by nature: totals still divide, rows merely belong to the wrong request. These checks read device
values back, so they are for tests and for hunting a wrong answer, not for serving.
"""

from __future__ import annotations

from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.engine.messages import StepInputs
from surefoot.engine.state import DeviceState


class LayoutError(AssertionError):
    """Two descriptions of the same step disagree."""


def check_layout(
    inputs: StepInputs, state: DeviceState, cache: PagedCache, batch: FlatBatch, widths: Tensor, anchor_row: Tensor
) -> None:
    """Compare every description of the step with the requests' own; raise `LayoutError` naming the first that differs."""
    lengths, history = state.lengths.tolist(), state.history.tolist()
    all_widths = widths.tolist()
    slots, positions = batch.row_slot.tolist(), batch.positions.tolist()
    visible, tokens = batch.kv_lens.tolist(), batch.token_ids.tolist()
    logit_rows, anchors = batch.logit_rows.tolist(), anchor_row.tolist()
    cache_slots = [places.tolist() for places in batch.cache_slots]
    written: dict[tuple[int, int], str] = {}
    end = logit = 0
    for index, slot in enumerate(inputs.slots):
        name = f"request {index} in slot {slot}"

        def check(condition: bool, what: str, name: str = name) -> None:
            if not condition:
                raise LayoutError(f"{name}: {what}")

        emits = index < inputs.num_emitting
        width = all_widths[index] if emits else 0
        if index < inputs.num_drafting:
            check(
                0 <= width <= inputs.plan.limits[index], f"width {width} is outside 0 ... {inputs.plan.limits[index]}"
            )
        else:
            check(width == 0, f"width {width} without a draft")
        rows = inputs.context_rows[index] + (width + 1 if emits else 0)
        start, end = end, end + rows
        check(end <= batch.num_rows, f"needs rows {start} ... {end}, the batch has {batch.num_rows}")
        for row in range(start, end):
            position = lengths[slot] + row - start
            check(slots[row] == slot, f"row {row} belongs to slot {slots[row]}")
            check(positions[row] == position, f"row {row} stands at position {positions[row]}, expected {position}")
            check(visible[row] == position + 1, f"row {row} sees {visible[row]} positions, expected {position + 1}")
            check(tokens[row] == history[slot][position], f"row {row} carries another token than the history")
            for group, places in enumerate(cache_slots):
                place = (group, places[row])
                check(place[1] >= cache.block_size, f"row {row} writes into the scratch block of group {group}")
                shared = cache.groups[group].stride > 1 and written.get(place) == name
                check(
                    shared or place not in written,
                    f"row {row} writes where {written.get(place)} writes (group {group})",
                )
                written[place] = name
        if emits:
            check(anchors[index] == logit, f"its anchor has logit row {anchors[index]}, expected {logit}")
            expected = list(range(start + inputs.context_rows[index], end))
            got = logit_rows[logit : logit + width + 1]
            check(got == expected, f"its logits come from rows {got}, expected {expected}")
            logit += width + 1
    if any(visible[row] for row in range(end, batch.num_rows)):
        raise LayoutError(f"a padding row after row {end} sees cached positions")
