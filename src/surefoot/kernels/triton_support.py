"""Whether Triton's kernels serve CUDA tensors here, and the one warning where they do not."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

from torch import Tensor

log = logging.getLogger(__name__)

_problems: list[str] = []


@cache
def installed() -> bool:
    """Whether there is a Triton at all."""
    return find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: all on CUDA, Triton there, and nothing has failed to compile yet."""
    if not all(tensor.device.type == "cuda" for tensor in tensors):
        return False
    if not installed():
        give_up("Triton is not installed")
    return not _problems


def works() -> bool:
    """Whether CUDA tensors can be served by the Triton kernels, as far as is known."""
    return installed() and not _problems


def give_up(problem: Exception | str) -> None:
    """From here on torch's operations serve CUDA tensors; the first time, a warning says why."""
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {_first_line(problem)}"
    if not _problems:
        log.warning(
            "the Triton kernels cannot be used here (%s): torch's own operations are slower, cannot be captured in CUDA "
            "graphs, and do not promise that a row's bits are independent of the rows beside it",
            text,
        )
    _problems.append(text)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or ["no message"])[0]
