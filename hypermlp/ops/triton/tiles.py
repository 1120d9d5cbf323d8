"""The tile sizes of the kernels: a table, because autotuning would need a GPU."""

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and slots of a tile, and how many warps and pipeline stages compute it."""

    rows: int
    slots: int
    warps: int
    stages: int = 2


TILES = {
    "inner": Tile(16, 32, 1, 3),
    "activate": Tile(16, 32, 1),
    "finish": Tile(32, 64, 2),
    "project": Tile(16, 32, 1),
    "activate_backward": Tile(16, 32, 1),
    "parameters": Tile(32, 32, 4),
    "parameters_scalar": Tile(32, 32, 4, 1),  # stride 1: a pipeline would need too many registers
}
HIGH_RANK_TILES = TILES | {"activate_backward": Tile(16, 32, 2)}
"""Tiles for ranks above 16: more warps share the registers."""
FLOAT32_TILES = TILES | {
    "activate": Tile(16, 32, 2),
    "finish": Tile(32, 32, 4),
    "project": Tile(16, 32, 2),
    "activate_backward": Tile(16, 32, 4),
}
"""Tiles for products that no matrix unit computes: more warps share them, too."""


def choose_tiles(rank: int, precision: str) -> dict[str, Tile]:
    """Return the tiles for mixes of this rank, and products of this precision ("ieee" or "tf32")."""
    if precision == "ieee":
        return FLOAT32_TILES
    return HIGH_RANK_TILES if rank > 16 else TILES


RESIDUES = 8
"""A program takes every eighth row, so that all of its rows are aligned alike: 8 cells are 16 bytes in half
precision."""
ROWS = 128
"""Rows of a chunk come in multiples of this number, so that tiles are full in every residue class."""
PROGRAMS = 2048
"""Row kernels are split over slots until they have about as many programs: more than 1,500 keep a large GPU
busy."""
DECODE_KEYS = 64
"""Keys of one tile when decoding."""
DECODE_PROGRAMS = 512
"""Decoding is split over keys until each kernel has about as many programs."""
DECODE_CHANNELS = 64
"""Channels of a head that one program multiplies when decoding."""
COLLECT = 256
"""Sums that one program of ``collect`` owns."""
L2_BYTES = 40 << 20
"""Level-2 cache that is assumed where there is no device: that of an A100."""
L2_SHARE = 0.8
"""How much of it the scratch of a chunk may take."""


def padded_rank(rank: int) -> int:
    """Return the rank that kernels compute with: a power of two, at least 16, as matrix units need."""
    return max(16, 1 << (rank - 1).bit_length()) if rank else 16
