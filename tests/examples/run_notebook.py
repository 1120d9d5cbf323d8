"""Execute a notebook's cells in this process, one after another, and collect what they print.

    python tests/examples/run_notebook.py examples/quickstart.ipynb    # executes it and stores the outputs

A cell that draws assigns a matplotlib ``Figure`` to the name ``figure``; it becomes an image.
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of its code cells replaced; an error in a cell is raised."""
    names: dict[str, Any] = {"__name__": "notebook"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"outputs": _run("".join(cell["source"]), names), "execution_count": count}
        cells.append(cell)
    return notebook | {"cells": cells}


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute one cell and return its outputs."""
    printed = io.StringIO()
    names.pop("figure", None)
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if "figure" in names:
        image = io.BytesIO()
        names["figure"].savefig(image, format="png", dpi=80)
        data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def printed_text(notebook: dict[str, Any]) -> list[str]:
    """Return what each code cell prints."""
    return [
        "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(json.dumps(execute(json.loads(path.read_text())), indent=1) + "\n")
    print(f"executed {path}")
