"""Which steps are measured, and what is left out where there is no time."""

from __future__ import annotations

from surefoot.profiling.points import Point, buckets_up_to, points_of, visits_within


def test_buckets_and_mixes() -> None:
    assert buckets_up_to(8) == [1, 2, 3, 4, 6, 8]
    assert buckets_up_to(128) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]
    assert buckets_up_to(10)[-1] == 10
    mixes = {(point.rows, point.requests) for point in points_of((64,), max_num_seqs=4, gamma=3)}
    assert mixes == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 4), (6, 4), (8, 4), (12, 4), (16, 4)}
    assert all(requests <= rows <= requests * 4 for rows, requests in mixes)


def test_padded_sizes_and_shorter_blocks_are_points() -> None:
    sizes = (2, 4, 8, 16)
    points = points_of((64, 256), 2, 4, lambda rows: next(size for size in sizes if size >= rows), model_gamma=4)
    assert sorted({point.rows for point in points if point.depth is None}) == [2, 4, 8, 10]
    assert [point for point in points if point.depth] == [Point(64, 1, 1, depth) for depth in (1, 2, 3)]


def test_what_there_is_no_time_for_is_left_out_step_by_step() -> None:
    points = points_of((64, 1024), 16, 7, model_gamma=7)

    def rows_and_visits(seconds: float) -> tuple[list[int], set[int]]:
        found = visits_within(points, lambda point: 1.0 * point.rows, seconds)
        by_context = [sorted({point.rows for point in found if point.context == context}) for context in (64, 1024)]
        assert by_context[0] == by_context[1]  # a table needs the same rows at every context
        assert {point.requests for point in found} >= {1, 16}
        return by_context[0], set(found.values())

    assert rows_and_visits(1e6) == (buckets_up_to(128), {2})
    assert rows_and_visits(1.3) == ([1, 2, 4, 8, 16, 32, 64, 128], {2})
    assert rows_and_visits(0.8) == ([1, 2, 4, 8, 16, 32, 64, 128], {1})
    assert rows_and_visits(0.0) == ([1, 4, 16, 64, 128], {1})


def test_what_is_left_out_saves_the_time() -> None:
    points = points_of((64,), 16, 7)
    for seconds in (2.0, 1.0, 0.6):
        found = visits_within(points, lambda point: 1.0 * point.rows, seconds)
        assert sum(visits * point.rows for point, visits in found.items()) <= seconds * 1e3
