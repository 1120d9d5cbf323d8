"""What a whole model costs: parameters, FLOPs, decoding state, and the memory of a training step.

A mixer's own costs are in hypermlp/costs/mixer.py; the formulas are explained in docs/train.md.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hypermlp.costs.mixer import flops_table, parameter_count, parameter_table, state_bytes
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.ops.blocked import workspace_bytes
from hypermlp.ops.dispatch import use_backend
from hypermlp.train.recipe import Recipe

STATE_BYTES = {
    "weights": 4,
    "gradients": 4,
    "optimizer": 8,
}  # for a parameter: float32, and AdamW's two moments


def model_parameter_table(config: HyperMLPConfig) -> dict[str, int]:
    """Parameters by part; their sum is the model's."""
    parts: dict[str, int] = {}
    for index in range(config.num_hidden_layers):
        for part, count in parameter_table(config.mixer_config(index)).items():
            parts[f"mixer: {part}"] = parts.get(f"mixer: {part}", 0) + count
    tables = (
        config.vocab_size * (1 if config.tie_word_embeddings else 2)
        + config.max_position_embeddings * config.learned_positions
    )
    return parts | {
        "MLPs": config.num_hidden_layers * _mlp(config),
        "norms": (2 * config.num_hidden_layers + 1) * config.hidden_size,
        "embeddings": tables * config.hidden_size,
    }


def model_parameters(config: HyperMLPConfig) -> int:
    return sum(model_parameter_table(config).values())


def model_flops_table(config: HyperMLPConfig, length: int) -> dict[str, int]:
    """Forward FLOPs of one sequence by part: two per multiply-add, only pairs that see each other."""
    parts: dict[str, int] = {}
    for index in range(config.num_hidden_layers):
        for part, count in flops_table(config.mixer_config(index), length).items():
            parts[f"mixer: {part}"] = parts.get(f"mixer: {part}", 0) + count
    return parts | {
        "MLPs": 2 * length * config.num_hidden_layers * _mlp(config),
        "head": 2 * length * config.hidden_size * config.vocab_size,
    }


def forward_flops_per_token(config: HyperMLPConfig, length: int) -> int:
    """The mean over a sequence of this length."""
    return sum(model_flops_table(config, length).values()) // length


def model_state_bytes(config: HyperMLPConfig, length: int, dtype: torch.dtype = torch.float32) -> int:
    """Of decoding, after so many positions of one sequence."""
    return sum(
        state_bytes(config.mixer_config(index), length, dtype=dtype)
        for index in range(config.num_hidden_layers)
    )


def with_softmax(config: HyperMLPConfig) -> HyperMLPConfig:
    """The same model with softmax attention."""
    return HyperMLPConfig(**(config.to_diff_dict() | {"mixer": "S-p", "baseline_settings": None}))


def largest_layer(config: HyperMLPConfig) -> int:
    """Parameters of the largest block: what a sharded process holds whole for a moment."""
    return max(
        parameter_count(config.mixer_config(i)) + _mlp(config) + 2 * config.hidden_size
        for i in range(config.num_hidden_layers)
    )


def _mlp(config: HyperMLPConfig) -> int:
    assert config.intermediate_size is not None
    return (2 if config.block == "gpt2" else 3) * config.hidden_size * config.intermediate_size


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are made under it and still there, and the most there ever were, as if on ``device``."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.device = device
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.hypermlp.blocked_backward.default:  # what happens in it is not seen
            (q, k, v), mixes = args[1:4], sum(x.numel() for x in args[4:12] if x is not None)
            self.peak = max(self.peak, self.live + workspace_bytes(self.device, q, k, v, mixes))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def ignore(self, tensor: Tensor) -> None:
        """It was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def step_bytes(recipe: Recipe, config: HyperMLPConfig, accumulation: int, device: str = "cuda") -> int:
    """Most memory that the micro-batches of one step hold beyond weights and optimizer: activations, gradients, and what lies between.

    The model runs forward and backward on tensors without contents, in the backend of GPUs.
    """
    with _without_contents(recipe):
        model = HyperMLPForCausalLM(config).train()
        if recipe.training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        tokens = torch.zeros(recipe.training.micro_batch, recipe.data.context, dtype=torch.int64)
        packed = {"document_ids": tokens} if recipe.data.packing == "documents" else {}
        with LiveBytes(device) as live:
            for parameter in model.parameters():
                live.ignore(parameter)
            for _ in range(
                min(accumulation, 2)
            ):  # from the second micro-batch on all gradients are there from the beginning
                model(tokens, labels=tokens, shift_labels=tokens, **packed, use_cache=False).loss.backward()
    return live.peak


@contextmanager
def _without_contents(recipe: Recipe) -> Iterator[None]:
    lower = recipe.training.precision == "bfloat16"
    with FakeTensorMode(), use_backend("blocked"), torch.autocast("cpu", torch.bfloat16, enabled=lower):
        yield
