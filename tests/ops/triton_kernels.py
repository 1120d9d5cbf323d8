"""Every kernel of the backend "triton" alone, in Triton's interpreter, against a few lines of PyTorch.

A call is recorded, then each launch is repeated on fresh random tensors. tests/ops/test_triton.py runs this
file in a process of its own.
"""

import pytest
import torch
import torch.nn.functional as F

from hypermlp.ops import contract
from hypermlp.ops.triton.launch import recording, use_settings
from hypermlp.testing import assert_close

LAYOUTS = [
    ("lag", "padding"),
    pytest.param("lag", "all", marks=pytest.mark.slow),
    pytest.param("forward", "all", marks=pytest.mark.slow),
    pytest.param("forward", "packed", marks=pytest.mark.slow),
]
TIGHT = 1e-10  # float64
EPS = 1e-12
B, H, G, M, N, RANK = 2, 1, 2, 9, 37, 3


def recorded(layout, pattern, queries=M):
    """The launches of a forward and a backward pass in one chunk, the first of each name first."""
    sizes = {"queries": queries, "keys": N, "batch": B, "heads": H, "rank": RANK}
    case = contract.attention("glu", "12", layout, pattern, **sizes)
    with use_settings(rows=64, programs=16, scratch_bytes=1 << 30), recording() as record:
        case.results("triton", torch.float64)
    found = {}
    for one in record.launches:
        found.setdefault(one.name, []).append(one)
    return found


def repeat(one, **tensors):
    """Run a launch again with copies of its tensors, some of them replaced; return its arguments."""
    arguments = {
        name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in (one.arguments | tensors).items()
    }
    one.kernel[one.grid](**arguments)
    return arguments


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def like(one, name):
    return noise(*one.arguments[name].shape)


def slots(arguments, buffer, rows=None):
    """``[matrices, M, ld]`` in slot order, ``[B, heads, M, N]``; zero where no slot exists."""
    position = torch.arange(N - M, N)[None, :].expand(B, -1)
    starts = arguments["starts"]
    start = torch.zeros_like(position) if starts is None else starts
    slot = torch.arange(N)
    origin, sign = (position, -1) if arguments["LAG"] else (start, 1)
    cell = arguments["pad"] + origin[:, :, None] + sign * slot  # [B, M, N]
    exists = (slot < (position + 1 - start)[:, :, None])[:, None]
    heads = buffer.shape[0] // B
    values = buffer.unflatten(0, (B, heads)).to(torch.float64)
    index = cell.clamp(0, buffer.shape[2] - 1)[:, None].expand(B, heads, M, N)
    return values.gather(3, index).masked_fill(~exists, 0), exists


def hidden_keys(arguments, buffer):
    """The cells of keys that their query does not see."""
    position, key = torch.arange(N - M, N)[:, None], torch.arange(N)
    starts = arguments["starts"]
    start = torch.zeros(B, M, dtype=torch.int64) if starts is None else starts
    seen = (key <= position) & (key >= start[:, :, None])
    by_key = buffer.unflatten(0, (B, -1))[..., arguments["pad"] : arguments["pad"] + N]
    return by_key[~seen[:, None].expand(by_key.shape)]


def mixed(x, exists, diag, rows, gated):
    """x (1 + diag) + gated rowsᵀ; x is [B, heads, M, N], gated [B, heads, M, r]."""
    low_rank = torch.einsum("bhmr,hnr->bhmn", gated, rows)
    return (x * (1 + diag)[:, None] + low_rank).masked_fill(~exists, 0)


def by_row(sums, gate):
    """Sums [matrices, M, width] times gates [B, M, heads, r], as [B, heads, M, r]."""
    return sums.unflatten(0, (B, -1))[..., :RANK] * gate.transpose(1, 2)


def total(partial, *shape):
    return partial.sum(0).view(*shape)


