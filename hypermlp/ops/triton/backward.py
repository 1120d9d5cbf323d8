"""The backward pass: recomputes each chunk from the saved sums, so that memory is O(T).

For one head and row, with scores z, mixed scores h, activation a and weights w = a R(mix2)ᵀ over the slots,
from the gradient do of the output o::

    dw = do Vᵀ                              GEMM
    da = dw R(mix2)                         inner, activate_backward
    dh_gate = (softplus(h_scale) [h_gate > 0] da - h_gate <da, a> / rho) / rho
    dh_scale = sigmoid(h_scale) relu(h_gate / rho) da
    dz = dh R(mix1)ᵀ                        finish
    dq = dz K,  dK += dzᵀ q,  dV += wᵀ do   GEMMs

The projection <da, a> equals <do, o>; gradients.py says where which of them is taken.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton import gradients
from hypermlp.ops.triton.forward import weight_scale
from hypermlp.ops.triton.launch import Chunk, launch, multiply
from hypermlp.ops.triton.problem import Problem, heads_first, mix_arguments
from hypermlp.ops.triton.saved import saved_sums

LONGEST = 4096.0  # norm of a row of q, in float16, after it took a factor


class RowFactors(NamedTuple):
    """What float16 needs: stored rows are divided by these numbers, so that they neither overflow nor vanish.

    The gradients of k and v multiply such a row with a row of q or of the output's gradient, which takes the
    factor instead.
    """

    scores: Tensor | None = None
    """The factor of each row of the gradient of the scores, ``[B * G, Tq]``."""
    weights: Tensor | None = None
    """The factor of each row of the weights, ``[B * H, Tq]``; None for 1."""


class MixGrad:
    """Gradients of one mix in float32, one copy for each residue class, accumulated chunk by chunk."""

    def __init__(self, mix: Mix, problem: Problem, num_queries: int):
        heads, slots, rank = mix.left.shape
        residues = problem.geometry.parameter_residues
        zeros = mix.left.new_zeros
        self.diag = zeros(residues, heads, slots, dtype=problem.score_dtype)
        self.left = zeros(residues, heads, slots, rank, dtype=problem.score_dtype)
        self.right = torch.zeros_like(self.left)
        matrices = problem.geometry.batch * heads
        self.sums = mix.left.new_empty(matrices, num_queries, rank, dtype=problem.score_dtype)
        """Gradient of the mixed values · right, ``[B * heads, Tq, r]``."""

    def result(self, mix: Mix, sums: Tensor, factors: Tensor | None) -> Mix:
        """Return the gradients of the parameters; ``sums`` are the values · left, to be multiplied by
        ``factors`` ``[B * heads, Tq]``.
        """
        # The factors come first: the values are not normalised, and the product of both may overflow.
        gate = self.sums * (sums if factors is None else sums * factors[:, :, None])
        gate = gate.unflatten(0, (-1, mix.left.shape[0])).transpose(1, 2)
        grads = (self.diag.sum(0), self.left.sum(0), self.right.sum(0), gate)
        return Mix(*(grad.to(x.dtype).contiguous() for grad, x in zip(grads, mix, strict=True)))


def backward(grad_out: Tensor, out: Tensor, saved: Tensor, arguments: Attention) -> list[Tensor]:
    """Return the gradients of q, k, v and of the tensors of the mixes that are present."""
    q, k, v = arguments[:3]
    heads, itemsize = v.shape[2], q.dtype.itemsize
    branches, score_bytes = q.shape[2] // heads, max(4, itemsize)
    bytes_per_cell = (branches + 1) * (score_bytes + itemsize)
    problem = Problem(arguments, bytes_per_cell=bytes_per_cell)
    geometry, mix1, mix2 = problem.geometry, problem.mix1, problem.mix2
    sums1, sums2 = saved_sums(arguments, saved)
    grad_rows = heads_first(grad_out)
    wide_grad = grad_rows.to(problem.score_dtype)
    exact = q.dtype == problem.score_dtype  # the projections are summed over slots (gradients.py)
    if exact:
        delta = q.new_empty(*grad_rows.shape[:2], 2)
    else:
        delta = (wide_grad * heads_first(out).to(problem.score_dtype)).sum(-1, keepdim=True)  # [B * H, Tq, 1]
    inverse_norm = (sums2[:, :, -1] + arguments.eps).rsqrt()
    factors = _row_factors(problem, wide_grad, inverse_norm, sums1) if problem.scaled else RowFactors()
    score_rows, weight_rows = problem.q, grad_rows  # the rows that the gradients of k and v are made of
    key_scale: float | Tensor = 1.0  # common to all rows, so that those of small gradients do not vanish
    if factors.scores is not None:
        scaled_q = problem.q * factors.scores[:, :, None]
        key_scale = LONGEST / scaled_q.abs().amax().clamp(min=torch.finfo(scaled_q.dtype).tiny)
        score_rows = (scaled_q * key_scale).to(q.dtype)
    if factors.weights is not None:
        weight_rows = (wide_grad * factors.weights[:, :, None]).to(q.dtype)

    row_dtype = problem.score_dtype if problem.scaled else q.dtype
    grad_q = torch.empty_like(problem.q, dtype=row_dtype)
    grad_k, grad_v = (torch.zeros_like(x, dtype=problem.score_dtype) for x in (problem.k, problem.v))
    grad1, grad2 = (mix and MixGrad(mix, problem, q.shape[1]) for mix in (mix1, mix2))

    for chunk in geometry.chunks():
        sums = [problem.of_heads(x, chunk) for x in (sums1, sums2)]
        scores = problem.product("scores", chunk, problem.q, problem.k)
        grad_weights = problem.product("grad weights", chunk, grad_rows, problem.v)
        if mix2 and grad2:
            problem.inner(chunk, grad_weights, mix2, mix2.left, problem.of_heads(grad2.sums, chunk))
        rows = _gradient_arguments(problem, chunk, sums, grad2)
        chunk_delta = problem.of_heads(delta, chunk)
        if exact:
            _project(problem, chunk, scores, grad_weights, rows, chunk_delta)
        weights = problem.buffer("weights", chunk, geometry.heads, q.dtype)
        grad_scores = problem.buffer("grad scores", chunk, geometry.branches, q.dtype)
        buffers = (scores, grad_weights, weights, grad_scores)
        _activate_backward(problem, chunk, buffers, rows, chunk_delta, factors, grad1, exact=exact)
        if mix1 and grad1:
            _parameters(
                problem, chunk, scores, grad_scores, mix1, grad1, sums[0], after_factors=factors.scores
            )
        if mix2 and grad2:
            turned = mix2._replace(left=mix2.right, right=mix2.left)  # R2 is applied transposed
            _parameters(
                problem,
                chunk,
                weights,
                grad_weights,
                turned,
                grad2,
                sums[1],
                normalised=True,
                before_factors=factors.weights,
            )
        problem.finish(chunk, weights, mix2, mix2 and mix2.left, sums[1], normalise=True, score_sums=sums[0])
        grad_sums = problem.of_heads(grad1.sums, chunk) if grad1 else sums[1]
        problem.finish(chunk, grad_scores, mix1, mix1 and mix1.left, grad_sums)

        queries, keys = chunk.queries, slice(chunk.num_keys)
        by_key = problem.by_key(grad_scores, chunk)
        of_heads = problem.of_heads
        multiply(of_heads(grad_q, chunk)[:, queries], by_key, of_heads(problem.k, chunk)[:, keys])
        for grad, left, right in (
            (grad_k, by_key, score_rows),
            (grad_v, problem.by_key(weights, chunk), weight_rows),
        ):
            multiply(
                of_heads(grad, chunk)[:, keys], left.mT, of_heads(right, chunk)[:, queries], accumulate=True
            )

    if factors.scores is not None:
        grad_q *= factors.scores[:, :, None]
        grad_k /= key_scale
    grads = [
        x.new_empty(x.shape).copy_(grad.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2))
        for grad, x in zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)
    ]
    if mix1 and grad1:
        grads += grad1.result(mix1, sums1[:, :, :-1], factors.scores)
    if mix2 and grad2:
        diag, right, left, gate = grad2.result(mix2, sums2[:, :, :-1], inverse_norm)
        grads += (diag, left, right, gate)
    return grads


def _row_factors(problem: Problem, grad: Tensor, inverse_norm: Tensor, sums1: Tensor) -> RowFactors:
    """Return factors of about the size of the rows.

    The gradient of a row's gate scores is of the order of the output's gradient times the weights' factor
    over rho, that of its scale scores of the order of the output's gradient; both mixes enlarge them. Rows of
    q must not overflow either.
    """
    norms = torch.linalg.vector_norm(grad, dim=-1)
    norms = norms.masked_fill(norms == 0, 1)
    weights = 1 / weight_scale(sums1, problem) if problem.glu else None
    gate = norms * inverse_norm
    branches = [gate] if weights is None else [gate * weights, norms]
    batch, heads = problem.geometry.batch, problem.geometry.heads
    expected = torch.stack([x.unflatten(0, (batch, heads)) for x in branches], dim=1)
    for mix in (problem.mix1, problem.mix2):
        if mix is not None:
            expected = expected * _gain(mix).view(-1, heads, 1)
    lengths = torch.linalg.vector_norm(problem.q, dim=-1, dtype=problem.score_dtype)
    return RowFactors(torch.minimum(expected.flatten(0, 2), LONGEST / lengths), weights)


def _gain(mix: Mix) -> Tensor:
    """Return by how much the mix of each head enlarges a row, about: the root mean square of its slots."""
    diag, left, right = (x.float().square() for x in mix[:3])
    return 1 + diag.mean(1).sqrt() + (left.mean((1, 2)) * right.sum((1, 2))).sqrt()


def _gradient_arguments(
    problem: Problem, chunk: Chunk, sums: list[Tensor], grad2: MixGrad | None
) -> dict[str, Any]:
    """Return what the kernels take that compute the activation and its gradient."""
    mix2 = problem.mix2
    return {
        "stats2": sums[1],
        "grad_stats2": grad2 and problem.of_heads(grad2.sums, chunk),
        "gate2": mix2 and mix2.gate[chunk.items],
        "diag2": mix2 and mix2.diag,
        "right2": mix2 and mix2.right,
        **problem.activation_arguments(chunk, sums[0]),
    }


def _project(
    problem: Problem,
    chunk: Chunk,
    scores: Tensor,
    grad_weights: Tensor,
    rows: dict[str, Any],
    total: Tensor,
) -> None:
    """Write the sums of ``project`` to ``total`` ``[matrices, Tq, 2]``."""
    geometry, matrices = problem.geometry, grad_weights.shape[0]
    place, splits, buffer = problem.partial_sums("project", chunk, total, matrices)
    grid = (geometry.row_programs("project", chunk), splits, matrices)
    tensors = {"scores": scores, "grad_weights": grad_weights}
    launch(gradients.project, "project", grid, geometry.tiles["project"], **tensors, **rows, **place)
    problem.collect(chunk, buffer, total)


def _activate_backward(
    problem: Problem,
    chunk: Chunk,
    buffers: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: dict[str, Any],
    delta: Tensor,
    factors: RowFactors,
    grad1: MixGrad | None,
    *,
    exact: bool,
) -> None:
    """Write the weights and the gradient of the mixed scores; the latter's sums go to ``grad1.sums``."""
    geometry = problem.geometry
    scores, grad_weights, weights, grad_scores = buffers
    total = None if grad1 is None else problem.of_heads(grad1.sums, chunk)
    matrices = weights.shape[0]
    if total is None:
        splits, per_split = geometry.splits("activate_backward", chunk, matrices)
        place = {"partial": None, "split_stride": 0, "matrix_stride": 0, "tiles_per_split": per_split}
        buffer = None
    else:
        place, splits, buffer = problem.partial_sums("activate_backward", chunk, total, matrices)
    launch(
        gradients.activate_backward,
        "activate_backward",
        (geometry.row_programs("activate_backward", chunk), splits, matrices),
        geometry.tiles["activate_backward"],
        scores=scores,
        grad_weights=grad_weights,
        weights=weights,
        grad_scores=grad_scores,
        delta=delta,
        grad_factors=None if factors.scores is None else problem.of_heads(factors.scores, chunk),
        SCALED=problem.scaled,
        EXACT=int(exact),
        **rows,
        **place,
    )
    if total is not None:
        problem.collect(chunk, buffer, total)


