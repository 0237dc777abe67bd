"""The micro-benchmark runs and reports what it measured."""

import sys

import torch

from surefoot.kernels import benchmark


def test_the_benchmark_prints_every_row_count(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "COLD_BYTES", 1 << 14)
    monkeypatch.setattr(benchmark, "SHAPES", {"tiny": {"o": (40, 24)}})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rows", "1", "3", "--repeats", "2"])
    benchmark.main()
    out = capsys.readouterr().out
    assert "tiny" in out
    assert out.count("40 x 24") + out.count("40 x") >= 2


def test_rates_are_weight_bytes_over_time(monkeypatch):
    """A clock that ticks one second per reading: every arm then takes exactly one second."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(benchmark, "COLD_BYTES", 3 * 32 * 24 * 2)
    data = torch.ones(1000, dtype=torch.int64)
    (result,) = benchmark.measure(32, 24, [2], 3, data, None)
    assert abs(result["packed"] - 3 * 32 * 24 * 2 * 1e-9) < 1e-15
    assert abs(result["torch"] - 3 * 32 * 24 * 2 * 1e-9) < 1e-15
    assert abs(result["stream"] - 8000e-9) < 1e-15
    assert abs(result["gflops"] - 2 * 2 * 3 * 32 * 24 * 1e-9) < 1e-12
