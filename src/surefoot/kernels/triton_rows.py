# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def"
"""Products and normalisation on CUDA whose rows do not depend on how many there are, and the small operations between them.

cuBLAS and torch's reductions choose their order of summation by the number of rows, so that a token verified among eight rows
can meet other logits than the same token decoded alone. Here every output is one walk over ascending inputs, the same for
every number of rows: no sum is ever split, and the matrix units add the same inputs in the same instruction order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Rows per tile: the fewest that Hopper's matrix units take whole. Fewer rows are padded, which costs no memory traffic."""
MANY_ROWS = 256
"""Beyond so many rows tiles are larger. That changes which sums are made side by side, not the order within any of them."""


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    x_row,
    weight_row,
    out_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    tiles = tl.cdiv(rows, TILE_ROWS)  # neighbours share a tile of the weight
    tile, panel = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = (tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    output = (panel * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)).to(tl.int64)
    step = tl.arange(0, TILE_INPUTS)
    there, wanted = row < rows, output < OUTPUTS
    x_at = x + row[:, None] * x_row + step[None, :]
    weight_at = weight + output[:, None] * weight_row + step[None, :]
    total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for start in range(0, INPUTS, TILE_INPUTS):
        inside = start + step < INPUTS
        a = tl.load(x_at + start, mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=wanted[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_row + output[None, :],
        total.to(out.dtype.element_ty),
        mask=there[:, None] & wanted[None, :],
    )


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ bias), accumulated in float32 over ascending inputs: [..., K], [N, K], [N] -> [..., N], all in one dtype."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows = flat.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        # A decode pass is the reading of weights: a narrow layer needs many programs to read at the speed of memory.
        tile, inner, warps = ROWS, 128, 4
        panel = 32 if outputs <= 4096 else 64
        if x.element_size() > 2:  # float32 has no matrix unit: small tiles that fit the registers
            panel, inner = 32, 32
        elif rows > MANY_ROWS:
            tile, panel, inner, warps = 128, 128, 64, 8
        elif outputs > 32768:
            panel, inner = 128, 64
        kernel: Any = _product
        kernel[(triton.cdiv(rows, tile) * triton.cdiv(outputs, panel),)](
            flat,
            weight,
            out if bias is None else bias,
            out,
            rows,
            flat.stride(0) if rows > 1 else inputs,
            weight.stride(0),
            outputs,
            OUTPUTS=outputs,
            INPUTS=inputs,
            BIAS=bias is not None,
            TILE_ROWS=tile,
            TILE_OUTPUTS=panel,
            TILE_INPUTS=inner,
            num_warps=warps,
            num_stages=3,
        )
    return out.view(*x.shape[:-1], outputs)


@triton.jit
def _norm(x, weight, out, x_row, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = at < SIZE
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = value / tl.sqrt(tl.sum(value * value) / SIZE + eps)
    if UNIT_OFFSET:
        normed = normed * (1.0 + scale)
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * SIZE + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """See `kernels.elementwise.rms_norm`: one program per row."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        kernel: Any = _norm
        kernel[(flat.shape[0],)](
            flat,
            weight,
            out,
            flat.stride(0) if flat.shape[0] > 1 else size,
            float(eps),
            SIZE=size,
            WIDTH=triton.next_power_of_2(size),
            UNIT_OFFSET=unit_offset,
            num_warps=4,
        )
    return out.view(x.shape)


@triton.jit
def _rotary(
    x,
    cos,
    sin,
    out,
    x_row,
    x_head,
    turn_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside, turns = at < DIM, at < TURNED
    partner = tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2)
    source = x + row * x_row + head * x_head
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    other = tl.where(at < TURNED // 2, -other, other)
    c = tl.load(cos + row * turn_row + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + row * turn_row + at, mask=turns, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    rotated = value * c + other * s
    tl.store(out + (row * HEADS + head) * DIM + at, tl.where(turns, rotated, value).to(dtype), mask=inside)


def rotary_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.elementwise.rotary`: one program per row and head."""
    rows, heads, dim = x.shape
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    if rows:
        kernel: Any = _rotary
        kernel[(rows, heads)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            HEADS=heads,
            DIM=dim,
            TURNED=cos.shape[-1],
            WIDTH=triton.next_power_of_2(dim),
            num_warps=1,
        )
    return out


@triton.jit
def _gated(gate_up, out, row_stride, SIZE: tl.constexpr, GELU: tl.constexpr, TILE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # the tanh form, as gate * sigmoid(2 y)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    dtype = out.dtype.element_ty
    tl.store(out + row * SIZE + at, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def gated_activation_rows(gate_up: Tensor, gelu: bool) -> Tensor:
    """See `kernels.elementwise.gated_activation`."""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    rows, size = flat.shape[0], flat.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        kernel: Any = _gated
        kernel[(rows, triton.cdiv(size, 1024))](flat, out, flat.stride(0), SIZE=size, GELU=gelu, TILE=1024, num_warps=4)
    return out.view(*gate_up.shape[:-1], size)
