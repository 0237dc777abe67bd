"""Cost tables in the file formats of other engines: SGLang's simple and additive form, and TensorRT-LLM's form.

None of them has a context length, and their axes are clamped at both ends. `docs/formats.md` lists the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from surefoot.errors import ConfigurationError, CostTableError
from surefoot.speculation.cost import CostTable, Floats, check_axis, is_number

ForeignFormat = Literal["sglang", "tensorrt-llm"]
FOREIGN_FORMATS: tuple[str, ...] = get_args(ForeignFormat)
FAR = 1 << 24  # a token or request count that no step reaches: the last value of a clamped curve holds up to here
LARGEST = 1e15  # of a number in a file


def import_table(data: Mapping[str, Any], form: str) -> CostTable:
    """Read a cost table of another engine. It has no fingerprint.

    Raises:
        ConfigurationError: an unknown format.
        CostTableError: a field that is missing or malformed, by name.
    """
    return from_sglang(data) if _known(form) == "sglang" else from_tensorrt_llm(data)


def export_table(
    table: CostTable, form: str, *, max_requests: int, max_batch_tokens: int, context: float = 0.0
) -> dict[str, Any]:
    """Write a cost table for another engine (SGLang: its additive form), as a JSON object.

    Args:
        max_requests: batch sizes 1 ... max_requests are written.
        max_batch_tokens: largest number of rows of a target pass.
        context: cached tokens per request at which V is taken.

    Raises:
        ConfigurationError: an unknown format.
    """
    write = to_sglang_additive if _known(form) == "sglang" else to_tensorrt_llm
    return write(table, max_requests, max_batch_tokens, context)


def _known(form: str) -> str:
    if form not in FOREIGN_FORMATS:
        raise ConfigurationError(f"cost table format is {form!r}; allowed: {', '.join(FOREIGN_FORMATS)}")
    return form


def from_sglang(data: Mapping[str, Any]) -> CostTable:
    """Read SGLang's simple form (steps/s over tokens, floor lookup) or its additive form (b + alpha(R) + theta(M)).

    Raises:
        CostTableError: a field that is missing or malformed, by name.
    """
    if "theta_seconds" in data:
        return _from_sglang_additive(data)
    tokens = _numbers(data, "sample_batch_tokens")
    rates = _numbers(data, "sample_steps_per_sec")
    if len(rates) != len(tokens):
        raise CostTableError(f"{len(tokens)} sample_batch_tokens but {len(rates)} sample_steps_per_sec")
    if not all(rate > 0 for rate in rates):
        raise CostTableError(f"sample_steps_per_sec must be positive, got {rates}")
    last = data.get("max_batch_tokens", tokens[-1] if tokens else 0)
    check_axis("sample_batch_tokens", tokens)
    if not isinstance(last, int) or not tokens[-1] <= last < FAR:
        raise CostTableError(f"max_batch_tokens must be an integer >= the last sample and < {FAR}, got {last!r}")
    # Sample i holds from its own token count up to the next sample's: a bucket that ends just before it.
    ends = (*(int(token) - 1 for token in tokens[1:]), int(last))
    times = tuple(1000.0 / rate for rate in rates)
    kept = [i for i, end in enumerate(ends) if end >= 1]
    return CostTable(
        token_buckets=(*(ends[i] for i in kept), FAR),
        verify_ms=((*(times[i] for i in kept), times[-1]),),
    )


def _from_sglang_additive(data: Mapping[str, Any]) -> CostTable:
    bias = data.get("bias_seconds")
    if not is_number(bias) or not abs(bias) <= LARGEST:
        raise CostTableError(f"bias_seconds must be a finite number, got {bias!r}")
    sizes, alpha = _clamped(data, "bs_probes", "alpha_seconds")
    tokens, theta = _clamped(data, "m_probes", "theta_seconds")
    return CostTable(
        token_buckets=tokens,
        verify_ms=(theta,),
        captured_tokens=0,
        draft_requests=sizes,
        draft_ms=alpha,
        fixed_overhead_ms=bias * 1000.0,
    )


def to_sglang_simple(table: CostTable, requests: int, max_batch_tokens: int, context: float = 0.0) -> dict[str, Any]:
    """SGLang's simple form at one batch size; it has neither D nor a context length, so both are part of the rate."""
    shelves = _shelves(table.step_costs(requests, 1, max_batch_tokens, context))
    return {
        "sample_batch_tokens": [low + 1 for low, _, _ in shelves],
        "sample_steps_per_sec": [1000.0 / ms for _, _, ms in shelves],
        "max_batch_tokens": max_batch_tokens,
    }


