"""A group of one: everything stays here, nothing waits."""

from __future__ import annotations

from surefoot.parallel.group import Alone, Group


def test_alone_is_a_group() -> None:
    group: Group = Alone()
    assert (group.rank, group.size) == (0, 1)
    assert group.broadcast({"width": [1, 2]}) == {"width": [1, 2]}
    assert group.all_gather(3) == [3]
    group.barrier()
    group.leave()
