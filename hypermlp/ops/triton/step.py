"""A layer's decoding step on caches of fixed size: eleven launches, five of them GEMMs.

Nothing waits for the device, and addresses and shapes are the same at every step, so a CUDA graph can capture
it.

Shapes: B batch, D width, N rows of a ring, K taps.
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton.decode import decode
from hypermlp.ops.triton.elementwise import sum_type
from hypermlp.ops.triton.launch import launch
from hypermlp.ops.triton.step_kernels import step_conv, step_gates

COLUMNS = 256


def step(
    x: Tensor,
    inputs: Tensor | None,
    convs: tuple[Tensor | None, Tensor | None],
    weights: list[Tensor],
    gates: tuple[Tensor | None, Tensor | None],
    sizes: list[int],
    keys: Tensor,
    values: Tensor,
    counter: Tensor,
    mixes: list[Tensor | None],
    starts: Tensor | None,
    reach: Tensor | None,
    settings: tuple[str, str, float],
) -> Tensor:
    """Return the layer's output ``[B, 1, D]`` and write the rings.

    Args:
        x: ``[B, 1, D]``.
        inputs: ring of inputs ``[B, N, D]``; None without a convolution.
        convs: weights of the convolutions before keys and values, ``[D, K]``.
        weights: of the projections of queries, keys, values and outputs.
        gates: weight and bias of all gates.
        sizes: columns of the gates of the query, the output and both mixes; 0 for an absent one.
        keys: ring ``[B, N, branches, width]``.
        values: ring ``[B, N, heads, width]``.
        counter: int64 ``[]``, positions so far.
        mixes: diag, left and right of both mixes.
        starts: int64 ``[B, 1]``; None if all positions are visible.
        reach: int64 ``[B, 1]``, how many positions the new one sees; None for all.
        settings: activation, layout and eps.
    """
    batch, _, width = x.shape
    row = x[:, 0].contiguous()
    dtype = sum_type(x.dtype)
    row_k = row_v = row
    if inputs is not None:
        assert convs[0] is not None
        row_k, row_v = torch.empty_like(row), torch.empty_like(row)
        tensors = {"x": row, "ring": inputs, "counter": counter, "out1": row_k, "out2": row_v}
        launch(
            step_conv,
            "step_conv",
            (-(-width // COLUMNS), batch),
            None,
            **tensors,
            weight1=convs[0],
            weight2=convs[1],
            reach=reach,
            rows=inputs.shape[1],
            width=width,
            TAPS=convs[0].shape[1],
            HAS_REACH=reach is not None,
            DTYPE=dtype,
            BN=COLUMNS,
        )
    q, k, v = (_product(y, w) for y, w in zip((row, row_k, row_v), weights[:3], strict=True))
    logits = None if gates[0] is None else _product(row, gates[0])
    gated = [x.new_empty(batch, size) for size in sizes]
    widest = max(sum(sizes), k.shape[1], v.shape[1])
    names = ("gated_q", "output", "mix1", "mix2")
    launch(
        step_gates,
        "step_gates",
        (-(-widest // COLUMNS), batch),
        None,
        **{"logits": logits, "bias": gates[1], "q": q, "k": k, "v": v},
        **{"keys": keys, "values": values, "counter": counter, "rows": keys.shape[1]},
        **{name: y if y.numel() else None for name, y in zip(names, gated, strict=True)},
        **dict(zip(("QUERY", "OUTPUT", "MIX1", "MIX2"), sizes, strict=True)),
        KEY=k.shape[1],
        VALUE=v.shape[1],
        DTYPE=dtype,
        BN=COLUMNS,
    )
    branches, heads = keys.shape[2], values.shape[2]
    query = (gated[0] if sizes[0] else q).view(batch, 1, branches, -1)
    arguments = Attention(
        query,
        keys,
        values,
        _mix(mixes[:3], gated[2], batch, branches),
        _mix(mixes[3:], gated[3], batch, heads),
        starts,
        *settings,
    )
    out, _ = decode(arguments, counter.expand(batch), factor=gated[1] if sizes[1] else None)
    return _product(out.view(batch, -1), weights[3])[:, None]


def _product(a: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(a, weight.t())


def _mix(parameters: list[Any], gate: Tensor, batch: int, heads: int) -> Mix | None:
    return None if parameters[0] is None else Mix._make([*parameters, gate.view(batch, 1, heads, -1)])
