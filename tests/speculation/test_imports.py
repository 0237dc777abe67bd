"""The library stands alone."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("hypothesis", "pydantic", "transformers", "matplotlib", "rich", "typer", "scipy", "safetensors")


def test_speculation_imports_nothing_heavier_than_torch_and_numpy() -> None:
    code = (
        "import sys, surefoot.speculation, surefoot.speculation.simulation\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('surefoot.')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots, ours = (line.split() for line in result.stdout.splitlines())
    assert "torch" in roots
    assert not set(HEAVY) & set(roots)
    assert all(name.startswith(("surefoot.speculation", "surefoot.errors")) for name in ours)


def test_the_pure_half_reads_in_one_place() -> None:
    import surefoot.speculation as speculation

    assert sorted(speculation.__all__) == speculation.__all__
    assert all(hasattr(speculation, name) for name in speculation.__all__)
