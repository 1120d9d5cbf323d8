"""The base class of every sequence mixer: our layer and the baselines.

Shapes: B batch, T new positions, D hidden size.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hypermlp.config import is_integer, require
from hypermlp.errors import UserError
from hypermlp.layers.initialization import initialize_
from hypermlp.layers.state import DecodingState, visibility_after
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.layout import check_starts_form


class SequenceMixer(nn.Module):
    """A causal layer ``[B, T, D] -> [B, T, D]`` in the place of attention. A subclass writes ``mix``.

    The base checks the input, computes which positions each position sees, hides padding, and keeps the
    decoding state
    consistent: a call that fails leaves it as it was.
    """

    recurrent: ClassVar[bool] = False
    """Whether positions are folded into a memory of fixed size. ``starts`` can then begin documents, but not
    slide along as a window, and a state cannot be cropped."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Parameters with two dimensions or more that are no matrices; weight decay skips them."""
    state_class: ClassVar[type[DecodingState]] = DecodingState
    o_proj: nn.Module

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.backend = "auto"

    @property
    def max_visible(self) -> int | None:
        """The most positions that one position may see; None for any number."""
        return None

    def mix(self, x: Tensor, state: Any, visibility: Visibility) -> Tensor:
        """Mix ``x``, ``[B, T, D]``, whose padding is zero.

        ``state`` (None, or a DecodingState) takes what it offers.
        """
        raise NotImplementedError

    def core_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of everything but matrices and convolutions, for the last ``queries`` of ``keys``
        positions.
        """
        raise NotImplementedError

    def initial_values(self) -> dict[str, Tensor]:
        """Return the values of the layer's own parameters, by name, that are neither matrices, biases nor
        norms.
        """
        return {}

    def initialize_parameters(self, init: Any, std: float) -> None:
        for name, value in self.initial_values().items():
            init.copy_(self.get_parameter(name), value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters new initial values: matrices N(0, init_std), biases zero, norms one."""
        for module in (*list(self.modules())[1:], self):
            initialize_(module, self.config.init_std)

    def new_state(self, batch_size: int, *, rollback: int = 128, capacity: int | None = None) -> Any:
        """Return an empty decoding state for ``forward``.

        Args:
            batch_size: number of sequences.
            rollback: how many positions ``state.crop`` can take back where there is a convolution, which
                needs earlier inputs. Without one, any number can be taken back; in a recurrence, none.
            capacity: make a state of fixed size that holds this many positions (see ``StaticState``): a
                step has the same shapes and addresses at every position, for torch.compile and CUDA graphs.
                None, the default, makes a state that grows.
        """
        require("batch_size", batch_size, is_integer(batch_size) and batch_size > 0, "a positive integer")
        require("rollback", rollback, is_integer(rollback) and rollback >= 0, "an integer, 0 or more")
        if capacity is not None:
            return self.new_static_state(batch_size, rollback=rollback, capacity=capacity)
        return self.state_class(batch_size, self.config, rollback=rollback, recurrent=self.recurrent)

    def new_static_state(self, batch_size: int, *, rollback: int, capacity: int) -> Any:
        """Return a state of fixed size, or raise if the layer has none."""
        raise UserError(
            f"capacity is {capacity}, but {type(self).__name__} has no decoding state of fixed size; leave "
            "capacity out (in generate: cache_implementation='static')"
        )

    def forward(
        self,
        x: Tensor,
        *,
        state: Any = None,
        starts: Tensor | None = None,
        visibility: Visibility | None = None,
    ) -> Tensor:
        """Mix ``x`` along the sequence.

        Args:
            x: ``[B, T, D]``.
            state: from ``new_state``. ``x`` then continues what the state has seen, and the state takes it
                in: a whole prompt, a chunk or one token at a time give the same result as everything at once.
            starts: int ``[B]`` or ``[B, T]``, the first position that each new position sees, counted from
                the beginning of the stream. ``[B]`` for left padding, ``[B, T]`` for packed documents or a
                sliding window. With a state, the last ``starts`` is reused until a new one is passed.
            visibility: what a model computed for all its layers, instead of ``starts``.

        Returns:
            ``[B, T, D]``.
        """
        self._check(x, state, starts)
        if visibility is None:
            visibility = visibility_after(
                state, starts, new=x.shape[1], device=x.device, max_visible=self.max_visible
            )
        self._check_visibility(visibility, state)
        out = self.mix(visibility.hide_padding(x), state, visibility)
        out = visibility.hide_padding(out)
        if state is not None:
            state.commit(visibility)
        return out

    def _check_visibility(self, visibility: Visibility, state: DecodingState | None) -> None:
        """Raise if the layer cannot see the sequence that way."""

    def _check(self, x: Tensor, state: DecodingState | None, starts: Tensor | None) -> None:
        require("x", type(x), isinstance(x, Tensor), "a tensor")
        if x.dim() != 3 or x.shape[-1] != self.config.hidden_size or 0 in x.shape:
            raise UserError(
                f"x has shape {list(x.shape)}; it must be [batch, positions, {self.config.hidden_size}], "
                "none empty"
            )
        self._check_weight(x, getattr(self.o_proj, "weight", None))
        if starts is not None:
            check_starts_form(starts, x)
        if state is None:
            return
        if not isinstance(state, self.state_class) or state.config != self.config:
            raise UserError(
                f"the state belongs to a layer with another configuration ({state!r}); make one with "
                "new_state"
            )
        if state.batch_size != x.shape[0]:
            raise UserError(
                f"x has batch size {x.shape[0]}, the state {state.batch_size}; "
                f"make one with new_state(batch_size={x.shape[0]})"
            )

    def _check_weight(self, x: Tensor, weight: Any) -> None:
        """Raise if ``x`` fits the layer's weights neither in device nor in dtype.

        Adapters may have no such weight.
        """
        if not isinstance(weight, Tensor):
            return
        if x.device != weight.device:
            raise UserError(f"x is on {x.device}, the layer on {weight.device}; move one of them")
        if x.dtype != weight.dtype and weight.is_floating_point() and not autocast_enabled(x.device.type):
            raise UserError(
                f"x is {x.dtype}, the layer {weight.dtype}; cast one of them, or use torch.autocast"
            )
