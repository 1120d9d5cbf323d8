"""Small models whose every part matters."""

import pytest
import torch

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.testing import randomise_

LABELS = ["G-cg-q-12o", "R-cg-q-12o", "S-p"]  # HyperGLU, HyperMLP, softmax attention


def build(mixer="G-cg-q-12o", dtype=torch.float64, **settings):
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vocab_size": 61,
        "rank": 3,
    } | settings
    torch.manual_seed(1)
    model = HyperMLPForCausalLM(HyperMLPConfig(mixer=mixer, **settings)).eval()
    return randomise_(model, scale=0.2).to(dtype)


@pytest.fixture
def ids():
    return torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(2))
