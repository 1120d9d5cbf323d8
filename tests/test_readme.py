"""Every Python block of the README and of the guides runs by itself and checks its own result."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
GUIDES = ("getting-started", "layer", "language-model", "inspect", "baselines", "long-context")
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in GUIDES))
BLOCKS = {
    f"{document} {number}": block
    for document in DOCUMENTS
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S), 1)
}


def has_assertion(block: str) -> bool:
    """Return whether the block contains an ``assert`` statement or calls ``torch.testing.assert_close``."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.testing.assert_close")
        for node in ast.walk(ast.parse(block))
    )


def run(block: str) -> None:
    """Execute the block in a fresh namespace."""
    torch.manual_seed(0)
    exec(compile(block, "block", "exec"), {"__name__": "readme"})


def test_every_document_has_code():
    assert {name.split()[0] for name in BLOCKS} == set(DOCUMENTS)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs_alone_and_asserts(name):
    assert has_assertion(BLOCKS[name]), f"block {name} asserts nothing"
    run(BLOCKS[name])


def test_a_block_without_an_assertion_is_found():
    assert not has_assertion("import torch\ny = torch.zeros(2)  # assert y.shape == (2,)")
    assert has_assertion("with open('x') as file:\n    assert file")


def test_blocks_share_no_names():
    run("value = 1\nassert value == 1")
    with pytest.raises(NameError, match="value"):
        run("assert value == 1")


def test_a_failing_assertion_is_reported():
    with pytest.raises(AssertionError):
        run("import torch\nassert torch.zeros(2).shape == (3,)")
