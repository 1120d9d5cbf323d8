"""A Hugging Face language model around any mixer; importing this package needs transformers.

``HyperMLPConfig`` describes the model, ``HyperMLPForCausalLM`` is the model with its head, ``HyperMLPModel``
the model without it. After ``import hypermlp.models``, the Auto classes of transformers load all three
(model_type "hypermlp").
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hypermlp.models.cache import HyperMLPCacheLayer
from hypermlp.models.configuration_hypermlp import HyperMLPConfig
from hypermlp.models.modeling_hypermlp import HyperMLPForCausalLM, HyperMLPModel

AutoConfig.register("hypermlp", HyperMLPConfig)
AutoModel.register(HyperMLPConfig, HyperMLPModel)
AutoModelForCausalLM.register(HyperMLPConfig, HyperMLPForCausalLM)

__all__ = ["HyperMLPCacheLayer", "HyperMLPConfig", "HyperMLPForCausalLM", "HyperMLPModel"]
