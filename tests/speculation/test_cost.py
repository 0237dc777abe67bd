"""The cost table: staircase, running maximum, provenance, and what a damaged file says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import CostTableError, SurefootError
from surefoot.speculation import CostTable

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"token_buckets": ()}, "empty"),
    ({"token_buckets": (1, 1, 2)}, "strictly increasing"),
    ({"token_buckets": (0, 1, 2)}, "at least 1"),
    ({"token_buckets": (1, 2.5, 3)}, "integers"),
    ({"verify_ms": ((1.0, 2.0),)}, "2 entries, token_buckets has 3"),
    ({"verify_ms": ((1.0, math.nan, 2.0),)}, "finite"),
    ({"verify_ms": ((1.0, math.inf, 2.0),)}, "finite"),
    ({"verify_ms": ((0.0, 1.0, 2.0),)}, "positive"),
    ({"verify_ms": (("a", 1.0, 2.0),)}, "numbers"),
    ({"verify_ms": ((1.0, 2.0, 3.0),) * 2}, "1 context lengths but 2"),
    ({"draft_ms": (-1.0,)}, "at least 0"),
    ({"draft_ms": (1.0, 2.0)}, "2 entries, draft_requests has 1"),
    ({"draft_requests": ()}, "empty"),
    ({"fixed_overhead_ms": math.nan}, "finite"),
    ({"draft_depths": (1, 2), "draft_depth_ms": (1.0,)}, "1 entries, draft_depths has 2"),
    ({"draft_depths": (0, 2), "draft_depth_ms": (1.0, 2.0)}, "at least 1"),
    ({"batch_sizes": (1, 2), "batch_overhead_ms": (1.0,)}, "1 entries, batch_sizes has 2"),
    ({"batch_overhead_ms": (1.0,)}, "empty"),
    ({"token_buckets": 3}, "token_buckets must be a list, got 3"),
    ({"token_buckets": (1, 4, 1 << 70)}, "token_buckets"),
    ({"verify_ms": 2.0}, "verify_ms must be a list, got 2.0"),
    ({"verify_ms": (None,)}, "verify_ms must be a list, got None"),
    ({"verify_ms": ((1.0, 2.0, 10**400),)}, "verify_ms must be finite"),
    ({"draft_ms": 1.0}, "draft_ms must be a list, got 1.0"),
    ({"batch_sizes": 1, "batch_overhead_ms": (1.0,)}, "batch_sizes must be a list, got 1"),
    ({"captured_tokens": "8"}, "captured_tokens must be an integer or null, got '8'"),
    ({"fixed_overhead_ms": None}, "fixed_overhead_ms must be numbers, got None"),
    ({"unsteady": 1.5}, "unsteady must be a share of 0 ... 1 or null, got 1.5"),
    ({"unsteady": "no"}, "unsteady must be a share"),
]


def table(**changes: Any) -> CostTable:
    return CostTable(**{"token_buckets": (1, 4, 8), "verify_ms": ((1.0, 2.0, 4.0),), **changes})


@pytest.mark.parametrize(("changes", "message"), MALFORMED)
def test_each_malformed_table_has_its_own_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        table(**changes)


def test_staircase_inside_the_buckets_and_linear_beyond() -> None:
    costs = table().verify_costs(0, 13)
    assert costs[:9].tolist() == [1, 1, 2, 2, 2, 4, 4, 4, 4]
    np.testing.assert_allclose(costs[9:], 4 + 0.5 * np.arange(1, 5))  # the slope of the upper half, 4 to 8 tokens


def test_points_beyond_the_captured_range_are_interpolated() -> None:
    costs = table(captured_tokens=4).verify_costs(1, 8)
    np.testing.assert_allclose(costs, [1, 2, 2, 2, 2.5, 3, 3.5, 4])


def test_running_maximum_over_tokens_and_context_lengths() -> None:
    noisy = CostTable((1, 2, 4), ((3.0, 2.0, 5.0), (2.5, 4.0, 4.5)), context_lengths=(0, 100))
    assert noisy.verify_costs(1, 4).tolist() == [3, 3, 5, 5]
    assert noisy.verify_costs(1, 4, 100).tolist() == [3, 4, 5, 5]
    assert noisy.verify_ms == ((3.0, 2.0, 5.0), (2.5, 4.0, 4.5))  # the file keeps what was measured


def test_context_is_interpolated_between_lengths_and_extended_beyond() -> None:
    grown = CostTable((1, 2), ((1.0, 2.0), (3.0, 6.0)), context_lengths=(0, 100))
    assert [grown.verify_ms_at(2, context) for context in (0, 50, 100, 150)] == [2, 4, 6, 8]


def test_draft_and_overheads_do_not_cancel() -> None:
    full = table(
        draft_requests=(1, 4),
        draft_ms=(1.0, 4.0),
        fixed_overhead_ms=0.5,
        batch_sizes=(1, 4),
        batch_overhead_ms=(0.25, 1.0),
    )
    assert full.draft_ms_at(0) == 0.0
    assert [full.draft_ms_at(requests) for requests in (1, 2, 4, 6)] == [1, 2, 4, 6]
    assert [full.overhead_ms_at(requests) for requests in (1, 3, 4, 9)] == [0.75, 0.75, 1.5, 1.5]
    assert full.step_costs(2, 4, 1)[0] == 2.0 + 2.0 + 0.75
    assert full.step_costs(2, 4, 1, draft_requests=0)[0] == 2.0 + 0.75


def test_json_round_trip_and_fingerprint(tmp_path: Path) -> None:
    fingerprint = {"model": "m", "gamma": 7, "threads": 2, "buckets": (1, 4, 8), "versions": {"torch": "2.13"}}
    measured = table(fingerprint=fingerprint, captured_tokens=4, batch_sizes=(1,), batch_overhead_ms=(0.1,))
    measured.save(tmp_path / "cost.json")
    loaded = CostTable.load(tmp_path / "cost.json", fingerprint)
    assert loaded.to_dict() == measured.to_dict()
    with pytest.raises(CostTableError, match=r"gamma: table 7, engine 5; threads: table 2, engine 8.*surefoot profile"):
        CostTable.load(tmp_path / "cost.json", {**fingerprint, "gamma": 5, "threads": 8})
    with pytest.raises(CostTableError, match="dtype: table 'unset', engine 'bf16'"):
        loaded.require({**fingerprint, "dtype": "bf16"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "expected an object"),
        ("{}", "not a cost table"),
        ('{"format": "surefoot-cost-table", "version": 2}', "version 2"),
        ('{"format": "surefoot-cost-table", "version": 1}', "lacks 'token_buckets'"),
        (json.dumps({**table().to_dict(), "token_buckets": 3}), "token_buckets must be a list"),
        (json.dumps({**table().to_dict(), "fingerprint": 3}), "fingerprint"),
    ],
)
def test_each_malformed_file_has_its_own_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostTableError, match=message):
        CostTable.load(tmp_path / "cost.json")


def test_flat_tables_know_it() -> None:
    assert table(verify_ms=((2.0, 2.0, 2.0),)).is_flat
    assert table(verify_ms=((2.0, 1.0, 1.5),)).is_flat  # noise only: the running maximum never rises
    assert not table().is_flat


def test_shallow_drafts_cost_what_as_many_rows_cost() -> None:
    """D of n requests at depth g is D of n * g rows: below gamma rows from one request's depths, above from requests."""
    costs = table(draft_requests=(1, 3), draft_ms=(10.0, 22.0), draft_depths=(1, 2, 4), draft_depth_ms=(4.0, 6.0, 10.0))
    assert [costs.draft_ms_at(1, depth) for depth in (1, 2, 3, 4, 9, None)] == [4.0, 6.0, 8.0, 10.0, 10.0, 10.0]
    assert [costs.draft_ms_at(2, depth) for depth in (1, 2, 3, 4)] == [6.0, 10.0, 13.0, 16.0]
    assert costs.draft_ms_at(0, 2) == 0.0
    assert costs.step_costs(2, 2, 1, depth=1)[0] == costs.step_costs(2, 2, 1)[0] - 10.0
    assert costs.scaled(2.0).draft_ms_at(1, 2) == 12.0
    assert CostTable.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert table(draft_ms=(5.0,)).draft_ms_at(1, 1) == 5.0  # never measured


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurefootError, match=r"cannot write .*file/table.json: .*must be a directory"):
        table().save(tmp_path / "file" / "table.json")


