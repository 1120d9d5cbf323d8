"""The forward pass: GEMM, row kernels, GEMM, chunk by chunk; and decoding, in decode.py."""

from torch import Tensor

from hypermlp.ops.arguments import Attention
from hypermlp.ops.triton import kernels
from hypermlp.ops.triton.decode import decode
from hypermlp.ops.triton.launch import Chunk, launch, multiply
from hypermlp.ops.triton.problem import Problem
from hypermlp.ops.triton.saved import saved_size, saved_sums


def forward(arguments: Attention) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Tq, H, Dv]`` and the sums that the backward pass needs (``saved_sums``)."""
    if arguments.q.shape[1] == 1:
        return decode(arguments)
    q, v = arguments.q, arguments.v
    heads, itemsize = v.shape[2], q.dtype.itemsize
    branches = q.shape[2] // heads
    problem = Problem(arguments, bytes_per_cell=branches * max(4, itemsize) + itemsize)
    saved = q.new_empty(saved_size(arguments), dtype=problem.score_dtype)
    sums1, sums2 = saved_sums(arguments, saved)
    # float16 rows may be kept at a smaller scale, which only float32 can undo
    out_dtype = problem.score_dtype if problem.scaled else q.dtype
    out = q.new_empty(problem.v.shape[0], q.shape[1], v.shape[3], dtype=out_dtype)
    for chunk in problem.geometry.chunks():
        scores = problem.product("scores", chunk, problem.q, problem.k)
        chunk_sums1, chunk_sums2 = problem.of_heads(sums1, chunk), problem.of_heads(sums2, chunk)
        if problem.width1:
            left = None if problem.mix1 is None else problem.mix1.left
            problem.inner(chunk, scores, problem.mix1, left, chunk_sums1)
        weights = _activate(problem, chunk, scores, chunk_sums1, chunk_sums2)
        left = None if problem.mix2 is None else problem.mix2.left
        problem.finish(
            chunk,
            weights,
            problem.mix2,
            left,
            chunk_sums2,
            activated=True,
            normalise=True,
            score_sums=chunk_sums1,
        )
        values = problem.of_heads(problem.v, chunk)[:, : chunk.num_keys]
        multiply(problem.of_heads(out, chunk)[:, chunk.queries], problem.by_key(weights, chunk), values)
    if problem.scaled and problem.glu:
        out /= weight_scale(sums1, problem)[:, :, None]
    result = q.new_empty(q.shape[0], q.shape[1], heads, v.shape[3])
    return result.copy_(out.unflatten(0, (q.shape[0], heads)).transpose(1, 2)), saved


def weight_scale(sums1: Tensor, problem: Problem) -> Tensor:
    """Return the factors of the rows of weights in float16, ``[B * H, Tq]`` (see ``half_scale``)."""
    batch, heads = problem.geometry.batch, problem.geometry.heads
    squares = sums1[:, :, -1].unflatten(0, (batch, 2, heads))[:, 1].flatten(0, 1)
    return (1024 / (squares + 1e-30).sqrt()).clamp(max=1)


def _activate(problem: Problem, chunk: Chunk, scores: Tensor, sums1: Tensor, sums2: Tensor) -> Tensor:
    """Return the activation in scratch; its sums are written to ``sums2``."""
    geometry, mix2 = problem.geometry, problem.mix2
    weights = problem.buffer("weights", chunk, geometry.heads, problem.dtype)
    place, splits, buffer = problem.partial_sums("activate", chunk, sums2, weights.shape[0])
    launch(
        kernels.activate,
        "activate",
        (geometry.row_programs("activate", chunk), splits, weights.shape[0]),
        geometry.tiles["activate"],
        scores=scores,
        weights=weights,
        right2=mix2 and mix2.right,
        SCALED=problem.scaled,
        **problem.activation_arguments(chunk, sums1),
        **place,
    )
    problem.collect(chunk, buffer, sums2)
    return weights