def to_sglang_additive(
    table: CostTable, max_requests: int, max_batch_tokens: int, context: float = 0.0
) -> dict[str, Any]:
    """SGLang's additive form at one context length; alpha is D plus the overhead of the batch size."""
    sizes = range(1, max_requests + 1)
    alpha = [table.draft_ms_at(size) + table.overhead_ms_at(size) - table.fixed_overhead_ms for size in sizes]
    tokens, theta = _shelf_points(table.verify_costs(1, max_batch_tokens, context))
    return {
        "bias_seconds": table.fixed_overhead_ms / 1000.0,
        "bs_probes": list(sizes),
        "alpha_seconds": [ms / 1000.0 for ms in alpha],
        "m_probes": tokens,
        "theta_seconds": [ms / 1000.0 for ms in theta],
    }


def from_tensorrt_llm(data: Mapping[str, Any]) -> CostTable:
    """Read TensorRT-LLM's form: times interpolated over token counts that include the bonus token, clamped outside.

    Raises:
        CostTableError: a field that is missing or malformed, by name.
    """
    tokens, times = _clamped(data, "token_counts", "step_time_ms", scale=1.0)
    sizes = _numbers(data, "batch_sizes") if data.get("batch_sizes") else ()
    overhead = _numbers(data, "batch_overhead_ms") if data.get("batch_overhead_ms") else ()
    return CostTable(
        token_buckets=tokens,
        verify_ms=(times,),
        captured_tokens=0,
        fixed_overhead_ms=data.get("fixed_overhead_ms", 0.0),
        batch_sizes=sizes,
        batch_overhead_ms=overhead,
    )


def to_tensorrt_llm(table: CostTable, max_requests: int, max_batch_tokens: int, context: float = 0.0) -> dict[str, Any]:
    """TensorRT-LLM's form at one context length; D goes into the overhead of each batch size.

    A shelf is written as its two ends, so that interpolation and a floor lookup read the same.
    """
    sizes = list(range(1, max_requests + 1))
    tokens, times = _shelf_points(table.verify_costs(1, max_batch_tokens, context))
    return {
        "token_counts": tokens,
        "step_time_ms": times,
        "fixed_overhead_ms": table.fixed_overhead_ms,
        "batch_sizes": sizes,
        "batch_overhead_ms": [
            table.draft_ms_at(size) + table.overhead_ms_at(size) - table.fixed_overhead_ms for size in sizes
        ],
    }


def _shelves(costs: Floats) -> list[tuple[int, int, float]]:
    """Maximal runs of equal cost: (first index, last index, ms)."""
    edges = np.flatnonzero(np.diff(costs)) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(costs)]]) - 1
    return [(int(low), int(high), float(costs[low])) for low, high in zip(starts, ends, strict=True)]


def _shelf_points(costs: Floats) -> tuple[list[int], list[float]]:
    """Both ends of every shelf of costs at 1, 2, ... tokens."""
    points = [(end + 1, ms) for low, high, ms in _shelves(costs) for end in sorted({low, high})]
    return [token for token, _ in points], [ms for _, ms in points]


def _numbers(data: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    values = data.get(name)
    if not isinstance(values, (list, tuple)) or not all(is_number(value) and abs(value) <= LARGEST for value in values):
        raise CostTableError(f"{name} must be a list of numbers up to {LARGEST:g}, got {values!r}")
    return tuple(values)


def _clamped(
    data: Mapping[str, Any], axis: str, values: str, scale: float = 1000.0
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A curve in ms that keeps its last value for ever; an entry at 0 tokens is replaced by the value at 1."""
    x, y = _numbers(data, axis), tuple(value * scale for value in _numbers(data, values))
    if len(x) != len(y):
        raise CostTableError(f"{axis} has {len(x)} entries, {values} has {len(y)}")
    check_axis(axis, x)
    if x[0] == 0:
        at_one = float(np.interp(1.0, x, y))
        rest = 2 if len(x) > 1 and x[1] == 1 else 1
        x, y = (1, *x[rest:]), (at_one, *y[rest:])
    return (*x, FAR), (*y, y[-1])
