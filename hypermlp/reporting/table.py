"""One table for commands, documents and pages."""

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

Columns = Sequence[tuple[str, str | Callable[[dict[str, Any]], str]]]
BOLD = re.compile(r"\*\*(.*?)\*\*")


@dataclass(frozen=True)
class Table:
    """Columns and rows of text, which render to Markdown, to a terminal and to HTML.

    The first column is aligned to the left, the others to the right, unless ``left`` names them. The cells
    are plain text, except that ``**text**`` is bold; each renderer escapes what its format would interpret.

    Example::

        Table(["mixer", "loss"], [["S-p", "1.21"], ["G-cg-q-12o", "1.13"]]).markdown()
    """

    columns: list[str]
    rows: list[list[str]]
    left: frozenset[str] = frozenset()
    """Titles of further columns that are aligned to the left, such as prose."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, the table {len(self.columns)} columns: {row}")

    @classmethod
    def of(
        cls,
        results: Iterable[dict[str, Any]],
        columns: Columns,
        left: frozenset[str] = frozenset(),
    ) -> Self:
        """Return a table with one row per result.

        ``columns`` holds (title, cell) pairs. A cell is a format string over the keys of a result, such as
        ``"{loss:.3f}"``, or a function that returns the text.

        Example::

            Table.of([{"mixer": "S-p", "loss": 1.21}], [("mixer", "{mixer}"), ("loss", "{loss:.2f}")])
        """
        rows = [
            [cell.format(**result) if isinstance(cell, str) else cell(result) for _, cell in columns]
            for result in results
        ]
        return cls([title for title, _ in columns], rows, left)

    def aligned_left(self, index: int) -> bool:
        """Return whether the column at ``index`` is aligned to the left."""
        return index == 0 or self.columns[index] in self.left

    def markdown(self) -> str:
        """Return a Markdown table. Cells may hold Markdown, such as ``**bold**``; pipes are escaped."""
        rule = ["---" if self.aligned_left(index) else "---:" for index in range(len(self.columns))]
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in (self.columns, *self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:]))

    def terminal(self) -> str:
        """Return the table drawn for a terminal; Markdown where ``rich`` is not installed."""
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
            from rich.text import Text
        except ImportError:
            return self.markdown()
        drawn = RichTable(box=None, pad_edge=False)
        for index, title in enumerate(self.columns):
            drawn.add_column(title, justify="left" if self.aligned_left(index) else "right", overflow="fold")
        for row in self.rows:
            drawn.add_row(*(Text(BOLD.sub(r"\1", cell)) for cell in row))
        unfolded = sum(2 + max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True))
        console = Console(file=io.StringIO(), width=max(80, unfolded), color_system=None)
        with console.capture() as captured:
            console.print(drawn)
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))

    def html(self) -> str:
        """Return a ``<table>`` element; right-aligned cells carry the class ``number``."""
        kinds = ["" if self.aligned_left(index) else ' class="number"' for index in range(len(self.columns))]

        def line(tag: str, row: list[str]) -> str:
            texts = (BOLD.sub(r"<b>\1</b>", html.escape(cell)) for cell in row)
            cells = (f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))
            return f"<tr>{''.join(cells)}</tr>"

        head, body = line("th", self.columns), "".join(line("td", row) for row in self.rows)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
