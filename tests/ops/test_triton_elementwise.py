"""The kernels of the convolution pair and of the gates, without a GPU: interpreted, and compiled.

Triton decides at import whether it interprets, so each way has a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def check_apart(file, marks="not slow", **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, file]
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "[100%]" in done.stdout, done.stdout


@pytest.mark.thorough
def test_interpreted():
    check_apart("tests/ops/triton_elementwise.py", TRITON_INTERPRET="1")


@pytest.mark.thorough
def test_compiled():
    check_apart("tests/ops/triton_resources.py", TRITON_DEFAULT_FP_FUSION="1")


@pytest.mark.slow
def test_more_cases_interpreted():
    check_apart("tests/ops/triton_elementwise.py", "slow", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_compiled_for_more_targets():
    check_apart("tests/ops/triton_resources.py", "slow", TRITON_DEFAULT_FP_FUSION="1")
