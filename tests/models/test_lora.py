"""PEFT: LoRA trains, saves and merges; its default targets are the readout, V and O."""

import pytest
import torch

from hypermlp.testing import assert_close

from .conftest import build

peft = pytest.importorskip("peft")


def test_lora_on_the_default_targets(ids, tmp_path):
    model = build(dtype=torch.float32)
    before = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    trained = {name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {"v_proj", "o_proj"}
    assert_close(adapted(ids).logits, before, tolerance=1e-6)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    first = adapted(ids, labels=ids).loss
    for _ in range(5):
        optimizer.zero_grad()
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss < first
    adapted.eval()
    trained_logits = adapted(ids).logits
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(dtype=torch.float32), tmp_path)
    assert_close(again(ids).logits, trained_logits, tolerance=1e-6)
    assert adapted.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (3, 20)
    assert_close(adapted.merge_and_unload()(ids).logits, trained_logits, tolerance=1e-4)
