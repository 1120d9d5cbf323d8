"""Launches kernels and GEMMs, cuts a call into chunks of query rows, and allocates their scratch memory.

No function reads the contents of a tensor, so the host never waits for the device. On the meta device
everything runs but the kernels and GEMMs themselves; tests count launches in this way, with ``recording``.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention
from hypermlp.ops.triton import tiles
from hypermlp.ops.triton.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a call is cut into chunks and programs. Results depend on it by rounding only; tests change it."""

    residues: int = tiles.RESIDUES
    rows: int = tiles.ROWS
    programs: int = tiles.PROGRAMS
    decode_programs: int = tiles.DECODE_PROGRAMS
    scratch_bytes: int | None = None
    """Bytes that the scratch of one chunk may take; None for a share of the device's level-2 cache."""


class Launch(NamedTuple):
    """One launch: a Triton kernel, or a GEMM, which has no ``kernel`` and its sizes as ``grid``."""

    name: str
    grid: tuple[int, ...]
    kernel: Any
    arguments: dict[str, Any]

    @property
    def programs(self) -> int:
        return math.prod(self.grid) if self.kernel is not None else 0


class Record:
    """The launches and the scratch of the calls that ran within ``recording``."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.scratch: dict[str, int] = {}
        """The most bytes of each scratch buffer."""


_settings = Settings()
_record: Record | None = None


@contextlib.contextmanager
def use_settings(**changes: Any) -> Iterator[None]:
    """Change settings within the context."""
    global _settings
    before, _settings = _settings, dataclasses.replace(_settings, **changes)
    try:
        yield
    finally:
        _settings = before


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record what is launched and allocated within the context."""
    global _record
    before, _record = _record, Record()
    try:
        yield _record
    finally:
        _record = before


def launch(kernel: Any, name: str, grid: tuple[int, ...], tile: Tile | None, **arguments: Any) -> None:
    """Run a kernel, unless its tensors are on the meta device."""
    if tile is not None:
        arguments |= {"BM": tile.rows, "BN": tile.slots}
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    if _record is not None:
        _record.launches.append(Launch(name, grid, kernel, arguments | options))
    if not any(isinstance(x, Tensor) and x.is_meta for x in arguments.values()):
        kernel[grid](**arguments, **options, enable_fp_fusion=True)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """Write a b, or out + a b, into strided memory; products of half precision may be summed in float32."""
    if _record is not None:
        _record.launches.append(Launch("gemm", (*a.shape, b.shape[2]), None, {}))
    if out.is_meta:
        return
    if a.dtype == out.dtype and (a.is_cuda or a.dtype in (torch.float32, torch.float64)):
        if accumulate:
            out.baddbmm_(a, b)
        else:
            torch.bmm(a, b, out=out)
    elif a.is_cuda and torch.version.hip is None:
        if accumulate:
            torch.ops.aten.baddbmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    else:  # such products exist for CUDA only
        product = torch.bmm(a.to(torch.float32), b.to(torch.float32))
        out.add_(product) if accumulate else out.copy_(product)


def empty(name: str, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return scratch memory of ``size`` numbers. Tests replace this function, to guard the memory."""
    return like.new_empty(size, dtype=dtype)


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose elements lie as kernels expect them; None stays None."""
    return None if x is None else x.contiguous()


class Scratch:
    """Scratch buffers by name, which all chunks of a call share."""

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous buffer; the previous content of that name is lost."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = empty(name, self.like, size, dtype)
            if _record is not None:
                _record.scratch[name] = max(_record.scratch.get(name, 0), size * dtype.itemsize)
        return self.buffers[name][:size].view(shape)


class Chunk(NamedTuple):
    """The query rows of some sequences that are computed at once, and the size of their scratch."""

    items: slice
    queries: slice
    num_keys: int
    """Keys up to the last query of the chunk."""
    ld: int

    @property
    def num_items(self) -> int:
        return int(self.items.stop - self.items.start)

    @property
    def num_rows(self) -> int:
        return int(self.queries.stop - self.queries.start)


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size) or tiles.L2_BYTES


