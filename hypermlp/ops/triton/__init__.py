"""Backend "triton": the operator on CUDA and ROCm devices.

Importing this package does not import Triton; the first call does. With ``TRITON_INTERPRET=1`` in the
environment (set it before anything imports Triton) the kernels also run on CPU tensors, slowly, in Triton's
interpreter: that is how they are tested without a GPU.

A chunk of query rows is a GEMM (scores), a few kernels that stream over the scores in slot coordinates, and
another GEMM (readout). kernels.py and gradients.py have the kernels, forward.py and backward.py the order in
which they run, decode.py a shorter way for one query, launch.py the geometry of chunks, selfcheck.py the
check that runs on a GPU before "auto" takes the kernels there.
"""

import importlib.util
import os

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.triton.saved import saved_size, score_dtype


def interpreting() -> bool:
    """Return True if the environment asks for Triton's interpreter, which runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def unavailable() -> str | None:
    """Return why the backend cannot run on this machine; None if it can."""
    if not torch.cuda.is_available() and not interpreting():
        return (
            "there is no CUDA or ROCm device; set TRITON_INTERPRET=1 in the environment to run its kernels "
            "on the CPU, slowly"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; `pip install triton`"
    return None


def unsupported(request: Request) -> str | None:
    """Return why the backend cannot serve a request; None if it can."""
    if request.device_type != "cuda" and not (request.device_type == "cpu" and interpreting()):
        return (
            f"it runs on CUDA and ROCm devices, not on {request.device_type} (on the CPU with "
            "TRITON_INTERPRET=1 in the environment)"
        )
    if request.activation == "softmax":
        return "it has no softmax"
    if request.operation == "attention" and request.dtype == torch.float16:
        return "its scratch in float16 would overflow; use bfloat16, or backend 'blocked'"
    return None


def distrusted() -> str | None:
    """Return why "auto" should not take the kernels on this GPU; the first call runs the self-check there."""
    from hypermlp.ops.triton import selfcheck

    return selfcheck.distrusted()


def empty_sums(arguments: Attention) -> Tensor:
    """Return an empty tensor of the size that the forward pass saves for the backward pass."""
    return arguments.q.new_empty(saved_size(arguments), dtype=score_dtype(arguments.q.dtype))


def forward(arguments: Attention) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Tq, H, Dv]`` and the sums that the backward pass needs."""
    from hypermlp.ops.triton.forward import forward as run

    return run(arguments)


def backward(grad_out: Tensor, out: Tensor, saved: Tensor, arguments: Attention) -> list[Tensor]:
    """Return a gradient for each present tensor."""
    from hypermlp.ops.triton.backward import backward as run

    return run(grad_out, out, saved, arguments)
