"""flash-linear-attention's kernels in the place of our PyTorch forms: on a GPU, where it is installed and
nothing is masked.

Same functions, same shapes as in recurrence.py, scan.py, gsa.py and path.py.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def usable(x: Tensor, reach: Tensor | None) -> bool:
    return x.is_cuda and reach is None and x.dtype != torch.float64 and _installed()


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    options = {"scale": 1.0, "initial_state": memory, "output_final_state": True}
    q, k = q.to(v.dtype), k.to(v.dtype)
    if log_decay.shape[-1] == 1:
        out: tuple[Tensor, Tensor] = _kernel("simple_gla", "chunk_simple_gla")(
            q, k, v, g=log_decay[..., 0].contiguous(), **options
        )
    else:
        out = _kernel("gla", "chunk_gla")(q, k, v, log_decay, **options)
    return out


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    memories: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    known = None if memories[0] is None else memories
    out: tuple[Tensor, tuple[Tensor, Tensor]] = _kernel("gsa", "chunk_gsa")(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        write.to(v.dtype),
        log_decay,
        scale=1.0,
        initial_state=known,
        output_final_state=True,
    )
    return out


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _kernel("gated_delta_rule", "chunk_gated_delta_rule")(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        log_decay[..., 0].float(),
        beta[..., 0].to(v.dtype),
        scale=1.0,
        initial_state=memory,
        output_final_state=True,
    )
    return out


def diagonal_plus_rank_one(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, a, b = (x.to(v.dtype) for x in (q, k, a, b))
    out: tuple[Tensor, Tensor] = _kernel("generalized_delta_rule", "chunk_dplr_delta_rule")(
        q, k, v, a, b, log_decay, scale=1.0, initial_state=memory, output_final_state=True
    )
    return out


def scan(keep: Tensor, add: Tensor, memory: Tensor) -> Tensor:
    out: Tensor = _kernel("hgrn", "fused_recurrent_hgrn")(add, keep.log(), initial_state=memory)[0]
    return out


def path_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """``[B, H, T, C]``, beta ``[B, T, H]``; no state. Returns ``[B, T, H, C]``."""
    q, k, v, w = (x.transpose(1, 2).contiguous() for x in (q, k, v, w))
    out: Tensor = _kernel("path_attn", "parallel_path_attn")(q, k, v, w, beta, scale=q.shape[-1] ** -0.5)[0]
    return out