@pytest.mark.parametrize(("layout", "pattern"), LAYOUTS)
def test_row_kernels(layout, pattern):
    found = recorded(layout, pattern)

    one = found["inner"][0]
    a = repeat(one, scores=like(one, "scores"))
    x, exists = slots(a, a["scores"])
    expected = torch.einsum("bhmn,hnr->bhmr", x, a["parameter"])
    assert one.grid[1] > 1
    assert_close(total(a["partial"], B, G, M, RANK), expected, tolerance=TIGHT, what="inner")

    one = found["collect"][0]
    a = repeat(one, partial=like(one, "partial"))
    expected = total(a["partial"], *a["total"].shape)
    assert_close(a["total"], expected, tolerance=TIGHT, what="collect")

    one = found["activate"][0]
    a = repeat(one, scores=like(one, "scores"), stats1=like(one, "stats1"))
    x, exists = slots(a, a["scores"])
    h = mixed(x, exists, a["diag1"], a["right1"], by_row(a["stats1"], a["gate1"]))
    activation = h[:, :H].relu() * F.softplus(h[:, H:])
    assert_close(slots(a, a["weights"])[0], activation, tolerance=TIGHT, what="activate")
    inner = torch.einsum("bhmn,hnr->bhmr", activation, a["right2"])
    expected = torch.cat([inner, h[:, :H].square().sum(-1, keepdim=True)], -1)
    assert_close(total(a["partial"], B, H, M, RANK + 1), expected, tolerance=TIGHT, what="activate's sums")

    one = found["finish"][0]
    stats, values = like(one, "stats").abs(), like(one, "values")
    a = repeat(one, values=values, stats=stats)
    x, exists = slots(a, values)
    inverse = (stats[:, :, -1:].unflatten(0, (B, H)) + EPS).rsqrt()
    expected = mixed(x * inverse, exists, a["diag"], a["parameter"], by_row(stats, a["gate"]) * inverse)
    assert_close(slots(a, a["values"])[0], expected, tolerance=TIGHT, what="finish")
    assert (hidden_keys(a, a["values"]) == 0).all()
    assert hidden_keys(a, a["values"]).numel() > 0


@pytest.mark.parametrize(("layout", "pattern"), LAYOUTS)
def test_gradient_kernels(layout, pattern):
    found = recorded(layout, pattern)

    one = found["project"][0]
    fresh = {name: like(one, name) for name in ("scores", "grad_weights", "stats1", "grad_stats2")}
    fresh["stats2"] = like(one, "stats2").abs()
    projected = repeat(one, **fresh)["partial"]
    one = found["activate_backward"][0]
    a = repeat(one, **fresh, delta=like(one, "delta").abs())
    z, exists = slots(a, a["scores"])
    dw, _ = slots(a, a["grad_weights"])
    da = mixed(dw, exists, a["diag2"], a["right2"], by_row(a["grad_stats2"], a["gate2"]))
    h = mixed(z, exists, a["diag1"], a["right1"], by_row(a["stats1"], a["gate1"]))
    inverse = (a["stats2"][:, :, -1:].unflatten(0, (B, H)) + EPS).rsqrt()
    gate, scale = h[:, :H] * inverse, h[:, H:]
    delta, squares = a["delta"].unflatten(0, (B, H)).split(1, -1)
    delta = delta / (squares + EPS * inverse.square())
    d_gate = (torch.where(gate > 0, da * F.softplus(scale), 0.0) - gate * delta) * inverse
    d_scale = da * gate.relu() * torch.sigmoid(scale)
    expected = torch.cat([d_gate, d_scale], 1).masked_fill(~exists, 0)
    assert_close(slots(a, a["grad_scores"])[0], expected, tolerance=TIGHT, what="gradient of the scores")
    weights = gate.relu() * F.softplus(scale)
    assert_close(slots(a, a["weights"])[0], weights, tolerance=TIGHT, what="weights")
    expected_sums = torch.stack([(weights * da).sum(-1), gate.square().sum(-1)], -1)
    assert_close(total(projected, B, H, M, 2), expected_sums, tolerance=TIGHT, what="project")
    sums = torch.einsum("bhmn,hnr->bhmr", expected, a["right1"])
    assert_close(total(a["partial"], B, G, M, RANK), sums, tolerance=TIGHT, what="activate_backward's sums")

    name = "parameters" if "parameters" in found else "parameters_scalar"
    for one, heads, normalised in zip(found[name], (G, H), (False, True), strict=True):
        stats = like(one, "stats").abs()
        fresh = {field: like(one, field) for field in ("before", "after", "grad_stats")}
        before = {field: one.arguments[field].sum(0) for field in ("grad_diag", "grad_left", "grad_right")}
        a = repeat(one, **fresh, stats=stats)
        x, y = slots(a, a["before"])[0], slots(a, a["after"])[0]
        sums = by_row(stats, a["gate"])
        if normalised:
            sums *= (stats[:, :, -1:].unflatten(0, (B, heads)) + EPS).rsqrt()
        expected = {
            "grad_diag": (x * y).sum((0, 2)),
            "grad_left": torch.einsum("bhmn,bhmr->hnr", x, by_row(a["grad_stats"], a["gate"])),
            "grad_right": torch.einsum("bhmn,bhmr->hnr", y, sums),
        }
        for field, value in expected.items():  # added to what was there
            assert_close(a[field].sum(0), before[field] + value, tolerance=TIGHT, what=field)


