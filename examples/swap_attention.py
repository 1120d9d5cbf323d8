"""Train a small GPT twice, with causal attention and with HyperGLU in its place, and draw both curves.

    python examples/swap_attention.py                  # about a minute and a half on 2 cores
    python examples/swap_attention.py --steps 1000

The model predicts the bytes of Python's standard library. HyperGLU's has 11 % more parameters, and each has
its own learning rate; docs/study.md compares models of equal size. Needs torch; with matplotlib, the curves
are drawn.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import HyperGLU

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 2, 2, 128, 16
RATES = {"attention": 4e-3, "HyperGLU": 8e-3}  # HyperGLU trains best at a higher rate


class Attention(nn.Module):
    """Causal softmax attention, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.norm1, self.norm2, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mixer
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        # Attention needs positional embeddings. HyperGLU learns positions by its mixing along the sequence.
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH)) if name == "attention" else None
        make = (
            Attention if name == "attention" else lambda: HyperGLU(WIDTH, max_length=CONTEXT)
        )  # <- the swap
        self.blocks = nn.Sequential(*(Block(make()) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(name: str, text: Tensor, steps: int) -> list[float]:
    """Train a model and return the loss of every step."""
    torch.manual_seed(0)
    model = GPT(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[name], betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * i / steps)))
    )
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        window = text[starts + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"{name:9}  step {step:4}  loss {losses[-1]:.3f}", flush=True)
    print(f"{name:9}  {sum(p.numel() for p in model.parameters()):,} parameters")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument(
        "--out", type=Path, default=Path("swap_attention.png"), help="picture (default: swap_attention.png)"
    )
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}; it must be at least 2")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    curves = {name: train(name, text, args.steps) for name in RATES}
    last = max(1, args.steps // 10)
    for name, losses in curves.items():
        print(f"{name:9}  mean loss of the last {last} steps: {sum(losses[-last:]) / last:.3f}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss, nats per byte, running mean")
    window = max(1, min(20, args.steps // 5))
    for name, losses in curves.items():
        means = torch.tensor(losses).unfold(0, window, 1).mean(1)
        axes.plot(range(window - 1, len(losses)), means, label=name)
    axes.legend(frameon=False)
    figure.savefig(args.out, dpi=150)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
