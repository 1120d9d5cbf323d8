"""Sequence mixers: causal layers ``[batch, positions, hidden_size] -> [batch, positions, hidden_size]``.

HyperGLU, HyperMLP   the paper's two layers
Mixer                any variant of the design study, from a ``hypermlp.MixerConfig`` or a label
build_mixer          any variant or baseline by its name
BASELINES            the names of the baselines
MixerState           the cache of a ``Mixer`` during decoding; get it from ``layer.new_state``
"""

from hypermlp.layers.labelled import HyperGLU, HyperMLP
from hypermlp.layers.mixer import Mixer
from hypermlp.layers.registry import BASELINES, build_mixer
from hypermlp.layers.state import MixerState

__all__ = ["BASELINES", "HyperGLU", "HyperMLP", "Mixer", "MixerState", "build_mixer"]
