"""The README's code runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_blocks_run(number):
    names: dict[str, object] = {}
    exec(compile("\n".join(BLOCKS[: number + 1]), str(README), "exec"), names)
    assert names["y"].shape == names["x"].shape
