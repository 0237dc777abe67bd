"""`python -m surefoot.kernels.benchmark`: how near the thin matrix product comes to the memory's own speed.

For every layer shape of the two default targets and 1 … 16 rows, the packed product, `F.linear` and a plain read of
memory (the stream) take turns; the medians are printed. Each arm walks over enough copies of the weight that no cache can hold
them, as a decode pass does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear

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
COLD_BYTES = 160 << 20  # what an arm walks over: several times the largest last-level cache of a small machine


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stream_seconds_per_byte(data: Tensor) -> float:
    """One read of `data`, int64 so that the sum is as cheap as adding can be."""
    return seconds(data.sum) / data.nbytes


def measure(outputs: int, inputs: int, rows: list[int], repeats: int, data: Tensor, quantize: str | None) -> list[dict]:
    """GB/s of weight bytes for each row count: packed, torch, stream (medians of `repeats` interleaved rounds)."""
    copies = max(1, COLD_BYTES // (outputs * inputs * 2))
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
    layers = [PackedLinear(weight, quantize=quantize) for weight in weights]  # type: ignore[arg-type]
    results = []
    for m in rows:
        x = torch.randn(m, inputs).bfloat16()
        times: dict[str, list[float]] = {"packed": [], "torch": [], "stream": []}
        for _ in range(repeats):
            times["stream"].append(stream_seconds_per_byte(data))
            spent = seconds(lambda x=x: [layer(x) for layer in layers])  # type: ignore[misc]
            times["packed"].append(spent / sum(layer.num_bytes for layer in layers))
            spent = seconds(lambda x=x: [F.linear(x, weight) for weight in weights])  # type: ignore[misc]
            times["torch"].append(spent / sum(weight.nbytes for weight in weights))
        result = {arm: 1e-9 / statistics.median(t) for arm, t in times.items()}
        result["gflops"] = result["packed"] * 2 * m / (layers[0].num_bytes / (outputs * inputs))
        results.append({"rows": m, **result})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m surefoot.kernels.benchmark", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="row counts M")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds; the median is printed")
    parser.add_argument("--threads", type=int, default=None, help="default: torch's")
    parser.add_argument("--quantize", choices=["int8"], default=None, help="pack the weights as int8")
    parser.add_argument("--model", choices=[*SHAPES], default=None, help="default: both")
    parser.add_argument("--layers", nargs="+", default=None, help="default: all")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    console.print(f"native kernels: {native.available()}, threads: {torch.get_num_threads()}")
    data = torch.ones(COLD_BYTES // 8, dtype=torch.int64)
    with torch.inference_mode():
        for model, shapes in SHAPES.items():
            if options.model not in (None, model):
                continue
            table = Table(
                "layer", "N x K", "rows", "packed GB/s", "F.linear GB/s", "stream GB/s", "of stream", "GFLOP/s"
            )
            table.title = model
            for name, (outputs, inputs) in shapes.items():
                if options.layers and name not in options.layers:
                    continue
                for r in measure(outputs, inputs, options.rows, options.repeats, data, options.quantize):
                    figures = [f"{r[arm]:.1f}" for arm in ("packed", "torch", "stream")]
                    share = f"{r['packed'] / r['stream']:.0%}"
                    table.add_row(name, f"{outputs} x {inputs}", str(r["rows"]), *figures, share, f"{r['gflops']:.0f}")
            console.print(table)


if __name__ == "__main__":
    main()
