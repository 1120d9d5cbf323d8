"""Backend "blocked": row blocks of scores in plain PyTorch, mixed in place, with a backward that recomputes
them.

Memory is O(T): the forward keeps q, k, v, the mixes and 1/rho; the backward walks the same blocks again.
1/rho is applied to the output row instead of the scores, since relu(c h) = c relu(h) for c > 0 and all that
follows is linear. Half precision is stored, float32 is computed; where there are tensor cores, they multiply
the large products in halves and sum in float32. No value is read back from a device.

Shapes: B batch, H heads, G branches (H, or 2 H for "glu"), Tq queries, Tk keys, M queries of one block, n
keys of one block, Dk, Dv widths, L slots, r rank. Inside, heads come first: [G, B, T, D], so that one GEMM
per head mixes a whole batch.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.score_block import ScoreBlock

MIN_ROWS, MAX_ROWS = 32, 128  # rows of a block, where the sequence is long enough
MAX_CELLS = {"cpu": 1 << 21}  # scores in one buffer: near the cache on a CPU,
DEFAULT_MAX_CELLS = 1 << 25  # enough work per call elsewhere
# Where a GEMM multiplies halves and returns float32 (torch.bmm with out_dtype).
TENSOR_CORES = {"cuda"} if torch.version.hip is None else set()


class _Scratch:
    """Named buffers that all blocks of a call share. Fresh pages cost more than the arithmetic on them."""

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return an uninitialised, contiguous buffer; the previous content of that name is lost."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size)
        return self.buffers[name][:size].view(shape)


class _Mixer:
    """One mix in the order of the blocks.

    Heads come first; in layout "lag" the newest slot comes last; slots beyond the parameters are zero rows.
    """

    def __init__(self, mix: Mix, *, slots: int, layout: str, scratch: _Scratch):
        dtype = scratch.like.dtype
        self.scratch = scratch
        self.newest_last = layout == "lag"
        self.slots = slots
        self.scale = 1 + self._rows(mix.diag[:, :, None], dtype).mT  # [G, 1, slots]
        self.left, self.right = self._rows(mix.left, dtype), self._rows(mix.right, dtype)  # [G, slots, r]
        self.gate = mix.gate.to(dtype).permute(2, 0, 1, 3).contiguous()  # [G, B, Tq, r]

    def _rows(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        rows = parameter[:, : self.slots].to(dtype)
        rows = F.pad(rows, (0, 0, 0, self.slots - rows.shape[1]))
        return rows.flip(1) if self.newest_last else rows

    def window(self, block: ScoreBlock) -> slice:
        """Return the slice of parameter rows that belong to the columns of this block."""
        return slice(self.slots - block.columns, None) if self.newest_last else slice(block.columns)

    def gates(self, block: ScoreBlock) -> Tensor:
        return self.gate[:, :, block.queries].flatten(1, 2)  # [G, B * M, r]

    def apply_(self, block: ScoreBlock, buffer: Tensor, *, transpose: bool = False) -> Tensor:
        """buffer ← buffer R (or Rᵀ), masked. Returns buffer · left (or right), ``[G, B * M, r]``."""
        left, right = (self.right, self.left) if transpose else (self.left, self.right)
        window, values = self.window(block), block.aligned(buffer)
        inner = torch.bmm(values, left[:, window])
        low_rank = self.scratch.get("temporary", values.shape)
        torch.bmm(inner * self.gates(block), right[:, window].mT, out=low_rank)
        torch.addcmul(low_rank, values, self.scale[:, :, window], out=values)
        block.store_aligned(buffer, values)
        block.mask_(buffer, aligned_write=True)
        return inner


class _MixerGrad:
    """Gradients of one mix, accumulated block by block in the mixer's own row order."""

    def __init__(self, mixer: _Mixer):
        self.mixer = mixer
        self.diag = torch.zeros_like(mixer.scale)
        self.left, self.right = torch.zeros_like(mixer.left), torch.zeros_like(mixer.right)
        self.gate = torch.zeros_like(mixer.gate)

    def apply_(self, block: ScoreBlock, before: Tensor, inner: Tensor, grad: Tensor) -> None:
        """grad, of ``before`` R, ← grad of ``before``; ``inner`` is ``before`` · left.

        The parameters' gradients add up.
        """
        mixer, window = self.mixer, self.mixer.window(block)
        before_rows, grad_rows, gates = block.aligned(before), block.aligned(grad), mixer.gates(block)
        product = torch.mul(before_rows, grad_rows, out=mixer.scratch.get("temporary", before_rows.shape))
        self.diag[:, :, window] += product.sum(1, keepdim=True)
        self.right[:, window].baddbmm_(grad_rows.mT, inner * gates)
        grad_inner = mixer.apply_(block, grad, transpose=True)
        self.left[:, window].baddbmm_(before_rows.mT, grad_inner * gates)
        self.gate[:, :, block.queries] = (grad_inner * inner).unflatten(1, (block.batch, block.rows))

    def result(self, mix: Mix) -> Mix:
        """Return the gradients in the order, shapes and dtypes of the parameters."""
        diag = self._rows(self.diag.mT, mix.diag).squeeze(-1)
        gate = self.gate.permute(1, 2, 0, 3).to(mix.gate.dtype).contiguous()
        return Mix(diag, self._rows(self.left, mix.left), self._rows(self.right, mix.right), gate)

    def _rows(self, grad: Tensor, parameter: Tensor) -> Tensor:
        rows = (grad.flip(1) if self.mixer.newest_last else grad)[:, : parameter.shape[1]].to(parameter.dtype)
        return F.pad(rows, (0, 0, 0, parameter.shape[1] - rows.shape[1])).contiguous()


