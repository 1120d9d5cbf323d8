"""What all row kernels share: which rows a program owns, where their slots lie, how parameters are read.

Scratch holds M rows of ``ld`` cells for each matrix (sequence and branch); key j of a row lies ``pad`` + j
cells after its beginning. In slot coordinates, slot l of row m lies at ``m * ld + origin[m] - l`` (layout
"lag", origin = pad + position) or ``m * ld + origin[m] + l`` (layout "forward", origin = pad + start).

Neighbouring rows are misaligned against each other by one cell. So a program takes rows of one residue class
modulo STRIDE and shifts its first slot by less than STRIDE: then every row of a tile begins at a multiple of
STRIDE cells. Such tile rows are read and written whole, if they hold a slot at all; the spare cells around a
row take what is no slot. STRIDE 1 promises nothing and masks every access.

Names: row m of the chunk, query = row + first_query of the sequence, BM rows and BN slots of a tile, R the
rank padded to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def first_row(STRIDE: tl.constexpr, BM: tl.constexpr):
    """Return the first row of this program."""
    pid = tl.program_id(0)
    return (pid // STRIDE) * (BM * STRIDE) + pid % STRIDE


@triton.jit
def visible(starts, item, row, live, first_query, num_queries, offset, HAS_STARTS: tl.constexpr):
    """Return position, first visible position and number of visible slots of each row."""
    position = offset + first_query + row
    start = tl.zeros_like(row)
    if HAS_STARTS:
        pointer = starts + item.to(tl.int64) * num_queries + first_query + row
        start = tl.load(pointer, mask=live, other=0).to(tl.int32)
    return position, start, tl.where(live, position + 1 - start, 0)


@triton.jit
def first_shift(first_origin, STRIDE: tl.constexpr, LAG: tl.constexpr):
    """Return by how many slots the tiles of a residue class are shifted; tiles have a multiple of STRIDE
    slots."""
    if STRIDE == 1:
        return first_origin * 0
    elif LAG:
        return STRIDE - 1 - first_origin % STRIDE
    else:
        return first_origin % STRIDE


@triton.jit
def tile_slots(tile, shift, BN: tl.constexpr, LAG: tl.constexpr):
    """Return the slots of a tile's columns, in the order of their addresses."""
    column = tl.arange(0, BN)
    if LAG:
        return tile * BN - shift + (BN - 1 - column)
    else:
        return tile * BN - shift + column


@triton.jit
def tile_offsets(row, origin, tile, shift, ld, STRIDE: tl.constexpr, BN: tl.constexpr, LAG: tl.constexpr):
    """Return the cells of a tile, ``[BM, BN]``, counted from the matrix's first cell."""
    low = tile * BN - shift
    begin = row * ld + (origin - low - (BN - 1) if LAG else origin + low)
    if STRIDE > 1:
        begin = tl.multiple_of(begin, [STRIDE])
    return begin[:, None] + tl.arange(0, BN)[None, :]


