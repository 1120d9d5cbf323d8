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

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton import gradients
from hypermlp.ops.triton.call import Call, heads_first, mix_arguments
from hypermlp.ops.triton.launch import Chunk, launch, multiply
from hypermlp.ops.triton.saved import saved_sums


class MixGrad:
    """Gradients of one mix in float32, one copy for each residue class, accumulated chunk by chunk."""

    def __init__(self, mix: Mix, call: Call, num_queries: int):
        heads, slots, rank = mix.left.shape
        residues = call.geometry.parameter_residues
        zeros = mix.left.new_zeros
        self.diag = zeros(residues, heads, slots, dtype=call.score_dtype)
        self.left = zeros(residues, heads, slots, rank, dtype=call.score_dtype)
        self.right = torch.zeros_like(self.left)
        matrices = call.geometry.batch * heads
        self.sums = mix.left.new_empty(matrices, num_queries, rank, dtype=call.score_dtype)
        """Gradient of the mixed values · right, ``[B * heads, Tq, r]``."""

    def result(self, mix: Mix, sums: Tensor, factors: Tensor | None = None) -> Mix:
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
    itemsize = q.dtype.itemsize
    branches, score_bytes = q.shape[2] // v.shape[2], max(4, itemsize)
    call = Call(arguments, bytes_per_cell=(branches + 1) * (score_bytes + itemsize))
    mix1, mix2, of_heads = call.mix1, call.mix2, call.of_heads
    sums1, sums2 = saved_sums(arguments, saved)
    grad_rows = heads_first(grad_out)
    exact = q.dtype == call.score_dtype  # the projections are summed over slots (gradients.py)
    if exact:
        delta = q.new_empty(*grad_rows.shape[:2], 2)
    else:  # [B * H, Tq, 1]
        delta = (grad_rows.to(call.score_dtype) * heads_first(out).to(call.score_dtype)).sum(-1, keepdim=True)
    grad_q = torch.empty_like(call.q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=call.score_dtype) for x in (call.k, call.v))
    grad1, grad2 = (mix and MixGrad(mix, call, q.shape[1]) for mix in (mix1, mix2))

    for chunk in call.geometry.chunks():
        chunk_sums1, chunk_sums2 = of_heads(sums1, chunk), of_heads(sums2, chunk)
        scores = call.product("scores", chunk, call.q, call.k)
        grad_weights = call.product("grad weights", chunk, grad_rows, call.v)
        if mix2 and grad2:
            call.inner(chunk, grad_weights, mix2.left, of_heads(grad2.sums, chunk))
        weights, grad_scores = _activate_backward(
            call, chunk, scores, grad_weights, chunk_sums1, chunk_sums2, of_heads(delta, chunk), grad1, grad2
        )
        if mix1 and grad1:
            _parameters(call, chunk, scores, grad_scores, mix1, grad1, chunk_sums1)
        if mix2 and grad2:
            turned = mix2._replace(left=mix2.right, right=mix2.left)  # R2 is applied transposed
            _parameters(call, chunk, weights, grad_weights, turned, grad2, chunk_sums2, normalised=True)
        call.finish(chunk, weights, mix2, chunk_sums2, normalise=True)
        call.finish(chunk, grad_scores, mix1, of_heads(grad1.sums, chunk) if grad1 else chunk_sums2)

        queries, keys = chunk.queries, slice(chunk.num_keys)
        by_key = call.by_key(grad_scores, chunk)
        multiply(of_heads(grad_q, chunk)[:, queries], by_key, of_heads(call.k, chunk)[:, keys])
        for grad, left, right in (
            (grad_k, by_key, call.q),
            (grad_v, call.by_key(weights, chunk), grad_rows),
        ):
            rows = of_heads(right, chunk)[:, queries]
            multiply(of_heads(grad, chunk)[:, keys], left.mT, rows, accumulate=True)

    grads = [
        x.new_empty(x.shape).copy_(grad.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2))
        for grad, x in zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)
    ]
    if mix1 and grad1:
        grads += grad1.result(mix1, sums1)
    if mix2 and grad2:
        inverse_norm = (sums2[:, :, -1] + arguments.eps).rsqrt()
        diag, right, left, gate = grad2.result(mix2, sums2[:, :, :-1], inverse_norm)
        grads += (diag, left, right, gate)
    return grads


def _activate_backward(
    call: Call,
    chunk: Chunk,
    scores: Tensor,
    grad_weights: Tensor,
    sums1: Tensor,
    sums2: Tensor,
    delta: Tensor,
    grad1: MixGrad | None,
    grad2: MixGrad | None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and the gradient of the mixed scores in scratch; the latter's sums go to
    ``grad1.sums``.

    ``delta`` holds the projections; in float32 ``[matrices, Tq, 2]``, which are computed here.
    """
    geometry, mix2, exact = call.geometry, call.mix2, delta.shape[2] == 2
    matrices = grad_weights.shape[0]
    common: dict[str, Any] = {
        "scores": scores,
        "grad_weights": grad_weights,
        "stats2": sums2,
        "grad_stats2": grad2 and call.of_heads(grad2.sums, chunk),
        "gate2": mix2 and mix2.gate[chunk.items],
        "diag2": mix2 and mix2.diag,
        "right2": mix2 and mix2.right,
        "EPS": call.eps,
        **call.activation_arguments(chunk, sums1),
    }
    if exact:
        place, splits, buffer = call.partial_sums("project", chunk, delta, matrices)
        grid = (geometry.row_programs("project", chunk), splits, matrices)
        launch(gradients.project, "project", grid, geometry.tiles["project"], **common, **place)
        call.collect(chunk, buffer, delta)
    weights = call.buffer("weights", chunk, geometry.heads, call.dtype)
    grad_scores = call.buffer("grad scores", chunk, geometry.branches, call.dtype)
    total = None if grad1 is None else call.of_heads(grad1.sums, chunk)
    place, splits, buffer = call.partial_sums("activate_backward", chunk, total, matrices)
    launch(
        gradients.activate_backward,
        "activate_backward",
        (geometry.row_programs("activate_backward", chunk), splits, matrices),
        geometry.tiles["activate_backward"],
        weights=weights,
        grad_scores=grad_scores,
        delta=delta,
        EXACT=int(exact),
        **common,
        **place,
    )
    call.collect(chunk, buffer, total)
    return weights, grad_scores


def _parameters(
    call: Call,
    chunk: Chunk,
    before: Tensor,
    after: Tensor,
    mix: Mix,
    grad: MixGrad,
    sums: Tensor,
    *,
    normalised: bool = False,
) -> None:
    """Add the gradients of a mix. ``normalised``: the values are divided by rho, but ``sums`` are not."""
    geometry, heads = call.geometry, mix.left.shape[0]
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
        grad_stats=call.of_heads(grad.sums, chunk),
        gate=mix.gate[chunk.items],
        grad_diag=grad.diag,
        grad_left=grad.left,
        grad_right=grad.right,
        items=chunk.num_items,
        num_slots=mix.left.shape[1],
        heads=heads,
        WIDTH=sums.shape[2],
        NORMALISE=normalised,
        EPS=call.eps,
        **options,
        **geometry.arguments(chunk, residues=residues),
    )
