"""The kernels of one query: ``decode_scores``, ``decode_activate`` and ``decode_readout``, split over keys.

They read keys and values where a decoding cache holds them, ``[B, T, heads, D]`` with any strides but the
last. Between them, scores and weights lie in slot order, ``[matrices, slots]`` in float32. A kernel adds the
partial sums of the kernel before it in a fixed order; ``collect`` of kernels.py adds those of the last one.

Grids: (splits, heads or blocks of channels, sequences or matrices).
"""

import triton
import triton.language as tl

from hypermlp.ops.triton.rows import inverse_norm, slot_rows, slot_scale, softplus

# Strides and channels are mostly multiples of 16, which allows vectors; other sizes make no variants.
DECODE_SIZES = [
    "num_keys",
    "capacity",
    "position_stride",
    "num_slots",
    "num_slots2",
    "tiles_per_split",
    "num_splits",
    "heads",
    "matrices",
]


@triton.jit
def _query(
    starts, positions, position_stride, item, num_keys, HAS_STARTS: tl.constexpr, IN_RING: tl.constexpr
):
    """Return position, first visible position and number of visible slots of a sequence's query."""
    position = num_keys - 1
    if IN_RING:
        position = tl.load(positions + item * position_stride).to(tl.int32)
    start = position * 0
    if HAS_STARTS:
        start = tl.load(starts + item).to(tl.int32)
    return position, start, position + 1 - start


@triton.jit
def _row(position, start, slot, num_keys, LAG: tl.constexpr, IN_RING: tl.constexpr):
    """Return the row of the cache that holds a slot. A cache of fixed size is a ring."""
    key = position - slot if LAG else start + slot
    if IN_RING:
        key = key % num_keys  # of existing slots, which are not negative
    return key


