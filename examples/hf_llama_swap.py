"""Exchange the attention of a Llama of transformers for HyperGLU, and train both on bytes.

    python examples/hf_llama_swap.py                   # about a minute and a half on 2 cores

Everything else stays Llama's: embeddings, norms, MLPs, head, ``save_pretrained``. HyperGLU's model has
15 % more parameters here. Padding works, and text is generated without a cache. For cached generation and
packing, use ``HyperMLPForCausalLM`` with ``block="llama"``, the same model with all of it
(docs/language-model.md). Needs pip install 'hypermlp[train]'.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hypermlp import HyperGLU

CONTEXT, BATCH = 128, 16
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}
RATES = {"attention": 4e-3, "HyperGLU": 8e-3}


class SwappedAttention(nn.Module):
    """HyperGLU behind the interface of ``LlamaAttention``. It needs no rotary positions."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.mixer = HyperGLU(config.hidden_size, max_length=config.max_position_embeddings)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if past_key_values is not None:
            raise NotImplementedError("call generate with use_cache=False, or use HyperMLPForCausalLM")
        starts = None
        if attention_mask is not None:  # [B, 1, T, T]
            seen = attention_mask[:, 0, -1]  # the first position that the last one sees ends the left padding
            starts = (seen if seen.dtype == torch.bool else seen == 0).int().argmax(-1)
        return self.mixer(hidden_states, starts=starts), None


def build(name: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    if name == "HyperGLU":
        model.config.use_cache = model.generation_config.use_cache = False
        for layer in model.model.layers:
            layer.self_attn = SwappedAttention(model.config)
    return model


def batches(text: Tensor, steps: int) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        yield text[starts + torch.arange(CONTEXT)].long()


def train(model: LlamaForCausalLM, text: Tensor, steps: int, rate: float, name: str) -> float:
    """Train a model and return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    losses = []
    for step, tokens in enumerate(batches(text, steps)):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"{name:9}  step {step:4}  loss {losses[-1]:.3f}", flush=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    last = max(1, steps // 10)
    return sum(losses[-last:]) / last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; it must be at least 1")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    for name, rate in RATES.items():
        model = build(name)
        loss = train(model, text, args.steps, rate, name)
        prompt = torch.tensor([list(b"import ")])
        new = model.eval().generate(prompt, max_new_tokens=40, do_sample=False, use_cache=False)
        print(f"{name:9}  {model.num_parameters():,} parameters, loss {loss:.3f}")
        print(f"{name:9}  writes {bytes(new[0].tolist()).decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
