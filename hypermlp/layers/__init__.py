"""Layers around the operator."""

from hypermlp.layers.mixer import HyperGLU, HyperMLP, Mixer
from hypermlp.layers.registry import build_mixer
from hypermlp.layers.state import MixerState

__all__ = ["HyperGLU", "HyperMLP", "Mixer", "MixerState", "build_mixer"]
