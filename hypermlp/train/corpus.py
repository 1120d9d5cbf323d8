"""Documents from the source that a recipe names, always in the same order."""

import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError, first_line
from hypermlp.train.recipe import DataSettings

REPLACED = "\ufffd"  # stands for bytes that are not UTF-8
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")


def documents(data: DataSettings, damaged: Counter[str] | None = None) -> Iterator[str]:
    """Yield the source's non-empty texts up to ``data.limit`` characters; the last text is cut there.

    ``damaged`` counts the characters of each file that are not UTF-8 and are read as U+FFFD.
    """
    left = data.limit
    for read in _read(data, Counter() if damaged is None else damaged):
        text = read.encode("utf-8", "replace").decode("utf-8")  # JSON may hold unpaired surrogates
        if text.strip():
            yield text[:left]
            left = None if left is None else left - len(text)
            if left is not None and left <= 0:
                return


def _read(data: DataSettings, damaged: Counter[str]) -> Iterator[str]:
    """Yield all texts of the source, and count what is ``damaged``."""
    if data.source.startswith("hub:"):
        yield from (_text(record, data, data.source) for record in hub_dataset(data))
    for path in corpus_files(data.source):
        for text in _read_file(path, data):
            if REPLACED in text:
                damaged[str(path)] += text.count(REPLACED)
            yield text


def corpus_files(source: str) -> list[Path]:
    """Return the files of a source on this machine, in their order; none for a Hugging Face dataset."""
    if source.startswith("hub:"):
        return []
    return stdlib_files() if source == "stdlib" else source_files(source)


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library, which every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files = [path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def source_files(source: str) -> list[Path]:
    """Return a file, or the files of a folder that can be read; raise if there is none."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"data.source is {source!r}, which does not exist; "
            "allowed: 'stdlib', a file, a folder, or 'hub:NAME'"
        )
    files = sorted(file for file in (path, *path.rglob("*")) if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise UserError(
            f"data.source is {source!r}; allowed are files of {', '.join(SUFFIXES)}, or a folder with some"
        )
    return files


def skipped_files(source: str) -> Counter[str]:
    """Return how many files of a folder are not read, by their suffix."""
    path = Path(source).expanduser()
    if source == "stdlib" or not path.is_dir():
        return Counter()
    others = (file for file in path.rglob("*") if file.is_file() and file.suffix not in SUFFIXES)
    return Counter(file.suffix or "no suffix" for file in others)


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
        yield from (_text(record, data, str(path)) for batch in batches for record in batch.to_pylist())
    else:
        yield path.read_text(encoding="utf-8", errors="ignore" if data.source == "stdlib" else "replace")


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from error


def _text(record: Any, data: DataSettings, where: str) -> str:
    """Return the text of a record; ``where`` names its file, and its line if it has one."""
    if not isinstance(record, dict):
        raise UserError(
            f"{where} has a {type(record).__name__} as a record; it must be an object with fields"
        )
    text = record.get(data.text_field)
    if not isinstance(text, str):
        raise UserError(
            f"data.text_field is {data.text_field!r}, "
            f"but a record of {where} has {', '.join(map(repr, record))}"
        )
    return text


def hub_dataset(data: DataSettings) -> Any:
    """Return a Hugging Face dataset, streamed or downloaded."""
    import datasets

    name, (split, _, config) = data.source.removeprefix("hub:"), data.split.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=data.streaming)
    except (ValueError, OSError) as error:  # an unknown split or configuration, or no network
        advice = "check the name and the network, or name a file or folder here"
        raise UserError(
            f"data.source {data.source!r} with data.split {data.split!r}: {first_line(error)}; {advice}"
        ) from error
