"""Tables are found by what they were measured on; damaged ones never stop a start."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.engine.assembly import make_policy
from surefoot.engine.engine import Engine
from surefoot.engine.fingerprint import find_table, fingerprint, load_table, table_path
from surefoot.engine.options import EngineOptions
from surefoot.errors import CostTableError
from surefoot.profiling.profile import profile
from surefoot.sampling import SamplingParams
from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import Reason
from tests.engine.engines import EngineUnderTest, tiny_drafter
from tests.tiny_models import tiny_target

PROMPTS = [[1, 2, 3, 4] * 4, [5, 6] * 8, [9, 8, 7] * 5]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The native kernels live in the real cache and are loaded by now.
    tiny_target()
    from surefoot.kernels import native

    native.available()
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    return tmp_path


def saved(max_num_seqs: int = 8, gamma: int = 4) -> Path:
    target = tiny_target()
    drafter = tiny_drafter(target, "prompt-lookup", gamma)
    measured = fingerprint(target, drafter, max_num_seqs=max_num_seqs, block_size=16)
    path = table_path(measured)
    CostTable((1, 2, 4), ((1.0, 1.5, 2.5),), fingerprint=measured).save(path)
    return path


def policy_for(max_num_seqs: int, gamma: int = 4, cost_table: str | Path = "auto", **config: int) -> CostTable | None:
    target = tiny_target()
    settings = EngineOptions(max_num_seqs=max_num_seqs, cost_table=cost_table, **config)
    drafter = tiny_drafter(target, "prompt-lookup", gamma)
    return make_policy(target, drafter, settings).costs.table


def test_a_table_is_found_by_fingerprint_and_serves_fewer_requests(cache: Path) -> None:
    assert policy_for(8) is None
    saved(8)
    found = policy_for(8)
    assert found is not None
    assert found.fingerprint["max_num_seqs"] == 8
    assert policy_for(2) == found
    saved(4)
    narrower = policy_for(2)
    assert narrower is not None
    assert narrower.fingerprint["max_num_seqs"] == 4
    assert policy_for(8) == found
    assert policy_for(16) is None
    assert policy_for(8, gamma=3) is None
    assert policy_for(8, block_size=4) is None
    assert policy_for(8, cost_table="none") is None


def test_another_engine_is_refused_by_name_of_the_field(cache: Path) -> None:
    path = saved(8)
    assert policy_for(4, cost_table=path) is not None
    with pytest.raises(CostTableError, match=r"gamma: table 4, engine 3.*surefoot profile"):
        policy_for(8, gamma=3, cost_table=path)
    with pytest.raises(CostTableError, match=r"max_num_seqs: table 8, engine 16"):
        policy_for(16, cost_table=path)
    with pytest.raises(CostTableError, match="cannot read"):
        policy_for(8, cost_table=cache / "nothing.json")


DAMAGED = {
    "empty": "",
    "truncated": '{"format": "surefoot-cost-table", "version": 1, "token_buck',
    "another object": "{}",
    "no object": "[1, 2]",
    "deep": "[" * 100_000,
    "not text": "\udcff\udcfe",
    "wrong types": '{"format": "surefoot-cost-table", "version": 1, "token_buckets": 3, "verify_ms": "x", '
    '"draft_requests": {}, "draft_ms": null}',
    "wrong numbers": '{"format": "surefoot-cost-table", "version": 1, "token_buckets": [1, 2], "verify_ms": [[1e999, "1"]], '
    '"draft_requests": [1], "draft_ms": [0]}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_in_the_cache_is_set_aside_and_said_once(cache: Path, text: str) -> None:
    path = saved(8)
    path.write_text(text, errors="surrogateescape")
    wanted = fingerprint(tiny_target(), None, max_num_seqs=8, block_size=16)
    with pytest.raises(CostTableError):
        load_table(path, wanted)
    with pytest.warns(RuntimeWarning, match=f"was set aside as {path.name}.damaged") as caught:
        assert find_table(wanted) is None
    assert len(caught) == 1
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_table(wanted) is None
        saved(8)  # made anew
        assert policy_for(8) is not None


def test_a_table_of_another_version_is_left_alone(cache: Path) -> None:
    path = saved(8)
    text = path.read_text().replace('"version": 1', '"version": 2')
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy_for(8) is None
    assert path.read_text() == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_table_that_may_not_be_read_is_left_out(cache: Path) -> None:
    path = saved(8)
    path.chmod(0)
    with pytest.warns(RuntimeWarning, match="is left out: cannot read"):
        assert policy_for(8) is None
    assert path.exists()


def test_a_damaged_table_in_a_cache_that_cannot_be_written_is_left_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(8).write_text("{")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="is left out"):
        assert policy_for(8) is None


def test_the_fingerprint_survives_json_and_knows_drafters_apart(cache: Path) -> None:
    target = tiny_target()
    marks = [
        fingerprint(target, tiny_drafter(target, name, 3), max_num_seqs=4, block_size=16)
        for name in ("none", "prompt-lookup", "dspark", "dspark-gated")
    ]
    assert len({table_path(mark) for mark in marks}) == 4
    CostTable((1,), ((1.0,),), fingerprint=marks[2]).save(table_path(marks[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_table(marks[2]) is not None
        assert find_table(marks[3]) is None


def test_an_engine_with_a_found_table_plans(cache: Path) -> None:
    target = tiny_target()
    options = EngineOptions(max_num_seqs=4, max_model_len=200)
    drafter = tiny_drafter(target, "prompt-lookup", 4)
    found = profile(Engine(target, drafter, make_policy(target, drafter, options), options), budget_s=0.0)
    # Of a tiny target on a busy machine every pass may look alike, and a flat table has nothing to plan with.
    rising = tuple(
        tuple(ms + rows for ms, rows in zip(curve, found.table.token_buckets, strict=True))
        for curve in found.table.verify_ms
    )
    replace(found.table, verify_ms=rising).save(table_path(found.table.fingerprint))
    policy = make_policy(target, drafter, options)
    assert "measured cost table" in policy.describe()
    engine = EngineUnderTest(target, drafter, policy, options)
    engine.run(PROMPTS, SamplingParams(temperature=0.0, max_tokens=80))
    assert Reason.NO_TABLE.value not in engine.statistics.reasons
    assert engine.statistics.timed_steps > 0
