"""A Hugging Face language model around any mixer."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hypermlp.models.cache import HyperMLPCacheLayer
from hypermlp.models.configuration_hypermlp import HyperMLPConfig
from hypermlp.models.modeling_hypermlp import HyperMLPForCausalLM, HyperMLPModel

AutoConfig.register("hypermlp", HyperMLPConfig)
AutoModel.register(HyperMLPConfig, HyperMLPModel)
AutoModelForCausalLM.register(HyperMLPConfig, HyperMLPForCausalLM)

__all__ = ["HyperMLPCacheLayer", "HyperMLPConfig", "HyperMLPForCausalLM", "HyperMLPModel"]
