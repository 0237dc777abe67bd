"""The thin products of every instruction set: those of this CPU, and AMX and AVX-512 BF16 in emulation.

The emulation replaces single instructions by loops with their documented semantics (`tiles.hpp`); everything around them is
the code that runs on a CPU that has them. Where the CPU does, it is tested itself too.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.bench.thin_products import SHAPES
from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.kernels.formats import INT8
from surefoot.kernels.linear import PackedLinear, linear_argmax
from surefoot.kernels.native import ISAS, Kernel

if not native.available():
    pytest.skip("no compiler", allow_module_level=True)

EMULATED = {"emulated-avx512": ("avx512", "pairs"), "emulated-amx": ("amx", "tiles")}
LAYERS = sorted(
    {(min(n, 2065), k) for shapes in SHAPES.values() for n, k in shapes.values()}
)  # of an LM head, its beginning
ODD = [(1, 1), (16, 32), (33, 33), (31, 257), (70, 63), (5, 4865), (48, 96)]


@pytest.fixture(scope="module", params=[*ISAS, *EMULATED])
def kernel(request):
    if request.param not in EMULATED:
        if reason := native.missing(request.param):
            pytest.skip(f"{request.param.upper()} IS NOT TESTED ON REAL HARDWARE HERE: {reason}")
        return native.kernel(request.param)
    if native.cpu_level() == "portable":
        pytest.skip("the emulation is built for AVX2")
    flags = (*native.level_flags("avx2"), "-DSUREFOOT_EMULATED")
    native.load_products("surefoot_emulated", flags)
    isa, layout = EMULATED[request.param]
    return Kernel(isa, "surefoot_emulated", layout)


def layer(kernel, outputs, inputs, dtype=torch.bfloat16, quantize=None, bias=True):
    """A packed layer, and the float64 weight and bias that it stands for."""
    generator = torch.Generator().manual_seed(outputs * 7919 + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    offset = torch.randn(outputs, generator=generator) if bias else None
    exact = weight.double()
    if quantize:
        values, scale = INT8.quantize(weight).tensors.values()
        exact = values.double() * scale.double()[:, None]
    return PackedLinear(weight, offset, quantize=quantize, kernel=kernel), exact, offset


def close(ours, x, exact, bias):
    """Within rounding of float64: the error is relative to the sum of magnitudes."""
    wanted, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    bound = 1e-6 * size + (2**-8 * wanted.abs() if ours.dtype == torch.bfloat16 else 0)
    return bool(((ours.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("shape", LAYERS)
@torch.no_grad()
def test_layer_shapes_of_both_targets_equal_float64(kernel, shape):
    packed, exact, bias = layer(kernel, *shape)
    x = torch.randn(17, shape[1]).bfloat16()
    rows = packed(x)
    assert close(rows, x, exact, bias)
    assert torch.equal(packed(x[16:]), rows[16:])  # one row, and one beyond a tile of sixteen


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_odd_sizes_equal_float64(kernel, shape, quantize, bias):
    packed, exact, offset = layer(kernel, *shape, quantize=quantize, bias=bias)
    for m in (1, 2, 16, 33):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(m, shape[1]).to(dtype)
            assert close(packed(x), x, exact, offset), (m, dtype)


@torch.no_grad()
def test_float_weights_equal_float64(kernel):
    packed, exact, bias = layer(kernel, 45, 130, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(19, 130).to(dtype)
        assert close(packed(x), x, exact, bias)


@pytest.mark.parametrize("quantize", [None, "int8"])
@torch.no_grad()
def test_rows_are_bit_identical_for_every_batch(kernel, quantize):
    packed, _, _ = layer(kernel, 80, 300, quantize=quantize)
    x = torch.randn(290, 300).bfloat16()
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for m in [*range(1, 34), 47, 48, 49, 127, 128, 129, 145, 290]:
        assert torch.equal(packed(x[:m]), alone[:m]), m
    for seed in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: 5 + 13 * seed]
        assert torch.equal(packed(x[order]), alone[order])


@settings(max_examples=15, deadline=None)
@given(
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 400),
    rows=st.integers(1, 40),
    place=st.integers(0, 39),
    threads=st.integers(1, 3),
    quantize=st.sampled_from([None, "int8"]),
)
@torch.no_grad()
def test_a_row_does_not_notice_its_neighbours_or_the_threads(kernel, outputs, inputs, rows, place, threads, quantize):
    packed, _, _ = layer(kernel, outputs, inputs, quantize=quantize)
    row = torch.randn(inputs).bfloat16()
    alone = packed(row[None])[0]
    batch = torch.full((rows, inputs), torch.nan, dtype=torch.bfloat16)
    batch[place % rows] = row
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(packed(batch)[place % rows], alone)
        assert torch.equal(linear_argmax(row[None], packed)[0], alone[None].argmax(-1))
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_many_threads_agree_on_a_large_layer(kernel):
    """Large enough to be split: every worker configures its own tiles."""
    packed, _, _ = layer(kernel, 640, 1024)
    x, results, before = torch.randn(5, 1024).bfloat16(), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((packed(x), *linear_argmax(x, packed)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@torch.no_grad()
def test_several_weights_are_packed_as_one(kernel):
    parts = [torch.randn(n, 70) for n in (5, 40, 1, 33)]
    x = torch.randn(3, 70).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        fused = PackedLinear([part.to(dtype) for part in parts], kernel=kernel)
        whole = PackedLinear(torch.cat(parts).to(dtype), kernel=kernel)
        assert torch.equal(fused.weight, whole.weight)
        assert [y.shape[1] for y in fused.split(fused(x))] == [5, 40, 1, 33]


def test_packing_loses_and_invents_nothing(kernel):
    for outputs, inputs in ODD:
        weight = torch.randn(outputs, inputs).bfloat16()
        packed = PackedLinear(weight, kernel=kernel).weight.view(torch.bfloat16).flatten()
        given = weight.flatten()
        assert torch.equal(packed[packed != 0].sort().values, given[given != 0].sort().values)


def tile_model(x, w):
    """TDPBF16PS over one pair of tiles in numpy: products of bfloat16 are exact in float32, so every sum rounds once."""
    chains = np.zeros((2, len(x), len(w)), np.float32)
    for k in range(16):
        for odd in range(2):
            chains[odd] += np.outer(x[:, 2 * k + odd], w[:, 2 * k + odd])
    return chains[0] + chains[1]


@torch.no_grad()
def test_the_emulated_tile_product_follows_the_manual(kernel):
    if (kernel.namespace, kernel.layout) != ("surefoot_emulated", "tiles"):
        pytest.skip("about the emulation")
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    a, b = x.float().numpy(), weight.float().numpy()
    wanted = tile_model(a[:, :32], b[:, :32]) + tile_model(a[:, 32:], b[:, 32:])
    packed = PackedLinear(weight, kernel=kernel)
    assert np.array_equal(packed(x).float().numpy(), torch.from_numpy(wanted).bfloat16().float().numpy())
    tiny = torch.full((1, 64), 1e-39).bfloat16()  # denormal: counts as zero
    assert tiny.abs().sum() > 0
    assert packed(tiny).abs().sum() == 0


def test_the_stream_reads_everything(kernel):
    """The result is the disjunction of what was read, so that a byte that is skipped shows."""
    data = torch.zeros(1 << 15, dtype=torch.int64)
    assert kernel.operations.stream(data) == 0
    for place in range(0, len(data), 41):
        data[place] = 1 << place % 63
        assert kernel.operations.stream(data) != 0, place
        data[place] = 0


def test_weights_of_one_layout_are_refused_by_kernels_without_it():
    weight = torch.zeros(1, 1, 2, 16, 32, dtype=torch.int16)
    if not native.missing("amx"):
        pytest.skip("this CPU has it")
    with pytest.raises(RuntimeError, match=r"AMX|no product"):
        torch.ops.surefoot.linear(torch.zeros(1, 32).bfloat16(), weight, 32, None, None)


# ------------------------------------------------------------------------------------------------ choosing


def start(code, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)


ASK = "from surefoot.kernels import native; native.available(); print(native.kernel().isa, native.kernel().namespace)"


def test_levels_follow_the_flags():
    avx2, avx512 = ["fpu", "avx2", "fma"], ["avx512f", "avx512bw", "avx512dq", "avx512vl"]
    assert native.level_of_flags([]) == native.level_of_flags(["avx2"]) == native.level_of_flags(avx512) == "portable"
    assert native.level_of_flags(avx2) == native.level_of_flags([*avx2, "avx512f"]) == "avx2"
    assert native.level_of_flags([*avx2, *avx512, "amx_tile"]) == "avx512"


def test_the_best_instruction_set_is_the_default():
    best = [isa for isa in ISAS if not native.missing(isa)][-1]
    if "SUREFOOT_ISA" not in os.environ:
        assert native.kernel().isa == best
    result = start(ASK, SUREFOOT_ISA=native.kernel().isa)
    assert result.stdout.split() == [native.kernel().isa, "surefoot"]


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_the_cpu_lacks_is_an_error(isa):
    if not (reason := native.missing(isa)):
        pytest.skip("this CPU has it")
    with pytest.raises(ConfigurationError, match="cannot be used here"):
        native.kernel(isa)
    result = start(ASK, SUREFOOT_ISA=isa)
    assert result.returncode != 0
    assert f"ConfigurationError: SUREFOOT_ISA={isa} cannot be used here: {reason}" in result.stderr


@pytest.mark.parametrize("isa", ["emulated", "AVX2", "sse9"])
def test_an_unknown_instruction_set_is_an_error(isa):
    """The emulation too: nothing but a test can name it."""
    result = start(ASK, SUREFOOT_ISA=isa)
    assert f"ConfigurationError: SUREFOOT_ISA={isa}: allowed are portable, avx2, avx512, amx" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the allocator decides")
def test_packed_weights_lie_side_by_side_and_give_their_memory_back():
    result = start("""
import torch
from pathlib import Path
from surefoot.kernels.linear import PackedLinear
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024  # MiB, of pages of 4 KiB
weight = torch.randn(4096, 4096)
layers = [PackedLinear(weight) for _ in range(3)]
huge = next(int(l.split()[1]) for l in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHuge" in l)
starts = [layer.weight.data_ptr() for layer in layers]
full = resident()
del layers[1]
one_less = resident()
another = PackedLinear(weight[:16])
layers.clear()
print(starts[0] % 2**21, starts[1] - starts[0], starts[2] - starts[1], another.weight.data_ptr() - starts[2],
      full - one_less, full - resident(), huge)
""")
    assert result.returncode == 0, result.stderr
    first, second, third, fourth, one, all_three, huge = map(int, result.stdout.split())
    assert first == 0
    assert second == third == fourth == 2**26
    assert 48 <= one <= 80
    assert 176 <= all_three <= 208
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[never]" not in setting.read_text():
        assert huge >= 96 * 1024  # KiB; all 192 MiB unless memory is in pieces
