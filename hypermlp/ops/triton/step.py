"""A layer's decoding step on caches of fixed size: eleven launches, five of them GEMMs.

Nothing waits for the device, and addresses and shapes are the same at every step, so a CUDA graph can capture
it.

Shapes: B batch, D width, N rows of a ring, K taps.
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.layer import RingStepArguments
from hypermlp.ops.triton.decode import decode
from hypermlp.ops.triton.elementwise import sum_type
from hypermlp.ops.triton.launch import contiguous, launch
from hypermlp.ops.triton.step_kernels import step_conv, step_gates

COLUMNS = 256


def step(arguments: RingStepArguments) -> Tensor:
    """Return the layer's output ``[B, 1, D]`` and write the rings."""
    x, weights, history, keys, values, past, starts, reach = arguments
    batch, _, width = x.shape
    row = x[:, 0].contiguous()
    dtype = sum_type(x.dtype)
    row_k = row_v = row
    if history is not None:
        assert weights.k_conv is not None
        row_k, row_v = torch.empty_like(row), torch.empty_like(row)
        tensors = {"x": row, "ring": history, "counter": past, "out1": row_k, "out2": row_v}
        launch(
            step_conv,
            "step_conv",
            (-(-width // COLUMNS), batch),
            None,
            **tensors,
            weight1=weights.k_conv,
            weight2=weights.v_conv,
            reach=contiguous(reach),
            rows=history.shape[1],
            width=width,
            TAPS=weights.k_conv.shape[1],
            HAS_REACH=reach is not None,
            DTYPE=dtype,
            BN=COLUMNS,
        )
    projections = (weights.q_weight, weights.k_weight, weights.v_weight)
    q, k, v = (_product(y, w) for y, w in zip((row, row_k, row_v), projections, strict=True))
    logits = None if weights.gate_weight is None else _product(row, weights.gate_weight)
    branches, heads = keys.shape[2], values.shape[2]
    sizes = [
        q.shape[1] if weights.q_gate >= 0 else 0,
        v.shape[1] if weights.output_gate >= 0 else 0,
        0 if weights.left1 is None else branches * weights.left1.shape[2],
        0 if weights.left2 is None else heads * weights.left2.shape[2],
    ]
    gated = [x.new_empty(batch, size) for size in sizes]
    widest = max(sum(sizes), k.shape[1], v.shape[1])
    names = ("gated_q", "output", "mix1", "mix2")
    launch(
        step_gates,
        "step_gates",
        (-(-widest // COLUMNS), batch),
        None,
        **{"logits": logits, "bias": weights.gate_bias, "q": q, "k": k, "v": v},
        **{"keys": keys, "values": values, "counter": past, "rows": keys.shape[1]},
        **{name: y if y.numel() else None for name, y in zip(names, gated, strict=True)},
        **dict(zip(("QUERY", "OUTPUT", "MIX1", "MIX2"), sizes, strict=True)),
        KEY=k.shape[1],
        VALUE=v.shape[1],
        DTYPE=dtype,
        BN=COLUMNS,
    )
    attention = Attention(
        (gated[0] if sizes[0] else q).view(batch, 1, branches, -1),
        keys,
        values,
        _mix((weights.diag1, weights.left1, weights.right1), gated[2], batch, branches),
        _mix((weights.diag2, weights.left2, weights.right2), gated[3], batch, heads),
        starts,
        weights.activation,
        weights.layout,
        weights.eps,
    )
    out, _ = decode(attention, past.expand(batch), factor=gated[1] if sizes[1] else None)
    return _product(out.view(batch, -1), weights.o_weight)[:, None]


def _product(a: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(a, weight.t())


def _mix(parameters: tuple[Any, ...], gate: Tensor, batch: int, heads: int) -> Mix | None:
    return None if parameters[0] is None else Mix._make([*parameters, gate.view(batch, 1, heads, -1)])
