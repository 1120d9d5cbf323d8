"""What a whole model costs: parameters, FLOPs, decoding state, and the memory of a training step.

The costs of one mixer are in hypermlp/costs/mixer.py; docs/train.md explains the formulas.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hypermlp.costs.mixer import flops_table, parameter_count, state_bytes
from hypermlp.layers.canon import TAPS
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.models.parameters import canon_parameters, mixer_parts, mlp_parameters
from hypermlp.models.parameters import model_parameter_table as model_parameter_table
from hypermlp.models.parameters import model_parameters as model_parameters
from hypermlp.ops.arguments import Attention
from hypermlp.ops.blocked import workspace_bytes
from hypermlp.ops.dispatch import use_backend
from hypermlp.reporting.table import Table
from hypermlp.train.recipe import Recipe


def model_flops_table(config: HyperMLPConfig, length: int) -> dict[str, int]:
    """Return the forward FLOPs of one sequence of ``length`` tokens by part, as in ``flops_table``."""
    return mixer_parts(config, lambda mixer: flops_table(mixer, length)) | {
        "MLPs": 2 * length * config.num_hidden_layers * mlp_parameters(config),
        "canon": 2 * length * config.num_hidden_layers * canon_parameters(config),
        "head": 2 * length * config.hidden_size * config.vocab_size,
    }


def forward_flops_per_token(config: HyperMLPConfig, length: int) -> int:
    """Return the mean forward FLOPs per token over a sequence of ``length`` tokens."""
    return sum(model_flops_table(config, length).values()) // length


def model_state_bytes(config: HyperMLPConfig, length: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of decoding state after ``length`` positions of one sequence."""
    canon = config.num_hidden_layers * min(length, TAPS - 1) * sum(config.canon_widths.values())
    states = mixer_parts(config, lambda mixer: {"state": state_bytes(mixer, length, dtype=dtype)})
    return canon * dtype.itemsize + sum(states.values())


def with_softmax(config: HyperMLPConfig) -> HyperMLPConfig:
    """Return the configuration of the same model with softmax attention."""
    return HyperMLPConfig(
        **(config.to_diff_dict() | {"mixer": "S-p", "baseline_settings": None, "canon": ""})
    )


def largest_layer(config: HyperMLPConfig) -> int:
    """Return the parameters of the largest block, which a sharded process gathers while it works on it."""
    mixers = {config.mixer_config(index) for index in range(config.num_hidden_layers)}
    rest = mlp_parameters(config) + canon_parameters(config) + 2 * config.hidden_size
    return max(map(parameter_count, mixers)) + rest


def cost_summary(config: HyperMLPConfig, length: int) -> dict[str, Any]:
    """Return all costs of a model; FLOPs per token are the mean over a sequence of ``length`` tokens."""
    flops = {part: count / length for part, count in model_flops_table(config, length).items()}
    softmax = with_softmax(config)
    return {
        "mixer": config.mixer,
        "length": length,
        "parameters": model_parameter_table(config),
        "forward_flops_per_token": flops,
        "training_flops_per_token": 3 * sum(flops.values()),
        "softmax_parameters": model_parameters(softmax),
        "softmax_forward_flops_per_token": sum(model_flops_table(softmax, length).values()) / length,
        "state_bytes": model_state_bytes(config, length),
        "softmax_state_bytes": model_state_bytes(softmax, length),
    }


def cost_table(summary: dict[str, Any]) -> Table:
    """Return the parameters and FLOPs of a ``cost_summary``, part by part."""
    parameters, flops = summary["parameters"], summary["forward_flops_per_token"]
    total, softmax = sum(flops.values()), summary["softmax_forward_flops_per_token"]
    costs = {part: (parameters.get(part, 0), flops.get(part, 0)) for part in parameters | flops}
    rows = [
        *(
            [part, f"{count:,}", f"{cost / 1e6:.4g}", f"{cost / total:.1%}"]
            for part, (count, cost) in costs.items()
            if count or cost
        ),
        ["all", f"{sum(parameters.values()):,}", f"{total / 1e6:.4g}", ""],
        ["the same with softmax attention", f"{summary['softmax_parameters']:,}", f"{softmax / 1e6:.4g}", ""],
    ]
    return Table(["part", "parameters", "forward, MFLOPs/token", "share"], rows)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are created in this mode and still alive, and their maximum.

    Tensors in ``ignored`` are not counted. ``device`` is the type of device whose workspace sizes are
    assumed.
    """

    def __init__(self, ignored: Iterable[Tensor], device: str) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.device = device
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.hypermlp.blocked_gradients.default:  # its workspace is not visible here
            attention = Attention.unflatten(args[2:])  # after the output's gradient and what the forward kept
            self.peak = max(self.peak, self.live + workspace_bytes(self.device, attention))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def step_bytes(
    recipe: Recipe,
    config: HyperMLPConfig,
    accumulation: int,
    device: str = "cuda",
    on_progress: Callable[[float], None] | None = None,
) -> int:
    """Return the most bytes that a training step holds at once besides weights and optimizer.

    These are activations, gradients, and buffers. The model runs forward and backward on fake tensors, which
    have no values, in the PyTorch backend. ``on_progress`` is called with the fraction of the blocks done.
    """
    lower = recipe.training.precision == "bfloat16"
    with FakeTensorMode(), use_backend("blocked"), torch.autocast("cpu", torch.bfloat16, enabled=lower):
        model = HyperMLPForCausalLM(config).train()
        if recipe.training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        tokens = torch.zeros(recipe.training.micro_batch, recipe.data.context, dtype=torch.int64)
        packed = {"document_ids": tokens} if recipe.data.packing == "documents" else {}
        if on_progress is not None:
            _report_blocks(model, min(accumulation, 2), on_progress)
        with LiveBytes(model.parameters(), device) as live:
            for _ in range(min(accumulation, 2)):  # the second micro-batch starts with all gradients present
                targets = {"labels": tokens, "shift_labels": tokens, "skip_logits": True}
                model(tokens, **targets, **packed, use_cache=False).loss.backward()
    return live.peak


def _report_blocks(
    model: HyperMLPForCausalLM, micro_batches: int, on_progress: Callable[[float], None]
) -> None:
    """Call ``on_progress`` after every block's forward and backward pass."""
    done, blocks = 0, list(model.model.layers)

    def report(*_arguments: Any) -> None:
        nonlocal done
        done += 1
        on_progress(min(1.0, done / (2 * micro_batches * len(blocks))))

    for block in blocks:
        block.register_forward_hook(report)
        # The gradient of the input's norm comes last in a block's backward pass.
        block.mixer_norm.weight.register_post_accumulate_grad_hook(report)
