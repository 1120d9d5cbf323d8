"""Backend "native": the C++ kernels, loaded on first use and called through ``torch.library`` like any other backend.

The kernels are plain C functions over pointers and strides; PyTorch's own BLAS is handed to them as a function pointer. Half
precision is stored, float32 is computed. csrc/block.h has the scheme, docs/performance.md the picture.

Shapes as in ops/api.py.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp.ops import build
from hypermlp.ops.types import Mix

BLOCK_ROWS = ((128, 32), (1536, 64), (1 << 62, 96))  # up to so many keys, so many queries in a block: measured, not derived
DECODE_QUERIES = 4  # up to so many queries are decoded one by one, without blocks


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class _Mix(ctypes.Structure):
    _fields_ = (
        _pointers("scale", "left", "right", "gate")
        + _integers("slots", "rank")
        + _pointers("grad_scale", "grad_left", "grad_right", "grad_gate")
    )


class _Strided(ctypes.Structure):
    _fields_ = _pointers("data") + _integers("batch", "token", "head")


TENSORS = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")


class _Problem(ctypes.Structure):
    """Mirrors ``struct Problem`` in csrc/common.h; their sizes are compared when the library is loaded."""

    _fields_ = (
        _integers("batch", "heads", "queries", "keys", "qk_dim", "vo_dim", "block_rows", "threads")
        + [("glu", ctypes.c_int32), ("lag", ctypes.c_int32), ("eps", ctypes.c_double), ("starts", ctypes.c_void_p)]
        + [(name, _Strided) for name in TENSORS]
        + [("inverse_norm", ctypes.c_void_p), ("mix1", _Mix), ("mix2", _Mix)]
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if need be. Raises BuildError with the reason."""
    path = build.build()
    try:
        library = ctypes.CDLL(str(path))
        blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        gemms = [ctypes.cast(getattr(blas, name), ctypes.c_void_p) for name in ("sgemm_", "dgemm_")]
    except (OSError, AttributeError) as error:
        raise build.BuildError(f"the kernels or PyTorch's BLAS cannot be loaded: {error}") from error
    library.hypermlp_problem_size.restype = library.hypermlp_conv_size.restype = ctypes.c_int64
    sizes = library.hypermlp_problem_size(), library.hypermlp_conv_size()
    if sizes != (ctypes.sizeof(_Problem), ctypes.sizeof(_Conv)):
        raise build.BuildError(f"{path} does not fit this version of hypermlp; remove it")
    library.hypermlp_set_gemm(*gemms)
    return library


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be used here; builds them when asked for the first time."""
    try:
        load()
    except build.BuildError as error:
        return str(error)
    return None


def unsupported(device_type: str, activation: str) -> str | None:
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if activation == "softmax":
        return "it has no softmax with mixes"
    return None


class _Call:
    """One call: the arguments in the kernel's form, and the tensors that must outlive it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mix1: Mix | None,
        mix2: Mix | None,
        starts: Tensor | None,
        activation: str,
        layout: str,
        eps: float,
        *,
        decode: bool = False,
    ):
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.kept: list[Tensor] = []
        self.newest_last = layout == "lag" and not decode
        self.decode = decode
        batch, queries, _, qk_dim = q.shape
        keys, heads, vo_dim = v.shape[1:]
        threads = torch.get_num_threads()
        block_rows = next(rows for most, rows in BLOCK_ROWS if keys <= most)
        p = _Problem(batch, heads, queries, keys, qk_dim, vo_dim, block_rows, threads, activation == "glu", layout == "lag", eps)
        self.problem = p
        p.starts = self.pointer(starts.contiguous()) if starts is not None else None
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.tensor(name, x)
        p.mix1, p.mix2 = self.mix(mix1), self.mix(mix2)

    def pointer(self, x: Tensor) -> int:
        self.kept.append(x)
        return x.data_ptr()

    def tensor(self, name: str, x: Tensor) -> None:
        """Pass ``x``, ``[B, T, H, D]``: itself, if dtype and strides allow it."""
        x = x.to(self.dtype)
        if x.stride(3) != 1 or x.stride(1) < x.shape[3]:
            x = x.contiguous()
        setattr(self.problem, name, _Strided(self.pointer(x), x.stride(0), x.stride(1), x.stride(2)))

    def rows(self, parameter: Tensor) -> Tensor:
        """In the kernel's order: blocks want lag order newest last."""
        parameter = parameter.to(self.dtype)
        return (parameter.flip(1) if self.newest_last else parameter).contiguous()

    def mix(self, mix: Mix | None) -> _Mix:
        if mix is None:
            return _Mix()
        slots, rank = mix.left.shape[1:]
        scale = mix.diag if self.decode else 1 + mix.diag
        tensors = (self.rows(scale), self.rows(mix.left), self.rows(mix.right), mix.gate.to(self.dtype).contiguous())
        return _Mix(*(self.pointer(x) for x in tensors), slots, rank)

    def run(self, name: str) -> None:
        suffix = "double" if self.dtype == torch.float64 else "float"
        function: Any = getattr(load(), f"hypermlp_{name}_{suffix}")
        function(ctypes.byref(self.problem))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mix1: Mix | None, mix2: Mix | None, starts: Tensor | None, activation: str, layout: str, eps: float
) -> tuple[Tensor, Tensor]:
    """The output ``[B, Tq, H, Dv]`` and 1/rho ``[H * B, Tq, 1]``."""
    decode = q.shape[1] <= DECODE_QUERIES
    call = _Call(q, k, v, mix1, mix2, starts, activation, layout, eps, decode=decode)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], v.shape[3], dtype=call.dtype)
    inverse_norm = torch.empty(v.shape[2] * q.shape[0], q.shape[1], 1, dtype=call.dtype)
    call.tensor("out", out)
    call.problem.inverse_norm = call.pointer(inverse_norm)
    call.run("decode" if decode else "forward")
    return out.to(q.dtype), inverse_norm


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix1: Mix | None,
    mix2: Mix | None,
    starts: Tensor | None,
    inverse_norm: Tensor,
    activation: str,
    layout: str,
    eps: float,
) -> list[Tensor]:
    """Gradients of q, k, v and of the tensors of the mixes that are there."""
    call = _Call(q, k, v, mix1, mix2, starts, activation, layout, eps)
    call.tensor("grad_out", grad_out)
    call.problem.inverse_norm = call.pointer(inverse_norm.contiguous())
    grads = [torch.empty(q.shape, dtype=call.dtype), torch.zeros(k.shape, dtype=call.dtype), torch.zeros(v.shape, dtype=call.dtype)]
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
        call.tensor(name, grad)
    mix_grads = []
    for mix, passed in ((mix1, call.problem.mix1), (mix2, call.problem.mix2)):
        if mix is None:
            continue
        per_item = [torch.zeros(q.shape[0], *x.shape, dtype=call.dtype) for x in mix[:3]]  # one for each batch item
        gate = torch.empty(mix.gate.shape, dtype=call.dtype)
        passed.grad_scale, passed.grad_left, passed.grad_right, passed.grad_gate = (call.pointer(x) for x in (*per_item, gate))
        mix_grads.append((mix, per_item, gate))
    call.run("backward")
    result = [grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)]
    for mix, per_item, gate in mix_grads:
        result += [call.rows(grad.sum(0)).to(x.dtype) for grad, x in zip(per_item, mix[:3], strict=True)]
        result.append(gate.to(mix.gate.dtype))
    return result


