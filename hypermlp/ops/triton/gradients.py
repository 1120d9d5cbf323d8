"""The row kernels of the backward pass: ``project``, ``activate_backward`` and ``parameters``.

``inner`` and ``finish`` of kernels.py serve the backward pass too: the gradient of a mix is the transposed
mix.

The gradient of a normalised row needs its projection: the sum over slots of the activation times its
gradient, which equals the product of the output and its gradient. If a row sees one slot, its gradient is all
cancellation against the projection. So in float32 ``project`` sums the same rounded numbers up that
``activate_backward`` subtracts it from, and their squares: a recomputed row may differ from the forward
pass's, whose norm divides it, by more than a rounding. In half precision, where the output is rounded anyway,
the product serves.
"""

import triton
import triton.language as tl

from hypermlp.ops.triton.kernels import SIZES
from hypermlp.ops.triton.row_tiles import (
    first_row,
    first_shift,
    gated_branches,
    gated_sums,
    inverse_norm,
    last_tile,
    load_tile,
    matmul,
    normalised,
    pre_activation,
    query_value,
    row_tile,
    sigmoid_from,
    softplus,
    store_sums,
    store_tile,
    tile_cells,
    tile_slots,
)


@triton.jit(do_not_specialize=SIZES)
def project(
    scores, grad_weights, stats1, stats2, grad_stats2,
    gate1, diag1, right1, gate2, diag2, right2, partial, starts,
    num_rows, first_query, num_queries, offset, num_slots, num_slots2, ld, pad,
    tiles_per_split, split_stride, matrix_stride, heads,
    RANK1: tl.constexpr, R1: tl.constexpr, MIXED1: tl.constexpr,
    RANK2: tl.constexpr, R2: tl.constexpr, MIXED2: tl.constexpr,
    GLU: tl.constexpr, EPS: tl.constexpr,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``partial[split, matrix, row] = [activation times its gradient, squares of the normalised scores]``,
    summed over slots.
    """
    first = first_row(STRIDE, BM)
    if first >= num_rows:
        return
    split, matrix = tl.program_id(1), tl.program_id(2)
    item, head = matrix // heads, matrix % heads
    dtype: tl.constexpr = scores.dtype.element_ty
    row, live, query, count, origin, shift = row_tile(
        starts, item, first, num_rows, first_query, num_queries, offset, pad, HAS_STARTS, LAG, STRIDE, BM
    )
    norm = query_value(stats2, matrix, query, live, num_queries, RANK2 + 1, RANK2)
    gated, gated_scale = gated_branches(
        stats1, gate1, item, head, heads, query, live, num_queries, RANK1, R1, MIXED1, GLU, dtype
    )
    gated_grad = gated_sums(
        grad_stats2, gate2, item, head, heads, query, live, num_queries, RANK2, RANK2, R2, MIXED2, dtype
    )
    cells = num_rows.to(tl.int64) * ld
    base = scores + (item * heads * (1 + GLU) + head) * cells
    projection = tl.zeros([BM], dtype=dtype)
    squares = tl.zeros([BM], dtype=dtype)
    for tile in tl.range(split * tiles_per_split, last_tile(split, tiles_per_split, count, shift, BN)):
        slot, exists, reached, offsets = tile_cells(
            row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN
        )
        grad, _ = pre_activation(
            grad_weights + matrix * cells, offsets, exists, reached, slot, gated_grad, diag2, right2, head,
            num_slots2, RANK2, R2, MIXED2, STRIDE, PRECISION, dtype,
        )  # fmt: skip
        h, _ = pre_activation(
            base, offsets, exists, reached, slot, gated, diag1, right1, head, num_slots,
            RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
        )  # fmt: skip
        h = normalised(h, norm, EPS, True)
        if GLU:
            h_scale, _ = pre_activation(
                base + heads * cells, offsets, exists, reached, slot, gated_scale, diag1, right1,
                head + heads, num_slots, RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
            )  # fmt: skip
            strength, _ = softplus(h_scale)
            grad *= strength
        projection += tl.sum(tl.where(h > 0, grad * h, 0.0), 1)
        squares += tl.sum(h * h, 1)
    sums = partial + split.to(tl.int64) * split_stride + matrix.to(tl.int64) * matrix_stride
    tl.store(sums + 2 * row, projection, mask=live)
    tl.store(sums + 2 * row + 1, squares, mask=live)


@triton.jit(do_not_specialize=SIZES)
def activate_backward(
    scores, grad_weights, weights, grad_scores, stats1, stats2, grad_stats2, delta,
    gate1, diag1, right1, gate2, diag2, right2, partial, starts,
    num_rows, first_query, num_queries, offset, num_slots, num_slots2, ld, pad,
    tiles_per_split, split_stride, matrix_stride, heads,
    RANK1: tl.constexpr, R1: tl.constexpr, MIXED1: tl.constexpr,
    RANK2: tl.constexpr, R2: tl.constexpr, MIXED2: tl.constexpr,
    GLU: tl.constexpr, EXACT: tl.constexpr, EPS: tl.constexpr,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Recompute the normalised activation (``weights``); write the gradient of the mixed scores.

    ``partial[split, branch, row] = gradient of the mixed scores · right1``; ``grad_stats2`` holds the
    gradient of the weights · left2, ``delta`` the projections; EXACT (see ``normalised``): the sums of
    ``project``.
    """
    first = first_row(STRIDE, BM)
    if first >= num_rows:
        return
    split, matrix = tl.program_id(1), tl.program_id(2)
    item, head = matrix // heads, matrix % heads
    branch = item * heads * (1 + GLU) + head
    dtype: tl.constexpr = scores.dtype.element_ty
    row, live, query, count, origin, shift = row_tile(
        starts, item, first, num_rows, first_query, num_queries, offset, pad, HAS_STARTS, LAG, STRIDE, BM
    )
    width2: tl.constexpr = RANK2 + 1
    norm = query_value(stats2, matrix, query, live, num_queries, width2, RANK2)
    inverse = inverse_norm(norm, EPS)
    projection = query_value(delta, matrix, query, live, num_queries, 1 + EXACT, 0)
    if EXACT:
        projection /= query_value(delta, matrix, query, live, num_queries, 2, 1) + EPS / (norm + EPS)
    gated, gated_scale = gated_branches(
        stats1, gate1, item, head, heads, query, live, num_queries, RANK1, R1, MIXED1, GLU, dtype
    )
    gated_grad = gated_sums(
        grad_stats2, gate2, item, head, heads, query, live, num_queries, RANK2, RANK2, R2, MIXED2, dtype
    )

    cells = num_rows.to(tl.int64) * ld
    base, out = scores + branch * cells, grad_scores + branch * cells
    base_scale, out_scale = base + heads * cells, out + heads * cells
    products = tl.zeros([BM, R1], dtype=dtype)
    products_scale = tl.zeros([BM, R1], dtype=dtype)
    for tile in tl.range(split * tiles_per_split, last_tile(split, tiles_per_split, count, shift, BN)):
        slot, exists, reached, offsets = tile_cells(
            row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN
        )
        grad, _ = pre_activation(
            grad_weights + matrix * cells, offsets, exists, reached, slot, gated_grad, diag2, right2, head,
            num_slots2, RANK2, R2, MIXED2, STRIDE, PRECISION, dtype,
        )  # fmt: skip
        h, factors = pre_activation(
            base, offsets, exists, reached, slot, gated, diag1, right1, head, num_slots,
            RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
        )  # fmt: skip
        h = normalised(h, norm, EPS, EXACT)
        a = tl.where(h > 0, h, 0.0)
        if GLU:
            h_scale, factors_scale = pre_activation(
                base_scale, offsets, exists, reached, slot, gated_scale, diag1, right1, head + heads,
                num_slots, RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
            )  # fmt: skip
            strength, e = softplus(h_scale)
            grad_scale = grad * a * sigmoid_from(h_scale, e)
            store_tile(out_scale, offsets, grad_scale, exists, reached, STRIDE)
            if MIXED1:
                products_scale = matmul(grad_scale, factors_scale, products_scale, PRECISION)
            a *= strength
            grad *= strength
        store_tile(weights + matrix * cells, offsets, a, exists, reached, STRIDE)
        grad = (tl.where(h > 0, grad, 0.0) - h * projection[:, None]) * inverse[:, None]
        store_tile(out, offsets, grad, exists, reached, STRIDE)
        if MIXED1:
            products = matmul(grad, factors, products, PRECISION)
    if MIXED1:
        sums = partial + split.to(tl.int64) * split_stride + branch.to(tl.int64) * matrix_stride
        store_sums(sums, row, live, products, RANK1, RANK1, R1)
        if GLU:
            sums += heads.to(tl.int64) * matrix_stride
            store_sums(sums, row, live, products_scale, RANK1, RANK1, R1)


@triton.jit(do_not_specialize=SIZES)
def parameters(
    before, after, stats, grad_stats, gate,
    grad_diag, grad_left, grad_right, starts,
    items, num_rows, first_query, num_queries, offset, num_slots, ld, pad, heads,
    RANK: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add a chunk's gradients of diag, left and right for ``after = before R``; grid (slot tiles · STRIDE, 1,
    heads).

    ``before`` holds values, ``after`` the gradients of the mixed ones. A program owns a slot tile of one
    residue class, so nothing is added by two programs. ``stats`` = before · left, ``grad_stats`` =
    after · right.
    """
    pid, head = tl.program_id(0), tl.program_id(2)
    residue, tile = pid % STRIDE, pid // STRIDE
    dtype: tl.constexpr = stats.dtype.element_ty
    shift = first_shift(pad + (offset + first_query + residue if LAG else 0), STRIDE, LAG)
    diag = tl.zeros([BN], dtype=dtype)
    left = tl.zeros([BN, R], dtype=dtype)
    right = tl.zeros([BN, R], dtype=dtype)
    for index in tl.range(0, items):
        item = index + head * 0  # a tensor, in the interpreter too
        matrix = item * heads + head
        cells = matrix.to(tl.int64) * num_rows * ld
        for group in tl.range(0, tl.cdiv(num_rows, BM * STRIDE)):
            first = residue + STRIDE * BM * group
            row, live, query, count, origin, _shift = row_tile(
                starts, item, first, num_rows, first_query, num_queries, offset, pad,
                HAS_STARTS, LAG, STRIDE, BM,
            )  # fmt: skip
            _slot, exists, reached, offsets = tile_cells(
                row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN
            )
            x = load_tile(before + cells, offsets, exists, reached, STRIDE, dtype)
            y = load_tile(after + cells, offsets, exists, reached, STRIDE, dtype)
            sums = gated_sums(
                stats, gate, item, head, heads, query, live, num_queries, WIDTH, RANK, R, True, dtype
            )
            if NORMALISE:
                norm = query_value(stats, matrix, query, live, num_queries, WIDTH, WIDTH - 1)
                sums *= inverse_norm(norm, EPS)[:, None]
            grad_sums = gated_sums(
                grad_stats, gate, item, head, heads, query, live, num_queries, RANK, RANK, R, True, dtype
            )
            diag += tl.sum(x * y, 0)
            left = matmul(tl.trans(x), grad_sums, left, PRECISION)
            right = matmul(tl.trans(y), sums, right, PRECISION)
    # [residues, heads, slots, ...]
    slot = tile_slots(tile, shift, BN, LAG)
    owned = (residue * heads + head).to(tl.int64) * num_slots + slot
    mask = (slot >= 0) & (slot < num_slots)
    tl.store(grad_diag + owned, tl.load(grad_diag + owned, mask=mask, other=0.0) + diag, mask=mask)
    column = tl.arange(0, R)
    places = owned[:, None] * RANK + column[None, :]
    mask2 = mask[:, None] & (column < RANK)[None, :]
    tl.store(grad_left + places, tl.load(grad_left + places, mask=mask2, other=0.0) + left, mask=mask2)
    tl.store(grad_right + places, tl.load(grad_right + places, mask=mask2, other=0.0) + right, mask=mask2)
