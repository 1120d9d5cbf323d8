"""The example of fine-tuning: two steps, with whichever trainer is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import byte_model, save

pytest.importorskip("peft")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


@pytest.mark.thorough
def test_two_steps_lower_the_loss_and_save_an_adapter(tmp_path):
    base = save(*byte_model(), tmp_path / "base")
    command = [sys.executable, EXAMPLE, "--model", base, "--steps", "2", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
