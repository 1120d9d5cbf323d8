"""Layers around the operator."""

from hypermlp.layers.mixer import HyperGLU, HyperMLP, Mixer
from hypermlp.layers.registry import BASELINES, build_mixer
from hypermlp.layers.state import MixerState

__all__ = ["BASELINES", "HyperGLU", "HyperMLP", "Mixer", "MixerState", "build_mixer"]
