"""Every example runs, with two steps and (slow) in full. The notebook gives the outputs that it shows."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import run_notebook as notebook

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW_STEPS = {
    "swap_attention.py": ["--steps", "2"],
    "hf_llama_swap.py": ["--steps", "2"],
    "custom_mixer.py": ["--grid", "smoke"],
}
FULL = {  # what the last lines of a full run show
    "swap_attention.py": r"HyperGLU   mean loss of the last \d+ steps: ([\d.]+)",
    "hf_llama_swap.py": r"HyperGLU   [\d,]+ parameters, loss ([\d.]+)",
    "custom_mixer.py": r"\| G-cg-q-12o \| ([\d.]+)",
}
BOUNDS = {"swap_attention.py": (0.5, 2.1), "hf_llama_swap.py": (0.5, 2.1), "custom_mixer.py": (99, 100)}


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run an example in ``folder`` and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_example(name: str):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW_STEPS)
def test_a_few_steps(name, tmp_path):
    assert "HyperGLU" in run(name, tmp_path, *FEW_STEPS[name])


def test_short_trainings_have_curves_too(tmp_path):
    """The picture of a few steps shows both curves: a line of one point would be invisible."""
    run("swap_attention.py", tmp_path, "--steps", "3", "--out", "curves.svg")
    lines = re.findall(
        r'<g id="line2d_\d+">\s*<path d="([^"]*)"[^>]*clip-path', (tmp_path / "curves.svg").read_text()
    )
    assert sum(line.count("L") >= 2 for line in lines) == 2


def test_padding_of_the_swapped_llama():
    swap = load_example("hf_llama_swap.py")
    model = swap.build("HyperGLU").eval()
    ids = torch.randint(256, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        alone = [model(ids[:1], use_cache=False).logits[0], model(ids[1:, 5:], use_cache=False).logits[0]]
    torch.testing.assert_close(padded[0], alone[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded[1, 5:], alone[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_in_full(name, tmp_path):
    found = re.search(FULL[name], run(name, tmp_path))
    assert found
    low, high = BOUNDS[name]
    assert low < float(found[1]) <= high


@pytest.mark.thorough
def test_the_notebook_gives_the_outputs_that_it_shows():
    stored = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    again = notebook.execute(stored)
    assert all(notebook.printed_text(stored)[i] for i in (0, 1, 2))
    assert notebook.printed_text(again) == notebook.printed_text(stored), (
        "store its outputs again: python tests/examples/run_notebook.py examples/quickstart.ipynb"
    )
    assert any(
        "image/png" in output.get("data", {})
        for cell in stored["cells"]
        for output in cell.get("outputs", [])
    )


def test_an_error_in_a_cell_is_raised():
    with pytest.raises(ZeroDivisionError):
        notebook.execute({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