class _Problem:
    """One call in the order of the blocks: what forward and backward share."""

    def __init__(self, arguments: Attention):
        q, k, v, mix1, mix2, starts, activation, layout, eps = arguments
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.heads, self.branches = q.shape[0], v.shape[2], q.shape[2]
        # Keys before every start take no part. Elsewhere than on a CPU, reading starts would wait for the
        # device.
        known = starts if starts is not None and starts.device.type == "cpu" else None
        self.unseen = 0 if known is None else min(int(known.min()), k.shape[1] - q.shape[1])
        self.reads_starts = known is not None
        k, v, starts = (
            k[:, self.unseen :],
            v[:, self.unseen :],
            None if starts is None else starts - self.unseen,
        )
        self.num_queries, self.num_keys = q.shape[1], k.shape[1]
        self.activation, self.layout, self.eps, self.starts = activation, layout, eps, starts
        self.score_scale = q.shape[3] ** -0.5 if activation == "softmax" else 1.0
        self.scratch = _Scratch(q.new_empty(0, dtype=self.dtype))
        self.half = q.dtype if q.dtype != self.dtype and q.device.type in TENSOR_CORES else None
        self.q, self.k, self.v = (self.heads_first(x, self.half) for x in (q, k, v))
        self.mix1 = mix1 and self._mixer(mix1)
        self.mix2 = mix2 and self._mixer(transposed(mix2))

    def _mixer(self, mix: Mix) -> _Mixer:
        return _Mixer(mix, slots=self.num_keys, layout=self.layout, scratch=self.scratch)

    def heads_first(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[B, T, H, D] -> [H * B, T, D]``"""
        return x.to(dtype or self.dtype).permute(2, 0, 1, 3).flatten(0, 1).contiguous()

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Return one of the large products, in float32 (float64 for float64).

        Tensor cores multiply halves, if both factors are halves already, which loses nothing, or if they are
        rounded to bfloat16, which has the range of float32. float16 would overflow. Everything else is a
        product of the user's ``torch.set_float32_matmul_precision``.
        """
        if self.half is not None and (left.dtype == right.dtype == self.half or self.half == torch.bfloat16):
            product = half_product(left.to(self.half), right.to(self.half))
            return product if out is None else out.copy_(product)
        left, right = left.to(self.dtype), right.to(self.dtype)
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)

    def accumulate(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total ← total + left · right"""
        if self.half is None:
            total.baddbmm_(left, right)
        else:
            total.add_(self.multiply(left, right))

    def tokens_first(self, x: Tensor) -> Tensor:
        """``[H * B, T, D] -> [B, T, H, D]``, a view"""
        return x.unflatten(0, (-1, self.batch)).permute(1, 2, 0, 3)

    def blocks(self) -> Iterator[ScoreBlock]:
        rows = rows_per_block(self.q.device.type, self.branches * self.batch, self.num_queries, self.num_keys)
        offset = self.num_keys - self.num_queries
        oldest = self.starts.amin(0).tolist() if self.starts is not None and self.reads_starts else None
        for first in reversed(range(0, self.num_queries, rows)):  # the largest first, to size the scratch
            queries = range(first, min(first + rows, self.num_queries))
            first_key = (
                0 if oldest is None else min(oldest[first], offset + first)
            )  # at least one column, even if none is visible
            yield ScoreBlock(
                queries,
                offset=offset,
                batch=self.batch,
                layout=self.layout,
                starts=self.starts,
                first_key=first_key,
                device=self.q.device,
            )

    def buffer(self, name: str, block: ScoreBlock, heads: int) -> Tensor:
        return self.scratch.get(name, block.buffer_shape(heads))

    def copy(self, name: str, source: Tensor) -> Tensor:
        return self.scratch.get(name, source.shape).copy_(source)

    def product(self, name: str, block: ScoreBlock, rows: Tensor, columns: Tensor) -> Tensor:
        """rows · columnsᵀ as a masked buffer.

        A batched GEMM is fast only into contiguous memory, hence the copy.
        """
        product = self.scratch.get("temporary", (rows.shape[0], block.rows, block.columns))
        self.multiply(rows[:, block.queries], columns[:, block.keys].mT, product)
        buffer = self.buffer(name, block, rows.shape[0] // self.batch)
        block.ordinary(buffer).copy_(product)
        return block.mask_(buffer)

    def scores(self, block: ScoreBlock) -> Tensor:
        scores = self.product("scores", block, self.q, self.k)
        return scores if self.score_scale == 1.0 else scores.mul_(self.score_scale)

    def activate(self, block: ScoreBlock, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The activation, zero where the scores are masked, not yet divided by rho.

        And softplus(scale) of "glu".
        """
        weights = self.buffer("weights", block, self.heads)
        if self.activation == "softmax":
            weights = block.mask_(weights.copy_(scores), torch.finfo(self.dtype).min)
            rows = block.ordinary(weights)
            rows.copy_(rows.softmax(-1))
            return block.mask_(weights), None
        torch.clamp(scores[: self.heads], min=0, out=weights)
        if self.activation == "relu":
            return weights, None
        strength = self.buffer("strength", block, self.heads)
        # softplus is linear to the last bit of float64 beyond 40
        torch.ops.aten.softplus.out(scores[self.heads :], 1, 40, out=strength)
        return weights.mul_(strength), strength

    def inverse_norm(self, block: ScoreBlock, scores: Tensor) -> Tensor:
        """Return 1 / rho, ``[H * B, M, 1]``; 1 for softmax."""
        rows = block.ordinary(scores[: self.heads])
        if self.activation == "softmax":
            return torch.ones_like(rows[:, :, :1])
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().add_(self.eps).rsqrt_()

    def activate_backward(
        self,
        block: ScoreBlock,
        scores: Tensor,
        weights: Tensor,
        strength: Tensor | None,
        grad: Tensor,
        inverse_norm: Tensor,
    ) -> Tensor:
        """Return the scores' gradient from ``grad`` of the activation. Overwrites all but the scores."""
        if self.activation == "softmax":
            rows, grad_rows = block.ordinary(weights), block.ordinary(grad)
            grad_rows.sub_((rows * grad_rows).sum(-1, keepdim=True)).mul_(rows)
            return block.mask_(grad)
        products = torch.mul(grad, weights, out=self.buffer("temporary", block, self.heads))
        sums = block.ordinary(products).sum(-1, keepdim=True)
        norm_grad = sums.mul_(inverse_norm.square()).neg_()  # -<do, o> / rho²
        result = self.buffer("grad scores", block, self.branches)
        gate, scale = scores[: self.heads], scores[self.heads :]
        if strength is not None:
            torch.sigmoid(scale, out=result[self.heads :])
            result[self.heads :].mul_(grad).mul_(torch.clamp(gate, min=0, out=weights))
            grad.mul_(strength)
        torch.ops.aten.threshold_backward.grad_input(grad, gate, 0, grad_input=result[: self.heads])
        block.ordinary(result[: self.heads]).addcmul_(block.ordinary(gate), norm_grad)
        return result


def half_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of halves, summed in float32."""
    return torch.bmm(left, right, out_dtype=torch.float32)


def row_scale(inverse_norm: Tensor) -> Tensor:
    """Return the power of two by which a row of activations is multiplied before the readout.

    The activations are not yet divided by rho. Scaled like this, the readout neither overflows nor underflows
    where the normalised row would not. If rho is infinite the scale is 0, like the normalised row.
    """
    exponent = torch.frexp(inverse_norm).exponent
    scale = torch.ldexp(torch.ones_like(inverse_norm), exponent)
    return scale.masked_fill(inverse_norm == 0, 0).masked_fill(inverse_norm.isnan(), 1)


def rows_per_block(device: str, matrices: int, num_queries: int, num_keys: int) -> int:
    """Return the rows of a block: at most MAX_ROWS, fewer to fit MAX_CELLS or if the sequence is short.

    In a short sequence large blocks would waste work on positions after the query.
    """
    fitting = MAX_CELLS.get(device, DEFAULT_MAX_CELLS) // (matrices * num_keys)
    return max(1, min(MAX_ROWS, max(MIN_ROWS, min(fitting, num_queries // 4) // 16 * 16)))


def workspace_bytes(device: str, arguments: Attention) -> int:
    """Estimate the bytes that ``backward`` holds for itself.

    These are copies of the inputs, of the mixes and of the gradients with heads first, and six buffers of
    scores.
    """
    q, k, v = arguments[:3]
    matrices, num_queries, num_keys = q.shape[0] * q.shape[2], q.shape[1], k.shape[1]
    scores = matrices * rows_per_block(device, matrices, num_queries, num_keys) * num_keys
    inputs = sum(x.numel() for x in arguments.tensors() if x is not None)
    return torch.float32.itemsize * (2 * inputs + v.numel() + 6 * scores)


def transposed(mix: Mix) -> Mix:
    """Return the mix whose R is the transpose of this one's."""
    return mix._replace(left=mix.right, right=mix.left)


def forward(arguments: Attention) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Tq, H, Dv]`` and 1/rho ``[H * B, Tq, 1]``."""
    problem, q, v = _Problem(arguments), arguments.q, arguments.v
    out = torch.empty_like(v[:, : q.shape[1]], memory_format=torch.contiguous_format)
    inverse_norms = problem.scratch.like.new_empty(problem.v.shape[0], q.shape[1], 1)
    for block in problem.blocks():
        scores = problem.scores(block)
        if problem.mix1:
            problem.mix1.apply_(block, scores)
        inverse_norm = inverse_norms[:, block.queries] = problem.inverse_norm(block, scores)
        weights, _ = problem.activate(block, scores)
        scale = row_scale(inverse_norm)
        block.ordinary(weights).mul_(scale)
        if problem.mix2:
            problem.mix2.apply_(block, weights)
        rows = problem.multiply(block.ordinary(weights), problem.v[:, block.keys])
        rows.mul_(torch.where(scale == 0, scale, inverse_norm / scale))
        out[:, block.queries] = problem.tokens_first(rows)
    return out, inverse_norms


def backward(grad_out: Tensor, inverse_norm: Tensor, arguments: Attention) -> list[Tensor]:
    """Return the gradients of q, k, v and of the tensors of the mixes that are present."""
    problem = _Problem(arguments)
    grad_out = problem.heads_first(grad_out) * inverse_norm
    grad_q, grad_k, grad_v = (
        torch.empty_like(problem.q, dtype=problem.dtype),
        torch.zeros_like(problem.k, dtype=problem.dtype),
        torch.zeros_like(problem.v, dtype=problem.dtype),
    )
    grad1, grad2 = (mixer and _MixerGrad(mixer) for mixer in (problem.mix1, problem.mix2))
    for block in problem.blocks():
        rows, keys = block.queries, block.keys
        scores = problem.scores(block)
        if grad1:
            before1 = problem.copy("before1", scores)
            inner1 = grad1.mixer.apply_(block, scores)
        weights, strength = problem.activate(block, scores)
        mixed = weights
        if grad2:
            mixed = problem.copy("mixed", weights)
            inner2 = grad2.mixer.apply_(block, mixed)

        problem.accumulate(grad_v[:, keys], block.ordinary(mixed).mT, grad_out[:, rows])
        grad = problem.product("grad weights", block, grad_out, problem.v)
        if grad2:
            grad2.apply_(block, weights, inner2, grad)
        grad = problem.activate_backward(block, scores, weights, strength, grad, inverse_norm[:, rows])
        if grad1:
            grad1.apply_(block, before1, inner1, grad)
        if problem.score_scale != 1.0:
            grad.mul_(problem.score_scale)
        grad_q[:, rows] = problem.multiply(block.ordinary(grad), problem.k[:, keys])
        problem.accumulate(grad_k[:, keys], block.ordinary(grad).mT, problem.q[:, rows])

    grad_k, grad_v = (F.pad(g, (0, 0, problem.unseen, 0)) for g in (grad_k, grad_v))
    grads = [
        problem.tokens_first(grad).to(x.dtype).contiguous()
        for grad, x in zip((grad_q, grad_k, grad_v), arguments[:3], strict=True)
    ]
    if grad1 and arguments.mix1:
        grads += grad1.result(arguments.mix1)
    if grad2 and arguments.mix2:
        grads += transposed(grad2.result(transposed(arguments.mix2)))
    return grads
