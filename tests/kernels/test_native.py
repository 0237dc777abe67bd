"""Building, caching, falling back, and tracing the native kernels."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.kernels import native
from surefoot.kernels.attention import paged_attention
from surefoot.kernels.elementwise import add_rms_norm, gated_activation, rms_norm, rotary
from surefoot.kernels.linear import PackedLinear, linear_argmax
from surefoot.kernels.sampling import argmax_rows, sample_rows, softmax_rows

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")

ASK = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from surefoot.kernels import native
    from surefoot.kernels.linear import PackedLinear
    import torch
    y = PackedLinear(torch.eye(3), quantize="int8")(torch.ones(1, 3))
    PackedLinear(torch.eye(3))
print(native.available(), [round(v, 4) for v in y[0].tolist()], len([w for w in seen if "native" in str(w.message)]))
print(*(w.message for w in seen))
"""


def start(**environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", ASK], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_the_switch_forces_the_fallback_silently():
    out, _ = start(SUREFOOT_NATIVE="0").communicate()
    assert out.splitlines()[0] == "False [1.0, 1.0, 1.0] 0"


def test_a_broken_compiler_gives_one_warning_with_the_reason(tmp_path):
    out, _ = start(SUREFOOT_CACHE=str(tmp_path), CXX="no-such-compiler").communicate()
    first, *rest = out.splitlines()
    assert first == "False [1.0, 1.0, 1.0] 1"
    assert "no-such-compiler" in " ".join(rest)


def calls():
    """Every operation on small inputs."""
    x, weight = torch.randn(3, 8), torch.randn(8)
    packed = PackedLinear(torch.randn(20, 8))
    cos, sin = torch.randn(3, 4), torch.randn(3, 4)
    cache = torch.randn(8, 1, 4)
    table, slots, lens = (
        torch.tensor([[1]], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([1, 2, 3]),
    )
    return [
        (packed, (x,)),
        (lambda t: linear_argmax(t, packed), (x,)),
        (lambda t, w: rms_norm(t, w, 1e-6), (x, weight)),
        (lambda t, r, w: add_rms_norm(t, r, w, 1e-6), (x, x + 1, weight)),
        (lambda t, c, s: rotary(t.view(3, 2, 4), c, s), (x, cos, sin)),
        (gated_activation, (x,)),
        (softmax_rows, (x, torch.ones(3))),
        (argmax_rows, (x,)),
        (sample_rows, (x.softmax(-1), torch.rand(3))),
        (
            lambda q, c, t, r, n: paged_attention(q.view(3, 2, 4), c, c, t, r, n, block_size=4, scaling=0.5),
            (x, cache, table, slots, lens),
        ),
    ]


@needs_native
@pytest.mark.parametrize("which", range(9))
@torch.no_grad()
def test_fake_tensors_have_the_real_shapes(which):
    f, args = calls()[which]
    real = f(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = f(*(mode.from_tensor(a) for a in args))
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (real, fake)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@needs_native
@torch.no_grad()
def test_compiles_without_graph_breaks():
    for f, args in calls():
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (f(*args), compiled(*args))), strict=True):
            assert torch.equal(a, b)


@needs_native
def test_one_openmp_runtime():
    """A second OpenMP runtime would keep a second pool of spinning threads."""
    maps = "/proc/self/maps"
    if not os.path.exists(maps):
        pytest.skip("needs /proc")
    with open(maps) as lines:
        assert len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}) <= 1
