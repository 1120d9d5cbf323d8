"""The row kernels of the forward pass: ``inner``, ``collect``, ``activate`` and ``finish``.

Between two GEMMs a chunk of M query rows lies in scratch (see row_tiles.py for the addresses). ``inner``
multiplies the scores with ``left``; ``activate`` mixes them, applies the activation and multiplies with the
second mix's ``right``; ``finish`` adds the second mix's low-rank part and clears what no query sees. The
first two are split over slots; ``collect`` adds their partial sums in a fixed order.

Grids: (row tiles of all residue classes, splits or slot tiles, matrices).
"""

import triton
import triton.language as tl

from hypermlp.ops.triton.row_tiles import (
    first_row,
    gated_branches,
    gated_sums,
    inverse_norm,
    last_tile,
    load_tile,
    matmul,
    mixed,
    parameter_tile,
    pre_activation,
    query_value,
    row_tile,
    slot_scale,
    softplus,
    store_sums,
    store_tile,
    tile_cells,
)

# Sizes that change from chunk to chunk must not make new variants of a kernel; `ld` is a multiple of 16.
SIZES = [
    "num_rows",
    "first_query",
    "num_queries",
    "offset",
    "num_slots",
    "num_slots2",
    "num_keys",
    "pad",
    "tiles_per_split",
    "num_splits",
    "split_stride",
    "partial_stride",
    "matrix_stride",
    "heads",
    "items",
    "length",
]


