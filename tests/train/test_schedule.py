"""The learning rate of NanoGPT's protocol, and which parameters have weight decay."""

import pytest
import torch

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.train.recipe import TrainingSettings
from hypermlp.train.schedule import learning_rate_factor, optimizer_groups


def rate(step, **settings):
    training = TrainingSettings(
        **(
            {
                "steps": 40_000,
                "batch_tokens": 1,
                "learning_rate": 6e-4,
                "min_learning_rate": 6e-5,
                "warmup_steps": 2000,
            }
            | settings
        )
    )
    return training.learning_rate * learning_rate_factor(step, training)


def test_warm_up_and_cosine():
    assert rate(0) == pytest.approx(6e-4 / 2001)
    assert rate(1999) == pytest.approx(6e-4 * 2000 / 2001)
    assert rate(2000) == pytest.approx(6e-4)
    assert rate(21_000) == pytest.approx((6e-4 + 6e-5) / 2)
    assert rate(40_000) == rate(50_000) == pytest.approx(6e-5)
    assert rate(40_000, decay_steps=600_000) == pytest.approx(
        5.946e-4, abs=1e-7
    )  # the value in NanoGPT's protocol


def test_matrices_are_decayed_and_nothing_is_counted_twice():
    model = HyperMLPForCausalLM(
        HyperMLPConfig(hidden_size=32, num_hidden_layers=2, max_position_embeddings=16, vocab_size=50)
    )
    settings = {"steps": 1, "batch_tokens": 1, "learning_rate": 1.0, "weight_decay": 0.1}
    decayed, rest = optimizer_groups(model, TrainingSettings(**settings))
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in rest["params"]} == {
        "mixer_norm",
        "mlp_norm",
        "norm",
        "gates",
    }
    assert any("mix1.diag" in names[id(p)] for p in decayed["params"])  # it has two dimensions
    both = [*decayed["params"], *rest["params"]]
    assert len({id(p) for p in both}) == len(both) == len(list(model.parameters()))
    (everything,) = optimizer_groups(model, TrainingSettings(**settings, decayed="all"))
    assert sum(p.numel() for p in everything["params"]) == sum(p.numel() for p in model.parameters())
    assert torch.is_tensor(everything["params"][0])
