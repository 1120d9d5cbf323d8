"""One call of the operator: what the forward and the backward pass share.

Shapes: B batch, H heads, G branches (H, or 2 H for "glu"), Tq queries, Tk keys, M rows and n keys of a
chunk, r rank. Inside, heads come first: [B * G, T, D].
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton import kernels, tiles
from hypermlp.ops.triton.launch import Chunk, Geometry, Scratch, launch, multiply
from hypermlp.ops.triton.saved import score_dtype
from hypermlp.ops.triton.tiles import padded_rank


def heads_first(x: Tensor) -> Tensor:
    """Return ``[B, T, H, D]`` as ``[B * H, T, D]``, contiguous."""
    return x.permute(0, 2, 1, 3).contiguous().flatten(0, 1)


def mix_arguments(mix: Mix | None, index: str = "") -> dict[str, Any]:
    """Return RANK, R and MIXED of a mix."""
    rank = 0 if mix is None else mix.left.shape[2]
    return {
        f"RANK{index}": rank,
        f"R{index}": padded_rank(rank),
        f"MIXED{index}": mix is not None,
    }


def contiguous_mix(mix: Mix | None) -> Mix | None:
    return mix and Mix(*(x.contiguous() for x in mix))


class Call:
    """The tensors of a call with heads first, its geometry, and the launches that both passes need."""

    def __init__(self, arguments: Attention, *, bytes_per_cell: int):
        self.dtype, self.score_dtype = arguments.q.dtype, score_dtype(arguments.q.dtype)
        self.mix1, self.mix2 = contiguous_mix(arguments.mix1), contiguous_mix(arguments.mix2)
        self.glu = arguments.activation == "glu"
        self.eps = arguments.eps
        self.geometry = Geometry(arguments, bytes_per_cell)
        self.q, self.k, self.v = (heads_first(x) for x in (arguments.q, arguments.k, arguments.v))
        self.scratch = Scratch(self.q)

    def of_heads(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return the sequences of a chunk from a tensor ``[B * H, ...]`` or ``[B * G, ...]``."""
        heads = x.shape[0] // self.geometry.batch
        return x[chunk.items.start * heads : chunk.items.stop * heads]

    def buffer(self, name: str, chunk: Chunk, heads: int, dtype: torch.dtype) -> Tensor:
        """Return scratch ``[matrices, M, ld]``."""
        return self.scratch.get(name, (chunk.num_items * heads, chunk.num_rows, chunk.ld), dtype)

    def by_key(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """Return the view ``[matrices, M, n]`` in which column j is key j."""
        return buffer[:, :, self.geometry.pad : self.geometry.pad + chunk.num_keys]

    def product(self, name: str, chunk: Chunk, rows: Tensor, columns: Tensor) -> Tensor:
        """Return rows · columnsᵀ in scratch; both are ``[B * heads, T, D]``."""
        buffer = self.buffer(name, chunk, rows.shape[0] // self.geometry.batch, self.score_dtype)
        a, b = self.of_heads(rows, chunk)[:, chunk.queries], self.of_heads(columns, chunk)
        multiply(self.by_key(buffer, chunk), a, b[:, : chunk.num_keys].mT)
        return buffer

    def partial_sums(
        self, name: str, chunk: Chunk, total: Tensor | None, kernel_matrices: int
    ) -> tuple[dict[str, Any], int, Tensor | None]:
        """Return where a row kernel puts its sums, the number of splits, and the buffer to be collected.

        A kernel that is not split writes into ``total`` ``[matrices, Tq, width]`` itself; one without sums
        has no ``total``.
        """
        splits, per_split = self.geometry.splits(name, chunk, kernel_matrices)
        if total is None:
            return _sums(None, 0, 0, per_split), splits, None
        matrices, queries, width = total.shape
        if splits == 1:
            place = total[:, chunk.queries]
            return _sums(place, 0, queries * width, per_split), 1, None
        size = chunk.num_rows * width
        buffer = self.scratch.get("partial sums", (splits, matrices, size), self.score_dtype)
        return _sums(buffer, matrices * size, size, per_split), splits, buffer

    def collect(self, chunk: Chunk, buffer: Tensor | None, total: Tensor | None) -> None:
        """Add partial sums up into ``total`` ``[matrices, Tq, width]``; nothing without a buffer."""
        if buffer is None or total is None:
            return
        splits, matrices, size = buffer.shape
        launch(
            kernels.collect,
            "collect",
            (-(-size // tiles.COLLECT), matrices),
            None,
            partial=buffer,
            total=total[:, chunk.queries],
            factor=None,
            SCALE=False,
            length=size,
            num_splits=splits,
            split_stride=matrices * size,
            partial_stride=size,
            matrix_stride=total.stride(0),
            BLOCK=tiles.COLLECT,
        )

    def activation_arguments(self, chunk: Chunk, sums1: Tensor) -> dict[str, Any]:
        """Return what every kernel that computes the activation of a chunk takes."""
        mix1, mix2 = self.mix1, self.mix2
        return {
            "stats1": None if mix1 is None else sums1,
            "gate1": mix1 and mix1.gate[chunk.items],
            "diag1": mix1 and mix1.diag,
            "right1": mix1 and mix1.right,
            "num_slots": 0 if mix1 is None else mix1.right.shape[1],
            "num_slots2": 0 if mix2 is None else mix2.right.shape[1],
            "heads": self.geometry.heads,
            "GLU": int(self.glu),
            **mix_arguments(mix1, "1"),
            **mix_arguments(mix2, "2"),
            **self.geometry.arguments(chunk),
        }

    def inner(self, chunk: Chunk, values: Tensor, parameter: Tensor, total: Tensor) -> None:
        """total ← values · parameter, which is ``left`` of a mix."""
        matrices = values.shape[0]
        sums, splits, buffer = self.partial_sums("inner", chunk, total, matrices)
        launch(
            kernels.inner,
            "inner",
            (self.geometry.row_programs("inner", chunk), splits, matrices),
            self.geometry.tiles["inner"],
            scores=values,
            parameter=parameter,
            num_slots=parameter.shape[1],
            heads=matrices // chunk.num_items,
            RANK=parameter.shape[2],
            R=padded_rank(parameter.shape[2]),
            **sums,
            **self.geometry.arguments(chunk),
        )
        self.collect(chunk, buffer, total)

    def finish(
        self,
        chunk: Chunk,
        values: Tensor,
        mix: Mix | None,
        sums: Tensor,
        *,
        activated: bool = False,
        normalise: bool = False,
    ) -> None:
        """Add the low-rank part of a transposed mix to ``values``, in place, and clear what no query sees."""
        launch(
            kernels.finish,
            "finish",
            (
                self.geometry.row_programs("finish", chunk),
                self.geometry.slot_tiles("finish", chunk),
                values.shape[0],
            ),
            self.geometry.tiles["finish"],
            values=values,
            stats=sums,
            gate=mix and mix.gate[chunk.items],
            diag=mix and mix.diag,
            parameter=mix and mix.left,
            num_slots=0 if mix is None else mix.left.shape[1],
            num_keys=chunk.num_keys,
            heads=values.shape[0] // chunk.num_items,
            WIDTH=sums.shape[2],
            NORMALISE=normalise,
            ACTIVATED=activated,
            EPS=self.eps,
            **mix_arguments(mix),
            **self.geometry.arguments(chunk),
        )


def _sums(partial: Tensor | None, split_stride: int, matrix_stride: int, per_split: int) -> dict[str, Any]:
    return {
        "partial": partial,
        "split_stride": split_stride,
        "matrix_stride": matrix_stride,
        "tiles_per_split": per_split,
    }
