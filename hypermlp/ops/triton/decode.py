"""Decoding: one query for each sequence, on the caches as they are, in four launches.

Nothing is copied and nothing depends on the contents of a tensor, so a CUDA graph can capture a step.
``positions`` serves caches of fixed size, in which the query's position is a number on the device.
"""

from typing import Any

from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton import decode_kernels, kernels, tiles
from hypermlp.ops.triton.call import contiguous_mix, mix_arguments
from hypermlp.ops.triton.launch import Scratch, contiguous, decode_splits, launch
from hypermlp.ops.triton.saved import saved_size, saved_sums, score_dtype

SPLITS = 16  # partial sums that are added at once


def decode(
    arguments: Attention, positions: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, 1, H, Dv]`` of one query and the sums that the backward pass needs.

    Args:
        arguments: with one query. k and v are read where they are, if their last dimension is contiguous.
        positions: int64 ``[B]``, the position of each sequence's query; None for the last key. Key j is in
            row ``j mod`` the number of rows. Rows that hold no key yet are not read.
        factor: ``[B, H * Dv]``, multiplies the output; None for 1.
    """
    assert arguments.q.shape[1] == 1
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in arguments[:3])
    mix1, mix2 = contiguous_mix(arguments.mix1), contiguous_mix(arguments.mix2)
    batch, num_keys, heads, channels = v.shape
    dtype = score_dtype(q.dtype)
    saved = q.new_empty(saved_size(arguments), dtype=dtype)
    sums1, sums2 = saved_sums(arguments, saved)
    scratch = Scratch(q)
    scores = scratch.get("scores", (batch * q.shape[2], num_keys), dtype)
    weights = scratch.get("weights", (batch * heads, num_keys), dtype)
    splits, per_split = decode_splits(num_keys, batch * heads)
    partial1 = scratch.get("partial sums 1", (splits, *sums1.shape), dtype) if mix1 else None
    partial2 = scratch.get("partial sums 2", (splits, *sums2.shape), dtype)
    partial_out = scratch.get("partial output", (splits, batch * heads, channels), dtype)
    common: dict[str, Any] = {
        "starts": contiguous(arguments.starts),
        "positions": positions,
        "position_stride": 0 if positions is None else positions.stride(0),
        "num_keys": num_keys,
        "tiles_per_split": per_split,
        "HAS_STARTS": arguments.starts is not None,
        "IN_RING": positions is not None,
        "BN": tiles.DECODE_KEYS,
    }
    layout = {"LAG": arguments.layout == "lag", "BD": tiles.DECODE_CHANNELS}
    collected = {"num_splits": splits, "matrices": batch * heads, "heads": heads, "SPLITS": SPLITS}
    _scores(q, k, mix1, scores, partial1, splits, common | layout)
    launch(
        decode_kernels.decode_activate,
        "decode_activate",
        (splits, heads, batch),
        None,
        scores=scores,
        weights=weights,
        partial1=partial1,
        stats1=mix1 and sums1,
        gate1=mix1 and mix1.gate,
        diag1=mix1 and mix1.diag,
        right1=mix1 and mix1.right,
        right2=mix2 and mix2.right,
        partial2=partial2,
        num_slots=_slots(mix1),
        num_slots2=_slots(mix2),
        GLU=int(arguments.activation == "glu"),
        **mix_arguments(mix1, "1"),
        **mix_arguments(mix2, "2"),
        **common,
        **collected,
    )
    _readout(v, mix2, weights, partial2, sums2, partial_out, arguments.eps, common | layout | collected)
    return _collect(partial_out, q.new_empty(batch, 1, heads, channels), factor), saved


def _slots(mix: Mix | None) -> int:
    return 0 if mix is None else mix.left.shape[1]


def _scores(
    q: Tensor,
    k: Tensor,
    mix: Mix | None,
    scores: Tensor,
    partial: Tensor | None,
    splits: int,
    common: dict[str, Any],
) -> None:
    """Write the scores and, with a mix, their partial sums."""
    batch, _, branches, channels = q.shape
    launch(
        decode_kernels.decode_scores,
        "decode_scores",
        (splits, branches, batch),
        None,
        q=q,
        k=k,
        parameter=mix and mix.left,
        scores=scores,
        partial=partial,
        q_item=q.stride(0),
        q_head=q.stride(2),
        k_item=k.stride(0),
        k_key=k.stride(1),
        k_head=k.stride(2),
        num_slots=_slots(mix),
        channels=channels,
        matrices=batch * branches,
        heads=branches,
        **mix_arguments(mix),
        **common,
    )


def _readout(
    v: Tensor,
    mix: Mix | None,
    weights: Tensor,
    partial: Tensor,
    sums: Tensor,
    out: Tensor,
    eps: float,
    common: dict[str, Any],
) -> None:
    """Write the partial outputs ``[splits, B * H, Dv]``, and the weights' ``sums`` over all splits."""
    splits, matrices, channels = out.shape
    launch(
        decode_kernels.decode_readout,
        "decode_readout",
        (splits, -(-channels // tiles.DECODE_CHANNELS), matrices),
        None,
        weights=weights,
        v=v,
        partial2=partial,
        stats2=sums,
        gate2=mix and mix.gate,
        diag2=mix and mix.diag,
        left2=mix and mix.left,
        partial_out=out,
        v_item=v.stride(0),
        v_key=v.stride(1),
        v_head=v.stride(2),
        num_slots2=_slots(mix),
        channels=channels,
        EPS=eps,
        **mix_arguments(mix),
        **common,
    )


def _collect(partial: Tensor, out: Tensor, factor: Tensor | None) -> Tensor:
    """Add the partial outputs ``[splits, B * H, Dv]`` up into ``out``, and return it."""
    splits, matrices, channels = partial.shape
    launch(
        kernels.collect,
        "collect",
        (-(-channels // tiles.COLLECT), matrices),
        None,
        partial=partial,
        total=out,
        factor=factor,
        SCALE=factor is not None,
        length=channels,
        num_splits=splits,
        split_stride=matrices * channels,
        partial_stride=channels,
        matrix_stride=channels,
        BLOCK=tiles.COLLECT,
    )
    return out
