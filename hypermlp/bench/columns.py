"""Rows of results as a Markdown table."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Column(NamedTuple):
    title: str
    show: Callable[[dict[str, Any]], str]


def table(rows: list[dict[str, Any]], columns: list[Column]) -> str:
    lines = [
        "| " + " | ".join(column.title for column in columns) + " |",
        "| --- |" + " ---: |" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(column.show(row) for column in columns) + " |" for row in rows]
    return "\n".join(lines)
