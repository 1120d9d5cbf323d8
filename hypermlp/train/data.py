"""Tokens on disk, and training sequences cut from them.

Prepared data is a folder: the tokens of all documents in a row, where each document begins, the tokenizer,
and a description with checksums. Sequences are a pure function of (data, seed, index), so a run resumes by
counting.
"""

import hashlib
import itertools
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoTokenizer

from hypermlp import __version__
from hypermlp.cache import cache_directory, require_private
from hypermlp.errors import UserError, first_line
from hypermlp.sealed import digests, file_digest, replace
from hypermlp.train.corpus import SUFFIXES, corpus_files, documents, skipped_files
from hypermlp.train.recipe import DataSettings
from hypermlp.train.tokenization import build_tokenizer, save_tokenizer

SPLITS = ("train", "validation")
IGNORED = -100  # a target that does not count in the loss
DESCRIPTION = "prepared.json"
DTYPES = ("uint16", "uint32")
REQUIRED = {f"{split}{end}" for split in SPLITS for end in (".bin", "-begins.npy")}
TOKENIZED_AT_ONCE = 256  # documents
ONLY_DOCUMENT = 0.1  # least share of a corpus of one document that is held out
FEW = 4096  # tokens held out: a loss of fewer says little


class PreparedData:
    """Prepared data, read from its folder.

    ``tokens[split]`` are the tokens, ``begins[split]`` the first token of each document, and ``digest``
    identifies the content. One process per machine verifies the checksums.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.description = _read_description(folder)
        checksums = self.description["sha256"]
        self.digest = hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
        for name, digest in checksums.items():
            if os.environ.get("LOCAL_RANK", "0") == "0" and file_digest(folder / name) != digest:
                raise UserError(
                    f"{folder / name} is not what was prepared: its checksum differs; "
                    f"remove {folder} and prepare again"
                )
        dtype = np.dtype(self.description["dtype"])
        for split, count in self.description["tokens"].items():
            size = (folder / f"{split}.bin").stat().st_size
            if size != count * dtype.itemsize:
                raise _damaged(folder, f"{split}.bin has {size} bytes, not {count} tokens of {dtype.name}")
        self.tokens = {split: np.memmap(folder / f"{split}.bin", dtype, "r") for split in SPLITS}
        self.begins = {split: np.load(folder / f"{split}-begins.npy", mmap_mode="r") for split in SPLITS}
        # It is saved with the model, and its prompts go to generate: padding belongs on the left.
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left")


def _damaged(folder: Path, reason: str) -> UserError:
    return UserError(f"{folder / DESCRIPTION} is damaged: {reason}; remove {folder} and prepare again")


def _read_description(folder: Path) -> dict[str, Any]:
    """Return the checked description of prepared data.

    It decides how the bytes of the tokens are read, so it must be what ``_write`` wrote.
    """
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        seal = description.pop("seal", None)  # data prepared by earlier versions has none
        checksums, dtype, counts = (
            dict(description["sha256"]),
            description["dtype"],
            dict(description["tokens"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"it is not a description of prepared data ({first_line(error)})") from error
    if seal not in (None, _seal(description)):
        raise _damaged(folder, "its checksum differs")
    missing = REQUIRED - checksums.keys()
    if missing:
        raise _damaged(folder, f"it has no checksum of {', '.join(sorted(missing))}")
    if dtype not in DTYPES:
        raise _damaged(folder, f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    if counts.keys() != set(SPLITS):
        raise _damaged(folder, f"it counts tokens of {sorted(counts)}, expected: {', '.join(SPLITS)}")
    return description


def _seal(description: dict[str, Any]) -> str:
    """Return the checksum of a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def prepare(data: DataSettings) -> PreparedData:
    """Return the prepared data of a recipe from the cache; if it is missing, one process makes it first.

    The folder in the cache is complete or absent.
    """
    folder = _prepared_folder(data)
    if not (folder / DESCRIPTION).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / DESCRIPTION).exists():  # else another process has just made it
                _make(data, folder)
    return PreparedData(folder)


