"""Parameters and optimizer state over several processes: FSDP2 to hold them, safetensors to keep them.

Optimizer state is saved in one form however many processes there are, each writing what it holds, and is loaded by any other
number of them. There is no pickle in it.
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

MOMENTS = ("exp_avg", "exp_avg_sq")


def shard(model: HyperMLPForCausalLM) -> None:
    """Split every parameter over all processes: block by block, so that one block at a time is whole."""
    processes = torch.distributed.get_world_size()
    mesh = init_device_mesh(model.device.type, (processes,))
    for module in (*model.model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: Shard(sharded_dim(parameter.shape, processes)),
        )


def sharded_dim(shape: torch.Size, processes: int) -> int:
    """The first dimension that divides evenly: rows, except that mixes have few heads and many slots."""
    return next((dim for dim, size in enumerate(shape) if size % processes == 0), 0)


def local_size(model: nn.Module) -> int:
    """How many elements of the parameters this process holds in memory of its own."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Every parameter once, tied or not, on the main process; every process must call."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in whole.items() if name in own}


def save_optimizer(optimizer: AdamW, model: nn.Module, folder: Path) -> None:
    """Every process writes its part."""
    state = {
        f"{name}.{key}": value.cpu() if key == "step" else value  # a counter for each parameter
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    with _quietly():
        save(
            state,
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=_alone(),
        )


def load_optimizer(optimizer: AdamW, model: nn.Module, folder: Path) -> None:
    """Every process reads its part, whoever wrote it."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"{name}.step"] = torch.zeros(())
        for key in MOMENTS:
            state[f"{name}.{key}"] = torch.zeros_like(parameter.detach())
    with _quietly():
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=_alone())
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: state[f"{name}.{key}"] for key in ("step", *MOMENTS)}


def _alone() -> bool:
    return not torch.distributed.is_initialized()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # it says so even when told
        try:
            yield
        except CheckpointException as error:  # derives from BaseException
            raise OSError(str(error)) from error
