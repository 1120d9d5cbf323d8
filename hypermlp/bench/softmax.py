"""What a user would pick instead: softmax attention of the same hidden size around PyTorch's fused kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SoftmaxAttention(nn.Module):
    """Causal multi-head attention, one fused qkv projection, no biases; the best ordinary way to write it."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)]

    def cache(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Preallocated keys and values, ``[B, heads, length, width]``."""
        width = self.out.in_features // self.num_heads
        keys, values = (
            torch.randn(batch, self.num_heads, length, width, dtype=self.out.weight.dtype) for _ in range(2)
        )
        return keys, values

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """One token at the last position of the cache."""
        q, k, v = self._heads(x)
        keys, values = cache
        keys[:, :, -1:], values[:, :, -1:] = k, v
        y = F.scaled_dot_product_attention(q, keys, values)
        return self.out(y.transpose(1, 2).flatten(2))
