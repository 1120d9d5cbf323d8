"""Tokens on disk, and training sequences cut from them.

Prepared data is a folder: the tokens of all documents in a row, where each begins, the tokenizer, and a description with
checksums. Sequences are a pure function of (data, seed, index), so a run resumes by counting.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from hypermlp import __version__
from hypermlp.cache import cache_directory
from hypermlp.errors import UserError
from hypermlp.train.checkpoints import file_digest
from hypermlp.train.corpus import documents, source_files, stdlib_files
from hypermlp.train.recipe import DataSettings
from hypermlp.train.tokenization import build_tokenizer, save_tokenizer

SPLITS = ("train", "validation")
IGNORED = -100  # a target that counts for nothing
DESCRIPTION = "prepared.json"


class PreparedData:
    """What ``prepare`` made: ``tokens[split]``, ``begins[split]`` (first token of each document) and ``tokenizer``."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
            checksums = self.description["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder / DESCRIPTION} is damaged; remove {folder} and prepare again"
            ) from error
        self.digest = hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
        mine = (
            self.description["sha256"].items() if _is_local_main() else ()
        )  # one process of a machine checks for all
        for name, digest in mine:
            if file_digest(folder / name) != digest:
                raise UserError(
                    f"{folder / name} is not what was prepared: its checksum differs; remove {folder} and prepare again"
                )
        dtype = np.dtype(self.description["dtype"])
        self.tokens = {split: np.memmap(folder / f"{split}.bin", dtype, "r") for split in SPLITS}
        self.begins = {split: np.load(folder / f"{split}-begins.npy", mmap_mode="r") for split in SPLITS}
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")


def prepare(data: DataSettings, *, quiet: bool = False) -> PreparedData:
    """The prepared data of a recipe: from the cache if it is there, or made and put there, complete or not at all."""
    folder = _prepared_folder(data)
    cache = folder.parent
    while not _is_local_main() and not (folder / DESCRIPTION).exists():
        time.sleep(0.2)  # the first process of each machine prepares; if it fails, torchrun ends this one too
    if not (folder / DESCRIPTION).exists():
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(cache)
        if folder.exists():  # without its description it is nothing
            shutil.rmtree(folder)
        aside = Path(
            tempfile.mkdtemp(dir=cache, prefix=f"{socket.gethostname()}-{os.getpid()}-", suffix=".part")
        )
        try:
            _write(data, aside, quiet=quiet)
            try:
                aside.rename(folder)
            except OSError:  # another process was faster
                if not (folder / DESCRIPTION).exists():
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return PreparedData(folder)


def _remove_leftovers(cache: Path) -> None:
    """Of processes of this machine that were killed while they prepared."""
    for path in cache.glob(f"{socket.gethostname()}-*.part"):
        pid = path.name.removeprefix(socket.gethostname() + "-").split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_local_main() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _prepared_folder(data: DataSettings) -> Path:
    """Return the folder of the prepared data: in ``data.cache``, or in the folder ``data`` of our cache."""
    key = _key(data)
    if data.cache:
        return Path(data.cache) / key
    root = cache_directory()
    # Data prepared by earlier revisions is in a folder beside the root, or in HYPERMLP_CACHE.
    earlier = Path(os.environ.get("HYPERMLP_CACHE") or root.parent) / "hypermlp-data" / key
    return earlier if (earlier / DESCRIPTION).exists() else root / "data" / key


def _key(data: DataSettings) -> str:
    """A name that changes with everything the tokens depend on."""
    settings = [data.source, data.text_field, data.split, data.tokenizer, data.validation, data.limit]
    key = hashlib.sha256(json.dumps(settings).encode())
    files = (
        []
        if data.source.startswith("hub:")
        else stdlib_files()
        if data.source == "stdlib"
        else source_files(data.source)
    )
    if Path(data.tokenizer).is_dir():
        files += sorted(path for path in Path(data.tokenizer).iterdir() if path.is_file())
    for path in files:
        key.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    name = data.source.replace("/", "-").replace(":", "-").strip("-.")[-40:]
    return f"{name}-{key.hexdigest()[:16]}"


