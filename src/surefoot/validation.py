"""Range checks of options and parameters, raised where the value is given: what it is, what is allowed, what to do.

Scalars of numpy count as numbers, `bool` does not. Every check returns the value as a plain Python number.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Sequence
from typing import Any

from surefoot.errors import SurefootError

LARGEST_FLOAT32 = 3.4028234663852886e38
LARGEST_INT32, LARGEST_INT64 = (1 << 31) - 1, (1 << 63) - 1
LONGEST_SHOWN = 60
"""Characters of a refused value that an error message shows."""


def shown(value: Any) -> str:
    """`repr(value)` on one line, shortened."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer with more digits than Python prints
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def number(
    name: str,
    value: Any,
    error: type[SurefootError],
    *,
    low: float = -LARGEST_FLOAT32,
    high: float = LARGEST_FLOAT32,
    open_low: bool = False,
    remedy: str,
) -> float:
    """A finite number in [low, high], or in (low, high].

    Computation is in float32, so a value that float32 rounds to 0 counts as 0 and one that overflows it is refused.
    """
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
    held = ctypes.c_float(found).value
    if not math.isfinite(held) or found > high or not (low < held if open_low else low <= found):
        bottom = f"above {low:g}" if open_low else f"{low:g}"
        raise error(f"{name} is {shown(value)}; allowed: {bottom} … {high:g}; {remedy}")
    return found


def integer(
    name: str,
    value: Any,
    error: type[SurefootError],
    *,
    low: int,
    high: int,
    remedy: str,
) -> int:
    """A whole number in [low, high]."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= high:
        raise error(f"{name} is {shown(value)}; allowed: a whole number, {low} … {high}; {remedy}")
    return int(value)


def flag(name: str, value: Any, error: type[SurefootError]) -> bool:
    """True or False; numpy's own count as well."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise error(f"{name} is {shown(value)}; allowed: True or False")


def choice(name: str, value: Any, allowed: Sequence[str], error: type[SurefootError], *, remedy: str) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise error(f"{name} is {shown(value)}; allowed: {', '.join(allowed)}; {remedy}")
    return value
