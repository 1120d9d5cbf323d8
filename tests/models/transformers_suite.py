"""Transformers' own common tests of models, for ours.

tests/models/test_transformers_suite.py puts this file beside the tests in the source archive of transformers
and runs it there. The archive has no generation tests; tests/models/test_generate.py checks what they do.
"""

import unittest

import torch
from transformers.models.auto import modeling_auto

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM, HyperMLPModel

# The tests ask these tables which classes have a loss and which labels they take.
modeling_auto.MODEL_MAPPING_NAMES["hypermlp"] = "HyperMLPModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["hypermlp"] = "HyperMLPForCausalLM"

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402


class Tester:
    """What the tests ask about a model; the names are theirs."""

    batch_size, seq_length, is_training = 3, 9, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 2, 99
    base_model_class = HyperMLPModel

    def get_config(self):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "rank": 4}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return HyperMLPConfig(vocab_size=99, max_position_embeddings=64, **sizes, **special)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class HyperMLPTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (HyperMLPModel, HyperMLPForCausalLM)
    all_generative_model_classes = (HyperMLPForCausalLM,)
    has_attentions = False  # there are no attention maps: the weights of a score depend on all scores

    def setUp(self):
        self.model_tester = Tester()
