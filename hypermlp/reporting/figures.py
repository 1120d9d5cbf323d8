"""Figures as PNG and SVG, drawn with Matplotlib."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.files import write_bytes

FORMATS = ("png", "svg")


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Return an empty figure of this size in inches, which Matplotlib draws without a display."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib: pip install 'hypermlp[report]'") from error
    matplotlib.rcParams.update({"font.size": 8, "svg.hashsalt": "hypermlp", "svg.fonttype": "none"})
    return Figure(figsize=(width, height), layout=layout)


def save(figure: Any, folder: Path, name: str) -> Iterator[Path]:
    """Write the figure in every format and yield the paths; equal figures give equal bytes."""
    for kind in FORMATS:
        path, drawn = folder / f"{name}.{kind}", io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, dpi=160, bbox_inches="tight", metadata=metadata)
        write_bytes(path, drawn.getvalue())
        yield path
