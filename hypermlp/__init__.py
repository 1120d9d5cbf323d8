"""HyperMLP and HyperGLU: attention as a dynamic two-layer MLP, with learned mixing along the sequence."""

from hypermlp.config import MixerConfig
from hypermlp.layers import HyperGLU, HyperMLP, Mixer

__version__ = "0.1.0"
__all__ = ["HyperGLU", "HyperMLP", "Mixer", "MixerConfig", "__version__"]