@pytest.mark.parametrize(("layout", "pattern"), LAYOUTS)
def test_decode_kernels(layout, pattern):
    found = recorded(layout, pattern, queries=1)

    def in_order(arguments, x):
        """Keys or values ``[B, N, heads, D]`` in slot order, ``[B, heads, N, D]``, and which slots exist."""
        start = (
            torch.zeros(B, dtype=torch.int64) if arguments["starts"] is None else arguments["starts"][:, 0]
        )
        slot = torch.arange(N)
        exists = slot < (N - start)[:, None]
        key = (N - 1 - slot).expand(B, -1) if layout == "lag" else start[:, None] + slot
        index = key.clamp(0, N - 1)[:, :, None, None].expand(x.shape)
        return x.gather(1, index).transpose(1, 2), exists[:, None]

    one = found["decode_scores"][0]
    a = repeat(one)
    k, exists = in_order(a, a["k"])
    z = torch.einsum("bhd,bhnd->bhn", a["q"][:, 0], k).masked_fill(~exists, 0)
    actual = a["scores"].unflatten(0, (B, G)).masked_fill(~exists, 0)
    assert_close(actual, z, tolerance=TIGHT, what="decode_scores")
    expected = torch.einsum("bhn,hnr->bhr", z, a["parameter"])
    assert_close(total(a["partial"], B, G, RANK), expected, tolerance=TIGHT)

    one = found["decode_activate"][0]
    a = repeat(one, scores=like(one, "scores"), partial1=like(one, "partial1"))
    sums = total(a["partial1"], B, G, 1, RANK)
    assert_close(a["stats1"], sums.flatten(0, 1), tolerance=TIGHT, what="sums of the scores")
    x = a["scores"].unflatten(0, (B, G)).masked_fill(~exists, 0)[:, :, None]
    h = mixed(x, exists[:, :, None], a["diag1"], a["right1"], by_row(sums.flatten(0, 1), a["gate1"]))
    activation = (h[:, :H].relu() * F.softplus(h[:, H:]))[:, :, 0].masked_fill(~exists, 0)
    actual = a["weights"].unflatten(0, (B, H)).masked_fill(~exists, 0)
    assert_close(actual, activation, tolerance=TIGHT, what="decode_activate")
    inner = torch.einsum("bhn,hnr->bhr", activation, a["right2"])
    expected = torch.cat([inner, h[:, :H, 0].square().sum(-1, keepdim=True)], -1)
    assert_close(total(a["partial2"], B, H, RANK + 1), expected, tolerance=TIGHT)

    one = found["decode_readout"][0]
    a = repeat(one, weights=like(one, "weights"), partial2=like(one, "partial2").abs())
    sums = total(a["partial2"], B, H, 1, RANK + 1)
    assert_close(a["stats2"], sums.flatten(0, 1), tolerance=TIGHT, what="sums of the weights")
    x = a["weights"].unflatten(0, (B, H)).masked_fill(~exists, 0)[:, :, None]
    w = mixed(x, exists[:, :, None], a["diag2"], a["left2"], by_row(sums.flatten(0, 1), a["gate2"]))
    v, _ = in_order(a, a["v"])
    expected = torch.einsum("bhmn,bhnd->bhmd", w, v) * (sums[..., -1:] + EPS).rsqrt()
    assert_close(total(a["partial_out"], B, H, 1, -1), expected, tolerance=TIGHT, what="decode_readout")
