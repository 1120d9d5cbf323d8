"""``hyper_attention`` and ``causal_conv``: the formulas, the checks, the choice of a backend."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops.arguments import Attention, Mix, Request
from hypermlp.ops.chunks import attend_in_chunks
from hypermlp.ops.dispatch import choose_backend
from hypermlp.ops.layout import LAYOUTS, check_cu_seqlens_form, check_starts_form, packed_starts, row_starts

ACTIVATIONS = ("relu", "glu", "softmax")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def hyper_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix1: Mix | None = None,
    mix2: Mix | None = None,
    *,
    activation: str = "glu",
    layout: str = "lag",
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-12,
    backend: str = "auto",
) -> Tensor:
    """Causal attention as a dynamic two-layer MLP, with learned mixing along the sequence.

    Letters: B sequences, Tq queries, Tk keys, H heads, Hq score branches (H, or 2 H for "glu"), Dk width of
    queries and keys, Dv width of values, L slots of a mix, r its rank, n the number of keys that a query
    sees. For one head at one query, over the n visible keys in slot order::

        z = q Kᵀ                                              scores
        h = z R(mix1)                                         first mix
        a = relu(h / sqrt(‖h‖² + eps))                        activation "relu"
          = softplus(h_scale) relu(h_gate / sqrt(‖h_gate‖² + eps))       "glu"
          = softmax(h / sqrt(Dk))                                        "softmax"
        o = a R(mix2)ᵀ V                                      second mix, readout

    where ``R(mix) = I + Diag(diag) + left Diag(gate) rightᵀ`` is ``[n, n]`` (see ``Mix``). In "glu", h_gate
    of head j is the h of branch j, and h_scale that of branch H + j. Only softmax scales its scores by 1 /
    sqrt(Dk): in "relu" and in the gate of "glu", the norm removes any factor (up to eps), and h_scale is used
    as it is.

    Args:
        q: ``[B, Tq, Hq, Dk]``, float32, float64, bfloat16 or float16, like k and v, on one device; no
            dimension may be empty. The queries are the last Tq of the Tk positions (Tq <= Tk), so decoding
            and chunked prefill are calls of this function too.
        k: ``[B, Tk, Hq, Dk]``.
        v: ``[B, Tk, H, Dv]``.
        mix1: mix of the scores, one for each of the Hq branches; None, the default, for the identity.
        mix2: mix of the activation, one for each of the H heads; None, the default, for the identity. The
            mixes need at least as many slots L as the most keys that a query sees: Tk without ``starts``.
            They have the dtype of q, or float32 where q is bfloat16 or float16.
        activation: "glu" (the default), "relu" or "softmax".
        layout: "lag" (the default) counts slots from the query backwards, "forward" from the first visible
            position. It has no effect without mixes.
        starts: the first position that each query sees, integers ``[B]`` or ``[B, Tq]``, counted from 0 at
            the first key; between 0 and position + 1 (the query sees nothing, and its output is 0),
            non-decreasing along the queries. ``[B]`` is the number of positions of left padding (at most Tk);
            ``[B, Tq]`` describes packed documents (where the query's document begins) or a sliding window of
            w positions (``max(0, position - w + 1)``). None: every query sees all positions up to its own.
        cu_seqlens: integers ``[N + 1]``, the cumulative lengths of N sequences that are packed into one row
            (B = 1), in the place of ``starts``: 0, and where each sequence ends. A query sees its own
            sequence.
        eps: added to the squared norm, so that a row of zeros is not divided by zero (1e-12); at least the
            smallest normal number of the dtype. "softmax" has no norm.
        backend: "auto" (the default) or a name from ``available_backends()``. A backend that is asked for by
            name is used, or refused with the reason.

    Returns:
        ``[B, Tq, H, Dv]`` in the dtype of q. float16 and bfloat16 are computed in float32. Under autocast, q,
        k and v are first cast to its dtype. The result is differentiable in q, k, v and all tensors of both
        mixes.

    Raises:
        UserError: for wrong shapes, dtypes, devices, ``starts`` or names, for mixes with too few slots, and
            for a backend that cannot run.

    Keys and values that no query sees must still be finite: they are multiplied by zero weights.

    Example::

        import torch
        from hypermlp.ops import Mix, hyper_attention

        B, T, H, L, r = 2, 64, 2, 128, 8
        q, k, v = torch.randn(B, T, 2 * H, 16), torch.randn(B, T, 2 * H, 16), torch.randn(B, T, H, 32)
        diag, left, right = torch.zeros(2 * H, L), torch.randn(2 * H, L, r), torch.randn(2 * H, L, r)
        mix1 = Mix(diag, left, right, gate=torch.rand(B, T, 2 * H, r))
        o = hyper_attention(q, k, v, mix1, activation="glu")  # [2, 64, 2, 32]
        last = hyper_attention(q[:, -1:], k, v, mix1._replace(gate=mix1.gate[:, -1:]))  # decoding: one query
        torch.testing.assert_close(last, o[:, -1:], rtol=1e-3, atol=1e-3)
    """
    if activation not in ACTIVATIONS:
        raise UserError(f"unknown activation {activation!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
    if layout not in LAYOUTS:
        raise UserError(f"unknown layout {layout!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
    _check_tensors(q, k, v, activation)
    if autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    _check_dtypes(q, k, v)
    _check_eps(eps, q.dtype)
    mixes = (("mix1", mix1, q.shape[2]), ("mix2", mix2, v.shape[2]))
    lengths = [_check_mix(name, mix, q, heads) for name, mix, heads in mixes if mix is not None]
    slots = min(lengths) if lengths else -1
    if cu_seqlens is not None:
        if starts is not None:
            raise UserError("starts and cu_seqlens are both given; pass one of them")
        check_cu_seqlens_form(cu_seqlens, q)
        starts = packed_starts(cu_seqlens, q.shape[1], k.shape[1], -1)
    if starts is not None:
        check_starts_form(starts, q)
        starts = row_starts(starts, q.shape[1], k.shape[1], slots)
    elif 0 <= slots < k.shape[1]:
        raise UserError(
            f"{k.shape[1]} positions, but the mixes have only {slots} slots; pass longer mixes, or starts "
            "that let each "
            f"query see at most {slots}"
        )
    return attend(Attention(q, k, v, mix1, mix2, starts, activation, layout, float(eps)), backend)


def attend(arguments: Attention, backend: str, window: int | None = None) -> Tensor:
    """Run the operator on arguments that are known to be valid; ``starts`` comes from ``row_starts``.

    ``window``: the most positions that a query sees; None for any number.
    """
    request = _request("attention", arguments)
    chosen = choose_backend(backend, request)
    if window is not None and arguments.starts is not None and not chosen.skips(request):
        return attend_in_chunks(chosen.attention, arguments, window)
    return chosen.attention(arguments)


def attend_ring(arguments: Attention, positions: Tensor, backend: str) -> Tensor:
    """Run the operator over keys and values in rings, for queries at ``positions``, int64 ``[Tq]``.

    The arguments are known to be valid; ``starts`` comes from ``ring_starts``. A backend without rings leaves
    them to "auto".
    """
    run = choose_backend(backend, _request("ring", arguments), required=False).ring
    assert run is not None
    return run(arguments, positions)


def _request(operation: str, arguments: Attention) -> Request:
    mixed = arguments.mix1 is not None or arguments.mix2 is not None
    return Request(operation, arguments.q.device.type, arguments.q.dtype, arguments.activation, mixed)


def causal_conv(
    x: Tensor,
    weights: Sequence[Tensor],
    length: int,
    reach: Tensor | None = None,
    *,
    backend: str = "auto",
    required: bool = True,
) -> list[Tensor]:
    """Compute depthwise causal convolutions of one input, in one pass.

    For each weight, ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``.

    Args:
        x: ``[B, >= T, D]``, the T positions and, before them, the earlier ones that exist. The last K - 1 of
            those matter; zeros stand in for missing ones.
        weights: ``[D, K]`` each, column i for lag i; all of one shape.
        length: T.
        reach: int64 ``[B, T]``, how many positions each position sees, itself included; None for all. A
            position that sees nothing (0) gets a zero row.
        backend: "auto", or a backend that has the convolution: "native", "triton", "blocked" or "reference".
        required: whether a backend that has no convolution is refused; otherwise "auto" takes its place.

    Returns:
        a tensor ``[B, T, D]`` in the dtype of x for each weight.
    """
    request = Request("convolution", x.device.type, x.dtype)
    run = choose_backend(backend, request, required=required).convolution
    assert run is not None
    return run(x, list(weights), length, reach)


def autocast_enabled(device_type: str) -> bool:
    """Return True if autocast is on for this kind of device. Some kinds, such as meta, have no autocast."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _check_eps(eps: float, dtype: torch.dtype) -> None:
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny
    if not isinstance(eps, (int, float)) or not least <= eps < math.inf:  # NaN is not
        raise UserError(
            f"eps is {eps!r}; it must be a finite number of at least {least:.3g} (for {dtype}), such as 1e-12"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, activation: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise UserError(
                f"{name} is a {type(x).__name__}; it must be a tensor [batch, positions, heads, width]"
            )
        if x.dim() != 4:
            raise UserError(f"{name} has shape {list(x.shape)}; it must be [batch, positions, heads, width]")
        if 0 in x.shape:
            raise UserError(f"{name} has shape {list(x.shape)}; no dimension may be empty")
        if x.device != q.device:
            raise UserError(f"{name} is on {x.device}, q on {q.device}; all tensors must be on one device")
    if k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:]:
        raise UserError(
            f"k has shape {list(k.shape)}; it must agree with q {list(q.shape)} in batch, heads and width"
        )
    if v.shape[:2] != k.shape[:2]:
        raise UserError(
            f"v has shape {list(v.shape)}; it must agree with k {list(k.shape)} in batch and positions"
        )
    if q.shape[1] > k.shape[1]:
        raise UserError(
            f"{q.shape[1]} queries for {k.shape[1]} keys; the queries are the last positions, so Tq <= Tk"
        )
    branches = 2 if activation == "glu" else 1
    if q.shape[2] != branches * v.shape[2]:
        raise UserError(
            f"q has {q.shape[2]} heads and v has {v.shape[2]}; activation {activation!r} needs {branches} x "
            "as many in q and k"
        )


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise UserError(f"q is {q.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise UserError(f"{name} is {x.dtype}, q is {q.dtype}; q, k and v must have one dtype")


def _check_mix(name: str, mix: Mix, q: Tensor, heads: int) -> int:
    """Raise unless the mix is well-formed; return its number of slots."""
    if not isinstance(mix, Mix) or not all(isinstance(x, Tensor) for x in mix):
        raise UserError(
            f"{name} is a {type(mix).__name__}; it must be None or a Mix of four tensors: diag, left, right, "
            "gate"
        )
    shapes = {field: x.dim() for field, x in zip(Mix._fields, mix, strict=True)}
    if shapes != {"diag": 2, "left": 3, "right": 3, "gate": 4}:
        form = "Mix(diag=[H, L], left=[H, L, r], right=[H, L, r], gate=[B, Tq, H, r])"
        raise UserError(f"{name} has tensors with {shapes} dimensions; it must be {form}")
    slots, rank = mix.left.shape[1:]
    expected = {
        "diag": (heads, slots),
        "left": (heads, slots, rank),
        "right": (heads, slots, rank),
        "gate": (*q.shape[:2], heads, rank),
    }
    for field, x in zip(Mix._fields, mix, strict=True):
        if any(a != b for a, b in zip(x.shape, expected[field], strict=True)):
            raise UserError(f"{name}.{field} has shape {list(x.shape)}; it must be {list(expected[field])}")
        if x.device != q.device:
            raise UserError(
                f"{name}.{field} is on {x.device}, q on {q.device}; all tensors must be on one device"
            )
        allowed = {
            q.dtype,
            torch.promote_types(q.dtype, torch.float32),
        }  # parameters may stay in float32 beside half precision
        if x.dtype not in allowed:
            raise UserError(
                f"{name}.{field} is {x.dtype}, q is {q.dtype}; allowed: "
                f"{', '.join(sorted(map(str, allowed)))}"
            )
    return slots
