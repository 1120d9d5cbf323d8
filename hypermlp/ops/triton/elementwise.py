"""The memory-bound parts of a layer as kernels: the pair of causal convolutions and the sigmoid gates.

Each tensor is read and written about once. Sums are float32 (float64 for float64), in a fixed order: the
weights' gradients are sums over tiles, first within a program, then over the programs.

Shapes: B batch, S rows of the convolution's input, T its output positions (the last T rows), D width, K taps;
for gates N positions, W columns of logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hypermlp.ops.triton.launch import empty, launch

POSITIONS, CHANNELS, WARPS = 8, 128, 4
TILES_PER_PROGRAM = 8  # of the backward, whose programs each write a part of the weights' gradients
GATE_ROWS, GATE_COLUMNS = 4, 256


@triton.jit
def _exists(reach, item, position, length, lag, HAS_REACH: tl.constexpr):
    """Return which positions exist and see as far back as ``lag``."""
    exists = (position >= 0) & (position < length)
    if HAS_REACH:
        seen = tl.load(reach + item.to(tl.int64) * length + position, mask=exists, other=0)
        exists = exists & (seen > lag)
    return exists


@triton.jit(do_not_specialize=["rows", "length"])
def conv_forward(
    x,
    weight1,
    weight2,
    reach,
    out1,
    out2,
    rows,
    length,
    width,
    batch_stride,
    row_stride,
    TAPS: tl.constexpr,
    HAS_REACH: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Both convolutions of a tile of positions and channels."""
    item = tl.program_id(2)
    position = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    known = channel < width
    base = x + item.to(tl.int64) * batch_stride
    sum1 = tl.zeros([BM, BN], DTYPE)
    sum2 = tl.zeros([BM, BN], DTYPE)
    for lag in tl.static_range(TAPS):
        row = position + (rows - length) - lag
        seen = _exists(reach, item, position, length, lag, HAS_REACH) & (row >= 0)
        offsets = row[:, None].to(tl.int64) * row_stride + channel[None, :]
        tap = tl.load(base + offsets, mask=seen[:, None] & known[None, :], other=0.0).to(DTYPE)
        sum1 += tap * tl.load(weight1 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
        sum2 += tap * tl.load(weight2 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
    offsets = (item.to(tl.int64) * length + position)[:, None] * width + channel[None, :]
    mask = (position < length)[:, None] & known[None, :]
    tl.store(out1 + offsets, sum1.to(out1.dtype.element_ty), mask=mask)
    tl.store(out2 + offsets, sum2.to(out2.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "length"])
def conv_backward(
    grad1,
    grad2,
    x,
    weight1,
    weight2,
    reach,
    grad_x,
    partial,
    rows,
    length,
    width,
    batch_stride,
    row_stride,
    TAPS: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_REACH: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The input's gradient at some tiles of rows, and their part of the weights' gradients.

    A row of x is a tap of the outputs at its own position and the next TAPS - 1 ones.
    ``partial``: ``[programs of all sequences, 2, TAPS, width]``.
    """
    item = tl.program_id(2)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    known = channel < width
    tap = tl.arange(0, PADDED_TAPS)
    grads = item.to(tl.int64) * length * width
    sums1 = tl.zeros([PADDED_TAPS, BN], DTYPE)
    sums2 = tl.zeros([PADDED_TAPS, BN], DTYPE)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & known[None, :]
        offsets = item.to(tl.int64) * batch_stride + row[:, None].to(tl.int64) * row_stride + channel[None, :]
        values = tl.load(x + offsets, mask=mask, other=0.0).to(DTYPE)
        total = tl.zeros([BM, BN], DTYPE)
        for lag in tl.static_range(TAPS):
            position = row - (rows - length) + lag
            seen = _exists(reach, item, position, length, lag, HAS_REACH) & (row < rows)
            offsets = grads + position[:, None].to(tl.int64) * width + channel[None, :]
            load = seen[:, None] & known[None, :]
            g1 = tl.load(grad1 + offsets, mask=load, other=0.0).to(DTYPE)
            g2 = tl.load(grad2 + offsets, mask=load, other=0.0).to(DTYPE)
            total += g1 * tl.load(weight1 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
            total += g2 * tl.load(weight2 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
            own = (tap == lag)[:, None]
            sums1 += tl.where(own, tl.sum(g1 * values, axis=0)[None, :], 0.0)
            sums2 += tl.where(own, tl.sum(g2 * values, axis=0)[None, :], 0.0)
        offsets = (item.to(tl.int64) * rows + row)[:, None] * width + channel[None, :]
        tl.store(grad_x + offsets, total.to(grad_x.dtype.element_ty), mask=mask)
    program = item * tl.num_programs(0) + tl.program_id(0)
    offsets = (program.to(tl.int64) * 2 * TAPS + tap)[:, None] * width + channel[None, :]
    mask = (tap < TAPS)[:, None] & known[None, :]
    tl.store(partial + offsets, sums1, mask=mask)
    tl.store(partial + offsets + TAPS * width, sums2, mask=mask)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit(do_not_specialize=["num_rows"])
def gates_forward(
    logits,
    q,
    gated_q,
    output,
    mix1,
    mix2,
    num_rows,
    QUERY: tl.constexpr,
    OUTPUT: tl.constexpr,
    MIX1: tl.constexpr,
    MIX2: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The sigmoid of a tile of logits, stored by gate; the first QUERY columns multiply q."""
    WIDTH: tl.constexpr = QUERY + OUTPUT + MIX1 + MIX2
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    live = row < num_rows
    values = tl.load(logits + row * WIDTH + column, mask=live & (column < WIDTH), other=0.0)
    gate = _sigmoid(values.to(DTYPE))
    if QUERY > 0:
        mask = live & (column < QUERY)
        scaled = gate * tl.load(q + row * QUERY + column, mask=mask, other=0.0).to(DTYPE)
        tl.store(gated_q + row * QUERY + column, scaled.to(gated_q.dtype.element_ty), mask=mask)
    if OUTPUT > 0:
        own = column - QUERY
        mask = live & (own >= 0) & (own < OUTPUT)
        tl.store(output + row * OUTPUT + own, gate.to(output.dtype.element_ty), mask=mask)
    if MIX1 > 0:
        own = column - QUERY - OUTPUT
        mask = live & (own >= 0) & (own < MIX1)
        tl.store(mix1 + row * MIX1 + own, gate.to(mix1.dtype.element_ty), mask=mask)
    if MIX2 > 0:
        own = column - QUERY - OUTPUT - MIX1
        mask = live & (own >= 0) & (own < MIX2)
        tl.store(mix2 + row * MIX2 + own, gate.to(mix2.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gates_backward(
    grad_q_gated,
    grad_output,
    grad_mix1,
    grad_mix2,
    logits,
    q,
    grad_logits,
    grad_q,
    num_rows,
    QUERY: tl.constexpr,
    OUTPUT: tl.constexpr,
    MIX1: tl.constexpr,
    MIX2: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradients of a tile of logits, and of q."""
    WIDTH: tl.constexpr = QUERY + OUTPUT + MIX1 + MIX2
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    live = row < num_rows
    inside = live & (column < WIDTH)
    gate = _sigmoid(tl.load(logits + row * WIDTH + column, mask=inside, other=0.0).to(DTYPE))
    grad = tl.zeros([BM, BN], DTYPE)
    if QUERY > 0:
        mask = live & (column < QUERY)
        given = tl.load(grad_q_gated + row * QUERY + column, mask=mask, other=0.0).to(DTYPE)
        tl.store(grad_q + row * QUERY + column, (given * gate).to(grad_q.dtype.element_ty), mask=mask)
        grad += given * tl.load(q + row * QUERY + column, mask=mask, other=0.0).to(DTYPE)
    if OUTPUT > 0:
        own = column - QUERY
        mask = live & (own >= 0) & (own < OUTPUT)
        grad += tl.load(grad_output + row * OUTPUT + own, mask=mask, other=0.0).to(DTYPE)
    if MIX1 > 0:
        own = column - QUERY - OUTPUT
        mask = live & (own >= 0) & (own < MIX1)
        grad += tl.load(grad_mix1 + row * MIX1 + own, mask=mask, other=0.0).to(DTYPE)
    if MIX2 > 0:
        own = column - QUERY - OUTPUT - MIX1
        mask = live & (own >= 0) & (own < MIX2)
        grad += tl.load(grad_mix2 + row * MIX2 + own, mask=mask, other=0.0).to(DTYPE)
    result = grad * gate * (1.0 - gate)
    tl.store(grad_logits + row * WIDTH + column, result.to(grad_logits.dtype.element_ty), mask=inside)


@triton.jit  # a size that is a multiple of 16 allows vectors
def product_backward(grad, a, b, grad_a, grad_b, size, DTYPE: tl.constexpr, BN: tl.constexpr):
    """The gradients of ``a * b``."""
    index = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mask = index < size
    given = tl.load(grad + index, mask=mask, other=0.0).to(DTYPE)
    of_a = given * tl.load(b + index, mask=mask, other=0.0).to(DTYPE)
    of_b = given * tl.load(a + index, mask=mask, other=0.0).to(DTYPE)
    tl.store(grad_a + index, of_a.to(grad_a.dtype.element_ty), mask=mask)
    tl.store(grad_b + index, of_b.to(grad_b.dtype.element_ty), mask=mask)


def _sum_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _grid(size: int, tile: int) -> int:
    return -(-size // tile)


def _dense(name: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised memory, which tests fill with NaN and guard."""
    size = 1
    for each in shape:
        size *= each
    return empty(name, like, size, dtype or like.dtype).view(shape)


def _conv_arguments(x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None) -> Any:
    return {
        "x": x,
        "weight1": weight1.contiguous(),
        "weight2": weight2.contiguous(),
        "reach": None if reach is None else reach.contiguous(),
        "rows": x.shape[1],
        "length": length,
        "width": x.shape[2],
        "batch_stride": x.stride(0),
        "row_stride": x.stride(1),
        "TAPS": weight1.shape[1],
        "HAS_REACH": reach is not None,
        "DTYPE": _sum_type(x.dtype),
        "BM": POSITIONS,
        "BN": CHANNELS,
        "num_warps": WARPS,
        "num_stages": 1,  # a pipeline over tiles would take all registers
    }


def conv_pair(
    x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute both convolutions; see ``hypermlp.ops.api.causal_conv_pair``. One launch."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, _, width = x.shape
    outs = tuple(_dense(name, x, (batch, length, width)) for name in ("conv 1", "conv 2"))
    grid = (_grid(length, POSITIONS), _grid(width, CHANNELS), batch)
    arguments = _conv_arguments(x, weight1, weight2, length, reach)
    launch(conv_forward, "conv_forward", grid, None, out1=outs[0], out2=outs[1], **arguments)
    return outs[0], outs[1]


def conv_pair_backward(
    grad1: Tensor,
    grad2: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    length: int,
    reach: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and both weights. One launch, and one for each weight's sum."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, rows, width = x.shape
    taps = weight1.shape[1]
    programs = _grid(rows, POSITIONS * TILES_PER_PROGRAM)
    sums = torch.promote_types(x.dtype, torch.float32)
    grad_x = _dense("grad x", x, (batch, rows, width))
    partial = _dense("partial weights", x, (batch * programs, 2, taps, width), sums)
    launch(
        conv_backward,
        "conv_backward",
        (programs, _grid(width, CHANNELS), batch),
        None,
        grad1=grad1.contiguous(),
        grad2=grad2.contiguous(),
        grad_x=grad_x,
        partial=partial,
        PADDED_TAPS=max(2, 1 << (taps - 1).bit_length()),
        TILES=TILES_PER_PROGRAM,
        **_conv_arguments(x, weight1, weight2, length, reach),
    )
    total = partial.sum(0).mT  # [2, D, K]
    dtype = weight1.dtype
    return grad_x, total[0].to(dtype).contiguous(), total[1].to(dtype).contiguous()


def gates(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return q times its gate, and the gates of the output and of both mixes. One launch.

    Args:
        logits: ``[..., W]``.
        q: ``[..., the first of sizes]``.
        sizes: columns of the gates of the query, the output and both mixes; 0 for an absent one.
    """
    lead = q.shape[:-1]
    logits, q = logits.contiguous(), q.contiguous()
    names = ("gated q", "output gate", "gate 1", "gate 2")
    outs = [_dense(name, q, (*lead, size)) for name, size in zip(names, sizes, strict=True)]
    settings = _gate_settings(logits, sizes)
    launch(
        gates_forward,
        "gates_forward",
        settings.pop("grid"),
        None,
        logits=logits,
        q=q,
        gated_q=outs[0],
        output=outs[1],
        mix1=outs[2],
        mix2=outs[3],
        **settings,
    )
    return outs


def gates_grad(grads: list[Tensor], logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the gradients of the logits and of q. One launch."""
    logits, q = logits.contiguous(), q.contiguous()
    given = [grad.contiguous() for grad in grads]
    grad_logits, grad_q = _dense("grad logits", logits, logits.shape), _dense("grad q", q, q.shape)
    settings = _gate_settings(logits, sizes)
    launch(
        gates_backward,
        "gates_backward",
        settings.pop("grid"),
        None,
        grad_q_gated=given[0],
        grad_output=given[1],
        grad_mix1=given[2],
        grad_mix2=given[3],
        logits=logits,
        q=q,
        grad_logits=grad_logits,
        grad_q=grad_q,
        **settings,
    )
    return [grad_logits, grad_q]


def _gate_settings(logits: Tensor, sizes: list[int]) -> dict[str, Any]:
    rows, width = logits.numel() // logits.shape[-1], logits.shape[-1]
    return {
        "grid": (_grid(rows, GATE_ROWS), _grid(width, GATE_COLUMNS)),
        "num_rows": rows,
        "QUERY": sizes[0],
        "OUTPUT": sizes[1],
        "MIX1": sizes[2],
        "MIX2": sizes[3],
        "DTYPE": _sum_type(logits.dtype),
        "BM": GATE_ROWS,
        "BN": GATE_COLUMNS,
        "num_warps": WARPS,
    }


def product_grad(grad: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Return the gradients of ``a * b``, tensors of one shape. One launch."""
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    outs = [_dense(name, x, x.shape) for name, x in (("grad a", a), ("grad b", b))]
    block = GATE_ROWS * GATE_COLUMNS
    launch(
        product_backward,
        "product_backward",
        (_grid(grad.numel(), block),),
        None,
        grad=grad,
        a=a,
        b=b,
        grad_a=outs[0],
        grad_b=outs[1],
        size=grad.numel(),
        DTYPE=_sum_type(grad.dtype),
        BN=block,
        num_warps=WARPS,
    )
    return outs
