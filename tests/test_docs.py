"""The tables of the documents are their records', row by row."""

from pathlib import Path

import pytest

from hypermlp.bench.op import Row, table
from hypermlp.records import read_record

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("document", "record"), [("README.md", "bench-op.json"), ("docs/performance.md", "bench-op-sweep.json")], ids=str)
def test_benchmark_tables(document, record):
    rows = [Row(**row) for row in read_record(ROOT / "docs" / "results" / record, "bench-op")["results"]]
    assert table(rows) in (ROOT / document).read_text(), f"{document} does not show docs/results/{record}; paste its table"