def _write(data: DataSettings, folder: Path, *, quiet: bool) -> None:
    tokenizer = build_tokenizer(data.tokenizer, documents(data))
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    lengths = {split: array("q") for split in SPLITS}
    tell = Teller(data.source)
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        for ids, split in _encoded(data, tokenizer):
            files[split].write(np.asarray(ids, dtype=dtype).tobytes())
            lengths[split].append(len(ids))
            if not quiet:
                tell(len(ids))
    if not lengths["validation"] and len(lengths["train"]) > 1:
        _move_last_document(folder, lengths, dtype)
    for split in SPLITS:
        if not lengths[split]:
            raise UserError(
                f"data.source {data.source!r} has no document for {split}; it needs two documents at least"
            )
        begins = np.concatenate([[0], np.cumsum(lengths[split])[:-1]]).astype(np.int64)
        np.save(folder / f"{split}-begins.npy", begins)
    save_tokenizer(tokenizer, folder / "tokenizer")
    tokens = {split: sum(lengths[split]) for split in SPLITS}
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    description = {
        "hypermlp": __version__,
        "settings": vars(data),
        "vocab_size": len(tokenizer),
        "dtype": dtype.name,
        "tokens": tokens,
        "documents": {split: len(lengths[split]) for split in SPLITS},
        "sha256": {path.relative_to(folder).as_posix(): file_digest(path) for path in written},
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    if not quiet:
        counts = ", ".join(f"{n:,} tokens for {split}" for split, n in tokens.items())
        print(f"prepared {data.source}: {counts}", flush=True)


class Teller:
    """Says how far the preparation is, every ten seconds."""

    def __init__(self, source: str):
        self.source, self.tokens = source, 0
        self.began = self.told = time.monotonic()

    def __call__(self, tokens: int) -> None:
        self.tokens += tokens
        if (now := time.monotonic()) - self.told > 10:
            self.told = now
            print(
                f"preparing {self.source}: {self.tokens:,} tokens, {self.tokens / (now - self.began):,.0f} per second",
                flush=True,
            )


def _move_last_document(folder: Path, lengths: dict[str, "array[int]"], dtype: np.dtype[Any]) -> None:
    """A small corpus may leave validation empty: it gets the last document."""
    count = lengths["train"].pop()
    lengths["validation"].append(count)
    with open(folder / "train.bin", "r+b") as train:
        train.seek(-count * dtype.itemsize, os.SEEK_END)
        (folder / "validation.bin").write_bytes(train.read())
        train.seek(-count * dtype.itemsize, os.SEEK_END)
        train.truncate()


def _encoded(data: DataSettings, tokenizer: Any) -> Iterator[tuple[list[int], str]]:
    """Every document's tokens, its end included, and its split, which depends on its text alone."""
    for batch in _batches(documents(data), 256):
        for text, ids in zip(batch, tokenizer(batch, add_special_tokens=False)["input_ids"], strict=True):
            yield [*ids, tokenizer.eos_token_id], "validation" if held_out(text, data.validation) else "train"


def held_out(text: str, share: float) -> bool:
    """Whether a document is among the share of all that is kept for validation: its text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < share


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences number 0, 1, ... of a run: ``input_ids``, ``labels`` and ``shift_labels`` (the next tokens), ``document_ids``.

    ``count`` may be larger than an epoch; every epoch has an order of its own.
    """

    def __init__(self, prepared: PreparedData, split: str, data: DataSettings, *, count: int, seed: int):
        self.tokens, self.begins = prepared.tokens[split], prepared.begins[split]
        self.data, self.count, self.seed = data, count, seed
        self.per_epoch = (len(self.tokens) - 1) // data.context
        if self.per_epoch < 1:
            raise UserError(
                f"{len(self.tokens)} tokens for {split} make no sequence of data.context = {data.context}; give more data"
            )
        self._order: tuple[int, np.ndarray] | None = None  # of one epoch

    def __len__(self) -> int:
        return self.count

    def first_token(self, index: int) -> int:
        """Where sequence ``index`` begins."""
        if self.data.order == "random":
            generator = np.random.default_rng([self.seed, index])
            return int(generator.integers(0, len(self.tokens) - self.data.context))
        epoch, place = divmod(index, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.per_epoch)
        return int(self._order[1][place]) * self.data.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, context = self.first_token(index), self.data.context
        window = torch.from_numpy(self.tokens[first : first + context + 1].astype(np.int64))
        inputs, targets = window[:-1], window[1:].clone()
        item = {"input_ids": inputs, "labels": targets, "shift_labels": targets}
        if self.data.packing == "documents":
            positions = np.arange(first, first + context + 1)
            owners = torch.from_numpy(np.searchsorted(self.begins, positions, side="right"))
            targets[owners[1:] != owners[:-1]] = (
                IGNORED  # nothing in a document tells how the next one begins
            )
            item["document_ids"] = owners[:-1]
        return item