def scratch_budget(device: torch.device) -> int:
    """Return the bytes that the scratch of one chunk should not exceed, so that it stays in the cache."""
    if _settings.scratch_bytes is not None:
        return _settings.scratch_bytes
    return int(tiles.L2_SHARE * (_l2_bytes(device) if device.type == "cuda" else tiles.L2_BYTES))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Geometry:
    """The addresses of rows and slots of one call, and how its kernels are cut into programs."""

    def __init__(self, arguments: Attention, bytes_per_cell: int):
        """``bytes_per_cell``: of all scratch buffers, for one query, key and head."""
        q, k, v = arguments[:3]
        self.batch, self.num_queries, self.num_keys = q.shape[0], q.shape[1], k.shape[1]
        self.heads, self.branches = v.shape[2], q.shape[2]
        self.offset = self.num_keys - self.num_queries
        self.lag, self.starts = arguments.layout == "lag", contiguous(arguments.starts)
        # In layout "forward" with starts rows begin anywhere: no residue class is aligned.
        self.residues = _settings.residues if self.lag or self.starts is None else 1
        self.precision = dot_precision(q.dtype)
        ranks = [mix.left.shape[2] for mix in (arguments.mix1, arguments.mix2) if mix is not None]
        self.tiles = tiles.choose_tiles(max(ranks, default=0), self.precision)
        widest = max(tile.slots for tile in self.tiles.values())
        self.pad = _round_up(widest + self.residues, 16)
        self._tail = widest + self.residues
        self._bytes_per_row_cell = bytes_per_cell * self.heads
        budget = scratch_budget(q.device)
        rows = min(_settings.rows, self.num_queries)
        fitting = budget // (self._bytes_per_row_cell * rows * self.ld(self.num_keys))
        self.items_per_chunk = max(1, min(self.batch, fitting))
        self._budget = budget
        # One residue class at a time is fast, but each has gradients of its own to read and write.
        many_rows = min(fitting * rows, self.batch * self.num_queries) >= 64 * self.residues
        self.parameter_residues = self.residues if many_rows else 1

    def ld(self, num_keys: int) -> int:
        """Return the cells of a row."""
        return _round_up(self.pad + num_keys + self._tail, 16)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks; the fewer keys there are so far, the more rows a chunk has."""
        for item in range(0, self.batch, self.items_per_chunk):
            items = slice(item, min(item + self.items_per_chunk, self.batch))
            first = 0
            while first < self.num_queries:
                last = min(first + self._chunk_rows(items.stop - item, first), self.num_queries)
                keys = self.offset + last
                yield Chunk(items, slice(first, last), keys, self.ld(keys))
                first = last

    def _chunk_rows(self, items: int, first: int) -> int:
        cells = self._budget // (self._bytes_per_row_cell * items)
        rows = _settings.rows
        while (
            first + rows < self.num_queries
            and (rows + _settings.rows) * self.ld(self.offset + first + rows + _settings.rows) <= cells
        ):
            rows += _settings.rows
        return rows

    def arguments(self, chunk: Chunk, *, residues: int | None = None) -> dict[str, Any]:
        """Return the arguments that every row kernel takes for a chunk."""
        return {
            "starts": None if self.starts is None else self.starts[chunk.items],
            "num_rows": chunk.num_rows,
            "first_query": chunk.queries.start,
            "num_queries": self.num_queries,
            "offset": self.offset,
            "ld": chunk.ld,
            "pad": self.pad,
            "HAS_STARTS": self.starts is not None,
            "LAG": self.lag,
            "STRIDE": self.residues if residues is None else residues,
            "PRECISION": self.precision,
        }

    def row_programs(self, name: str, chunk: Chunk) -> int:
        """Return the programs that cover the rows of one matrix."""
        return -(-chunk.num_rows // (self.tiles[name].rows * self.residues)) * self.residues

    def slot_tiles(self, name: str, chunk: Chunk, residues: int | None = None) -> int:
        residues = self.residues if residues is None else residues
        return -(-(chunk.num_keys + residues - 1) // self.tiles[name].slots)

    def splits(self, name: str, chunk: Chunk, matrices: int) -> tuple[int, int]:
        """Return into how many parts the slots are split, and the tiles of each."""
        count = self.slot_tiles(name, chunk)
        wanted = -(-_settings.programs // (matrices * self.row_programs(name, chunk)))
        per_split = max(1, round(count / wanted))
        return -(-count // per_split), per_split


def decode_splits(num_keys: int, matrices: int) -> tuple[int, int]:
    """Return into how many parts the keys are split when decoding, and the tiles of each."""
    count = -(-num_keys // tiles.DECODE_KEYS)
    per_split = max(1, count // max(1, _settings.decode_programs // matrices))
    return -(-count // per_split), per_split


def dot_precision(dtype: torch.dtype) -> str:
    """Return how kernels multiply float32: as float32, unless the user or half precision allows TF32."""
    if dtype == torch.float64 or torch.version.hip is not None:  # AMD's units multiply float32 as it is
        return "ieee"
    return "ieee" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
