"""The adapter to the server of transformers is needed, and is enough."""

import pytest
from transformers.cli.serving import model_manager

from hypermlp.commands.serve import add_model_class_to_server
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM


@pytest.fixture
def checkpoint(tmp_path):
    config = HyperMLPConfig(hidden_size=32, num_hidden_layers=1, max_position_embeddings=16, vocab_size=50)
    HyperMLPForCausalLM(config).save_pretrained(tmp_path)
    return f"{tmp_path}@main"


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.delattr(model_manager.transformers, "HyperMLPForCausalLM", raising=False)
    return model_manager.ModelManager(device="cpu")


def test_the_server_does_not_load_registered_models_by_itself(checkpoint, manager):
    """If this fails, transformers serves registered models, and the adapter can be removed."""
    with pytest.raises(AttributeError, match="HyperMLPForCausalLM"):
        manager._load_model(checkpoint)


def test_the_adapter_makes_the_server_load_our_model(checkpoint, manager, monkeypatch):
    """If this fails, the server looks models up in another place, and the adapter must follow."""
    monkeypatch.setattr(
        model_manager.transformers, "HyperMLPForCausalLM", None, raising=False
    )  # to be undone
    add_model_class_to_server()
    assert type(manager._load_model(checkpoint)) is HyperMLPForCausalLM
