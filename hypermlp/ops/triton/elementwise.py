"""The memory-bound parts of a layer as kernels: the causal convolutions and the sigmoid gates.

Each tensor is read and written about once. Sums are float32 (float64 for float64), in a fixed order: the
weights' gradients are sums over tiles, first within a program, then over the programs.

Shapes: B batch, S rows of the convolution's input, T its output positions (the last T rows), D width, K taps;
for gates N positions, W columns of logits.
"""

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hypermlp.ops.triton.elementwise_kernels import (
    conv_backward,
    conv_forward,
    gates_backward,
    gates_forward,
    product_backward,
)
from hypermlp.ops.triton.launch import empty, launch

POSITIONS, CHANNELS, WARPS = 8, 128, 4
TILES_PER_PROGRAM = 8  # of the backward, whose programs each write a part of the weights' gradients
GATE_POSITIONS, GATE_COLUMNS = 4, 256


def sum_type(dtype: torch.dtype) -> Any:
    """Return Triton's type of sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def _grid(size: int, tile: int) -> int:
    return -(-size // tile)


def _dense(name: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised memory, which tests fill with NaN and guard."""
    size = 1
    for each in shape:
        size *= each
    return empty(name, like, size, dtype or like.dtype).view(shape)


def conv(x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None) -> list[Tensor]:
    """Compute the convolutions; see ``hypermlp.ops.api.causal_conv``. One launch for every two weights."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, _, width = x.shape
    outs = [_dense(f"conv {i}", x, (batch, length, width)) for i in range(len(weights))]
    grid = (_grid(length, POSITIONS), _grid(width, CHANNELS), batch)
    for first in range(0, len(weights), 2):
        arguments = _conv_arguments(x, weights[first : first + 2], length, reach)
        launch(conv_forward, "conv_forward", grid, None, **_pair("out", outs[first : first + 2]), **arguments)
    return outs


def conv_gradients(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None
) -> list[Tensor]:
    """Return the gradients of x and the weights. One launch for every two weights, and one for their sum."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, rows, width = x.shape
    taps = weights[0].shape[1]
    programs = _grid(rows, POSITIONS * TILES_PER_PROGRAM)
    grads_x, grad_weights = [], []
    for first in range(0, len(weights), 2):
        pair = weights[first : first + 2]
        grads_x.append(_dense("grad x", x, (batch, rows, width)))
        sums = torch.promote_types(x.dtype, torch.float32)
        partial = _dense("partial weights", x, (batch * programs, len(pair), taps, width), sums)
        launch(
            conv_backward,
            "conv_backward",
            (programs, _grid(width, CHANNELS), batch),
            None,
            **_pair("grad", [grad.contiguous() for grad in grads[first : first + 2]]),
            grad_x=grads_x[-1],
            partial=partial,
            PADDED_TAPS=max(2, 1 << (taps - 1).bit_length()),
            TILES=TILES_PER_PROGRAM,
            **_conv_arguments(x, pair, length, reach),
        )
        grad_weights += [total.to(pair[0].dtype).contiguous() for total in partial.sum(0).mT]
    return [functools.reduce(torch.add, grads_x), *grad_weights]


def _pair(name: str, tensors: list[Tensor]) -> dict[str, Tensor | None]:
    """Return the arguments of a kernel for one or two convolutions."""
    return {f"{name}1": tensors[0], f"{name}2": tensors[1] if len(tensors) > 1 else None}


def _conv_arguments(x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None) -> dict[str, Any]:
    return {
        "x": x,
        **_pair("weight", [weight.contiguous() for weight in weights]),
        "BOTH": len(weights) > 1,
        "reach": None if reach is None else reach.contiguous(),
        "rows": x.shape[1],
        "length": length,
        "width": x.shape[2],
        "batch_stride": x.stride(0),
        "row_stride": x.stride(1),
        "TAPS": weights[0].shape[1],
        "HAS_REACH": reach is not None,
        "DTYPE": sum_type(x.dtype),
        "BM": POSITIONS,
        "BN": CHANNELS,
        "num_warps": WARPS,
        "num_stages": 1,  # a pipeline over tiles would take all registers
    }


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
    positions, width = logits.numel() // logits.shape[-1], logits.shape[-1]
    return {
        "grid": (_grid(positions, GATE_POSITIONS), _grid(width, GATE_COLUMNS)),
        "num_positions": positions,
        "QUERY": sizes[0],
        "OUTPUT": sizes[1],
        "MIX1": sizes[2],
        "MIX2": sizes[3],
        "DTYPE": sum_type(logits.dtype),
        "BM": GATE_POSITIONS,
        "BN": GATE_COLUMNS,
        "num_warps": WARPS,
    }


def product_grad(grad: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Return the gradients of ``a * b``, tensors of one shape. One launch."""
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    outs = [_dense(name, x, x.shape) for name, x in (("grad a", a), ("grad b", b))]
    block = GATE_POSITIONS * GATE_COLUMNS
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
        DTYPE=sum_type(grad.dtype),
        BN=block,
        num_warps=WARPS,
    )
    return outs
