"""The layers of a Hugging Face cache: each holds the decoding state of one mixer."""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from hypermlp.errors import UserError
from hypermlp.layers.state import DecodingState


class HasState(Protocol):
    """A mixer, or a block, that decodes with a state."""

    def new_state(self, batch_size: int, **settings: Any) -> Any: ...


class _StateLayer:
    """The part of transformers' cache layer that works on a decoding state, which the mixer extends
    itself.
    """

    is_croppable = True
    is_compileable = False
    is_sliding = False
    capacity: int | None = None

    def __init__(self, **kwargs: Any):
        self.state: DecodingState | None = None

    @property
    def keys(self) -> Tensor | None:
        """The keys so far, ``[B, branches, T, width]`` as in transformers' cache layers.

        None before the first call, and in a layer that keeps no keys.
        """
        return self._rows("keys")

    @property
    def values(self) -> Tensor | None:
        """The values so far, ``[B, heads, T, width]``; None before the first call, and in a recurrence."""
        return self._rows("values")

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has a decoding state."""
        return self.state is not None

    def _rows(self, name: str) -> Tensor | None:
        rows = None if self.state is None else self.state.rows(name)
        return rows.transpose(1, 2) if rows is not None and rows.dim() == 4 else None

    def state_of(self, mixer: HasState, batch_size: int) -> DecodingState:
        """Return the state for the mixer or block, made at the first call."""
        if self.state is None:
            self.state = mixer.new_state(batch_size, capacity=self.capacity)
        assert self.state is not None
        return self.state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a HyperMLP cache layer is filled by its mixer")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a HyperMLP cache layer is filled by its mixer")

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. ``tokens_to_remove`` is zero or negative: transformers' convention."""
        if tokens_to_remove > 0:
            raise UserError(
                f"tokens_to_remove is {tokens_to_remove}; it must be zero or negative: so many tokens are "
                "removed"
            )
        if self.state is not None:
            self.state.crop(self.state.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state.reorder(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        if self.state is not None and self.state.device is not None:
            self.device = self.state.device
            self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None and self.state.device is not None:
            self.state.to(self.device)


class HyperMLPCacheLayer(_StateLayer, DynamicLayer):  # type: ignore[override]
    """One layer of transformers' ``DynamicCache`` that holds the decoding state of a block; ``generate``
    makes it.

    ``DynamicCache(config=model.config)`` has one for each layer. Its attribute ``state`` is the layer's
    ``DecodingState``, None before the first call. The methods are those of transformers' cache layers.
    """

    _layer_type = "hypermlp"


class HyperMLPStaticCacheLayer(_StateLayer, StaticLayer):  # type: ignore[override]
    """The same for a static cache: the decoding state has a fixed size, and its length is on the device."""

    _layer_type = "hypermlp"
    is_compileable = True

    def __init__(self, max_cache_len: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_cache_len = self.capacity = max_cache_len

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        if self.state is not None:
            self.state.crop(0)  # keeps the tensors and their addresses


def layer_state(cache: Cache | None, index: int, mixer: HasState, batch_size: int) -> DecodingState | None:
    """Return the decoding state of layer ``index`` in a cache; None without a cache."""
    if cache is None:
        return None
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, _StateLayer):
        raise UserError(
            f"past_key_values holds {type(layer).__name__} for layer {index}; make it with "
            "DynamicCache(config=model.config)"
        )
    return layer.state_of(mixer, batch_size)


def is_static(cache: Cache) -> bool:
    """Return True if the layers of the cache have a fixed size."""
    static = [isinstance(layer, HyperMLPStaticCacheLayer) for layer in cache.layers]
    return bool(static) and all(static)
