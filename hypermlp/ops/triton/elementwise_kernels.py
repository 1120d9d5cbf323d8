"""The kernels of elementwise.py: one or two causal convolutions, the gates, the gradients of a product.

Shapes: as in elementwise.py. BM rows and BN columns of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def _exists(reach, item, position, length, lag, HAS_REACH: tl.constexpr):
    """Return which positions exist and see as far back as ``lag``."""
    exists = (position >= 0) & (position < length)
    if HAS_REACH:
        seen = tl.load(reach + item.to(tl.int64) * length + position, mask=exists, other=0)
        exists = exists & (seen > lag)
    return exists


@triton.jit(do_not_specialize=["rows", "length"])
def conv_forward(
    x, weight1, weight2, reach, out1, out2, rows, length, width, batch_stride, row_stride,
    TAPS: tl.constexpr, BOTH: tl.constexpr, HAS_REACH: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One or both convolutions of a tile of positions and channels."""
    item = tl.program_id(2)
    position = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    known = channel < width
    base = x + item.to(tl.int64) * batch_stride
    sum1 = tl.zeros([BM, BN], DTYPE)
    sum2 = tl.zeros([BM, BN], DTYPE)
    for lag in tl.static_range(TAPS):
        row = position + (rows - length) - lag
        seen = _exists(reach, item, position, length, lag, HAS_REACH) & (row >= 0)
        offsets = row[:, None].to(tl.int64) * row_stride + channel[None, :]
        tap = tl.load(base + offsets, mask=seen[:, None] & known[None, :], other=0.0).to(DTYPE)
        sum1 += tap * tl.load(weight1 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
        if BOTH:
            sum2 += tap * tl.load(weight2 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
    offsets = (item.to(tl.int64) * length + position)[:, None] * width + channel[None, :]
    mask = (position < length)[:, None] & known[None, :]
    tl.store(out1 + offsets, sum1.to(out1.dtype.element_ty), mask=mask)
    if BOTH:
        tl.store(out2 + offsets, sum2.to(out2.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "length"])
def conv_backward(
    grad1, grad2, x, weight1, weight2, reach, grad_x, partial, rows, length, width, batch_stride,
    row_stride,
    TAPS: tl.constexpr, PADDED_TAPS: tl.constexpr, TILES: tl.constexpr, BOTH: tl.constexpr,
    HAS_REACH: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The input's gradient at some tiles of rows, and their part of the weights' gradients.

    A row of x is a tap of the outputs at its own position and the next TAPS - 1 ones.
    ``partial``: ``[programs of all sequences, convolutions, TAPS, width]``.
    """
    item = tl.program_id(2)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    known = channel < width
    tap = tl.arange(0, PADDED_TAPS)
    grads = item.to(tl.int64) * length * width
    sums1 = tl.zeros([PADDED_TAPS, BN], DTYPE)
    sums2 = tl.zeros([PADDED_TAPS, BN], DTYPE)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & known[None, :]
        offsets = item.to(tl.int64) * batch_stride + row[:, None].to(tl.int64) * row_stride + channel[None, :]
        values = tl.load(x + offsets, mask=mask, other=0.0).to(DTYPE)
        total = tl.zeros([BM, BN], DTYPE)
        for lag in tl.static_range(TAPS):
            position = row - (rows - length) + lag
            seen = _exists(reach, item, position, length, lag, HAS_REACH) & (row < rows)
            offsets = grads + position[:, None].to(tl.int64) * width + channel[None, :]
            load = seen[:, None] & known[None, :]
            g1 = tl.load(grad1 + offsets, mask=load, other=0.0).to(DTYPE)
            total += g1 * tl.load(weight1 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)[None, :]
            own = (tap == lag)[:, None]
            sums1 += tl.where(own, tl.sum(g1 * values, axis=0)[None, :], 0.0)
            if BOTH:
                g2 = tl.load(grad2 + offsets, mask=load, other=0.0).to(DTYPE)
                row2 = tl.load(weight2 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)
                total += g2 * row2[None, :]
                sums2 += tl.where(own, tl.sum(g2 * values, axis=0)[None, :], 0.0)
        offsets = (item.to(tl.int64) * rows + row)[:, None] * width + channel[None, :]
        tl.store(grad_x + offsets, total.to(grad_x.dtype.element_ty), mask=mask)
    program = item * tl.num_programs(0) + tl.program_id(0)
    COUNT: tl.constexpr = 2 if BOTH else 1
    offsets = (program.to(tl.int64) * COUNT * TAPS + tap)[:, None] * width + channel[None, :]
    mask = (tap < TAPS)[:, None] & known[None, :]
    tl.store(partial + offsets, sums1, mask=mask)
    if BOTH:
        tl.store(partial + offsets + TAPS * width, sums2, mask=mask)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _gate_tile(num_positions, BM: tl.constexpr, BN: tl.constexpr):
    """Return the positions of this program, ``[BM, 1]``, its columns of logits, ``[1, BN]``, and which
    positions exist."""
    position = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    return position, column, position < num_positions


@triton.jit
def store_gate(pointer, position, exists, gate, column, WIDTH: tl.constexpr):
    """Store the part of a tile that belongs to one gate; ``column`` counts from the gate's first."""
    if WIDTH > 0:
        mask = exists & (column >= 0) & (column < WIDTH)
        tl.store(pointer + position * WIDTH + column, gate.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _add_gate(grad, pointer, position, exists, column, WIDTH: tl.constexpr):
    """Return ``grad`` plus the gradient of one gate; ``column`` counts from the gate's first."""
    if WIDTH > 0:
        mask = exists & (column >= 0) & (column < WIDTH)
        grad += tl.load(pointer + position * WIDTH + column, mask=mask, other=0.0).to(grad.dtype)
    return grad


@triton.jit(do_not_specialize=["num_positions"])
def gates_forward(
    logits, q, gated_q, output, mix1, mix2, num_positions,
    QUERY: tl.constexpr, OUTPUT: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sigmoid of a tile of logits, stored by gate; the first QUERY columns multiply q."""
    WIDTH: tl.constexpr = QUERY + OUTPUT + MIX1 + MIX2
    position, column, exists = _gate_tile(num_positions, BM, BN)
    values = tl.load(logits + position * WIDTH + column, mask=exists & (column < WIDTH), other=0.0)
    gate = sigmoid(values.to(DTYPE))
    if QUERY > 0:
        mask = exists & (column < QUERY)
        scaled = gate * tl.load(q + position * QUERY + column, mask=mask, other=0.0).to(DTYPE)
        tl.store(gated_q + position * QUERY + column, scaled.to(gated_q.dtype.element_ty), mask=mask)
    store_gate(output, position, exists, gate, column - QUERY, OUTPUT)
    store_gate(mix1, position, exists, gate, column - QUERY - OUTPUT, MIX1)
    store_gate(mix2, position, exists, gate, column - QUERY - OUTPUT - MIX1, MIX2)


@triton.jit(do_not_specialize=["num_positions"])
def gates_backward(
    grad_q_gated, grad_output, grad_mix1, grad_mix2, logits, q, grad_logits, grad_q, num_positions,
    QUERY: tl.constexpr, OUTPUT: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of logits, and of q."""
    WIDTH: tl.constexpr = QUERY + OUTPUT + MIX1 + MIX2
    position, column, exists = _gate_tile(num_positions, BM, BN)
    inside = exists & (column < WIDTH)
    gate = sigmoid(tl.load(logits + position * WIDTH + column, mask=inside, other=0.0).to(DTYPE))
    grad = tl.zeros([BM, BN], DTYPE)
    if QUERY > 0:
        mask = exists & (column < QUERY)
        given = tl.load(grad_q_gated + position * QUERY + column, mask=mask, other=0.0).to(DTYPE)
        tl.store(grad_q + position * QUERY + column, (given * gate).to(grad_q.dtype.element_ty), mask=mask)
        grad += given * tl.load(q + position * QUERY + column, mask=mask, other=0.0).to(DTYPE)
    grad = _add_gate(grad, grad_output, position, exists, column - QUERY, OUTPUT)
    grad = _add_gate(grad, grad_mix1, position, exists, column - QUERY - OUTPUT, MIX1)
    grad = _add_gate(grad, grad_mix2, position, exists, column - QUERY - OUTPUT - MIX1, MIX2)
    result = grad * gate * (1.0 - gate)
    tl.store(grad_logits + position * WIDTH + column, result.to(grad_logits.dtype.element_ty), mask=inside)


@triton.jit  # a size that is a multiple of 16 allows vectors
def product_backward(grad, a, b, grad_a, grad_b, size, DTYPE: tl.constexpr, BN: tl.constexpr):
    """The gradients of ``a * b``."""
    index = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mask = index < size
    given = tl.load(grad + index, mask=mask, other=0.0).to(DTYPE)
    of_a = given * tl.load(b + index, mask=mask, other=0.0).to(DTYPE)
    of_b = given * tl.load(a + index, mask=mask, other=0.0).to(DTYPE)
    tl.store(grad_a + index, of_a.to(grad_a.dtype.element_ty), mask=mask)
    tl.store(grad_b + index, of_b.to(grad_b.dtype.element_ty), mask=mask)
