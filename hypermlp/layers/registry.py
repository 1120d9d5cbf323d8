"""From a name to a layer: the labels of the design study, and the baselines that they are compared with."""

import dataclasses
import importlib
from typing import Any

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.label import BASES, GRAMMAR, PAPER_NAMES, Label
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.baselines.base import Baseline, BaselineConfig
from hypermlp.layers.mixer import Mixer
from hypermlp.validation import near_miss

Config = MixerConfig | BaselineConfig

BASELINES = {  # name -> module and class in hypermlp.layers.baselines, imported when the name is used
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
    "fox": "fox:ForgettingAttention",
}
OURS = tuple(PAPER_NAMES.values())


def chosen_mixers(names: list[str]) -> list[str]:
    """Return each name once, with HyperGLU, HyperMLP and every baseline in the place of "all"."""
    everything = [*OURS, *BASELINES]
    chosen = (mixer for name in names for mixer in (everything if name == "all" else [name]))
    return list(dict.fromkeys(PAPER_NAMES.get(mixer, mixer) for mixer in chosen))


def mixer_name(name: str) -> str:
    """Return the name of a baseline, or a label in its usual spelling; raise for anything else.

    "HyperGLU" and "HyperMLP" are names of their labels.
    """
    if isinstance(name, str) and name in PAPER_NAMES:
        return PAPER_NAMES[name]
    if isinstance(name, str) and name in BASELINES:
        return name
    baselines = ", ".join(BASELINES)
    if isinstance(name, str) and name[:1] not in tuple(BASES):
        names = [*PAPER_NAMES, *BASELINES]
        raise UserError(
            f"unknown mixer {name!r}{near_miss(name, names)}; allowed: {', '.join(names)}, or a label: "
            f"{GRAMMAR}"
        )
    try:
        return str(Label.parse(name))
    except ValueError as error:
        raise UserError(f"{error}. Baselines are allowed too: {baselines}") from None


def mixer_config(name: str, *, hidden_size: int, max_length: int, **settings: Any) -> Config:
    """Return the checked configuration of the layer that ``build_mixer`` builds."""
    name = mixer_name(name)
    if name not in BASELINES:
        return MixerConfig.from_label(name, hidden_size=hidden_size, max_length=max_length, **settings)
    config_class = _baseline(name).Config
    known = {field.name for field in dataclasses.fields(config_class)}
    for setting in settings:
        if setting not in known:
            raise UserError(f"{name} has no setting {setting!r}; allowed: {', '.join(sorted(known))}")
    return config_class(hidden_size=hidden_size, max_length=max_length, **settings)


def build_mixer(name: str, *, hidden_size: int, max_length: int, **settings: Any) -> SequenceMixer:
    """Build a sequence mixer, ``[B, T, hidden_size] -> [B, T, hidden_size]``, by its name.

    The layers are called, decode and take ``starts`` like a ``Mixer``. A recurrent baseline (all but softmax,
    softmax-naive, diff and fox) accepts no window in ``starts``, and its state cannot be cropped. Labels,
    softmax and diff have the setting ``sliding_window``.

    Args:
        name: "HyperGLU", "HyperMLP", a label, such as "G-cg-q-12o" (see ``hypermlp.label``), or a baseline:
            "softmax" (with RoPE), "softmax-naive" (the same without a fused kernel), "linear", "retnet",
            "gla", "hgrn", "hgrn2", "deltanet", "gated-deltanet", "gsa", "mamba", "rwkv7", "path", "diff" or
            "fox".
        hidden_size: width of the input and the output.
        max_length: for a label, the most positions that one position can see. Baselines accept longer input.
        settings: for a label (HyperGLU is G-cg-q-12o, HyperMLP R-cg-q-12o), ``compression`` (4) and what else
            ``MixerConfig.from_label`` accepts. For a baseline, ``init_std`` and the fields of its
            configuration: ``num_heads`` (0, the default, derives it from the published width of a head; mamba
            and hgrn have no heads), ``rope_theta`` (softmax, softmax-naive, retnet, diff), ``expand_v``
            (retnet, gated-deltanet), ``gate_rank`` (gla), ``conv_kernel`` (deltanet, gated-deltanet, mamba,
            path), ``num_slots`` (gsa), ``expand``, ``state_size``, ``step_rank`` (mamba), ``rank`` (path),
            ``lambda_init`` (diff). ``help(hypermlp.layers.baselines.gla.GlaConfig)`` and so on explain them;
            ``layer.config`` shows the values.

    Returns:
        a ``Mixer`` for a label, "HyperGLU" and "HyperMLP"; for a baseline, a
        ``hypermlp.layers.baselines.base.Baseline``.

    Raises:
        UserError: for an unknown name or setting, or a value that is not allowed.

    Example::

        import torch
        from hypermlp.layers import build_mixer

        layer = build_mixer("gla", hidden_size=64, max_length=128, num_heads=2)
        y = layer(torch.randn(2, 32, 64))  # [2, 32, 64]
        layer = build_mixer("R-cg-q-12o", hidden_size=64, max_length=128, compression=8)
    """
    return layer_of(mixer_config(name, hidden_size=hidden_size, max_length=max_length, **settings))


def layer_of(config: Config) -> SequenceMixer:
    """Build the layer of a configuration."""
    return Mixer(config) if isinstance(config, MixerConfig) else _baseline(config.name)(config)


def _baseline(name: str) -> type[Baseline[Any]]:
    """Import the class of a baseline."""
    module, kind = BASELINES[name].split(":")
    return getattr(importlib.import_module(f"hypermlp.layers.baselines.{module}"), kind)
