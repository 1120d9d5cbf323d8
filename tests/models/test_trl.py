"""TRL's SFT trainer: padded, padding-free and packed batches, with and without LoRA."""

import math

import pytest
import torch
from datasets import Dataset

from hypermlp.testing import assert_close
from hypermlp.train.tokenization import build_tokenizer

from .conftest import build

trl = pytest.importorskip("trl")
WAYS = {
    "padded": {"max_length": 64},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 64},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 64},
}


def trainer(way, folder, lora=None, **settings):
    tokenizer = build_tokenizer("bytes", [])
    model = build(dtype=torch.float32, vocab_size=len(tokenizer), **settings)
    rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(6) for b in range(6)]
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    args = trl.SFTConfig(
        output_dir=str(folder), max_steps=2, learning_rate=1e-3, logging_steps=1, **options, **WAYS[way]
    )
    data = Dataset.from_list(rows)
    return trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_trl_trains(way, lora, tmp_path):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, task_type="CAUSAL_LM") if lora else None
    training = trainer(way, tmp_path, adapter)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 5}], ids=str)
def test_a_padding_free_batch_equals_each_example_alone(settings, tmp_path):
    training = trainer("padding-free", tmp_path, **settings)
    batch = next(iter(training.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1
    model = training.model.eval()
    ends = batch["cu_seq_lens_q"].tolist()
    with torch.no_grad():
        packed = model(**batch).logits
        parts = batch["input_ids"].tensor_split(ends[1:-1], dim=1)
        alone = torch.cat([model(part).logits for part in parts], dim=1)
    assert_close(packed, alone, tolerance=1e-5)
