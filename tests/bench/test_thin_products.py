"""The micro-benchmark runs and reports what it measured."""

import json
import sys

import pytest
import torch

from surefoot.bench import thin_products as benchmark
from surefoot.kernels import native


@pytest.fixture
def isas():
    return [native.kernel().isa] if native.available() else []


def test_the_benchmark_prints_and_saves_every_figure(monkeypatch, capsys, tmp_path, isas):
    monkeypatch.setattr(benchmark, "COLD_BYTES", 1 << 14)
    monkeypatch.setattr(benchmark, "SHAPES", {"tiny-model": {"o": (40, 24), "down": (16, 70)}})
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "figures.json"
    chosen = ["--isa", *isas] if isas else []
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rows", "1", "3", "--repeats", "2", "--json", str(file), *chosen])
    benchmark.main()
    out = capsys.readouterr().out
    assert out.count("tiny o") == out.count("40 x 24") == out.count("16 x 70") == 1
    assert out.count("F.linear") == 2
    saved = json.loads(file.read_text())
    cells = {(r["layer"], r["isa"], r["rows"]) for r in saved["results"]}
    assert cells == {(n, arm, m) for n in ("o", "down") for arm in (*isas, "F.linear") for m in (1, 3)}
    assert all(r["rounds"] == 2 and r["gb_s"] > 0 and r["stream_gb_s"] > 0 for r in saved["results"])
    assert saved["threads"] == torch.get_num_threads()


def test_rates_are_weight_bytes_over_time(monkeypatch, isas):
    """A clock that ticks one second per reading: every arm then takes exactly one second."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(benchmark, "COLD_BYTES", 3 * 32 * 64 * 2)
    data = torch.ones(1000, dtype=torch.int64)
    results = benchmark.measure(32, 64, [2], isas, data, repeats=3)
    assert [r["isa"] for r in results] == [*isas, "F.linear"]
    for result in results:
        assert abs(result["gb_s"] - 3 * 32 * 64 * 2 * 1e-9) < 1e-15
        assert abs(result["stream_gb_s"] - 8000e-9) < 1e-15
        assert abs(result["of_stream"] - 3 * 32 * 64 * 2 / 8000) < 1e-9
        assert result["rounds"] == 3


def test_out_of_time_one_round_remains(monkeypatch, isas):
    monkeypatch.setattr(benchmark, "COLD_BYTES", 1 << 14)
    data = torch.ones(1000, dtype=torch.int64)
    results = benchmark.measure(40, 24, [1, 2], isas, data, repeats=9, limit_s=0)
    assert all(r["rounds"] == 1 for r in results)
