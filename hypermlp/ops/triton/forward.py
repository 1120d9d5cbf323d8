"""The forward pass: GEMM, row kernels, GEMM, chunk by chunk; and decoding, in decode.py."""

from torch import Tensor

from hypermlp.ops.arguments import Attention
from hypermlp.ops.triton import kernels
from hypermlp.ops.triton.call import Call
from hypermlp.ops.triton.decode import decode
from hypermlp.ops.triton.launch import Chunk, launch, multiply
from hypermlp.ops.triton.saved import saved_size, saved_sums


def forward(arguments: Attention) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Tq, H, Dv]`` and the sums that the backward pass needs (``saved_sums``)."""
    if arguments.q.shape[1] == 1:
        return decode(arguments)
    q, v = arguments.q, arguments.v
    heads, itemsize = v.shape[2], q.dtype.itemsize
    branches = q.shape[2] // heads
    call = Call(arguments, bytes_per_cell=branches * max(4, itemsize) + itemsize)
    saved = q.new_empty(saved_size(arguments), dtype=call.score_dtype)
    sums1, sums2 = saved_sums(arguments, saved)
    out = q.new_empty(call.v.shape[0], q.shape[1], v.shape[3])
    for chunk in call.geometry.chunks():
        scores = call.product("scores", chunk, call.q, call.k)
        chunk_sums1, chunk_sums2 = call.of_heads(sums1, chunk), call.of_heads(sums2, chunk)
        if call.mix1 is not None:
            call.inner(chunk, scores, call.mix1.left, chunk_sums1)
        weights = _activate(call, chunk, scores, chunk_sums1, chunk_sums2)
        call.finish(chunk, weights, call.mix2, chunk_sums2, activated=True, normalise=True)
        values = call.of_heads(call.v, chunk)[:, : chunk.num_keys]
        multiply(call.of_heads(out, chunk)[:, chunk.queries], call.by_key(weights, chunk), values)
    result = q.new_empty(q.shape[0], q.shape[1], heads, v.shape[3])
    return result.copy_(out.unflatten(0, (q.shape[0], heads)).transpose(1, 2)), saved


def _activate(call: Call, chunk: Chunk, scores: Tensor, sums1: Tensor, sums2: Tensor) -> Tensor:
    """Return the activation in scratch; its sums are written to ``sums2``."""
    geometry, mix2 = call.geometry, call.mix2
    weights = call.buffer("weights", chunk, geometry.heads, call.dtype)
    place, splits, buffer = call.partial_sums("activate", chunk, sums2, weights.shape[0])
    launch(
        kernels.activate,
        "activate",
        (geometry.row_programs("activate", chunk), splits, weights.shape[0]),
        geometry.tiles["activate"],
        scores=scores,
        weights=weights,
        right2=mix2 and mix2.right,
        **call.activation_arguments(chunk, sums1),
        **place,
    )
    call.collect(chunk, buffer, sums2)
    return weights
