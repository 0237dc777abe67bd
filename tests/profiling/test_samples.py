"""From milliseconds of single steps to a cost table."""

from __future__ import annotations

import pytest

from surefoot.profiling.samples import Samples

STAGES = {"update": 0.5, "draft": 2.0, "plan": 0.25, "pack": 0.25, "target": 10.0, "accept": 1.0, "extend": 0.5}


def test_the_stages_of_a_step_add_up_to_it() -> None:
    samples = Samples.empty()
    samples.add(64, 5, 2, None, STAGES, 16.0)
    assert samples.draft == {2: [2.0]}
    assert samples.verify[64, 5] == {2: [11.5]}
    assert samples.overhead == {2: [2.5]}
    samples.add(64, 1, 1, 3, STAGES, 16.0)
    assert samples.depth == {3: [2.0]}
    assert len(samples.verify) == 1


def test_disturbed_points_do_not_make_their_neighbours_dear() -> None:
    """Times of 10 + rows, three of them disturbed: a pass is never dearer than a larger one, or than one with more cached."""
    samples, rows = Samples.empty(), (1, 2, 3, 4, 8)
    for context, more in ((64, 0.0), (1024, 1.0)):
        for count in rows:
            slow = {(64, 3): 40.0, (1024, 8): 9.0}.get((context, count), 0.0)
            samples.verify[context, count][1] += [10.0 + count + more + slow] * 2
    for requests, slow in ((1, 7.0), (2, 0.0), (4, 0.0)):
        samples.draft[requests] += [2.0 + requests + slow, 2.0 + requests]
        samples.overhead[requests] += [1.0]
    for depth, slow in ((1, 0.0), (2, 30.0), (3, 0.0)):
        samples.depth[depth] += [1.0 + depth / 2 + slow]
    table = samples.table({}, 4)
    assert table.verify_ms[0] == (11.0, 12.0, 14.0, 14.0, 18.0)
    assert table.verify_ms[1][:4] == (12.0, 13.0, 14.0, 15.0)
    assert table.draft_ms == (4.0, 4.0, 6.0)
    assert table.draft_depth_ms == (1.5, 2.5, 2.5, 4.0)
    assert samples.unsteady() == pytest.approx(1 / 13)
    assert table.unsteady == samples.unsteady()
    assert Samples.empty().unsteady() is None
