"""The kernels of one query: ``decode_scores``, ``decode_activate`` and ``decode_readout``, split over keys.

They read keys and values where a decoding cache holds them, ``[B, T, heads, D]`` with any strides but the
last. Between them, scores and weights lie in slot order, ``[matrices, slots]`` in float32. A kernel adds the
partial sums of the kernel before it in a fixed order; ``collect`` of kernels.py adds those of the last one.

Grids: (splits, heads or blocks of channels, sequences or matrices).
"""

import triton
import triton.language as tl

from hypermlp.ops.triton.row_tiles import inverse_norm, parameter_tile, slot_scale, softplus

# Strides and channels are mostly multiples of 16, which allows vectors; other sizes make no variants.
DECODE_SIZES = [
    "num_keys",
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
def _slot_range(split, tiles_per_split, count, BN: tl.constexpr):
    """Return the first of a split's tiles and the end of those that hold visible slots."""
    return split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, tl.cdiv(count, BN))


@triton.jit
def _total(
    partial, matrix, matrices, num_splits,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return what all splits of a matrix add up to: the first RANK of WIDTH sums, ``[R]``, and the sum behind
    them (0 if there is none)."""
    column, split = tl.arange(0, R), tl.arange(0, SPLITS)
    products = tl.zeros([SPLITS, R], dtype=partial.dtype.element_ty)
    squares = tl.zeros([SPLITS], dtype=partial.dtype.element_ty)
    for first in tl.range(0, num_splits, SPLITS):
        exists = first + split < num_splits
        pointer = partial + ((first + split) * matrices + matrix) * WIDTH
        mask = exists[:, None] & (column < RANK)[None, :]
        products += tl.load(pointer[:, None] + column[None, :], mask=mask, other=0.0)
        if WIDTH > RANK:
            squares += tl.load(pointer + RANK, mask=exists, other=0.0)
    return tl.sum(products, 0), tl.sum(squares, 0)


@triton.jit
def _gated_total(
    partial, stats, gate, matrix, matrices, num_splits, save,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the inner products of the scores of one branch times its gates, ``[R]``; zeros without a mix.

    Where ``save`` holds, the products are written to ``stats``, for the backward pass.
    """
    if MIXED:
        products, _ = _total(partial, matrix, matrices, num_splits, RANK, RANK, R, SPLITS)
        if save:
            _store(stats, matrix, products, RANK, RANK, R)
        return products * _gates(gate, matrix, RANK, R, products.dtype)
    else:
        return tl.zeros([R], dtype=tl.float32)


@triton.jit
def _store(sums, matrix, products, WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr):
    """Store the first RANK of a matrix's WIDTH sums."""
    column = tl.arange(0, R)
    tl.store(sums + matrix * WIDTH + column, products, mask=column < RANK)


@triton.jit
def _gates(gate, matrix, RANK: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr):
    column = tl.arange(0, R)
    return tl.load(gate + matrix * RANK + column, mask=column < RANK, other=0.0).to(dtype)


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_scores(
    q, k, parameter, scores, partial, starts, positions, position_stride,
    q_item, q_head, k_item, k_key, k_head,
    num_keys, num_slots, channels, tiles_per_split, matrices, heads,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, HAS_STARTS: tl.constexpr,
    IN_RING: tl.constexpr, LAG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """scores = q Kᵀ in slot order; ``partial[split, matrix] = scores · parameter``."""
    split, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    matrix = item * heads + head
    dtype: tl.constexpr = scores.dtype.element_ty
    position, start, count = _query(starts, positions, position_stride, item, num_keys, HAS_STARTS, IN_RING)
    query = q + item.to(tl.int64) * q_item + head * q_head
    key = k + item.to(tl.int64) * k_item + head * k_head
    products = tl.zeros([R], dtype=dtype)
    begin, end = _slot_range(split, tiles_per_split, count, BN)
    for tile in tl.range(begin, end):
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
        tl.store(scores + matrix.to(tl.int64) * num_keys + slot, z, mask=exists)
        if MIXED:
            factors = parameter_tile(parameter, head, slot, num_slots, RANK, R, dtype)
            products += tl.sum(z[:, None] * factors, 0)
    if MIXED:
        _store(partial, split * matrices + matrix, products, RANK, RANK, R)


@triton.jit
def _mixed_values(
    base, slot, exists, gated, diag, right, head, num_slots,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Return scores or weights at these slots after their mix; zero where no slot exists."""
    dtype: tl.constexpr = base.dtype.element_ty
    x = tl.load(base + slot, mask=exists, other=0.0)
    if MIXED:
        factors = parameter_tile(right, head, slot, num_slots, RANK, R, dtype)
        x = x * slot_scale(diag, head, slot, num_slots, dtype) + tl.sum(factors * gated[None, :], 1)
        x = tl.where(exists, x, 0.0)
    return x


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_activate(
    scores, weights, partial1, stats1, gate1, diag1, right1, right2, partial2,
    starts, positions, position_stride,
    num_keys, num_slots, num_slots2, tiles_per_split, num_splits, matrices, heads,
    RANK1: tl.constexpr, R1: tl.constexpr, MIXED1: tl.constexpr, RANK2: tl.constexpr, R2: tl.constexpr,
    MIXED2: tl.constexpr, GLU: tl.constexpr, HAS_STARTS: tl.constexpr,
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
    _position, _start, count = _query(starts, positions, position_stride, item, num_keys, HAS_STARTS, IN_RING)
    gated = _gated_total(
        partial1,
        stats1,
        gate1,
        branch,
        matrices * branches,
        num_splits,
        split == 0,
        RANK1,
        R1,
        MIXED1,
        SPLITS,
    )
    gated_scale = gated
    if GLU:
        gated_scale = _gated_total(
            partial1, stats1, gate1, branch + heads, matrices * branches, num_splits, split == 0,
            RANK1, R1, MIXED1, SPLITS,
        )  # fmt: skip
    base = scores + branch.to(tl.int64) * num_keys
    base_scale = base + heads.to(tl.int64) * num_keys
    products2 = tl.zeros([R2], dtype=dtype)
    squares2 = tl.zeros([BN], dtype=dtype)
    begin, end = _slot_range(split, tiles_per_split, count, BN)
    for tile in tl.range(begin, end):
        slot = tile * BN + tl.arange(0, BN)
        exists = slot < count
        h = _mixed_values(base, slot, exists, gated, diag1, right1, head, num_slots, RANK1, R1, MIXED1)
        squares2 += h * h
        a = tl.where(h > 0, h, 0.0)
        if GLU:
            h_scale = _mixed_values(
                base_scale,
                slot,
                exists,
                gated_scale,
                diag1,
                right1,
                head + heads,
                num_slots,
                RANK1,
                R1,
                MIXED1,
            )
            strength, _ = softplus(h_scale)
            a *= strength
        tl.store(weights + matrix.to(tl.int64) * num_keys + slot, a, mask=exists)
        if MIXED2:
            factors = parameter_tile(right2, head, slot, num_slots2, RANK2, R2, dtype)
            products2 += tl.sum(a[:, None] * factors, 0)
    width2: tl.constexpr = RANK2 + 1
    place = split * matrices + matrix
    _store(partial2, place, products2, width2, RANK2, R2)
    tl.store(partial2 + place * width2 + RANK2, tl.sum(squares2, 0))


@triton.jit(do_not_specialize=DECODE_SIZES)
def decode_readout(
    weights, v, partial2, stats2, gate2, diag2, left2, partial_out, starts, positions, position_stride,
    v_item, v_key, v_head,
    num_keys, num_slots2, channels, tiles_per_split, num_splits, matrices, heads,
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
        _store(stats2, matrix, products, width, RANK, R)
        tl.store(stats2 + matrix * width + RANK, squares)
    inverse = inverse_norm(squares, EPS)
    gated = products
    if MIXED:
        gated = products * _gates(gate2, matrix, RANK, R, dtype)
    channel = block * BD + tl.arange(0, BD)
    values = v + item.to(tl.int64) * v_item + head * v_head
    out = tl.zeros([BD], dtype=dtype)
    begin, end = _slot_range(split, tiles_per_split, count, BN)
    for tile in tl.range(begin, end):
        slot = tile * BN + tl.arange(0, BN)
        exists = slot < count
        base = weights + matrix.to(tl.int64) * num_keys
        w = _mixed_values(base, slot, exists, gated, diag2, left2, head, num_slots2, RANK, R, MIXED)
        w *= inverse  # before the products with values, which may overflow otherwise
        place = _row(position, start, slot, num_keys, LAG, IN_RING).to(tl.int64) * v_key
        mask = exists[:, None] & (channel < channels)[None, :]
        x = tl.load(values + place[:, None] + channel[None, :], mask=mask, other=0.0).to(dtype)
        out += tl.sum(x * w[:, None], 0)
    pointer = partial_out + (split * matrices + matrix).to(tl.int64) * channels
    tl.store(pointer + channel, out, mask=channel < channels)