class _Conv(ctypes.Structure):
    """Mirrors ``struct Conv`` in csrc/conv.cpp."""

    _fields_ = _integers("batch", "length", "past", "width", "kernel", "chunk", "threads") + _pointers(
        "reach", "x", "weight1", "weight2", "out1", "out2", "grad_out1", "grad_out2", "grad_x", "grad_weight1", "grad_weight2"
    )


CONV_CHUNK = 64  # positions that one thread takes at a time


def conv_pair(x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
    """``causal_conv_pair`` of hypermlp/layers/common.py."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight1.dtype), torch.float32)
    conv, kept = _conv(x, weight1, weight2, length, reach, dtype)
    outs = [torch.empty(x.shape[0], length, x.shape[2], dtype=dtype) for _ in range(2)]
    conv.out1, conv.out2 = (out.data_ptr() for out in outs)
    _run_conv("forward", conv, dtype)
    del kept
    return outs[0].to(x.dtype), outs[1].to(x.dtype)


def conv_pair_backward(
    grad1: Tensor, grad2: Tensor, x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight1.dtype), torch.float32)
    conv, kept = _conv(x, weight1, weight2, length, reach, dtype)
    grads = [grad.to(dtype).contiguous() for grad in (grad1, grad2)]
    chunks = -(-length // CONV_CHUNK)
    grad_x = torch.empty(x.shape, dtype=dtype)
    grad_weights = [torch.empty(x.shape[0] * chunks, *reversed(weight1.shape), dtype=dtype) for _ in range(2)]
    conv.grad_out1, conv.grad_out2 = (grad.data_ptr() for grad in grads)
    conv.grad_x = grad_x.data_ptr()
    conv.grad_weight1, conv.grad_weight2 = (grad.data_ptr() for grad in grad_weights)
    _run_conv("backward", conv, dtype)
    del kept
    sums = [grad.sum(0).mT.to(weight1.dtype).contiguous() for grad in grad_weights]
    return grad_x.to(x.dtype), sums[0], sums[1]


def _conv(x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None, dtype: torch.dtype) -> tuple[_Conv, list[Tensor]]:
    """The arguments in the kernel's form, and the tensors that must outlive the call."""
    kept = [x.to(dtype).contiguous(), *(weight.to(dtype).mT.contiguous() for weight in (weight1, weight2))]
    past = x.shape[1] - length
    conv = _Conv(x.shape[0], length, past, x.shape[2], weight1.shape[1], CONV_CHUNK, torch.get_num_threads())
    conv.x, conv.weight1, conv.weight2 = (tensor.data_ptr() for tensor in kept)
    if reach is not None:
        kept.append(reach.long().contiguous())
        conv.reach = kept[-1].data_ptr()
    return conv, kept


def _run_conv(name: str, conv: _Conv, dtype: torch.dtype) -> None:
    suffix = "double" if dtype == torch.float64 else "float"
    getattr(load(), f"hypermlp_conv_{name}_{suffix}")(ctypes.byref(conv))
