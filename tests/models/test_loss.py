"""The loss without logits is the loss with logits, and never holds all of them."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hypermlp.models import loss as loss_module
from hypermlp.testing import assert_close

from .conftest import build


def labels_of(ids):
    labels = ids.clone()
    labels[0, :5] = labels[1, ::3] = -100
    return labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def loss_and_gradients(model, ids, **arguments):
    out = model(ids, **arguments)
    return out, gradients(model, out.loss)


def dense_loss(model, ids, labels, number=None):
    """The definition. transformers' own loss is float32, also for a float64 model."""
    logits, targets = model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if number is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / number


@pytest.mark.parametrize("chunk", [1, 7 * 61, 2**23])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("number", [None, 11, torch.tensor(23)], ids=str)
def test_loss_and_gradients_in_chunks(ids, monkeypatch, chunk, tied, number):
    monkeypatch.setattr(loss_module, "CHUNK", chunk)
    model = build(tie_word_embeddings=tied).train()
    dense = dense_loss(model, ids, labels_of(ids), number)
    wanted = [gradient.clone() for gradient in gradients(model, dense)]
    shifted = F.pad(labels_of(ids), (0, 1), value=-100)[:, 1:].contiguous()
    for targets in ({"labels": labels_of(ids)}, {"labels": ids, "shift_labels": shifted}):
        arguments = targets | {"num_items_in_batch": number}
        assert_close(model(ids, **arguments).loss, dense.float(), tolerance=1e-6)
        lean, found = loss_and_gradients(model, ids, **arguments, skip_logits=True)
        assert lean.logits is None
        assert_close(lean.loss, dense, tolerance=1e-10)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, tolerance=1e-10)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_a_float32_loss(ids, dtype, autocast):
    exact, wanted = loss_and_gradients(build().train(), ids, labels=ids)
    model = build(dtype=torch.float32 if autocast else dtype).train()
    with torch.autocast("cpu", dtype, enabled=autocast):
        dense, plain = loss_and_gradients(model, ids, labels=ids)
        lean, found = loss_and_gradients(model, ids, labels=ids, skip_logits=True)
    assert lean.loss.dtype == torch.float32
    assert abs(lean.loss - exact.loss) <= 2 * abs(dense.loss - exact.loss) + 1e-4
    for one, other, true in zip(found, plain, wanted, strict=True):
        assert (one - true).norm() <= 2 * (other - true).norm() + 1e-12


class LargestResult(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("skip", [True, False])
def test_all_logits_are_never_held(monkeypatch, skip):
    monkeypatch.setattr(loss_module, "CHUNK", 2**14)
    model, tokens = build(vocab_size=4096, dtype=torch.float32).train(), torch.randint(0, 4096, (4, 64))
    with LargestResult() as largest:
        model(tokens, labels=tokens, skip_logits=skip).loss.backward()
    weight = model.lm_head.weight.numel()
    assert largest.elements == (weight if skip else tokens.numel() * 4096)


def test_positions_without_a_target_have_no_gradient(ids):
    model = build().train()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    labels = torch.full_like(ids, -100)
    labels[0, 3] = 7
    model(inputs_embeds=embeddings, labels=labels, skip_logits=True).loss.backward()
    assert (embeddings.grad[1:] == 0).all()
    assert (embeddings.grad[0, 3:] == 0).all()
    assert embeddings.grad[0, :3].abs().max() > 0


def test_evaluation_needs_no_gradient(ids):
    model = build()
    with torch.no_grad():
        lean = model(ids, labels=ids, skip_logits=True)
        assert_close(lean.loss, dense_loss(model, ids, ids), tolerance=1e-10)
    assert not lean.loss.requires_grad


def _hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def _replaced(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * forward(hidden)


def _adapted(model):
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(model, config)


def _other_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.square().mean()


@pytest.mark.parametrize("change", [_hooked, _replaced, _adapted, _other_loss])
def test_a_head_that_is_more_than_its_weight_computes_logits(ids, change):
    model = build(tie_word_embeddings=False)
    before = model(ids, labels=ids).loss
    change(model)
    after = model(ids, labels=ids, skip_logits=True)
    assert_close(after.loss, model(ids, labels=ids).loss, tolerance=1e-10)
    assert after.logits is not None
    assert abs(after.loss - before) > 1e-3


MEASURE = """
import resource, sys, torch
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
config = HyperMLPConfig(hidden_size=256, num_hidden_layers=2, max_position_embeddings=512, vocab_size=50304)
model, tokens = HyperMLPForCausalLM(config), torch.randint(0, 50304, (4, 512))
model(tokens[:1, :8], labels=tokens[:1, :8], skip_logits=True).loss.backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model(tokens, labels=tokens, skip_logits=sys.argv[1] == "True").loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_of_a_training_step():
    """The resident set of a step with a large vocabulary, beyond weights, gradients and libraries."""
    peaks = {}
    for skip in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(skip)], capture_output=True, text=True, check=True
        )
        peaks[skip] = int(done.stdout)
    print(f"with logits {peaks[False]} MiB, in chunks {peaks[True]} MiB: {peaks[True] / peaks[False]:.2f}")
    assert peaks[True] <= 0.5 * peaks[False]
