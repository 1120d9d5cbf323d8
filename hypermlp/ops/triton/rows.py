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
def tile_rows(num_rows, STRIDE: tl.constexpr, BM: tl.constexpr):
    """Return the first row of this program, all of its rows, and which of them exist."""
    pid = tl.program_id(0)
    first = (pid // STRIDE) * (BM * STRIDE) + pid % STRIDE
    row = first + STRIDE * tl.arange(0, BM)
    return first, row, row < num_rows


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
def origins(position, start, pad, LAG: tl.constexpr):
    if LAG:
        return pad + position
    else:
        return pad + start


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
def rows_reached(live, count, tile, shift, BN: tl.constexpr):
    """Return which rows have slots in this tile or beyond."""
    return live & (count > tile * BN - shift)


@triton.jit
def slot_exists(slot, count):
    return (slot >= 0)[None, :] & (slot[None, :] < count[:, None])


@triton.jit
def slot_rows(pointer, head, slot, num_slots, RANK: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
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
def query_rows(
    pointer, matrix, query, live, num_queries, WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr
):
    """Load the first RANK of WIDTH sums of each query, ``[BM, R]``, from ``[matrices, queries, WIDTH]``."""
    column = tl.arange(0, R)
    base = pointer + matrix.to(tl.int64) * num_queries * WIDTH
    mask = live[:, None] & (column < RANK)[None, :]
    return tl.load(base + query[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def query_values(pointer, matrix, query, live, num_queries, WIDTH: tl.constexpr, COLUMN: tl.constexpr):
    """Load one of WIDTH sums of each query, ``[BM]``."""
    base = pointer + matrix.to(tl.int64) * num_queries * WIDTH
    return tl.load(base + query * WIDTH + COLUMN, mask=live, other=0.0)


@triton.jit
def query_gates(
    pointer,
    item,
    head,
    heads,
    query,
    live,
    num_queries,
    RANK: tl.constexpr,
    R: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load the gates of each query, ``[BM, R]``, from ``[items, queries, heads, RANK]``."""
    column = tl.arange(0, R)
    base = pointer + (item.to(tl.int64) * num_queries * heads + head) * RANK
    mask = live[:, None] & (column < RANK)[None, :]
    offsets = query[:, None] * (heads * RANK) + column[None, :]
    return tl.load(base + offsets, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def matmul(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a b. Operands are float32 or float64: the interpreter cannot multiply bfloat16."""
    return tl.dot(a, b, accumulator, input_precision=PRECISION, out_dtype=accumulator.dtype)


@triton.jit
def mixed(x, scale, gated, rows, exists, PRECISION: tl.constexpr):
    """Return ``x (1 + diag) + gated rowsᵀ`` at the slots that exist, zero elsewhere."""
    return tl.where(exists, matmul(gated, tl.trans(rows), x * scale[None, :], PRECISION), 0.0)


@triton.jit
def inverse_norm(squares, EPS: tl.constexpr):
    return 1.0 / tl.sqrt(squares + EPS)


@triton.jit
def half_scale(squares):
    """Return the factor at which the weights of a row are kept in float16: 1, less for strong scales.

    ``squares`` is the squared norm of the row's scale scores; softplus of one of them is at most about that
    norm, so that no weight exceeds about 1,024.
    """
    return tl.minimum(1024.0 / tl.sqrt(squares + 1e-30), 1.0)


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
    base,
    offsets,
    exists,
    reached,
    slot,
    gated,
    diag,
    right,
    branch,
    num_slots,
    RANK: tl.constexpr,
    R: tl.constexpr,
    MIXED: tl.constexpr,
    STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the mixed scores of one branch, ``[BM, BN]``, and the tile of ``right`` that they used."""
    x = load_tile(base, offsets, exists, reached, STRIDE, dtype)
    rows = gated  # of no use without a mix
    if MIXED:
        rows = slot_rows(right, branch, slot, num_slots, RANK, R, dtype)
        scale = slot_scale(diag, branch, slot, num_slots, dtype)
        x = mixed(x, scale, gated, rows, exists, PRECISION)
    return x, rows


@triton.jit
def gated_sums(
    stats,
    gate,
    item,
    head,
    heads,
    query,
    live,
    num_queries,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the inner products of one branch times its gates, ``[BM, R]``."""
    sums = query_rows(stats, item * heads + head, query, live, num_queries, WIDTH, RANK, R)
    return sums.to(dtype) * query_gates(gate, item, head, heads, query, live, num_queries, RANK, R, dtype)
