"""flash-linear-attention's kernels, which replace our PyTorch forms where they can.

Each function computes what the function of the same name in recurrence.py, scan.py, gsa.py or path.py does.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from hypermlp.layers.baselines.parts import Memory, Reach


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def usable(x: Tensor, reach: Reach) -> bool:
    """Return True on a GPU, if the library is installed, nothing is masked and the dtype is not float64."""
    return x.is_cuda and reach is None and x.dtype != torch.float64 and _installed()


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def _run(module: str, name: str, *inputs: Tensor, memory: Any, **options: Tensor) -> Any:
    """Return the outputs of a kernel and its last memory. No kernel scales the queries: the layers do.

    The ``inputs`` are q, k, v and others, all cast to the dtype of v; the ``options`` keep theirs.
    """
    cast = (x.to(inputs[2].dtype) for x in inputs)
    return _kernel(module, name)(*cast, scale=1.0, initial_state=memory, output_final_state=True, **options)


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Memory
) -> tuple[Tensor, Tensor]:
    if log_decay.shape[-1] == 1:
        log_decay = log_decay[..., 0].contiguous()
        return _run("simple_gla", "chunk_simple_gla", q, k, v, g=log_decay, memory=memory)
    return _run("gla", "chunk_gla", q, k, v, g=log_decay, memory=memory)


def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor, memories: tuple[Memory, Memory]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    known = None if memories[0] is None else memories
    return _run("gsa", "chunk_gsa", q, k, v, write, g=log_decay, memory=known)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Memory
) -> tuple[Tensor, Tensor]:
    options = {"g": log_decay[..., 0].float(), "beta": beta[..., 0].to(v.dtype)}
    return _run("gated_delta_rule", "chunk_gated_delta_rule", q, k, v, **options, memory=memory)


def diagonal_plus_rank_one(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, memory: Memory
) -> tuple[Tensor, Tensor]:
    return _run("generalized_delta_rule", "chunk_dplr_delta_rule", q, k, v, a, b, gk=log_decay, memory=memory)


def scan(keep: Tensor, add: Tensor, memory: Tensor) -> Tensor:
    return _kernel("hgrn", "fused_recurrent_hgrn")(add, keep.log(), initial_state=memory)[0]


def path_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Return PaTH attention of a whole sequence, ``[B, T, H, C]``.

    Args:
        q, k, v, w: ``[B, H, T, C]``.
        beta: ``[B, T, H]``.
    """
    q, k, v, w = (x.transpose(1, 2).contiguous() for x in (q, k, v, w))
    return _kernel("path_attn", "parallel_path_attn")(q, k, v, w, beta, scale=q.shape[-1] ** -0.5)[0]
