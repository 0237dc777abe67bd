"""`python benchmarks/competition.py`: what the threads give while other jobs have the cores.

Decode passes of a small random model (the native layers of a Llama, one row each) with one thread and with all of them, with
and without the adaptation of `threads.hpp`, interleaved, first on the machine as it is and then beside `--jobs` busy processes.
Each arm is a process of its own, because OpenMP reads its settings at start. Medians of tokens per second. Under competition
all threads should never be below half of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PASSES = """
import json, sys, time, torch
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.elementwise import rms_norm, gated_activation

threads, adapt, seconds, hidden, layers = json.loads(sys.argv[1])
torch.set_num_threads(threads)
assert native.available()
torch.ops.surefoot.adapt_threads(adapt)
shapes = [(2 * hidden, hidden), (hidden, hidden), (8 * hidden, hidden), (hidden, 4 * hidden)]
weights = [torch.randn(n, k).bfloat16() for n, k in shapes]
model = [[PackedLinear(weight) for weight in weights] for _ in range(layers)]
norm, x = torch.ones(hidden).bfloat16(), torch.randn(1, hidden).bfloat16()

@torch.inference_mode()
def token(h):
    for qkv, o, gate_up, down in model:
        mixed = qkv(rms_norm(h, norm, 1e-6))[:, :hidden]
        h = h + o(mixed)
        h = h + down(gated_activation(gate_up(rms_norm(h, norm, 1e-6))))
    return h

print("ready", flush=True)
for line in sys.stdin:  # one measurement a line
    token(x)
    before, start, tokens = torch.ops.surefoot.thread_pauses(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not tokens:
        token(x)
        tokens += 1
    rate = tokens / (time.perf_counter() - start)
    print(json.dumps([rate, torch.ops.surefoot.thread_pauses() - before]), flush=True)
"""
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the arms with all threads"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="busy processes beside the arms")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved measurements of every arm")
    parser.add_argument("--hidden", type=int, default=896, help="hidden size")
    parser.add_argument("--layers", type=int, default=24, help="decoder layers")
    parser.add_argument("--json", metavar="FILE", help="also write every figure to a file")
    given = parser.parse_args()
    arms = {
        "1 thread": (1, True),
        f"{given.threads} threads": (given.threads, True),
        f"{given.threads} threads, never alone": (given.threads, False),
    }
    processes = {name: _start([*arm, given.seconds, given.hidden, given.layers]) for name, arm in arms.items()}
    figures: dict[str, dict[str, list[list[float]]]] = {}
    try:
        for situation, jobs in (("quiet", 0), (f"beside {given.jobs} busy processes", given.jobs)):
            busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(jobs)]
            try:
                time.sleep(0.5)
                measured: dict[str, list[list[float]]] = {name: [] for name in arms}
                for _ in range(given.repeats):
                    for name, process in processes.items():
                        measured[name].append(_ask(process))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            figures[situation] = measured
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    for situation, measured in figures.items():
        one = statistics.median(rate for rate, _ in measured["1 thread"])
        print(f"{situation}:")
        for name, values in measured.items():
            rate = statistics.median(rate for rate, _ in values)
            pauses = statistics.median(pauses for _, pauses in values)
            print(f"  {name:28} {rate:8.1f} tok/s  {rate / one:5.2f} of one thread  {pauses:3.0f} pauses")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"options": vars(given), "tok_s_and_pauses": figures}, file, indent=1)


def _start(arguments: list[object]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PASSES, json.dumps(arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit("an arm did not start; see its message above")
    return process


def _ask(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    main()