def _make(data: DataSettings, folder: Path) -> None:
    """Write prepared data aside and publish it as ``folder``; leave nothing behind if that fails."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
    aside.mkdir()
    try:
        _write(data, aside)
        replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prepared_folder(data: DataSettings) -> Path:
    """Return the folder of the prepared data: in ``data.cache``, or in the folder ``data`` of our cache.

    Others must not be able to write to our cache. ``data.cache`` may be shared: the user chooses it.
    """
    key = _key(data)
    if data.cache:
        return Path(data.cache).expanduser() / key
    root = cache_directory()
    # Data prepared by earlier revisions is in a folder beside the root, or in HYPERMLP_CACHE.
    earlier = Path(os.environ.get("HYPERMLP_CACHE") or root.parent) / "hypermlp-data" / key
    folder = earlier if (earlier / DESCRIPTION).exists() else root / "data" / key
    require_private(folder.parent, "data")
    return folder


def _key(data: DataSettings) -> str:
    """Return a folder name that changes with everything the tokens depend on."""
    settings = [data.source, data.text_field, data.split, data.tokenizer, data.validation, data.limit]
    key = hashlib.sha256(json.dumps(settings).encode())
    files = corpus_files(data.source)
    if Path(data.tokenizer).is_dir():
        files += sorted(path for path in Path(data.tokenizer).iterdir() if path.is_file())
    for path in files:
        key.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    name = data.source.replace("/", "-").replace(":", "-").strip("-.")[-40:]
    return f"{name}-{key.hexdigest()[:16]}"


def _write(data: DataSettings, folder: Path) -> None:
    """Tokenize the source and write prepared data into ``folder``."""
    tokenizer = build_tokenizer(data.tokenizer, documents(data))
    dtype = np.dtype(DTYPES[0] if len(tokenizer) <= 1 << 16 else DTYPES[1])
    damaged: Counter[str] = Counter()
    lengths = _write_tokens(documents(data, damaged), data, tokenizer, dtype, folder)
    _fill_splits(data, folder, lengths, dtype)
    for split in SPLITS:
        if not lengths[split]:
            raise UserError(f"data.source {data.source!r} has no text; name files that are not empty")
        begins = np.concatenate([[0], np.cumsum(lengths[split])[:-1]]).astype(np.int64)
        np.save(folder / f"{split}-begins.npy", begins)
    save_tokenizer(tokenizer, folder / "tokenizer")
    description = {
        "hypermlp": __version__,
        "settings": vars(data),
        "vocab_size": len(tokenizer),
        "dtype": dtype.name,
        "tokens": {split: sum(lengths[split]) for split in SPLITS},
        "documents": {split: len(lengths[split]) for split in SPLITS},
        "sha256": digests(folder),
    }
    sealed = description | {"seal": _seal(description)}
    (folder / DESCRIPTION).write_text(json.dumps(sealed, indent=2) + "\n")
    counts = ", ".join(f"{sum(lengths[split]):,} tokens for {split}" for split in SPLITS)
    print(f"prepared {data.source}: {counts}", flush=True)
    for note in _notes(data, damaged, sum(lengths["validation"])):
        print(note, flush=True)


def _notes(data: DataSettings, damaged: Counter[str], held: int) -> Iterator[str]:
    """Yield what a user should know about the source; ``held`` is the number of tokens for validation."""
    if skipped := skipped_files(data.source):
        kinds = ", ".join(f"{count} of {suffix}" for suffix, count in skipped.most_common(5))
        yield f"not read: {skipped.total()} files ({kinds}); read are {', '.join(SUFFIXES)}"
    if damaged and data.source != "stdlib":
        first, _ = damaged.most_common(1)[0]
        yield (
            f"not UTF-8: {damaged.total():,} characters in {len(damaged)} files, most of them in {first}; "
            "they were read as U+FFFD. Convert the files to UTF-8, and the data is prepared again"
        )
    if held < FEW:
        yield (
            f"only {held:,} tokens are held out, so validation losses are rough; data.validation is "
            f"{data.validation:g}, the share of documents held out: a larger one holds out more"
        )


def _write_tokens(
    texts: Iterator[str], data: DataSettings, tokenizer: Any, dtype: np.dtype[Any], folder: Path
) -> dict[str, "array[int]"]:
    """Write every document's tokens to the file of its split; return the documents' lengths by split."""
    lengths = {split: array("q") for split in SPLITS}
    # A slow bar, shown only if preparing takes longer than a few seconds: a log gets a line now and then.
    bar = tqdm(desc=f"preparing {data.source}", unit=" tokens", delay=5, mininterval=10)
    with bar, open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as validation:
        files = {"train": train, "validation": validation}
        for ids, split in _encoded(texts, data, tokenizer):
            files[split].write(np.asarray(ids, dtype=dtype).tobytes())
            lengths[split].append(len(ids))
            bar.update(len(ids))
    return lengths


def _fill_splits(
    data: DataSettings, folder: Path, lengths: dict[str, "array[int]"], dtype: np.dtype[Any]
) -> None:
    """Fill a split that is empty by chance, because the corpus has few documents.

    The last training document moves to validation; if it is the only one, its end does.
    """
    if not lengths["train"]:
        os.replace(folder / "validation.bin", folder / "train.bin")
        (folder / "validation.bin").touch()
        lengths["train"], lengths["validation"] = lengths["validation"], lengths["train"]
    if lengths["validation"] or not lengths["train"]:
        return
    moved = lengths["train"].pop()
    if not lengths["train"]:
        whole = moved  # two tokens at least, one of them the end of the text
        moved = min(max(1, round(whole * max(data.validation, ONLY_DOCUMENT))), whole - 1)
        lengths["train"].append(whole - moved)
    lengths["validation"].append(moved)
    kept = sum(lengths["train"]) * dtype.itemsize  # bytes
    np.fromfile(folder / "train.bin", dtype, offset=kept).tofile(folder / "validation.bin")
    os.truncate(folder / "train.bin", kept)


def _encoded(texts: Iterator[str], data: DataSettings, tokenizer: Any) -> Iterator[tuple[list[int], str]]:
    """Yield every document's tokens, with the end-of-text token, and its split."""
    while batch := list(itertools.islice(texts, TOKENIZED_AT_ONCE)):
        for text, ids in zip(batch, tokenizer(batch, add_special_tokens=False)["input_ids"], strict=True):
            yield [*ids, tokenizer.eos_token_id], "validation" if held_out(text, data.validation) else "train"


def held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the ``share`` held out for validation; its text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < share


class Sequences(Dataset[dict[str, Tensor]]):
    """The training sequences 0, 1, ... of a run.

    A sequence has ``input_ids``, ``labels`` and ``shift_labels`` (both are the next tokens), and
    ``document_ids`` unless ``data.packing`` is "stream". ``count`` may exceed an epoch; every epoch has its
    own order.
    """

    def __init__(self, prepared: PreparedData, split: str, data: DataSettings, *, count: int, seed: int):
        self.tokens, self.begins = prepared.tokens[split], prepared.begins[split]
        self.data, self.count, self.seed = data, count, seed
        self.per_epoch = (len(self.tokens) - 1) // data.context
        if self.per_epoch < 1:
            raise UserError(
                f"{len(self.tokens)} tokens for {split} make no sequence of data.context = {data.context}; "
                "give more data, or a smaller context"
            )
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, its permutation), the last one used

    def __len__(self) -> int:
        return self.count

    def first_token(self, index: int) -> int:
        """Return the position in the data at which sequence ``index`` begins."""
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
            # A document does not determine how the next one begins, so that token is no target.
            targets[owners[1:] != owners[:-1]] = IGNORED
            item["document_ids"] = owners[:-1]
        return item
