"""One table, three renderings of the same cells."""

import pytest

from hypermlp.reporting.table import Table

TABLE = Table(
    ["mixer", "loss", "note"], [["S-p", "1.21", "a|b"], ["G", "**1.13**", "<i>"]], frozenset({"note"})
)


def test_markdown():
    assert TABLE.markdown() == (
        "| mixer | loss | note |\n| --- | ---: | --- |\n| S-p | 1.21 | a\\|b |\n| G | **1.13** | <i> |"
    )


def test_terminal():
    assert TABLE.terminal().split("\n") == ["mixer  loss  note", "S-p    1.21  a|b", "G      1.13  <i>"]


def test_terminal_never_folds_a_wide_table():
    wide = Table(["a", "b"], [["x" * 200, "y" * 200]])
    assert "x" * 200 in wide.terminal()


def test_html_is_escaped_and_aligned():
    assert TABLE.html().count("<tr>") == 3
    assert '<td class="number">1.21</td>' in TABLE.html()
    assert '<td class="number"><b>1.13</b></td>' in TABLE.html()
    assert "<td>a|b</td>" in TABLE.html()
    assert "<td>&lt;i&gt;</td>" in TABLE.html()


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="1 cells, the table 2 columns"):
        Table(["a", "b"], [["x"]])


def test_rows_from_results():
    columns = [
        ("mixer", "{mixer}"),
        ("loss", "{loss:.2f}"),
        ("best", lambda row: "yes" if row["loss"] < 1.2 else ""),
    ]
    results = [{"mixer": "S-p", "loss": 1.212}, {"mixer": "G", "loss": 1.131}]
    assert Table.of(results, columns) == Table(
        ["mixer", "loss", "best"], [["S-p", "1.21", ""], ["G", "1.13", "yes"]]
    )
