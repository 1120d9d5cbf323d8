"""The kernels of a layer's decoding step around the operator: ``step_conv`` and ``step_gates``.

One new position for each sequence. Caches are rings: position p is in row ``p mod`` the number of rows; the
number of positions so far is read from ``counter`` on the device.
"""

import triton
import triton.language as tl

from hypermlp.ops.triton.elementwise_kernels import sigmoid, store_gate


@triton.jit(do_not_specialize=["rows"])
def step_conv(
    x, ring, weight1, weight2, counter, reach, out1, out2, rows, width,
    TAPS: tl.constexpr, HAS_REACH: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Both convolutions at the new position, which is then written into the ring of inputs.

    Grid (blocks of channels, sequences).
    """
    item = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BN + tl.arange(0, BN)
    known = channel < width
    past = tl.load(counter)
    seen = past + 1 + 0 * channel  # a block, which masks need in the interpreter
    if HAS_REACH:
        seen = tl.minimum(seen, tl.load(reach + item))
    base = ring + item * rows * width + channel
    new = tl.load(x + item * width + channel, mask=known, other=0.0)
    sum1 = tl.zeros([BN], DTYPE)
    sum2 = tl.zeros([BN], DTYPE)
    for lag in tl.static_range(TAPS):
        exists = known & (seen > lag)
        if lag == 0:
            tap = tl.where(exists, new, 0.0).to(DTYPE)
        else:
            row = tl.maximum(past - lag, 0) % rows
            tap = tl.load(base + row * width, mask=exists, other=0.0).to(DTYPE)
        sum1 += tap * tl.load(weight1 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)
        sum2 += tap * tl.load(weight2 + channel * TAPS + lag, mask=known, other=0.0).to(DTYPE)
    tl.store(base + (past % rows) * width, new, mask=known)
    tl.store(out1 + item * width + channel, sum1.to(out1.dtype.element_ty), mask=known)
    tl.store(out2 + item * width + channel, sum2.to(out2.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows"])
def step_gates(
    logits, bias, q, k, v, keys, values, counter, gated_q, output, mix1, mix2, rows,
    QUERY: tl.constexpr, OUTPUT: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the new key and value into their rings; and the gates, each to its own tensor, with the first
    QUERY multiplied by q. Grid (blocks of columns, sequences).
    """
    WIDTH: tl.constexpr = QUERY + OUTPUT + MIX1 + MIX2
    item = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    place = item * rows + tl.load(counter) % rows
    key = tl.load(k + item * KEY + column, mask=column < KEY, other=0.0)
    tl.store(keys + place * KEY + column, key, mask=column < KEY)
    value = tl.load(v + item * VALUE + column, mask=column < VALUE, other=0.0)
    tl.store(values + place * VALUE + column, value, mask=column < VALUE)
    if WIDTH > 0:
        gate = tl.load(logits + item * WIDTH + column, mask=column < WIDTH, other=0.0).to(DTYPE)
        gate += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(DTYPE)
        gate = sigmoid(gate)
        if QUERY > 0:
            mask = column < QUERY
            scaled = gate * tl.load(q + item * QUERY + column, mask=mask, other=0.0).to(DTYPE)
            tl.store(gated_q + item * QUERY + column, scaled.to(gated_q.dtype.element_ty), mask=mask)
        store_gate(output, item, True, gate, column - QUERY, OUTPUT)
        store_gate(mix1, item, True, gate, column - QUERY - OUTPUT, MIX1)
        store_gate(mix2, item, True, gate, column - QUERY - OUTPUT - MIX1, MIX2)
