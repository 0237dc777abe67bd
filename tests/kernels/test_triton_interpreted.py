"""The CUDA kernels through Triton's interpreter, in a process of its own: the interpreter is chosen when triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run on this GPU")
def test_the_attention_kernel_agrees_with_its_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed: the CUDA attention kernel is NOT tested here")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "test_triton_attention.py"]
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER, env=settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 20, "the interpreter ran hardly anything"