@triton.jit(do_not_specialize=SIZES)
def inner(
    scores, parameter, partial, starts,
    num_rows, first_query, num_queries, offset, num_slots, ld, pad,
    tiles_per_split, split_stride, matrix_stride, heads,
    RANK: tl.constexpr, R: tl.constexpr,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``partial[split, matrix, row] = scores · parameter`` over the slots of one split."""
    first = first_row(STRIDE, BM)
    if first >= num_rows:
        return
    split, matrix = tl.program_id(1), tl.program_id(2)
    item, head = matrix // heads, matrix % heads
    dtype: tl.constexpr = scores.dtype.element_ty
    row, live, _query, count, origin, shift = row_tile(
        starts, item, first, num_rows, first_query, num_queries, offset, pad, HAS_STARTS, LAG, STRIDE, BM
    )
    base = scores + matrix.to(tl.int64) * num_rows * ld
    products = tl.zeros([BM, R], dtype=dtype)
    for tile in tl.range(split * tiles_per_split, last_tile(split, tiles_per_split, count, shift, BN)):
        slot, exists, reached, offsets = tile_cells(
            row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN
        )
        x = load_tile(base, offsets, exists, reached, STRIDE, dtype)
        factors = parameter_tile(parameter, head, slot, num_slots, RANK, R, dtype)
        products = matmul(x, factors, products, PRECISION)
    sums = partial + split.to(tl.int64) * split_stride + matrix.to(tl.int64) * matrix_stride
    store_sums(sums, row, live, products, RANK, RANK, R)


@triton.jit(do_not_specialize=SIZES)
def collect(
    partial, total, factor, length, num_splits, split_stride, partial_stride, matrix_stride,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``total[matrix] = sum over splits of partial[split, matrix]``, in a fixed order; ``length`` numbers
    each. SCALE: times ``factor``, which lies like ``total``."""
    matrix = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < length
    sums = tl.zeros([BLOCK], dtype=partial.dtype.element_ty)
    pointer = partial + matrix * partial_stride + index
    for _ in tl.range(0, num_splits):
        sums += tl.load(pointer, mask=mask, other=0.0)
        pointer += split_stride
    if SCALE:
        sums *= tl.load(factor + matrix * matrix_stride + index, mask=mask, other=0.0).to(sums.dtype)
    tl.store(total + matrix * matrix_stride + index, sums.to(total.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def activate(
    scores, weights, stats1, gate1, diag1, right1, right2, partial, starts,
    num_rows, first_query, num_queries, offset, num_slots, num_slots2, ld, pad,
    tiles_per_split, split_stride, matrix_stride, heads,
    RANK1: tl.constexpr, R1: tl.constexpr, MIXED1: tl.constexpr,
    RANK2: tl.constexpr, R2: tl.constexpr, MIXED2: tl.constexpr,
    GLU: tl.constexpr, HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """weights = the activation before it is divided by rho;
    ``partial[split, matrix, row] = [activation · right2, ‖h‖²]``.
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
    gated, gated_scale = gated_branches(
        stats1, gate1, item, head, heads, query, live, num_queries, RANK1, R1, MIXED1, GLU, dtype
    )
    base = scores + branch.to(tl.int64) * num_rows * ld
    base_scale = base + heads.to(tl.int64) * num_rows * ld
    out = weights + matrix.to(tl.int64) * num_rows * ld
    products = tl.zeros([BM, R2], dtype=dtype)
    squares = tl.zeros([BM], dtype=dtype)
    for tile in tl.range(split * tiles_per_split, last_tile(split, tiles_per_split, count, shift, BN)):
        slot, exists, reached, offsets = tile_cells(
            row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN
        )
        if GLU:
            h_scale, _ = pre_activation(
                base_scale, offsets, exists, reached, slot, gated_scale, diag1, right1, head + heads,
                num_slots, RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
            )  # fmt: skip
            strength, _ = softplus(h_scale)
        h, _ = pre_activation(
            base, offsets, exists, reached, slot, gated, diag1, right1, head, num_slots,
            RANK1, R1, MIXED1, STRIDE, PRECISION, dtype,
        )  # fmt: skip
        squares += tl.sum(h * h, 1)
        a = tl.where(h > 0, h, 0.0)
        if GLU:
            a *= strength
        store_tile(out, offsets, a, exists, reached, STRIDE)
        if MIXED2:
            factors = parameter_tile(right2, head, slot, num_slots2, RANK2, R2, dtype)
            products = matmul(a, factors, products, PRECISION)
    sums = partial + split.to(tl.int64) * split_stride + matrix.to(tl.int64) * matrix_stride
    width2: tl.constexpr = RANK2 + 1
    if MIXED2:
        store_sums(sums, row, live, products, width2, RANK2, R2)
    tl.store(sums + row * width2 + RANK2, squares, mask=live)


@triton.jit(do_not_specialize=SIZES)
def finish(
    values, stats, gate, diag, parameter, starts,
    num_rows, first_query, num_queries, offset, num_slots, num_keys, ld, pad, heads,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, WIDTH: tl.constexpr,
    NORMALISE: tl.constexpr, ACTIVATED: tl.constexpr, EPS: tl.constexpr,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """values ← values (1 + diag) + (stats gate) parameterᵀ at visible slots, in place, and 0 at other keys.

    NORMALISE: the sums in ``stats`` are multiplied by 1/rho, from the last of their WIDTH columns. ACTIVATED:
    so are the values, which ``activate`` wrote.
    """
    first = first_row(STRIDE, BM)
    if first >= num_rows:
        return
    tile, matrix = tl.program_id(1), tl.program_id(2)
    item, head = matrix // heads, matrix % heads
    row, live, query, count, origin, shift = row_tile(
        starts, item, first, num_rows, first_query, num_queries, offset, pad, HAS_STARTS, LAG, STRIDE, BM
    )
    base = values + matrix.to(tl.int64) * num_rows * ld
    first_cell = origin + 1 - count if LAG else origin
    _clear(base, row, live, first_cell, count, tile, num_keys, pad, ld, BN)
    if tile * BN - shift >= tl.max(count, 0):
        return
    dtype: tl.constexpr = stats.dtype.element_ty
    factor = tl.full([BM], 1.0, dtype=dtype)
    if NORMALISE:
        factor = inverse_norm(query_value(stats, matrix, query, live, num_queries, WIDTH, WIDTH - 1), EPS)
    slot, exists, reached, offsets = tile_cells(row, live, count, origin, tile, shift, ld, STRIDE, LAG, BN)
    x = load_tile(base, offsets, exists, reached, STRIDE, dtype)
    if ACTIVATED:
        x *= factor[:, None]
    if MIXED:
        gated = gated_sums(
            stats, gate, item, head, heads, query, live, num_queries, WIDTH, RANK, R, True, dtype
        )
        factors = parameter_tile(parameter, head, slot, num_slots, RANK, R, dtype)
        scale = slot_scale(diag, head, slot, num_slots, dtype)
        x = mixed(x, scale, gated * factor[:, None], factors, exists, PRECISION)
    store_tile(base, offsets, x, exists, reached, STRIDE)


@triton.jit
def _clear(base, row, live, first_cell, count, tile, num_keys, pad, ld, BN: tl.constexpr):
    """Set the cells of keys that their row does not see to zero, in the tile-th BN keys."""
    cell = pad + tile * BN + tl.arange(0, BN)
    end = first_cell + count
    hidden_before = tl.max(tl.where(live, first_cell, 0), 0) > pad + tile * BN
    hidden_after = tl.min(tl.where(live, end, pad + num_keys), 0) < pad + (tile + 1) * BN
    if hidden_before | hidden_after:
        hidden = (cell[None, :] < first_cell[:, None]) | (cell[None, :] >= end[:, None])
        hidden = hidden & live[:, None] & (cell < pad + num_keys)[None, :]
        zero = tl.zeros(hidden.shape, dtype=base.dtype.element_ty)
        tl.store(base + row[:, None] * ld + cell[None, :], zero, mask=hidden)