def test_a_table_is_not_scaled_by_nothing() -> None:
    with pytest.raises(CostTableError, match="scaled"):
        table().scaled(0.0)


FULL = table(
    draft_requests=(1, 3),
    draft_ms=(1.0, 2.0),
    draft_depths=(1, 2),
    draft_depth_ms=(0.5, 1.0),
    captured_tokens=4,
    batch_sizes=(1,),
    batch_overhead_ms=(0.1,),
    unsteady=0.25,
    fingerprint={"gamma": 7},
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FULL.to_dict())), ANYTHING)
def test_any_value_in_any_field_is_read_or_named(name: str, value: Any) -> None:
    """A damaged file never raises anything else, and a table that was read can be planned with."""
    read: CostTable | None = None
    problem = ""
    try:
        read = CostTable.from_dict({**FULL.to_dict(), name: value})
    except CostTableError as raised:
        problem = str(raised)
    if read is None:
        assert name.split("_")[0] in problem  # of two lists of different lengths either may be named
    else:
        assert np.isfinite(read.step_costs(2, 1, 16, 100.0, depth=1)).all()
        assert read.bucket_of(3) >= 0


@pytest.mark.parametrize(
    ("new", "saved", "replaces"),
    [
        (0.38, 0.05, False),
        (0.38, None, False),  # of an older version: its steadiness is not known
        (0.38, 0.6, True),
        (0.38, 0.38, True),
        (0.2, 0.05, True),
        (None, 0.05, True),
    ],
)
def test_an_unsteady_table_does_not_replace_a_steadier_one(
    new: float | None, saved: float | None, replaces: bool
) -> None:
    assert table(unsteady=new).replaces(table(unsteady=saved)) == replaces
    assert table(unsteady=new).replaces(None)
    assert CostTable.from_dict(table(unsteady=new).to_dict()).unsteady == new
