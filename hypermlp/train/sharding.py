"""Parameters and optimizer state over several processes: FSDP2 shards them, safetensors files store them.

The format of the saved optimizer state does not depend on the number of processes: each writes what it holds,
and any number of processes can load it. It contains no pickle.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from hypermlp.models import HyperMLPForCausalLM


def shard(model: HyperMLPForCausalLM) -> None:
    """Shard every parameter over all processes, block by block: only one block at a time is gathered."""
    processes = torch.distributed.get_world_size()
    mesh = init_device_mesh(model.device.type, (processes,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(sharded_dim(p.shape, processes)))


def sharded_dim(shape: torch.Size, processes: int) -> int:
    """Return the first dimension that divides evenly: the rows, or for a mix of few heads, the slots."""
    return next((dim for dim, size in enumerate(shape) if size % processes == 0), 0)


def local_size(model: nn.Module) -> int:
    """Return how many parameter elements this process holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Return all parameters, tied ones once, gathered on the main process; every process must call this."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in whole.items() if name in own}


def save_optimizer(optimizer: AdamW, model: nn.Module, folder: Path) -> None:
    """Write this process's part of the optimizer state to ``folder``; every process must call this."""
    with _storage() as alone:
        save(
            _state(optimizer, model),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=alone,
        )


def load_optimizer(optimizer: AdamW, model: nn.Module, folder: Path) -> None:
    """Read this process's part of the optimizer state from ``folder``; every process must call this."""
    for parameter in model.parameters():
        moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    with _storage() as alone:  # loads in place
        load(_state(optimizer, model), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)


def _state(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """Return AdamW's moments and step counters under the names of the parameters."""
    return {
        f"{name}.{key}": value.cpu() if key == "step" else value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


@contextlib.contextmanager
def _storage() -> Iterator[bool]:
    """Yield whether this process trains alone; turn storage errors into OSError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as requested by no_dist
        try:
            yield not torch.distributed.is_initialized()
        except CheckpointException as error:  # a BaseException, which `except Exception` would miss
            raise OSError(str(error)) from error