@triton.jit
def row_tile(
    starts, item, first, num_rows, first_query, num_queries, offset, pad,
    HAS_STARTS: tl.constexpr, LAG: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return BM rows from ``first`` on, which of them exist, their queries, how many slots each sees, their
    origins, and the shift of their tiles."""
    row = first + STRIDE * tl.arange(0, BM)
    live = row < num_rows
    position, start, count = visible(starts, item, row, live, first_query, num_queries, offset, HAS_STARTS)
    origin = pad + (position if LAG else start)
    shift = first_shift(pad + (offset + first_query + first if LAG else 0), STRIDE, LAG)
    return row, live, first_query + row, count, origin, shift


@triton.jit
def tile_cells(
    row, live, count, origin, tile, shift, ld, STRIDE: tl.constexpr, LAG: tl.constexpr, BN: tl.constexpr
):
    """Return the slots of a tile's columns, which cells are slots of their row, which rows have slots in this
    tile or beyond, and where the cells lie."""
    slot = tile_slots(tile, shift, BN, LAG)
    exists = (slot >= 0)[None, :] & (slot[None, :] < count[:, None])
    reached = live & (count > tile * BN - shift)
    return slot, exists, reached, tile_offsets(row, origin, tile, shift, ld, STRIDE, BN, LAG)


@triton.jit
def last_tile(split, tiles_per_split, count, shift, BN: tl.constexpr):
    """Return the end of a split's tiles: no row has slots beyond it."""
    return tl.minimum((split + 1) * tiles_per_split, tl.cdiv(tl.max(count, 0) + shift, BN))


@triton.jit
def load_tile(pointer, offsets, exists, reached, STRIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Load cells; those that are no slots of their row are zero."""
    if STRIDE > 1:  # a mask along the columns would prevent vectors
        values = tl.load(pointer + offsets, mask=reached[:, None], other=0.0).to(DTYPE)
        return tl.where(exists, values, 0.0)
    else:
        return tl.load(pointer + offsets, mask=exists, other=0.0).to(DTYPE)


@triton.jit
def store_tile(pointer, offsets, values, exists, reached, STRIDE: tl.constexpr):
    """Store cells; ``values`` must be zero where no slot exists."""
    values = values.to(pointer.dtype.element_ty)
    if STRIDE > 1:
        tl.store(pointer + offsets, values, mask=reached[:, None])
    else:
        tl.store(pointer + offsets, values, mask=exists)


@triton.jit
def parameter_tile(pointer, head, slot, num_slots, RANK: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
    """Load ``left`` or ``right`` at these slots, ``[slots, R]``; zero beyond the parameter."""
    column = tl.arange(0, R)
    mask = ((slot >= 0) & (slot < num_slots))[:, None]
    if RANK < R:
        mask = mask & (column < RANK)[None, :]
    base = pointer + head.to(tl.int64) * num_slots * RANK
    return tl.load(base + slot[:, None] * RANK + column[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def slot_scale(pointer, head, slot, num_slots, DTYPE: tl.constexpr):
    """Return 1 + diag at these slots."""
    mask = (slot >= 0) & (slot < num_slots)
    base = pointer + head.to(tl.int64) * num_slots
    return 1.0 + tl.load(base + slot, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def query_sums(
    pointer, matrix, query, live, num_queries, WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr
):
    """Load the first RANK of WIDTH sums of each query, ``[BM, R]``, from ``[matrices, queries, WIDTH]``."""
    column = tl.arange(0, R)
    base = pointer + matrix.to(tl.int64) * num_queries * WIDTH
    mask = live[:, None] & (column < RANK)[None, :]
    return tl.load(base + query[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def query_value(pointer, matrix, query, live, num_queries, WIDTH: tl.constexpr, COLUMN: tl.constexpr):
    """Load one of WIDTH sums of each query, ``[BM]``."""
    base = pointer + matrix.to(tl.int64) * num_queries * WIDTH
    return tl.load(base + query * WIDTH + COLUMN, mask=live, other=0.0)


@triton.jit
def query_gates(
    pointer, item, head, heads, query, live, num_queries,
    RANK: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load the gates of each query, ``[BM, R]``, from ``[items, queries, heads, RANK]``."""
    column = tl.arange(0, R)
    base = pointer + (item.to(tl.int64) * num_queries * heads + head) * RANK
    mask = live[:, None] & (column < RANK)[None, :]
    offsets = query[:, None] * (heads * RANK) + column[None, :]
    return tl.load(base + offsets, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def store_sums(pointer, row, live, values, WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr):
    """Store the first RANK of WIDTH sums of each row."""
    column = tl.arange(0, R)
    mask = live[:, None] & (column < RANK)[None, :]
    tl.store(pointer + row[:, None] * WIDTH + column[None, :], values, mask=mask)


@triton.jit
def matmul(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a b. Operands are float32 or float64: the interpreter cannot multiply bfloat16."""
    return tl.dot(a, b, accumulator, input_precision=PRECISION, out_dtype=accumulator.dtype)


@triton.jit
def mixed(x, scale, gated, factors, exists, PRECISION: tl.constexpr):
    """Return ``x (1 + diag) + gated factorsᵀ`` at the slots that exist, zero elsewhere.

    ``factors``: ``left`` or ``right`` at these slots, ``[BN, R]``.
    """
    return tl.where(exists, matmul(gated, tl.trans(factors), x * scale[None, :], PRECISION), 0.0)


@triton.jit
def inverse_norm(squares, EPS: tl.constexpr):
    return 1.0 / tl.sqrt(squares + EPS)


@triton.jit
def normalised(x, squares, EPS: tl.constexpr, EXACT: tl.constexpr):
    """Return the rows of ``x`` over their norms, from their squared norms.

    EXACT: square root and quotient are rounded correctly, so that a row of one number gives 1 or -1. The
    gradient of such a row is all cancellation, in which every rounding counts.
    """
    if EXACT and x.dtype == tl.float32:
        return tl.div_rn(x, tl.sqrt_rn(squares + EPS)[:, None])
    elif EXACT:
        return x / tl.sqrt(squares + EPS)[:, None]
    else:
        return x * inverse_norm(squares, EPS)[:, None]


@triton.jit
def softplus(x):
    """Return log(1 + eˣ), accurate at both ends, and e^-|x|."""
    e = tl.exp(-tl.abs(x))
    if x.dtype == tl.float64:
        u = 1.0 + e
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:
        # log1p(e) / e on [0, 1]: a polynomial is cheaper than a logarithm, and as accurate as float32
        p = e * 0.00523266895 - 0.0295051374
        p = e * p + 0.078225784
        p = e * p - 0.136632323
        p = e * p + 0.191060007
        p = e * p - 0.248429805
        p = e * p + 0.333190978
        p = e * p - 0.499994934
        p = e * p + 0.99999994
        log1p = e * p
    return tl.where(x > 0, x, 0.0) + log1p, e


@triton.jit
def sigmoid_from(x, e):
    """Return 1 / (1 + e^-x) from e^-|x|."""
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def pre_activation(
    base, offsets, exists, reached, slot, gated, diag, right, branch, num_slots,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the mixed scores of one branch, ``[BM, BN]``, and the tile of ``right`` that they used.

    The gradient of the activation comes from that of the weights in the same way.
    """
    x = load_tile(base, offsets, exists, reached, STRIDE, DTYPE)
    factors = gated  # not used without a mix
    if MIXED:
        factors = parameter_tile(right, branch, slot, num_slots, RANK, R, DTYPE)
        scale = slot_scale(diag, branch, slot, num_slots, DTYPE)
        x = mixed(x, scale, gated, factors, exists, PRECISION)
    return x, factors


@triton.jit
def gated_sums(
    stats, gate, item, head, heads, query, live, num_queries,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the inner products of one branch times its gates, ``[BM, R]``; zeros without a mix."""
    if MIXED:
        sums = query_sums(stats, item * heads + head, query, live, num_queries, WIDTH, RANK, R)
        gates = query_gates(gate, item, head, heads, query, live, num_queries, RANK, R, DTYPE)
        return sums.to(DTYPE) * gates
    else:
        return tl.zeros([query.shape[0], R], dtype=DTYPE)


@triton.jit
def gated_branches(
    stats, gate, item, head, heads, query, live, num_queries,
    RANK: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr, GLU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return ``gated_sums`` of the gate and the scale branch of a head; zeros for an absent one."""
    branches = heads * (1 + GLU)
    gated = gated_sums(
        stats, gate, item, head, branches, query, live, num_queries, RANK, RANK, R, MIXED, DTYPE
    )
    gated_scale = gated_sums(
        stats, gate, item, head + heads, branches, query, live, num_queries,
        RANK, RANK, R, MIXED and GLU, DTYPE,
    )  # fmt: skip
    return gated, gated_scale
