"""The example of fine-tuning: two steps, with whichever trainer is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.train.tokenization import build_tokenizer, save_tokenizer

pytest.importorskip("peft")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


@pytest.mark.thorough
def test_two_steps_lower_the_loss_and_save_an_adapter(tmp_path):
    torch.manual_seed(0)
    tokenizer = build_tokenizer("bytes", [])
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = HyperMLPConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    HyperMLPForCausalLM(config).save_pretrained(tmp_path / "base")
    save_tokenizer(tokenizer, tmp_path / "base")
    command = [sys.executable, str(EXAMPLE), "--model", str(tmp_path / "base"), "--steps", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
