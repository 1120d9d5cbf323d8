"""The package has types: a program of a user passes ``mypy --strict``, and a mistake in it is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hypermlp

PROGRAM = """
import torch
from torch import Tensor, nn

from hypermlp import HyperGLU, Mixer, MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers import build_mixer
from hypermlp.ops import Mix, available_backends, hyper_attention


class Block(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mixer = HyperGLU(hidden_size, max_length=128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mixer(x)
        return y


def attend(q: Tensor, k: Tensor, v: Tensor, mix: Mix | None) -> Tensor:
    return hyper_attention(q, k, v, mix, None, activation="relu", backend=available_backends()[0])


def make(name: str) -> nn.Module:
    try:
        return build_mixer(name, hidden_size=64, max_length=128)
    except UserError as error:
        raise SystemExit(str(error)) from error


config: MixerConfig = Mixer.from_label("G-cg-q-12o", hidden_size=64, max_length=128).config
print(Block(64)(torch.randn(1, 8, 64)).shape, config, make("gla"))
"""
MISTAKE = "from hypermlp.ops import hyper_attention\n\nhyper_attention(1, 2, 3)\n"


@pytest.mark.slow
def test_a_program_of_a_user_is_checked(tmp_path):
    """Only the user's files are reported, not the package's, as in an installation."""
    for name, text in {"program.py": PROGRAM, "mistake.py": MISTAKE}.items():
        (tmp_path / name).write_text(text)
    options = ["--strict", "--config-file=", "--no-incremental", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py", "mistake.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(Path(hypermlp.__file__).parents[1])},
    )
    assert 'mistake.py:3: error: Argument 1 to "hyper_attention" has incompatible type' in done.stdout
    assert "program.py" not in done.stdout, done.stdout


def test_the_package_is_marked_as_typed():
    assert (Path(hypermlp.__file__).parent / "py.typed").exists()