@triton.jit
def _total(
    partial, matrix, matrices, num_splits,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the inner products and the squares that all splits of a matrix add up to, ``[R]`` and ``[]``."""
    column, split = tl.arange(0, R), tl.arange(0, SPLITS)
    products = tl.zeros([SPLITS, R], dtype=partial.dtype.element_ty)
    squares = tl.zeros([SPLITS], dtype=partial.dtype.element_ty)
    for first in tl.range(0, num_splits, SPLITS):
        exists = first + split < num_splits
        pointer = partial + ((first + split) * matrices + matrix) * WIDTH
        mask = exists[:, None] & (column < RANK)[None, :]
        products += tl.load(pointer[:, None] + column[None, :], mask=mask, other=0.0)
        squares += tl.load(pointer + RANK, mask=exists, other=0.0)
    return tl.sum(products, 0), tl.sum(squares, 0)


@triton.jit
def _store_total(total, matrix, products, squares, WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr):
    column = tl.arange(0, R)
    tl.store(total + matrix * WIDTH + column, products, mask=column < RANK)
    tl.store(total + matrix * WIDTH + RANK, squares)


@triton.jit
def _gates(gate, matrix, RANK: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr):
    column = tl.arange(0, R)
    return tl.load(gate + matrix * RANK + column, mask=column < RANK, other=0.0).to(dtype)


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_scores(
    q, k, parameter, scores, partial, starts, positions, position_stride,
    q_item, q_head, k_item, k_key, k_head,
    num_keys, capacity, num_slots, channels, tiles_per_split, matrices, heads,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, SUMS: tl.constexpr,
    HAS_STARTS: tl.constexpr, IN_RING: tl.constexpr, LAG: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """scores = q Kᵀ in slot order; ``partial[split, matrix] = [scores · parameter, ‖scores‖²]``."""
    split, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    matrix = item * heads + head
    dtype: tl.constexpr = scores.dtype.element_ty
    position, start, count = _query(starts, positions, position_stride, item, num_keys, HAS_STARTS, IN_RING)
    query = q + item.to(tl.int64) * q_item + head * q_head
    key = k + item.to(tl.int64) * k_item + head * k_head
    products = tl.zeros([R], dtype=dtype)
    squares = tl.zeros([BN], dtype=dtype)
    last = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(count, BN))
    for tile in tl.range(split * tiles_per_split, last):
        slot = tile * BN + tl.arange(0, BN)
        exists = slot < count
        place = _row(position, start, slot, num_keys, LAG, IN_RING).to(tl.int64) * k_key
        z = tl.zeros([BN], dtype=dtype)
        for first in tl.range(0, channels, BD):
            channel = first + tl.arange(0, BD)
            mask = exists[:, None] & (channel < channels)[None, :]
            values = tl.load(key + place[:, None] + channel[None, :], mask=mask, other=0.0).to(dtype)
            x = tl.load(query + channel, mask=channel < channels, other=0.0).to(dtype)
            z += tl.sum(values * x[None, :], 1)
        z = tl.where(exists, z, 0.0)  # a query that is not finite times keys that do not exist
        tl.store(scores + matrix.to(tl.int64) * capacity + slot, z, mask=exists)
        if MIXED:
            rows = slot_rows(parameter, head, slot, num_slots, RANK, R, dtype)
            products += tl.sum(z[:, None] * rows, 0)
        squares += z * z
    if SUMS:
        width: tl.constexpr = RANK + 1
        place = split * matrices + matrix
        _store_total(partial, place, products, tl.sum(squares, 0), width, RANK, R)


@triton.jit
def _mixed_scores(
    scores, slot, exists, gated, diag, right, head, num_slots,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    x = tl.load(scores + slot, mask=exists, other=0.0)
    if MIXED:
        rows = slot_rows(right, head, slot, num_slots, RANK, R, dtype)
        x = x * slot_scale(diag, head, slot, num_slots, dtype) + tl.sum(rows * gated[None, :], 1)
        x = tl.where(exists, x, 0.0)
    return x


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_activate(
    scores, weights, partial1, stats1, gate1, diag1, right1, right2, partial2,
    starts, positions, position_stride,
    num_keys, capacity, num_slots, num_slots2, tiles_per_split, num_splits, matrices, heads,
    RANK1: tl.constexpr, R1: tl.constexpr, MIXED1: tl.constexpr, RANK2: tl.constexpr, R2: tl.constexpr,
    MIXED2: tl.constexpr, GLU: tl.constexpr, SUMS: tl.constexpr, HAS_STARTS: tl.constexpr,
    IN_RING: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """weights = the activation before it is divided by rho;
    ``partial2[split, matrix] = [activation · right2, ‖h‖²]``. The first split saves the sums of the scores.
    """
    split, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    matrix = item * heads + head
    branches: tl.constexpr = 1 + GLU
    branch = item * heads * branches + head
    dtype: tl.constexpr = scores.dtype.element_ty
    width1: tl.constexpr = RANK1 + 1
    _position, _start, count = _query(starts, positions, position_stride, item, num_keys, HAS_STARTS, IN_RING)
    gated = tl.zeros([R1], dtype=dtype)
    gated_scale = gated
    if SUMS:
        products, squares = _total(
            partial1, branch, matrices * branches, num_splits, width1, RANK1, R1, SPLITS
        )
        if split == 0:
            _store_total(stats1, branch, products, squares, width1, RANK1, R1)
        if MIXED1:
            gated = products * _gates(gate1, branch, RANK1, R1, dtype)
        if GLU:
            products, squares = _total(
                partial1, branch + heads, matrices * branches, num_splits, width1, RANK1, R1, SPLITS
            )
            if split == 0:
                _store_total(stats1, branch + heads, products, squares, width1, RANK1, R1)
            if MIXED1:
                gated_scale = products * _gates(gate1, branch + heads, RANK1, R1, dtype)
    base = scores + branch.to(tl.int64) * capacity
    base_scale = base + heads.to(tl.int64) * capacity
    products2 = tl.zeros([R2], dtype=dtype)
    squares2 = tl.zeros([BN], dtype=dtype)
    last = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(count, BN))
    for tile in tl.range(split * tiles_per_split, last):
        slot = tile * BN + tl.arange(0, BN)
        exists = slot < count
        h = _mixed_scores(base, slot, exists, gated, diag1, right1, head, num_slots, RANK1, R1, MIXED1, dtype)
        squares2 += h * h
        a = tl.where(h > 0, h, 0.0)
        if GLU:
            h_scale = _mixed_scores(
                base_scale, slot, exists, gated_scale, diag1, right1, head + heads, num_slots,
                RANK1, R1, MIXED1, dtype,
            )  # fmt: skip
            strength, _ = softplus(h_scale)
            a *= strength
        tl.store(weights + matrix.to(tl.int64) * capacity + slot, a, mask=exists)
        if MIXED2:
            rows = slot_rows(right2, head, slot, num_slots2, RANK2, R2, dtype)
            products2 += tl.sum(a[:, None] * rows, 0)
    width2: tl.constexpr = RANK2 + 1
    _store_total(partial2, split * matrices + matrix, products2, tl.sum(squares2, 0), width2, RANK2, R2)


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_readout(
    weights, v, partial2, stats2, gate2, diag2, left2, partial_out, starts, positions, position_stride,
    v_item, v_key, v_head,
    num_keys, capacity, num_slots2, channels, tiles_per_split, num_splits, matrices, heads,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, EPS: tl.constexpr,
    HAS_STARTS: tl.constexpr, IN_RING: tl.constexpr, LAG: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``partial_out[split, matrix] = weights R(mix2)ᵀ V / rho`` over the keys of one split."""
    split, block, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    item, head = matrix // heads, matrix % heads
    dtype: tl.constexpr = weights.dtype.element_ty
    width: tl.constexpr = RANK + 1
    position, start, count = _query(starts, positions, position_stride, item, num_keys, HAS_STARTS, IN_RING)
    products, squares = _total(partial2, matrix, matrices, num_splits, width, RANK, R, SPLITS)
    if (split == 0) & (block == 0):
        _store_total(stats2, matrix, products, squares, width, RANK, R)
    gated = products
    if MIXED:
        gated = products * _gates(gate2, matrix, RANK, R, dtype)
    channel = block * BD + tl.arange(0, BD)
    values = v + item.to(tl.int64) * v_item + head * v_head
    out = tl.zeros([BD], dtype=dtype)
    last = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(count, BN))
    for tile in tl.range(split * tiles_per_split, last):
        slot = tile * BN + tl.arange(0, BN)
        exists = slot < count
        w = _mixed_scores(
            weights + matrix.to(tl.int64) * capacity, slot, exists, gated, diag2, left2, head, num_slots2,
            RANK, R, MIXED, dtype,
        )  # fmt: skip
        place = _row(position, start, slot, num_keys, LAG, IN_RING).to(tl.int64) * v_key
        mask = exists[:, None] & (channel < channels)[None, :]
        x = tl.load(values + place[:, None] + channel[None, :], mask=mask, other=0.0).to(dtype)
        out += tl.sum(x * w[:, None], 0)
    out *= inverse_norm(squares, EPS)
    pointer = partial_out + (split * matrices + matrix).to(tl.int64) * channels
    tl.store(pointer + channel, out, mask=channel < channels)
