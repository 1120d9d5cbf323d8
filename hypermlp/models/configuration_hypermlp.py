"""The configuration of the language model."""

import sys
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hypermlp.config import is_integer, require
from hypermlp.layers.registry import BASELINES, Config, mixer_config

BLOCKS = ("gpt2", "llama")
LORA_TARGETS = ["v_proj", "o_proj"]  # the readout of the dynamic MLP: docs/derivation.md


@strict
class HyperMLPConfig(PreTrainedConfig):
    """A stack of blocks, each a mixer and an MLP.

    Example::

        HyperMLPConfig(mixer="G-cg-q-12o", hidden_size=768, num_hidden_layers=12, max_position_embeddings=1024, vocab_size=50304)
    """

    model_type = "hypermlp"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {"layers.*": "free_full_weight"}

    mixer: str | list[str] = (
        "G-cg-q-12o"  # a label such as "S-p", a peer such as "gla", or one for each layer: a hybrid stack
    )
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_heads: int = (
        2  # of labels; a peer has heads of its published width, unless peer_settings says otherwise
    )
    max_position_embeddings: int = 1024  # the longest context: slots of the sequence mixes
    vocab_size: int = 50304
    block: str = "gpt2"  # "gpt2": LayerNorm, GELU, scaled residual init; "llama": RMSNorm, SwiGLU
    intermediate_size: int | None = (
        None  # of the MLP; None: 4 x hidden for gpt2, 8/3 x hidden rounded up to 256 for llama
    )
    learned_positions: bool = False  # a table of absolute positions beside the embeddings, as GPT-2 has it
    rank: int = 16  # of the sequence mixes
    compression: int = 4  # what q or v in a label divides that side's width by
    conv_kernel: int = 4
    rope_theta: float = 10_000.0
    num_registers: int = (
        0  # of every layer of a label: learned rows before every context, beside max_position_embeddings
    )
    peer_settings: dict[str, Any] | None = (
        None  # of peers, by name: {"gla": {"num_heads": 2}}; docs/baselines.md
    )
    norm_eps: float | None = None  # None: 1e-5 for gpt2, 1e-6 for llama
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            require(
                name,
                getattr(self, name),
                is_integer(getattr(self, name)) and getattr(self, name) > 0,
                "a whole number, 1 or more",
            )
        require("block", self.block, self.block in BLOCKS, " or ".join(map(repr, BLOCKS)))
        if isinstance(self.mixer, list):
            fits = len(self.mixer) == self.num_hidden_layers
            require(
                "mixer",
                self.mixer,
                fits,
                f"one label, or a list of num_hidden_layers = {self.num_hidden_layers} of them",
            )
        if self.intermediate_size is None:
            wide = -(-8 * self.hidden_size // 3)
            self.intermediate_size = 4 * self.hidden_size if self.block == "gpt2" else -(-wide // 256) * 256
        if self.norm_eps is None:
            self.norm_eps = 1e-5 if self.block == "gpt2" else 1e-6
        for name, settings in (self.peer_settings or {}).items():
            used = list(dict.fromkeys(mixer for mixer in self.mixers if mixer in BASELINES))
            require(
                "peer_settings",
                self.peer_settings,
                name in used,
                f"settings of peers in the model ({', '.join(used) or 'none'}), by name",
            )
            fits = isinstance(settings, dict) and not {"hidden_size", "max_length", "init_std"} & set(
                settings
            )
            require(
                f"peer_settings[{name!r}]",
                settings,
                fits,
                "its own settings, as {'num_heads': 4}; widths are the model's",
            )
        if all(mixer in BASELINES for mixer in self.mixers):
            require(
                "num_registers",
                self.num_registers,
                self.num_registers == 0,
                "0 in a model of peers alone: only labels have registers",
            )
        for index in range(self.num_hidden_layers):
            self.mixer_config(index)  # says what is wrong before anything is built
        super().__post_init__(**kwargs)

    @property
    def mixers(self) -> list[str]:
        """The label of every layer."""
        return self.mixer if isinstance(self.mixer, list) else [self.mixer] * self.num_hidden_layers

    def mixer_config(self, index: int) -> Config:
        """That of one layer."""
        name = self.mixers[index]
        settings: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "max_length": self.max_position_embeddings,
            "init_std": self.initializer_range,
        }
        if name in BASELINES:
            return mixer_config(name, **settings, **(self.peer_settings or {}).get(name, {}))
        return mixer_config(
            name,
            **settings,
            num_heads=self.num_heads,
            rank=self.rank,
            compression=self.compression,
            conv_kernel=self.conv_kernel,
            rope_theta=self.rope_theta,
            num_registers=self.num_registers,
        )

    @property
    def layer_types(self) -> list[str]:
        """Which cache layers ``generate`` makes: models/cache.py."""
        return ["hypermlp"] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Ours is none of the types that transformers knows."""

    def to_dict(self) -> dict[str, Any]:
        _offer_lora_targets()  # PEFT asks a model for its configuration just before it looks up default targets
        result: dict[str, Any] = super().to_dict()
        return result


def _offer_lora_targets() -> None:
    constants = sys.modules.get("peft.utils.constants")
    if constants is not None:
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(
            HyperMLPConfig.model_type, LORA_TARGETS
        )
