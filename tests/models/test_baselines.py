"""A language model with a baseline in the place of our mixers: loss, generation, padding, saving."""

import pytest
import torch

from hypermlp.layers import BASELINES
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

pytestmark = pytest.mark.thorough


def make(mixer: str | list[str], **settings) -> HyperMLPForCausalLM:
    torch.manual_seed(0)
    config = HyperMLPConfig(
        mixer=mixer,
        hidden_size=32,
        num_hidden_layers=2,
        max_position_embeddings=48,
        vocab_size=50,
        initializer_range=0.3,
        pad_token_id=0,
        **settings,
    )
    return HyperMLPForCausalLM(config).eval()


def prompts(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mixer", [*BASELINES, ["gla", "G-cg-q-12o"], ["softmax", "mamba"]], ids=str)
def test_generation_is_the_forward_pass(mixer):
    model, ids = make(mixer), prompts()
    cached = model.generate(ids, max_new_tokens=12, do_sample=False)
    for end in range(ids.shape[1], cached.shape[1]):
        with torch.no_grad():
            best = model(cached[:, :end], use_cache=False).logits[:, -1].argmax(-1)
        assert (best == cached[:, end]).all()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids], dim=1)
    mask = (padded != 0).long()
    assert (
        model.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, 3:] == cached
    ).all()


@pytest.mark.parametrize("name", BASELINES)
def test_every_parameter_learns(name):
    model, ids = make(name), prompts(length=20)
    model(ids, labels=ids).loss.backward()
    missing = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert not missing


def test_a_new_model_is_initialised_as_its_layers_are():
    """The model's initialisation sets parameters that are no matrices, too."""
    mixer = make("mamba").model.layers[0].mixer
    assert (mixer.skip == 1).all()
    assert mixer.log_rate[0].exp()[-1].round() == 16
    assert (
        0.001
        <= torch.nn.functional.softplus(mixer.step_bias).min()
        <= torch.nn.functional.softplus(mixer.step_bias).max()
        <= 0.101
    )


def test_settings_of_a_baseline_are_checked():
    model = make(["gla", "mamba"], baseline_settings={"gla": {"num_heads": 2}, "mamba": {"state_size": 4}})
    assert model.model.layers[0].mixer.config.num_heads == 2
    assert model.model.layers[1].mixer.config.state_size == 4
    for mixer, settings, message in (
        ("gla", {"gla": {"heads": 2}}, "gla has no setting 'heads'"),
        ("gla", {"num_heads": 2}, "settings of the model's baselines \\(gla\\), by name"),
        ("S-p", {"gla": {"num_heads": 2}}, "settings of the model's baselines \\(it has none\\)"),
        ("gla", {"gla": {"hidden_size": 2}}, "the model sets the rest"),
    ):
        with pytest.raises(ValueError, match=message):
            make(mixer, baseline_settings=settings)


def test_a_recurrence_refuses_assisted_generation():
    with pytest.raises(ValueError, match="stateful"):
        make(["softmax", "gla"]).generate(prompts(batch=1), prompt_lookup_num_tokens=3, max_new_tokens=4)
    make("softmax").generate(prompts(batch=1), prompt_lookup_num_tokens=3, max_new_tokens=4)
