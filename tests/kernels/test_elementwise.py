"""Fused small operations against the transformers modules they replace.

bfloat16 results are bit-identical up to the order of a float32 sum (normalisation) or the last bit of exp
(activations): a differing value differs by one bfloat16 step, and only a small share differs.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from surefoot.kernels import native
from surefoot.kernels.elementwise import add_rms_norm, gated_activation, rms_norm, rms_norm_reference, rotary

needs_native = pytest.mark.skipif(not native.available(), reason="no compiler")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def assert_last_bit(ours, theirs, share):
    """Equal but for `share` of the values, which differ by one step of the dtype (float32: a few)."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    steps = 4 if ours.dtype == torch.float32 else 1
    step = torch.finfo(ours.dtype).eps * torch.maximum(ours.float().abs(), theirs.float().abs())
    assert bool(((ours.float() - theirs.float()).abs() <= steps * step + 1e-30).all())
    if ours.dtype == torch.bfloat16:
        assert (ours != theirs).float().mean() <= share


@dtypes
@pytest.mark.parametrize("size", [1, 7, 64, 896, 1003])
@pytest.mark.parametrize(
    ("module", "unit_offset"), [(LlamaRMSNorm, False), (Qwen2RMSNorm, False), (Gemma3RMSNorm, True)]
)
@torch.no_grad()
def test_rms_norm_equals_transformers(module, unit_offset, size, dtype):
    torch.manual_seed(size)
    norm = module(size, eps=1e-6)
    norm.weight.copy_(torch.randn(size))
    norm = norm.to(dtype)
    x = (3 * torch.randn(2, 17, size)).to(dtype)
    assert_last_bit(rms_norm(x, norm.weight, 1e-6, unit_offset=unit_offset), norm(x), share=2e-3)
    residual = torch.randn(2, 17, size).to(dtype)
    y, total = add_rms_norm(x, residual, norm.weight, 1e-6, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert_last_bit(y, norm(total), share=2e-3)
    assert_last_bit(rms_norm_reference(x, norm.weight, 1e-6, unit_offset=unit_offset), norm(x), share=0)


@dtypes
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (256, 256), (20, 20), (24, 10), (2, 2)])
@torch.no_grad()
def test_rotary_equals_transformers_bit_for_bit(dim, rotated, dtype):
    torch.manual_seed(dim)
    fused = torch.randn(9, 5 * dim).to(dtype)  # three query heads, one key head, one value head
    query = fused[:, : 3 * dim].unflatten(-1, (3, dim))
    key = fused[:, 3 * dim : 4 * dim].unflatten(-1, (1, dim))
    angle = torch.randn(9, rotated // 2).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k = (t[..., :rotated].transpose(0, 1)[None] for t in (query, key))
    wanted = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    for x, w in zip((query, key), wanted, strict=True):
        ours = rotary(x, cos, sin)
        assert torch.equal(ours[..., :rotated], w[0].transpose(0, 1))
        assert torch.equal(ours[..., rotated:], x[..., rotated:])


@dtypes
@pytest.mark.parametrize("size", [1, 13, 256, 4864])
@pytest.mark.parametrize(("name", "activation"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
@torch.no_grad()
def test_gated_activation_equals_transformers(name, activation, size, dtype):
    torch.manual_seed(size)
    gate_up = (4 * torch.randn(3, 5, 2 * size)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    ours, theirs = gated_activation(gate_up, activation), ACT2FN[name](gate) * up
    if dtype == torch.float32:  # the tail of gelu cancels 1 + tanh(-x): its float32 bits are noise in either
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=4e-6)
    elif activation == "silu":
        assert torch.equal(ours, theirs)
    else:  # where torch's tanh is already -1 and ours one float32 step short of it (1.5e-7 against 0)
        assert torch.equal(*(torch.where((gate > -5.2) & (gate < -5.0), 0, y) for y in (ours, theirs)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@torch.no_grad()
def test_every_bfloat16_gate(activation):
    """All 65,280 finite inputs: silu bit for bit, gelu but for four values whose result is 1.5e-7 instead of 0."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    ours = gated_activation(torch.cat([gate, torch.ones_like(gate)]), activation)
    theirs = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    differ = ours != theirs
    assert int(differ.sum()) <= (0 if activation == "silu" else 4)
    assert bool((ours[differ] - theirs[differ]).abs().le(2e-7).all())


@dtypes
@torch.no_grad()
def test_extreme_gates(dtype):
    gate = torch.tensor([-1e30, -200.0, -104.0, -88.5, -1.0, 0.0, 88.9, 200.0, 1e30]).to(dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)])
    for name, activation in (
        ("silu", F.silu),
        ("gelu_tanh", partial(F.gelu, approximate="tanh")),
    ):
        wanted = activation(gate.float())
        torch.testing.assert_close(gated_activation(gate_up, name).float(), wanted, rtol=1e-2, atol=1e-5)
        poisoned = gated_activation(torch.tensor([torch.nan, 1.0]).to(dtype), name)
        assert poisoned.isnan().all()


@needs_native
@dtypes
@torch.no_grad()
def test_rows_do_not_notice_their_neighbours(dtype):
    x, weight = torch.randn(300, 200).to(dtype), torch.randn(200).to(dtype)
    cos, sin = torch.randn(300, 20).to(dtype), torch.randn(300, 20).to(dtype)
    for f in (
        lambda rows: rms_norm(x[rows], weight, 1e-6),
        lambda rows: rms_norm(x[rows], weight, 1e-6, unit_offset=True),
        lambda rows: gated_activation(x[rows]),
        lambda rows: gated_activation(x[rows], "gelu_tanh"),
        lambda rows: rotary(x[rows].unflatten(1, (10, 20)), cos[rows], sin[rows]),
    ):
        order = torch.randperm(300)
        together = f(torch.arange(300))
        assert torch.equal(f(order), together[order])
        assert torch.equal(torch.cat([f(torch.tensor([i])) for i in range(20)]), together[:20])
