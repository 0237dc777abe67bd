"""`python -m surefoot.bench.thin_products`: how near the thin matrix product comes to the memory's own speed.

For every layer shape of the two default targets and 1 … 16 rows: the product of every instruction set that this CPU offers,
`F.linear`, and a plain read of memory (the stream) take turns, and the medians are printed in one table. Every arm walks
over so many copies of the weight that no cache holds them, as a decode pass does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from surefoot.kernels import formats, native
from surefoot.kernels.linear import PackedLinear
from surefoot.machine import last_level_cache, read_cpuinfo

SHAPES: dict[str, dict[str, tuple[int, int]]] = {  # name -> (outputs, inputs)
    "qwen2.5-coder-0.5b": {
        "q·k·v": (1152, 896),
        "o": (896, 896),
        "gate·up": (9728, 896),
        "down": (896, 4864),
        "head": (151936, 896),
    },
    "gemma3-270m": {
        "q·k·v": (1536, 640),
        "o": (640, 1024),
        "gate·up": (4096, 640),
        "down": (640, 2048),
        "head": (262144, 640),
    },
}
COLD_BYTES = max(160 << 20, 2 * last_level_cache())
"""What an arm walks over before it meets a byte again."""

Arm = tuple[Callable[[Tensor], object], int]
"""What reads all copies of a weight once, and their bytes."""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stream(data: Tensor) -> object:
    """One read of `data` by all threads."""
    return torch.ops.surefoot.stream(data) if native.available() else data.sum()


def arms(outputs: int, inputs: int, isas: list[native.Isa], quantize: str | None) -> Iterator[tuple[str, Arm]]:
    """Every way of multiplying by copies of one weight: each instruction set, and torch."""
    some = torch.randn(min(outputs, 4096), inputs).bfloat16()
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]  # drawing them all takes longer than measuring
    copies = max(1, COLD_BYTES // weight.nbytes)
    for isa in isas:
        layers = [PackedLinear(weight, quantize=quantize, kernel=native.kernel(isa)) for _ in range(copies)]
        yield isa, (lambda x, layers=layers: [layer(x) for layer in layers], sum(layer.num_bytes for layer in layers))  # type: ignore[misc]
    weights = [weight.clone() for _ in range(copies)]
    yield "F.linear", (lambda x: [F.linear(x, weight) for weight in weights], copies * weight.nbytes)


def measure(
    outputs: int,
    inputs: int,
    rows: list[int],
    isas: list[native.Isa],
    data: Tensor,
    *,
    quantize: str | None = None,
    repeats: int = 5,
    limit_s: float = float("inf"),
) -> list[dict[str, Any]]:
    """GB/s of weight bytes for each arm and number of rows, and the stream's: medians of interleaved rounds.

    `repeats` rounds, fewer (but one) where `limit_s` seconds have passed.
    """
    start = time.perf_counter()
    all_arms = dict(arms(outputs, inputs, isas, quantize))
    xs = {m: torch.randn(m, inputs).bfloat16() for m in rows}
    times: dict[tuple[str, int], list[float]] = {(arm, m): [] for arm in all_arms for m in rows}
    streams: list[float] = []
    for work, _ in all_arms.values():  # touches everything once
        work(xs[rows[0]])
    for _ in range(repeats):
        for m, x in xs.items():
            streams.append(seconds(lambda: stream(data)) / data.nbytes)
            for arm, (work, size) in all_arms.items():
                times[arm, m].append(seconds(lambda work=work, x=x: work(x)) / size)  # type: ignore[misc]
        if time.perf_counter() - start > limit_s:
            break
    ceiling = 1e-9 / statistics.median(streams)
    results = []
    for (arm, m), spent in times.items():
        rate = 1e-9 / statistics.median(spent)
        result = {"isa": arm, "rows": m, "gb_s": rate, "stream_gb_s": ceiling, "of_stream": rate / ceiling}
        results.append({**result, "rounds": len(spent)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m surefoot.bench.thin_products", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="row counts M")
    parser.add_argument("--isa", choices=native.ISAS, nargs="+", help="default: every one that this CPU has")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds; the median is printed")
    parser.add_argument("--seconds", type=float, default=45, help="after this time layers are measured in one round")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--quantize", choices=formats.names(), help="pack the weights in this format")
    parser.add_argument("--model", choices=[*SHAPES], help="default: both")
    parser.add_argument("--layers", nargs="+", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to a file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    missing = {isa: native.missing(isa) for isa in native.ISAS} if native.available() else {}
    isas = options.isa or [isa for isa, reason in missing.items() if not reason]
    with ThreadPoolExecutor() as pool:
        list(pool.map(native.kernel, isas))  # compiled before the clock starts; refused if this CPU lacks it
    chosen = [
        (model, name, shape)
        for model, shapes in SHAPES.items()
        for name, shape in shapes.items()
        if options.model in (None, model) and (not options.layers or name in options.layers)
    ]
    data = torch.ones(COLD_BYTES // 8, dtype=torch.int64)
    results: list[dict[str, Any]] = []
    start = time.perf_counter()
    with torch.inference_mode():
        for done, (model, name, (outputs, inputs)) in enumerate(chosen):
            share = (start + options.seconds - time.perf_counter()) / (len(chosen) - done)
            limits: dict[str, Any] = {"quantize": options.quantize, "repeats": options.repeats, "limit_s": share}
            for result in measure(outputs, inputs, options.rows, isas, data, **limits):
                results.append({"model": model, "layer": name, "outputs": outputs, "inputs": inputs, **result})
    cpu = read_cpuinfo().get("model name", "")
    facts = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "quantize": options.quantize}
    if options.json:
        report = {
            **facts,
            "cold_bytes": COLD_BYTES,
            "missing": {k: v for k, v in missing.items() if v},
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    console.print(table_of(results, options.rows, facts))
    for isa, reason in missing.items():
        if reason:
            console.print(f"not measured: {isa} ({reason})")


def table_of(results: list[dict[str, Any]], rows: list[int], facts: dict[str, Any]) -> Table:
    """One line per layer and arm: GB/s of weight bytes, and what share of the stream that is, for each number of rows."""
    table = Table("layer", "N x K", "stream", "isa", *(f"{m} row{'s' * (m > 1)}" for m in rows))
    weights = facts["quantize"] or "bfloat16"
    table.title = f"GB/s of {weights} weights (share of the stream), {facts['threads']} threads, {facts['cpu']}"
    lines: dict[tuple[str, ...], list[str]] = {}
    for r in results:
        place = (
            f"{r['model'].split('-')[0]} {r['layer']}",
            f"{r['outputs']} x {r['inputs']}",
            f"{r['stream_gb_s']:.1f}",
        )
        lines.setdefault((*place, r["isa"]), []).append(f"{r['gb_s']:.1f} ({r['of_stream']:.0%})")
    before: tuple[str, ...] = ()
    for key, figures in lines.items():
        layer, isa, new = key[:3], key[3], key[:3] != before
        before = layer
        if new and table.row_count:
            table.add_section()
        table.add_row(*(layer if new else ("", "", "")), isa, *figures)
    return table


if __name__ == "__main__":
    main()
