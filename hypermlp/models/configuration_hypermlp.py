"""The configuration of the language model."""

import dataclasses
import sys
from dataclasses import field
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from hypermlp.config import ROPE_SCALING, MixerConfig
from hypermlp.errors import UserError
from hypermlp.label import PAPER_NAMES, Label
from hypermlp.layers.canon import PLACES
from hypermlp.layers.registry import BASELINES, Config, mixer_config, mixer_name
from hypermlp.validation import (
    LARGEST_SIZE,
    POSITIVE_NUMBER,
    SIZE,
    check_fields,
    near_miss,
    one_of,
    require,
    rule,
    whole,
)

logger = logging.get_logger(__name__)
CANON = rule(
    lambda value: value == "".join(place for place in PLACES if place in value),
    f"letters of {''.join(PLACES)}, each at most once, in this order",
)
EARLIER_NAMES = {"peer_settings": "baseline_settings"}  # fields of configurations saved by early versions
OF_TRANSFORMERS = {  # arguments of PreTrainedConfig that are not its fields, and keys that it saves
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tie_last_hidden_states",
    "torch_dtype",
}
SET_BY_MODEL = {"hidden_size", "max_length", "init_std", "sliding_window"}
WINDOWED_BASELINES = ("softmax", "diff")  # the others are recurrences, or compute all scores
LORA_TARGETS = ["v_proj", "o_proj"]  # the readout of the dynamic MLP: docs/derivation.md


