"""The base class of every sequence mixer: our layer and the baselines.

Shapes: B batch, T new positions, D hidden size.
"""

from typing import Any, ClassVar, Never

import torch
from torch import Tensor, nn

from hypermlp.errors import UserError
from hypermlp.layers.initialization import initialize_
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility, visibility_after
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.layout import check_cu_seqlens_form, check_starts_form, packed_starts, raise_where
from hypermlp.validation import is_integer, require


class SequenceMixer(nn.Module):
    """A causal layer ``[B, T, D] -> [B, T, D]`` in the place of attention. A subclass writes ``mix``.

    The base checks the input, computes which positions each position sees, hides padding, and keeps the
    decoding state consistent: a call that fails leaves it as it was.

    Attributes:
        config: the configuration of the layer.
        backend: which implementation computes the layer: "auto" (the default), or a name from
            ``hypermlp.ops.available_backends()``. Assign it after construction.
        recurrent: whether positions are folded into a memory of fixed size. ``starts`` can then begin
            documents, but not slide along as a window, and a state cannot be cropped.
        undecayed: names of parameters with two dimensions or more that are no matrices; our training applies
            no weight decay to them.
        state_class: the class of the decoding state that ``new_state`` returns.
    """

    recurrent: ClassVar[bool] = False
    undecayed: ClassVar[tuple[str, ...]] = ()
    state_class: ClassVar[type[DecodingState]] = DecodingState
    o_proj: nn.Module

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.backend = "auto"

    @property
    def max_visible(self) -> int | None:
        """The most positions that one position may see, registers not counted; None for any number."""
        return None

    @property
    def window(self) -> int | None:
        """How many positions one position sees, itself included; None for all."""
        return getattr(self.config, "sliding_window", None)

    def mix(self, x: Tensor, state: Any, visibility: Visibility) -> Tensor:
        """Mix ``x``, ``[B, T, D]``, whose padding is zero. ``forward`` calls it; call the layer instead.

        Args:
            x: the new positions.
            state: the ``DecodingState`` that the new positions extend, or None. A layer offers it rows and
                tensors, which ``forward`` commits.
            visibility: which positions each new position sees.
        """
        raise NotImplementedError

    def core_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of the operator alone, for the last ``queries`` positions of ``keys``.

        The operator is everything but matrices and convolutions. Baselines implement this; for a ``Mixer``,
        call ``hypermlp.costs.mixer.core_flops(layer.config, queries, keys)``.
        """
        raise NotImplementedError

    def initial_values(self) -> dict[str, Tensor]:
        """Return initial values of the layer's own parameters, by name: those that are neither matrices,
        biases nor norms. A subclass with such parameters writes it; ``reset_parameters`` uses it.
        """
        return {}

    def initialize_parameters(self, init: Any, std: float) -> None:
        """Set the parameters that belong to the layer itself; ``reset_parameters`` and models call it.

        Args:
            init: functions that set a parameter, such as ``normal_``: those of ``torch.nn.init``, or of
                ``transformers.initialization``, which skip loaded parameters.
            std: standard deviation of normally distributed values.
        """
        for name, value in self.initial_values().items():
            init.copy_(self.get_parameter(name), value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters new initial values.

        Matrices are normally distributed with mean 0 and standard deviation ``config.init_std``, biases are
        zero, norms are one.
        """
        for module in (*list(self.modules())[1:], self):
            initialize_(module, self.config.init_std)

    def resize_(self, config: Any, method: str) -> None:
        """Take over ``config``, which differs from the layer's in max_length and RoPE alone, in place.

        ``extend_context`` of a model calls it; ``method`` is one of ``hypermlp.layers.resizing.METHODS``.
        Existing decoding states are refused afterwards. A subclass with learned slots resizes them.
        """
        self.config = config

    def new_state(self, batch_size: int, *, rollback: int = 128, capacity: int | None = None) -> Any:
        """Return an empty decoding state (cache) for ``forward``. Each layer needs a state of its own.

        The state takes the dtype and device of the first call; later calls must have the same, and a call
        with more than max_length positions in all raises unless a sliding window or ``starts`` limits what a
        position sees.

        Args:
            batch_size: number of sequences.
            rollback: how many of the latest positions ``state.crop`` can always remove again (128). It
                matters with a convolution or a sliding window, where the state drops older rows: a larger
                value keeps more of them. Without both, any number can be removed; in a recurrence, none.
            capacity: make a state of fixed size that holds this many positions (a ``StaticState``): a step
                has the same shapes and addresses at every position, for torch.compile and CUDA graphs. A call
                that exceeds it raises, unless a sliding_window, or a window in ``starts`` with every call,
                lets older positions be overwritten; max_length still limits what a position sees. Use it
                under ``torch.no_grad()``. Baselines and layers with registers or Canon layers have no such
                state. None, the default, makes a state that grows.

        Returns:
            a ``MixerState`` for a ``Mixer`` (with ``capacity``, its subclass ``StaticState``), a
            ``DecodingState`` for a baseline.

        Raises:
            UserError: for a value that is not allowed.
        """
        require("batch_size", batch_size, is_integer(batch_size) and batch_size > 0, "a positive integer")
        require("rollback", rollback, is_integer(rollback) and rollback >= 0, "an integer, 0 or more")
        if capacity is not None:
            return self.new_static_state(batch_size, rollback=rollback, capacity=capacity)
        settings: dict[str, Any] = {"recurrent": self.recurrent, "window": self.window}
        return self.state_class(batch_size, self.config, rollback=rollback, **settings)

    def new_static_state(self, batch_size: int, *, rollback: int, capacity: int) -> Any:
        """Return a state of fixed size, or raise if the layer has none."""
        raise UserError(
            f"capacity is {capacity}, but {type(self).__name__} has no decoding state of fixed size; leave "
            "capacity out (in generate: cache_implementation='static')"
        )

    def forward(
        self,
        x: Tensor,
        *more: Never,
        state: Any = None,
        starts: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        visibility: Visibility | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Mix ``x`` along the sequence: the output at a position depends on the positions that it sees.

        In a window, the keys and values of the oldest visible positions also depend on earlier inputs, which
        their convolution sees through windows of their own; nothing reaches beyond the beginning of a
        document, or into padding.

        Args:
            x: ``[B, T, D]``: B sequences of T positions of width D = ``hidden_size``, in the layer's dtype
                and on its device (under autocast, any floating dtype).
            state: from ``new_state``. ``x`` then continues the positions that the state holds, and the state
                is updated in place. A whole prompt, chunks or single tokens give the same outputs.
            starts: the first position that each position sees, integers ``[B]`` or ``[B, T]``. Positions
                count from 0 at the first input of the sequence (with a state, the first that it received),
                padding included, registers not. Values lie between 0 and position + 1 (the position sees
                nothing: it is padding) and do not decrease along T. ``[B]`` is the number of positions of
                left padding, at most the length; ``[B, T]`` describes packed documents (where the position's
                document begins) or a window of w positions (``max(0, position - w + 1)``). None: every
                position sees all positions up to its own. With a state, the last ``starts`` is reused until a
                new one is passed, which suits padding and documents; a window must pass it with every call.
                Padding on the right needs no ``starts``: later positions never influence earlier ones.
            cu_seqlens: integers ``[N + 1]``, the cumulative lengths of N sequences that are packed into one
                row (B = 1), in the place of ``starts``: 0, and where each sequence ends. A state must be
                empty.
            visibility: for models, which compute it once for all layers; leave it None.
            more: nothing else is accepted by position.
            unknown: nor by name. (The errors for an attention mask say what to pass instead.)

        Returns:
            ``[B, T, D]``, in the dtype of x or of autocast. The output at padding is 0, whatever the padding
            holds.

        Raises:
            UserError: for a wrong shape, dtype, device or ``starts``, for a state of a layer with another
                configuration, and for more than max_length visible positions. The state is then unchanged.
                (A state of another layer with the same configuration cannot be told apart.)

        Example::

            import torch
            from hypermlp import HyperGLU

            layer, x = HyperGLU(64, max_length=128), torch.randn(2, 40, 64)
            padded = layer(x, starts=torch.tensor([0, 10]))  # sequence 1 begins with 10 positions of padding
            windows = (torch.arange(40) - 15).clamp(min=0).expand(2, 40)  # each position sees the last 16
            windowed = layer(x, starts=windows)

            with torch.no_grad():  # decoding: a prompt, then token by token
                state = layer.new_state(batch_size=2)
                prompt = layer(x[:, :39], state=state)
                token = layer(x[:, 39:], state=state)
            torch.testing.assert_close(token, layer(x)[:, 39:], rtol=1e-3, atol=1e-4)
        """
        if more or unknown:
            wrong = "a second argument without a name" if more else ", ".join(unknown)
            raise TypeError(
                f"{type(self).__name__} does not take {wrong}; allowed after x: state=, starts= and "
                "cu_seqlens= (for a mask of left padding, starts=(attention_mask == 0).sum(1))"
            )
        if cu_seqlens is not None:
            starts = self._packed_starts(x, state, starts, cu_seqlens)
        self._check(x, state, starts if visibility is None else visibility.starts)
        if visibility is None:
            visibility = visibility_after(
                state, starts, new=x.shape[1], device=x.device, max_visible=self.max_visible
            )
        self._check_visibility(visibility, state)
        if self.window is not None:
            ring_rows = None if state is None else state.ring_rows
            visibility = visibility.windowed(self.window, batch=x.shape[0], ring_rows=ring_rows)
        out = self.mix(visibility.hide_padding(x), state, visibility)
        out = visibility.hide_padding(out)
        if state is not None:
            state.commit(visibility)
        return out

    def _packed_starts(
        self, x: Tensor, state: DecodingState | None, starts: Tensor | None, cu_seqlens: Tensor
    ) -> Tensor:
        """Return ``starts`` of packed sequences."""
        if starts is not None:
            raise UserError("starts and cu_seqlens are both given; pass one of them")
        if state is not None and state.length > 0:
            raise UserError(
                f"cu_seqlens cannot be given with a state that holds {state.length} positions; decode each "
                "sequence with a state of its own"
            )
        check_cu_seqlens_form(cu_seqlens, x)
        if self.max_visible is not None and self.window is None and not torch.compiler.is_compiling():
            lengths = cu_seqlens.diff()
            what, allowed = "cu_seqlens describes a sequence that is too long", f"at most {self.max_visible}"
            raise_where(lengths > self.max_visible, what, f"{allowed} positions (max_length)", lengths)
        return packed_starts(cu_seqlens, x.shape[1], x.shape[1], -1)

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
        if not isinstance(state, DecodingState):
            raise UserError(
                f"state is a {type(state).__name__}; it must be one state of this layer, from new_state"
            )
        # The fields are compared, because torch.compile(dynamic=True) cannot compare two dataclasses.
        same = state.config is self.config or vars(state.config) == vars(self.config)
        if not isinstance(state, self.state_class) or not same:
            raise UserError(
                f"the state belongs to a layer with another configuration or context ({state!r}); make one "
                "with new_state"
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
        if weight.is_meta and not x.is_meta:
            return  # the weight is kept elsewhere, and a hook brings it when the module is called
        if x.device != weight.device:
            raise UserError(f"x is on {x.device}, the layer on {weight.device}; move one of them")
        if x.dtype != weight.dtype and weight.is_floating_point() and not autocast_enabled(x.device.type):
            advice = "cast one of them, or use torch.autocast" if x.is_floating_point() else "cast x"
            raise UserError(f"x is {x.dtype}, the layer {weight.dtype}; {advice}")
