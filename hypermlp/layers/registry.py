"""From a name to a layer: the labels of the design study, and the peers that they are compared with."""

import dataclasses
import importlib
from typing import Any

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.label import BASES, GRAMMAR, Label
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.baselines.base import BaselineConfig
from hypermlp.layers.mixer import Mixer

Config = MixerConfig | BaselineConfig

BASELINES = {  # name -> module and class in hypermlp.layers.baselines, loaded when asked for
    "softmax": "softmax:Softmax",
    "softmax-naive": "softmax:SoftmaxNaive",
    "linear": "linear:LinearAttention",
    "retnet": "retnet:RetNet",
    "gla": "gla:GatedLinearAttention",
    "hgrn": "hgrn:Hgrn",
    "hgrn2": "hgrn2:Hgrn2",
    "deltanet": "deltanet:DeltaNet",
    "gated-deltanet": "gated_deltanet:GatedDeltaNet",
    "gsa": "gsa:GatedSlotAttention",
    "mamba": "mamba:Mamba",
    "rwkv7": "rwkv7:Rwkv7",
    "path": "path:PathAttention",
    "diff": "diff:DifferentialAttention",
}
OURS = ("G-cg-q-12o", "R-cg-q-12o")


def chosen_mixers(names: list[str]) -> list[str]:
    """Each once; "all" stands for HyperGLU, HyperMLP and every peer."""
    everything = [*OURS, *BASELINES]
    return list(dict.fromkeys(mixer for name in names for mixer in (everything if name == "all" else [name])))


def mixer_name(name: str) -> str:
    """A peer's name, or a label as it is written; anything else raises."""
    if isinstance(name, str) and name in BASELINES:
        return name
    peers = ", ".join(BASELINES)
    if isinstance(name, str) and name[:1] not in tuple(BASES):
        raise UserError(f"unknown mixer {name!r}; allowed: {peers}, or a label: {GRAMMAR}")
    try:
        return str(Label.parse(name))
    except ValueError as error:
        raise UserError(f"{error}. Or a peer: {peers}") from None


def mixer_config(name: str, *, hidden_size: int, max_length: int, **settings: Any) -> Config:
    """What ``build_mixer`` builds, checked."""
    name = mixer_name(name)
    if name not in BASELINES:
        return MixerConfig.from_label(name, hidden_size=hidden_size, max_length=max_length, **settings)
    kind = _baseline(name).Config
    known = {field.name for field in dataclasses.fields(kind)}
    for setting in settings:
        if setting not in known:
            raise UserError(f"{name} has no setting {setting!r}; allowed: {', '.join(sorted(known))}")
    config: BaselineConfig = kind(hidden_size=hidden_size, max_length=max_length, **settings)
    return config


def build_mixer(name: str, *, hidden_size: int, max_length: int, **settings: Any) -> SequenceMixer:
    """The layer of a label, such as "G-cg-q-12o", or of a peer, such as "gla".

    ``settings`` are the fields of its configuration.
    """
    return layer_of(mixer_config(name, hidden_size=hidden_size, max_length=max_length, **settings))


def layer_of(config: Config) -> SequenceMixer:
    if isinstance(config, MixerConfig):
        return Mixer(config)
    layer: SequenceMixer = _baseline(config.name)(config)
    return layer


def _baseline(name: str) -> Any:
    module, kind = BASELINES[name].split(":")
    return getattr(importlib.import_module(f"hypermlp.layers.baselines.{module}"), kind)