@strict
class HyperMLPConfig(PreTrainedConfig):
    """The configuration of a language model: a stack of blocks, each a sequence mixer and an MLP.

    Every block computes ``x = x + mixer(norm(x))``, then ``x = x + mlp(norm(x))``. In the text, a label is a
    variant of the paper's design study (``hypermlp.label``), and a baseline one of "softmax",
    "softmax-naive", "linear", "retnet", "gla", "hgrn", "hgrn2", "deltanet", "gated-deltanet", "gsa", "mamba",
    "rwkv7", "path", "diff" and "fox".

    Args:
        mixer: the sequence mixer: "HyperGLU", "HyperMLP", a label such as "G-cg-q-12o" (HyperGLU, the
            default) or "S-p" (softmax attention with RoPE), the name of a baseline, or a list with one of
            these for each layer, such as ``["G-cg-q-12o", "gla"]`` for two layers.
        hidden_size: width of the model (768).
        num_hidden_layers: number of blocks (12).
        num_heads: heads of a label's layer (2); num_attention_heads is another name of it. It does not apply
            to baselines: they have heads of their published width, unless ``baseline_settings`` says
            otherwise.
        max_position_embeddings: the most positions that one position can see (1024), registers not counted.
            Longer input raises UserError (a model of baselines alone accepts it); a packed row may be longer
            if none of its documents is. ``generate`` ends there with a warning, unless all labels have a
            sliding window.
        sliding_window: how many positions each position sees, itself included (None: all), at most
            max_position_embeddings; or a list with a number or None for each layer, such as ``[64, None]``.
            Labels, "softmax" and "diff" can have a window. Decoding then keeps O(sliding_window) positions.
            If all labels have a window and learned_positions is False, max_position_embeddings does not limit
            ``generate``.
        vocab_size: number of tokens (50304).
        block: "gpt2" (LayerNorm, GELU; the initial weights of the two matrices that add to the residual
            stream have the standard deviation initializer_range / sqrt(2 num_hidden_layers); the default) or
            "llama" (RMSNorm, SwiGLU).
        intermediate_size: width of the MLP. None: 4 x hidden_size for "gpt2", 8/3 x hidden_size rounded up to
            a multiple of 256 for "llama".
        learned_positions: whether a learned vector for each position is added to the embeddings, as in GPT-2
            (False).
        rank: rank of the low-rank part of the sequence mixes (16).
        compression: the letter q of a label divides the width of queries and keys by this number, v that of
            values and head outputs (4).
        conv_kernel: taps of a label's convolution (4).
        rope_theta: base of the rotary frequencies of labels with the letter p (10,000).
        rope_type: scaling of those frequencies, for contexts beyond those of training: "default" (none),
            "ntk" (NTK-aware) or "yarn" (``hypermlp.layers.rotary.Rope`` has the formulas).
        rope_factor: how many times as long the context becomes (1.0); 1 for rope_type "default".
        rope_original_length: for "yarn", the context that the model was trained with.
        rope_beta_slow, rope_beta_fast: for "yarn", the numbers of turns in that context between which it goes
            from slowed channels to those that stay (1.0 and 32.0).
        canon: places of a block that have a Canon layer, a short causal convolution with a residual: any of
            A (input of the mixer), B (queries, keys and values; labels only), C (input of the MLP) and D (its
            hidden units), in this order. Empty, the default, for none.
        num_registers: learned vectors that every position of a label's layer can also see, in addition to
            max_position_embeddings (0).
        baseline_settings: settings of baselines by name, such as ``{"gla": {"num_heads": 2}}``;
            ``hypermlp.layers.build_mixer`` lists them.
        norm_eps: what the norms of the blocks add to the variance or mean square. None: 1e-5 for "gpt2", 1e-6
            for "llama".
        initializer_range: standard deviation of the normally distributed initial weights (0.02).
        tie_word_embeddings: whether the output matrix is the embedding matrix (True); otherwise it is learned
            separately.
        use_cache: whether a forward pass returns a cache for decoding (True).
        bos_token_id: token that begins a text (None).
        eos_token_id: token that ends a text (None).
        pad_token_id: token for padding (None).

    Raises:
        UserError: for an unknown name (only a warning if it is read from a file), a value that is not
            allowed, a list of the wrong length, or contradicting values.

    Example::

        from hypermlp.models import HyperMLPConfig

        sizes = dict(hidden_size=64, max_position_embeddings=128, vocab_size=257)
        config = HyperMLPConfig(num_hidden_layers=4, **sizes)  # HyperGLU in every layer
        hybrid = HyperMLPConfig(mixer=["G-cg-q-12o", "gla"], num_hidden_layers=2, block="llama", **sizes)
    """

    model_type = "hypermlp"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {"layers.*": "free_full_weight"}

    mixer: str | list[str] = "G-cg-q-12o"
    hidden_size: int = field(default=768, metadata=SIZE)
    num_hidden_layers: int = field(default=12, metadata=whole(1, 10_000))
    num_heads: int = MixerConfig.num_heads
    max_position_embeddings: int = field(default=1024, metadata=SIZE)
    sliding_window: int | list[int | None] | None = None
    vocab_size: int = field(default=50304, metadata=SIZE)
    block: str = field(default="gpt2", metadata=one_of("gpt2", "llama"))
    intermediate_size: int | None = field(default=None, metadata=SIZE)
    learned_positions: bool = False
    rank: int = field(default=MixerConfig.rank, metadata=SIZE)
    compression: int = 4
    conv_kernel: int = field(default=MixerConfig.conv_kernel, metadata=SIZE)
    rope_theta: float = MixerConfig.rope_theta
    rope_type: str = MixerConfig.rope_type
    rope_factor: float = MixerConfig.rope_factor
    rope_original_length: int | None = MixerConfig.rope_original_length
    rope_beta_slow: float = MixerConfig.rope_beta_slow
    rope_beta_fast: float = MixerConfig.rope_beta_fast
    canon: str = field(default="", metadata=CANON)
    num_registers: int = field(default=MixerConfig.num_registers, metadata=whole(0, LARGEST_SIZE))
    baseline_settings: dict[str, Any] | None = None
    norm_eps: float | None = field(default=None, metadata=POSITIVE_NUMBER)
    initializer_range: float = MixerConfig.init_std
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for other, name in (self.attribute_map | EARLIER_NAMES).items():
            value, own = kwargs.pop(other, None), getattr(self, name)
            if value is not None:
                same = own in (value, getattr(type(self), name))
                require(other, value, same, f"{own!r} or left out: it is another name of {name}")
                setattr(self, name, value)
        for name in kwargs:
            if name not in OF_TRANSFORMERS:
                raise UserError(
                    f"HyperMLPConfig has no field {name!r}{near_miss(name, self.field_names())}; "
                    f"allowed: {', '.join(sorted(self.field_names()))}"
                )
        names = [self.mixer] if isinstance(self.mixer, str) else self.mixer
        names = [PAPER_NAMES.get(name, name) for name in names]
        self.mixer = names[0] if isinstance(self.mixer, str) else names
        if self.intermediate_size is None:
            wide = -(-8 * self.hidden_size // 3)
            self.intermediate_size = 4 * self.hidden_size if self.block == "gpt2" else -(-wide // 256) * 256
        if self.norm_eps is None:
            self.norm_eps = 1e-5 if self.block == "gpt2" else 1e-6
        check_fields(self)
        for name in ("mixer", "sliding_window"):
            value = getattr(self, name)
            fits = not isinstance(value, list) or len(value) == self.num_hidden_layers
            allowed = (
                f"one value, or a list with one for each layer (num_hidden_layers = {self.num_hidden_layers})"
            )
            require(name, value, fits, allowed)
        self._check_baselines()
        if not any(map(has_rope, self.mixers)):
            for name in ROPE_SCALING:
                allowed = "left out in a model without rotary labels (the letter p, such as S-p)"
                require(name, getattr(self, name), getattr(self, name) == getattr(type(self), name), allowed)
        for index in range(self.num_hidden_layers):
            self.mixer_config(index)  # raises before anything is built
        super().__post_init__(**kwargs)

    def _check_baselines(self) -> None:
        used = list(dict.fromkeys(mixer for mixer in self.mixers if mixer in BASELINES))
        for name, settings in (self.baseline_settings or {}).items():
            allowed = f"settings of the model's baselines ({', '.join(used) or 'it has none'}), by name"
            require("baseline_settings", self.baseline_settings, name in used, allowed)
            fits = isinstance(settings, dict) and not SET_BY_MODEL & set(settings)
            allowed = "settings of that baseline, such as {'num_heads': 4}; the model sets the rest"
            require(f"baseline_settings[{name!r}]", settings, fits, allowed)
        if any(mixer in BASELINES for mixer in self.mixers):
            allowed = "without B in a model with baselines: only labels have Canon layers inside the mixer"
            require("canon", self.canon, "B" not in self.canon, allowed)
        if all(mixer in BASELINES for mixer in self.mixers):
            allowed = "0 in a model of baselines alone: only labels have registers"
            require("num_registers", self.num_registers, self.num_registers == 0, allowed)

    @classmethod
    def field_names(cls) -> list[str]:
        """Return the names that the constructor accepts for the model, without those of transformers."""
        own = [field.name for field in dataclasses.fields(cls) if field.name in cls.__annotations__]
        return [*own, *cls.attribute_map]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from the content of a file. Unknown keys cause a warning and are kept."""
        fields = (field.name for field in dataclasses.fields(cls))
        known = {*fields, *cls.attribute_map, *EARLIER_NAMES, *OF_TRANSFORMERS}
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        if unknown:
            logger.warning(
                f"HyperMLPConfig does not read these keys of the file: {', '.join(sorted(unknown))}; "
                "they may be misspelled, or belong to another version"
            )
        config = super().from_dict({k: v for k, v in config_dict.items() if k in known}, **kwargs)
        for name, value in unknown.items():
            setattr(config[0] if isinstance(config, tuple) else config, name, value)
        return config

    @property
    def mixers(self) -> list[str]:
        """The label or baseline name of every layer; ``HyperMLPModel.mixers()`` returns the layers
        themselves.
        """
        return self.mixer if isinstance(self.mixer, list) else [self.mixer] * self.num_hidden_layers

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of every layer, None for a layer without one."""
        window = self.sliding_window
        return window if isinstance(window, list) else [window] * self.num_hidden_layers

    @property
    def canon_widths(self) -> dict[str, int]:
        """The channels of the Canon layers of a block outside its mixer, by their places."""
        assert self.intermediate_size is not None
        inner = self.intermediate_size * (1 if self.block == "gpt2" else 2)
        widths = {"A": self.hidden_size, "C": self.hidden_size, "D": inner}
        return {place: width for place, width in widths.items() if place in self.canon}

    def mixer_config(self, index: int) -> Config:
        """Return the configuration of the mixer of layer ``index`` (from 0): a ``MixerConfig``, or a
        baseline's.
        """
        name = self.mixers[index]
        settings: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "max_length": self.max_position_embeddings,
            "init_std": self.initializer_range,
        }
        window = self.windows[index]
        if window is not None:
            can = name not in BASELINES or name in WINDOWED_BASELINES
            allowed = f"None for {name!r}, which has no window; give a list with one for each layer"
            require(f"sliding_window of layer {index}", window, can, allowed)
            settings["sliding_window"] = window
        if name in BASELINES:
            return mixer_config(name, **settings, **(self.baseline_settings or {}).get(name, {}))
        shared = {name: getattr(self, name) for name in self.settings_of_labels()}
        if not has_rope(name):  # its layer refuses a scaling
            shared = {name: value for name, value in shared.items() if name not in ROPE_SCALING}
        return mixer_config(name, **settings, **shared, canon="B" in self.canon)

    @classmethod
    def settings_of_labels(cls) -> list[str]:
        """Return the fields that are settings of a label's layer under the same name."""
        of_layer = {"compression", *(field.name for field in dataclasses.fields(MixerConfig))}
        return [name for name in cls.field_names() if name in of_layer - SET_BY_MODEL - {"canon"}]

    @property
    def layer_types(self) -> list[str]:
        """The kinds of cache layers that ``generate`` makes: "hypermlp" for every layer."""
        return ["hypermlp"] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """For transformers: accept the ``layer_types`` "hypermlp", which is not among its own types."""

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary."""
        _offer_lora_targets()  # PEFT asks for the configuration just before it looks up default targets
        result: dict[str, Any] = super().to_dict()
        return result


def has_rope(mixer: str) -> bool:
    """Return whether a mixer is a label with rotary positions (the letter p)."""
    name = mixer_name(mixer)
    return name not in BASELINES and "p" in Label.parse(name).features


def _offer_lora_targets() -> None:
    constants = sys.modules.get("peft.utils.constants")
    if constants is not None:
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(
            HyperMLPConfig.model_type, LORA_TARGETS
        )
