"""HyperMLP and HyperGLU: attention as a dynamic two-layer MLP, with learned mixing along the sequence.

The paper is "HyperMLP: An Integrated Perspective for Sequence Modeling". Where to start:

    hypermlp.HyperGLU                     the layer that replaces attention; HyperMLP is its simpler sibling
    hypermlp.Mixer, MixerConfig           the same layer with every switch
    hypermlp.ops.hyper_attention          the operator inside the layer, on queries, keys and values
    hypermlp.layers.build_mixer           any variant or baseline by its name
    hypermlp.models.HyperMLPForCausalLM   a Hugging Face language model (needs pip install 'hypermlp[train]')
    hypermlp.tiny                         the folder of a small trained model that comes with the package
    hypermlp.mad                          the MAD benchmark: six synthetic tasks
    hypermlp.inspect.capture              every intermediate result of a layer
    hypermlp.costs.mixer                  a module with parameter counts, FLOPs and decoding memory of layers

``import hypermlp`` loads ``ops``, ``layers``, ``label`` and ``errors``. Import the others by name, for
example ``from hypermlp.inspect import capture``.

Glossary:

    label         the name of a variant of the paper's design study, such as "G-cg-q-12o" (hypermlp.label)
    baseline      an architecture of another paper, by name, such as "gla" (hypermlp.layers.BASELINES)
    context       the positions that a position sees: its sequence, document or window up to itself
    slot          the place of a position in the context. Layout "lag" counts from the newest (slot 0 is the
                  position itself), layout "forward" from the oldest
    branch        one vector of scores with its own queries and keys. A head has one branch; with activation
                  "glu" it has two: the gate selects slots, the scale sets their strength
    sequence mix  a learned matrix R over the slots: R1 multiplies the scores before the activation, R2 the
                  activated scores before the values are read
    register      a learned input vector that every position sees in addition to its context

Wrong values of arguments raise ``hypermlp.errors.UserError``, a ``ValueError``; an unknown keyword
raises ``TypeError``, or ``UserError`` where settings have names of their own (labels, baselines, models).

Example::

    import torch
    from hypermlp import HyperGLU

    layer = HyperGLU(hidden_size=64, max_length=128)
    y = layer(torch.randn(2, 100, 64))  # [batch, positions, hidden_size], causal
"""

from hypermlp.checkpoints import tiny
from hypermlp.config import MixerConfig
from hypermlp.layers import HyperGLU, HyperMLP, Mixer

__version__ = "0.1.0"
__all__ = ["HyperGLU", "HyperMLP", "Mixer", "MixerConfig", "__version__", "tiny"]
