"""Documents from wherever a recipe says, always in the same order."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.train.recipe import DataSettings

TEXT = (".txt", ".md", ".py")
RECORDS = (".jsonl", ".parquet")


def documents(data: DataSettings) -> Iterator[str]:
    """The texts, none empty, until ``data.limit`` characters are reached; the last one is cut there."""
    left = data.limit
    for read in _read(data):
        text = read.encode("utf-8", "replace").decode("utf-8")  # JSON may hold halves of characters
        if not text.strip():
            continue
        if left is None:
            yield text
            continue
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _read(data: DataSettings) -> Iterator[str]:
    if data.source == "stdlib":
        yield from (path.read_text(encoding="utf-8", errors="ignore") for path in stdlib_files())
    elif data.source.startswith("hub:"):
        yield from (_text(record, data) for record in hub_dataset(data))
    else:
        for path in source_files(data.source):
            yield from _read_file(path, data)


def stdlib_files() -> list[Path]:
    """The Python standard library's own source: on every machine, and nothing is downloaded."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files = [path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def source_files(source: str) -> list[Path]:
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"data.source is {source!r}, which does not exist; allowed: 'stdlib', a file, a folder, or 'hub:NAME'"
        )
    files = sorted(p for p in path.rglob("*") if p.suffix in (*TEXT, *RECORDS)) if path.is_dir() else [path]
    wrong = next((p for p in files if p.suffix not in (*TEXT, *RECORDS)), None)
    if not files or wrong is not None:
        raise UserError(
            f"data.source is {source!r}; allowed are files of {', '.join((*TEXT, *RECORDS))}, or a folder with some"
        )
    return files


def _read_file(path: Path, data: DataSettings) -> Iterator[str]:
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(_parsed(line, f"{path}:{number}"), data, f"{path}:{number}")
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is not Parquet: {error}") from error
        for batch in batches:
            for record in batch.to_pylist():
                yield _text(record, data, str(path))
    else:
        yield path.read_text(encoding="utf-8", errors="replace")


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from error


def _text(record: Any, data: DataSettings, where: str = "") -> str:
    if not isinstance(record, dict):
        raise UserError(
            f"{where or data.source} has {type(record).__name__} for a record; it must be an object with fields"
        )
    text = record.get(data.text_field)
    if not isinstance(text, str):
        fields = ", ".join(map(repr, record))
        raise UserError(
            f"data.text_field is {data.text_field!r}, but a record {where or 'of ' + data.source} has {fields}"
        )
    return text


def hub_dataset(data: DataSettings) -> Any:
    """A Hugging Face dataset, streamed or not."""
    import datasets

    split, _, config = data.split.partition(":")
    return datasets.load_dataset(
        data.source.removeprefix("hub:"), config or None, split=split, streaming=data.streaming
    )
