"""The private methods of transformers that we override still have the arguments that ours were written for.

If this fails after an update, CONTRIBUTING.md ("Private methods of transformers") says what to do.
"""

import inspect

import pytest
from transformers import GenerationMixin, PreTrainedModel, Trainer

from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.trainer import LMTrainer

OVERRIDDEN = {
    (LMTrainer, Trainer): {
        "_clip_grad_norm": ["model"],
        "_get_output_dir": ["trial"],
        "_get_train_sampler": ["train_dataset"],
        "_init_training_state": [
            *("max_steps", "num_update_steps_per_epoch", "num_train_epochs"),
            *("resume_from_checkpoint", "trial"),
        ],
        "_issue_warnings_after_load": ["load_result"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_save_checkpoint": ["model", "trial"],
        "_save_optimizer_and_scheduler": ["output_dir"],
    },
    (HyperMLPForCausalLM, GenerationMixin): {
        "_get_static_cache_init_shape": [],
        "_get_stopping_criteria": ["generation_config", "stopping_criteria", "tokenizer"],
        "_prepare_generated_length": [
            *("generation_config", "has_default_max_length", "has_default_min_length", "model_input_name"),
            *("input_ids_length", "inputs_tensor"),
        ],
    },
    (HyperMLPForCausalLM, PreTrainedModel): {"_init_weights": ["module"]},
}


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_overridden_private_methods_are_as_when_they_were_overridden(ours, theirs):
    found = {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in inspect.getmembers(theirs, inspect.isfunction)
        if name.startswith("_") and not name.startswith("__")
        if getattr(ours, name).__module__.startswith("hypermlp.")
    }
    assert found == OVERRIDDEN[ours, theirs]


def test_the_trainer_has_the_switch_that_keeps_it_from_wrapping_a_sharded_model():
    assert "self.is_distributed_loading_by_transformers" in inspect.getsource(Trainer)
