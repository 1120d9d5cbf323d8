"""Variants of one checkpoint beyond its context: extended, with a window, or with scaled rotary positions."""

import copy
from pathlib import Path
from typing import NamedTuple, Self

from hypermlp.config import ROPE_TYPES
from hypermlp.errors import UserError
from hypermlp.layers.registry import BASELINES
from hypermlp.layers.resizing import METHODS
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.validation import require_window

KINDS = {
    **{method: f"context extended by {method!r}" for method in METHODS},
    "window": "sliding window; deeper layers reach further back",
    "recomputed": "each prediction computed from the last positions alone",
    **dict.fromkeys(ROPE_TYPES[1:], "context extended, rotary frequencies scaled"),
}
ALLOWED = (
    f"RUN, or RUN@VARIANT with {', '.join(KINDS)}; window and recomputed also take =POSITIONS, ntk =FACTOR, "
    "yarn =FACTOR or =FACTOR,SLOW,FAST (numbers of turns)"
)
COUNTS = {**dict.fromkeys(METHODS, (0,)), "window": (1,), "recomputed": (1,), "ntk": (1,), "yarn": (1, 3)}


class Variant(NamedTuple):
    """One way to use a model beyond the context that it was trained with.

    ``Variant("runs/x", "window", (64.0,))`` is written ``runs/x@window=64``.
    """

    source: str
    """The checkpoint or mixer."""
    kind: str = ""
    """A key of KINDS; empty for the model as it is, with its slots extended by the default method."""
    numbers: tuple[float, ...] = ()
    """Positions of a window (default: the trained context); or the factor of scaled rotary frequencies
    (default: the evaluated length over the trained context), and for "yarn" the numbers of turns,
    rope_beta_slow and rope_beta_fast."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the variant that ``text`` names; raise for one that does not exist."""
        source, at, rest = text.rpartition("@")
        if not at or Path(text).exists():
            return cls(text)
        kind, equals, given = rest.partition("=")
        try:
            numbers = tuple(map(float, given.split(","))) if equals else ()
        except ValueError:
            numbers = (0.0,)
        fits = kind in KINDS and (not equals or len(numbers) in COUNTS[kind])
        whole = kind in ROPE_TYPES or all(number.is_integer() for number in numbers)
        if not (fits and whole and all(number > 0 for number in numbers)):
            raise UserError(f"{text!r} names no variant; allowed: {ALLOWED}")
        return cls(source, kind, numbers)

    @property
    def name(self) -> str:
        """What tables and figures call it, after the name of the model."""
        numbers = f"={','.join(f'{number:g}' for number in self.numbers)}" if self.numbers else ""
        return f"@{self.kind}{numbers}" if self.kind else ""

    def window(self, trained: int) -> int:
        """Return the positions of the window."""
        return int(self.numbers[0]) if self.numbers else trained

    def applied(self, model: HyperMLPForCausalLM, trained: int, length: int) -> HyperMLPForCausalLM:
        """Return a model that accepts ``length`` positions; ``model`` stays as it is.

        Args:
            model: the trained model.
            trained: the context that it was trained with.
            length: the positions that it must accept.
        """
        labels = any(mixer not in BASELINES for mixer in model.config.mixers)
        if self.kind in ("window", "recomputed"):
            window = self.window(trained)
            require_window(window, model.config.max_position_embeddings)
            return _with_window(model, window) if self.kind == "window" else model
        if self.kind in METHODS and not labels:
            raise UserError(f"{self.source}{self.name}: baselines have no slots to extend; leave {self.name}")
        model = copy.deepcopy(model)
        if self.kind in ROPE_TYPES:
            factor = self.numbers[0] if self.numbers else max(1.0, length / trained)
            if len(self.numbers) > 1:
                model.config.rope_beta_slow, model.config.rope_beta_fast = self.numbers[1:]
            model.extend_context(max(1, round(trained * factor)), rope_type=self.kind)
        if length > model.config.max_position_embeddings:
            model.extend_context(length, **({"method": self.kind} if self.kind in METHODS else {}))
        return model


def _with_window(model: HyperMLPForCausalLM, window: int) -> HyperMLPForCausalLM:
    """Return a copy of a model with a sliding window in every layer that can have one."""
    config = copy.deepcopy(model.config)
    config.sliding_window = window
    for index in range(config.num_hidden_layers):
        config.mixer_config(index)  # raises for a mixer that has no windows
    windowed = HyperMLPForCausalLM(config)
    windowed.load_state_dict(model.state_dict())
    return windowed.to(dtype=model.dtype, device=model.device).eval()  # type: ignore[call-arg]
