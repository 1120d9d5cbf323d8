"""The cross entropy of a language model's head without the matrix of all logits.

Shapes: N positions, D hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypermlp.errors import UserError
from hypermlp.ops.layout import raise_where

CHUNK = 2**23  # logits that exist at a time: 32 MiB in float32
IGNORED = -100  # the label of a position without a target, as in PyTorch and transformers


def check_labels(labels: Tensor | None, ids: Tensor | None, vocabulary: int) -> None:
    """Raise if ``labels`` has another shape than the token ids, or a value that is neither an id nor -100."""
    if not isinstance(labels, Tensor):
        return
    if isinstance(ids, Tensor) and labels.shape != ids.shape:
        raise UserError(
            f"labels has shape {list(labels.shape)}; it must be {list(ids.shape)}, the shape of input_ids"
        )
    if not torch.compiler.is_compiling():
        raise_where(
            (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary)),
            "labels has a value that is no token id",
            f"0 or more and below the size of the vocabulary, {vocabulary}, or {IGNORED}: not scored",
            labels,
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the loss and its gradients chunk by chunk in the forward pass; the backward pass scales them.

    The logits of a chunk are multiplied in the dtype of ``hidden`` and then widened, so the loss is float32
    for half precision too.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        loss = hidden.new_zeros((), dtype=wide)
        rows = max(1, CHUNK // weight.shape[0])
        for first in range(0, hidden.shape[0], rows):
            chunk, target = hidden[first : first + rows], targets[first : first + rows, None]
            visible = target != IGNORED
            target = target.where(visible, 0)
            logits = F.linear(chunk, weight).to(wide)  # [rows, V]
            normalizer = logits.logsumexp(-1, keepdim=True)
            loss += ((normalizer - logits.gather(1, target)) * visible).sum()
            if not (needs_hidden or needs_weight):
                continue
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, target, gradient.new_full((), -1).expand(target.shape))
            gradient = gradient.mul_(visible).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[first : first + rows])
            if grad_weight is not None:
                grad_weight += gradient.mT @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return transformers' loss of a causal language model, without the logits of all positions in memory.

    ``-log softmax(hidden weightᵀ)[next token]``, averaged over the positions with a target, or summed and
    divided by ``num_items_in_batch``.

    Args:
        hidden: ``[..., T, D]``, the last hidden states.
        weight: ``[V, D]``, the weight of the head.
        labels: ``[..., T]``, the tokens themselves; -100 for none.
        shift_labels: ``[..., T]``, the next token of each position, instead of ``labels``.
        num_items_in_batch: the number of targets of the whole batch, which may be divided into several calls.

    Returns:
        the loss in float32, or in float64 for a float64 model.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    targets = shift_labels.flatten().to(hidden.device)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets)
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
