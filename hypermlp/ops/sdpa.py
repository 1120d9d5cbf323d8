"""Backend "sdpa": softmax without mixing is ordinary attention, which PyTorch's fused kernel computes.

That kernel takes ``starts`` only as a dense mask, so long sequences go through it in row blocks that the
backward recomputes; the masks then take O(T) memory.

Shapes: B batch, H heads, Tq queries, Tk keys, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.layout import visible_keys

MAX_MASK_CELLS = 1 << 22


def unsupported(request: Request) -> str | None:
    """Return why the request cannot be served; None if it can."""
    if request.activation != "softmax" or request.mixed:
        return "it computes softmax without mixes only"
    return None


def attention(arguments: Attention) -> Tensor:
    """Compute softmax attention with PyTorch's fused kernel."""
    starts, num_queries, num_keys = arguments.starts, arguments.q.shape[1], arguments.k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (arguments.q, arguments.k, arguments.v))  # [B, H, T, D]
    if starts is None and num_queries == 1:
        out = F.scaled_dot_product_attention(q, k, v)
    elif starts is None and num_queries == num_keys:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        rows = max(1, MAX_MASK_CELLS // (q.shape[0] * num_keys))
        blocks = [range(first, min(first + rows, num_queries)) for first in range(0, num_queries, rows)]
        if len(blocks) == 1:
            out = _masked_rows(blocks[0], q, k, v, starts)
        else:
            out = torch.cat(
                [checkpoint(_masked_rows, rows, q, k, v, starts, use_reentrant=False) for rows in blocks],
                dim=2,
            )
    return out.transpose(1, 2)


def _masked_rows(rows: range, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
    num_keys = k.shape[2] - q.shape[2] + rows.stop  # the last one that these rows can see
    own_starts = None if starts is None else starts[:, rows.start : rows.stop]
    visible = visible_keys(own_starts, len(rows), num_keys, q.device)[:, None]  # [B or 1, 1, rows, keys]
    # Softmax over nothing is undefined: empty rows see everything, and their output is dropped.
    empty = ~visible.any(-1, keepdim=True)
    k, v = k[:, :, :num_keys], v[:, :, :num_keys]
    out = F.scaled_dot_product_attention(q[:, :, rows.start : rows.stop], k, v, attn_mask=visible | empty)
    return out.masked_fill(empty, 0)
