"""Which steps a profile measures, and how many of them there is time for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

VISITS = 2
"""How often every point is measured at least where there is time: one measurement cannot show whether it was disturbed."""


@dataclass(frozen=True, order=True)
class Point:
    """A step to measure: `rows` target rows by `requests` requests at `context` cached tokens each."""

    context: int
    rows: int
    requests: int
    depth: int | None = None  # tokens drafted of each block; where it is given, D alone is what counts


def buckets_up_to(rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, then powers of two, and `rows` itself."""
    powers = [1 << k for k in range(rows.bit_length())]
    halfway = [power * 3 // 2 for power in powers if power <= 16]
    return sorted({size for size in (*powers, *halfway, rows) if size <= rows})


def points_of(
    contexts: tuple[int, ...],
    max_num_seqs: int,
    gamma: int,
    bucket: Callable[[int], int] = lambda rows: rows,
    model_gamma: int | None = None,
) -> list[Point]:
    """Every bucket at every context, by as few requests as can bring so many rows and by as many.

    Where every request has drafts to verify anyway, one mix is enough.

    Args:
        bucket: rows that a pass is padded to; only padded sizes have a time of their own.
        model_gamma: tokens of a whole block of the drafter's model; its shorter blocks are measured as well.
    """
    points = []
    limit = max_num_seqs * (gamma + 1)
    for rows in sorted({min(bucket(size), limit) for size in buckets_up_to(limit)}):
        most = min(rows, max_num_seqs)
        mixes = {most} if rows > max_num_seqs else {-(-rows // (gamma + 1)), most}
        points += [Point(context, rows, requests) for context in contexts for requests in sorted(mixes)]
    if model_gamma is not None:
        points += [Point(contexts[0], 1, 1, depth) for depth in buckets_up_to(model_gamma - 1)]
    return points


def visits_within(points: Sequence[Point], cost_ms: Callable[[Point], float], seconds: float) -> dict[Point, int]:
    """How often to measure which points: all of them twice, or as much of that as fits into `seconds`.

    First the rows between powers of two are left out, then the repeats, then every second power of two. What is left is
    measured whatever it takes.

    Args:
        cost_ms: what one measurement of a point takes.
    """
    sizes = [point.rows for point in points]
    ends = min(sizes), max(sizes)
    powers = [point for point in points if point.rows & (point.rows - 1) == 0 or point.rows in ends]
    fewest = [point for point in powers if point.rows.bit_length() % 2 or point.rows in ends]
    choices = [(points, VISITS), (powers, VISITS), (powers, 1), (fewest, 1)]
    for chosen, visits in choices:
        if sum(map(cost_ms, chosen)) * visits <= seconds * 1e3:
            break
    return dict.fromkeys(chosen, visits)
