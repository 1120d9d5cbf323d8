"""Every switch of a mixer layer."""

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, Self

from hypermlp.errors import UserError
from hypermlp.label import Label
from hypermlp.validation import (
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_NUMBER,
    check_fields,
    is_integer,
    is_number,
    one_of,
    require,
    require_window,
    rule,
)

TINY = 2.0**-126
SCALING_OF_ROPE_TYPE = {  # rope_type -> the settings that it reads besides rope_theta
    "default": (),
    "ntk": ("rope_factor",),
    "yarn": ("rope_factor", "rope_original_length", "rope_beta_slow", "rope_beta_fast"),
}
ROPE_TYPES = tuple(SCALING_OF_ROPE_TYPE)
ROPE_SCALING = ("rope_type", *dict.fromkeys(itertools.chain(*SCALING_OF_ROPE_TYPE.values())))
ACTIVATION_OF_BASE = {"S": "softmax", "R": "relu", "G": "glu"}


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Every switch of one mixer layer. The defaults are HyperGLU, label ``G-cg-q-12o``.

    ``Mixer`` has the formula that the switches belong to; R1 and R2 are its sequence mixes. A configuration
    is frozen: ``dataclasses.replace`` makes a changed copy.

    Args:
        hidden_size: width D of the layer's input and output.
        max_length: the most positions that one position can see. Longer input raises unless the argument
            ``starts`` of the layer's ``forward`` limits every position to a window.
        num_heads: number of heads (2). Activation "glu" has two score branches per head.
        activation: "relu", "glu" or "softmax" ("glu").
        qk_width: width of queries and keys over all heads and branches, a multiple of the number of branches;
            0, the default, for hidden_size / 4 (hidden_size must then be a multiple of 4).
        vo_width: width of values and head outputs over all heads, a multiple of num_heads; 0, the default,
            for hidden_size.
        rope: rotary positions on queries and keys (False). The width of a branch must then be even.
        conv: depthwise causal convolution on the inputs of the key and value projections (True).
        feature_gates: sigmoid gates on the queries and on the head outputs (True).
        mix1: whether there is R1, which mixes the scores before the activation (True).
        mix2: whether there is R2, which mixes the activated scores before the values are read (True).
        layout: order of the slots of R1 and R2: "lag" (the default) counts back from the query, "forward"
            from the oldest visible position. It has no effect without mixes.
        rank: rank of the low-rank part of R1 and R2 (16).
        conv_kernel: taps of the convolution (4).
        canon: whether the projected queries, keys and values each have a Canon layer (Allen-Zhu, 2025):
            ``u + conv(u)``, depthwise and causal, always with 4 taps (False). It excludes registers.
        num_registers: number of registers, learned input vectors of width D that every position can also see
            (0). They stand before the first position, as its oldest context, and come in addition to
            max_length: the mixes have max_length + num_registers slots. In layout "lag" they are the last
            num_registers of the n slots that exist, in "forward" the first.
        sliding_window: how many positions each position sees, itself included, at most max_length; None, the
            default, for all. The input may then have any length, and decoding keeps O(sliding_window)
            positions. The convolution at a position sees that position's own window.
        rope_theta: base of the rotary frequencies (10,000).
        rope_type: scaling of the rotary frequencies, for contexts beyond those of training: "default" (none),
            "ntk" (NTK-aware) or "yarn"; ``hypermlp.layers.rotary.Rope`` has the formulas.
        rope_factor: how many times as long the context becomes (1.0, which changes nothing); at least 1. It
            must be 1 for rope_type "default".
        rope_original_length: for "yarn", the number of positions that the layer was trained with.
        rope_beta_slow, rope_beta_fast: for "yarn", channels that turn at most so often in training are slowed
            down by the factor, and those that turn at least so often stay (1.0 and 32.0, which its paper uses
            for contexts of 2,048 and more; short contexts need less).
        eps: added to the squared norm of the scores (1e-12), at least 2**-126; "softmax" has no norm.
        init_std: standard deviation of the normally distributed initial weights (0.02); biases and diagonals
            start at zero.

    Raises:
        UserError: for a value that is not allowed, and for values that contradict each other: a qk_width,
            vo_width or hidden_size that cannot be divided as stated above, or canon with registers.

    Example::

        from hypermlp import MixerConfig

        config = MixerConfig(hidden_size=768, max_length=1024, activation="relu")  # HyperMLP
        assert config == MixerConfig.from_label("R-cg-q-12o", hidden_size=768, max_length=1024)
    """

    hidden_size: int = field(metadata=POSITIVE)
    max_length: int = field(metadata=POSITIVE)
    num_heads: int = field(default=2, metadata=POSITIVE)
    activation: str = field(default="glu", metadata=one_of(*ACTIVATION_OF_BASE.values()))
    qk_width: int = field(default=0, metadata=NOT_NEGATIVE)
    vo_width: int = field(default=0, metadata=NOT_NEGATIVE)
    rope: bool = field(default=False, metadata=FLAG)
    conv: bool = field(default=True, metadata=FLAG)
    feature_gates: bool = field(default=True, metadata=FLAG)
    mix1: bool = field(default=True, metadata=FLAG)
    mix2: bool = field(default=True, metadata=FLAG)
    layout: str = field(default="lag", metadata=one_of("lag", "forward"))
    rank: int = field(default=16, metadata=POSITIVE)
    conv_kernel: int = field(default=4, metadata=POSITIVE)
    canon: bool = field(default=False, metadata=FLAG)
    num_registers: int = field(default=0, metadata=NOT_NEGATIVE)
    sliding_window: int | None = None
    rope_theta: float = field(default=10_000.0, metadata=POSITIVE_NUMBER)
    rope_type: str = field(default="default", metadata=one_of(*ROPE_TYPES))
    rope_beta_slow: float = field(default=1.0, metadata=POSITIVE_NUMBER)
    rope_beta_fast: float = field(default=32.0, metadata=POSITIVE_NUMBER)
    rope_factor: float = field(
        default=1.0,
        metadata=rule(lambda value: is_number(value) and value >= 1, "a finite number, at least 1"),
    )
    rope_original_length: int | None = None
    eps: float = field(
        default=1e-12,
        metadata=rule(
            lambda value: is_number(value) and value >= TINY,
            f"a finite number of at least {TINY:.3g}, the smallest normal float32",
        ),
    )
    init_std: float = field(default=0.02, metadata=POSITIVE_NUMBER)

    def __post_init__(self) -> None:
        check_fields(self)
        require_window(self.sliding_window, self.max_length)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if is_integer(value):  # also one of NumPy
                object.__setattr__(self, each.name, int(value))
        pairs = 2 if self.rope else 1
        derived = self.qk_width or divided(self.hidden_size, 4, self.num_branches * pairs)
        object.__setattr__(self, "qk_width", derived)
        object.__setattr__(self, "vo_width", self.vo_width or self.hidden_size)
        self._divides("qk_width", self.num_branches)
        self._divides("vo_width", self.num_heads)
        if self.canon:
            allowed = "0 in a layer with canon: registers are not part of the sequence"
            require("num_registers", self.num_registers, self.num_registers == 0, allowed)
        if self.rope:
            require(
                "qk_width",
                self.qk_width,
                self.qk_dim % 2 == 0,
                f"a multiple of {2 * self.num_branches}, since RoPE turns pairs of channels",
            )
        self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        kind, original = self.rope_type, self.rope_original_length
        allowed = "'default' in a layer without rotary positions (rope; in a label the letter p)"
        require("rope_type", kind, self.rope or kind == "default", allowed)
        for name in ROPE_SCALING[1:]:
            readers = [other for other, names in SCALING_OF_ROPE_TYPE.items() if name in names]
            usual, value = getattr(type(self), name), getattr(self, name)
            allowed = f"{usual} unless rope_type is {' or '.join(map(repr, readers))}"
            require(name, value, kind in readers or value == usual, allowed)
        if kind == "yarn":
            fits = is_integer(original) and original > 0  # type: ignore[operator]
            allowed = "the number of positions in training for rope_type 'yarn', a positive integer"
            require("rope_original_length", original, fits, allowed)
        allowed = f"above rope_beta_slow ({self.rope_beta_slow})"
        require("rope_beta_fast", self.rope_beta_fast, self.rope_beta_fast > self.rope_beta_slow, allowed)
        if kind == "ntk":
            allowed = f"at least {4 * self.num_branches} for rope_type 'ntk': two pairs of channels"
            require("qk_width", self.qk_width, self.qk_dim > 2, allowed)

    def _divides(self, name: str, parts: int) -> None:
        width = getattr(self, name)
        require(
            name,
            width,
            isinstance(width, int) and width > 0 and width % parts == 0,
            f"a positive multiple of {parts} (num_heads is {self.num_heads})",
        )

    @property
    def num_branches(self) -> int:
        """Score branches of all heads: num_heads, or 2 num_heads for "glu" (gates, then scales)."""
        return self.num_heads * (2 if self.activation == "glu" else 1)

    @property
    def num_slots(self) -> int:
        """Slots of the sequence mixes: max_length + num_registers."""
        return self.max_length + self.num_registers

    @property
    def qk_dim(self) -> int:
        """Width of the queries and keys of one branch: qk_width / num_branches."""
        return self.qk_width // self.num_branches

    @property
    def vo_dim(self) -> int:
        """Width of the values of one head: vo_width / num_heads."""
        return self.vo_width // self.num_heads

    @classmethod
    def from_label(
        cls, label: str | Label, *, hidden_size: int, max_length: int, compression: int = 4, **settings: Any
    ) -> Self:
        """Return the configuration of a label of the design study (see ``hypermlp.label``).

        Args:
            label: such as "G-cg-q-12o", or a ``Label``.
            hidden_size: width of the layer's input and output.
            max_length: the most positions that one position can see.
            compression: the letter q divides the width of queries and keys by this number, v that of values
                and head outputs (4; the paper uses 4 and 8). Without the letter, the side has width
                hidden_size.
            settings: fields that a label leaves open: num_heads, rank, conv_kernel, num_registers, canon,
                sliding_window, rope_theta, rope_type, rope_factor, rope_original_length, rope_beta_slow,
                rope_beta_fast, eps, init_std; also qk_width and vo_width, which then replace the label's
                widths.

        Raises:
            UserError: for a text that is not a label, an unknown setting, a setting that the label fixes, or
                a value that is not allowed.
        """
        label = Label.parse(label) if isinstance(label, str) else label
        require("compression", compression, is_integer(compression) and compression > 0, "a positive integer")
        require("hidden_size", hidden_size, is_integer(hidden_size) and hidden_size > 0, "a positive integer")
        known = {field.name for field in dataclasses.fields(cls)}
        heads = settings.get("num_heads", cls.num_heads)
        heads = heads if is_integer(heads) and heads > 0 else 1  # __post_init__ refuses anything else
        branches = heads * (2 if label.base == "G" else 1) * (2 if "p" in label.features else 1)
        widths = (("qk_width", "q", branches), ("vo_width", "v", heads))
        chosen: dict[str, Any] = {
            "activation": ACTIVATION_OF_BASE[label.base],
            **{
                name: divided(hidden_size, compression if label.rank == letter else 1, parts)
                for name, letter, parts in widths
                if name not in settings
            },
            "rope": "p" in label.features,
            "conv": "c" in label.features,
            "feature_gates": "g" in label.features,
            "mix1": "1" in label.mix,
            "mix2": "2" in label.mix,
            "layout": "lag" if label.lag else "forward",
        }
        for name in settings:
            if name not in known:
                fixed = {"hidden_size", "max_length"} | set(chosen) - {"qk_width", "vo_width"}
                allowed = ", ".join(["compression", *sorted(known - fixed)])
                raise UserError(f"unknown setting {name!r}; allowed: {allowed}")
        clash = sorted(set(chosen) & set(settings) - {"qk_width", "vo_width"})
        if clash:
            raise UserError(
                f"label {str(label)!r} already sets {', '.join(clash)}; write another label, or build a "
                "MixerConfig yourself"
            )
        return cls(hidden_size=hidden_size, max_length=max_length, **(chosen | settings))


def divided(hidden_size: int, compression: int, parts: int) -> int:
    """Return the width of a side, compressed; its heads or branches must divide it into ``parts``."""
    step = compression * parts
    near = sorted({max(hidden_size // step, 1) * step, (hidden_size // step + 1) * step})
    require(
        "hidden_size",
        hidden_size,
        hidden_size % step == 0,
        f"a multiple of {step}, such as {' or '.join(map(str, near))}: heads and branches divide a width "
        f"that is hidden_size / {compression} into {parts} equal parts; or change num_heads or compression",
    )
    return int(hidden_size) // compression