def _parameters(
    problem: Problem,
    chunk: Chunk,
    before: Tensor,
    after: Tensor,
    mix: Mix,
    grad: MixGrad,
    sums: Tensor,
    *,
    normalised: bool = False,
    before_factors: Tensor | None = None,
    after_factors: Tensor | None = None,
) -> None:
    """Add the gradients of a mix. ``normalised``: the values are divided by rho, but ``sums`` are not."""
    geometry, heads = problem.geometry, mix.left.shape[0]
    residues = geometry.parameter_residues
    name = "parameters" if residues > 1 else "parameters_scalar"
    options = mix_arguments(mix)
    del options["MIXED"]
    launch(
        gradients.parameters,
        name,
        (geometry.slot_tiles(name, chunk, residues) * residues, 1, heads),
        geometry.tiles[name],
        before=before,
        after=after,
        stats=sums,
        grad_stats=problem.of_heads(grad.sums, chunk),
        before_factors=None if before_factors is None else problem.of_heads(before_factors, chunk),
        after_factors=None if after_factors is None else problem.of_heads(after_factors, chunk),
        stats_norms=sums,
        gate=mix.gate[chunk.items],
        grad_diag=grad.diag,
        grad_left=grad.left,
        grad_right=grad.right,
        items=chunk.num_items,
        num_slots=mix.left.shape[1],
        heads=heads,
        WIDTH=sums.shape[2],
        WIDTH_NORMS=sums.shape[2],
        NORMALISE=normalised,
        BEFORE_SCALED=before_factors is not None,
        AFTER_SCALED=after_factors is not None,
        EPS=problem.eps,
        **options,
        **geometry.arguments(chunk, residues=residues),
    )
