"""From the arguments of a Hugging Face model to ``starts``.

Shapes: B batch, T new positions, P positions in the cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops.layout import check_cu_seqlens_form, packed_starts, raise_where
from hypermlp.validation import is_integer, require


def batch_starts(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    packed: Tensor | None = None,
    *,
    batch: int,
    new: int,
    past: int | Tensor,
) -> Tensor | None:
    """Return the first position that each token sees, ``[B]`` or ``[B, T]``; None if each sees all earlier
    ones.

    Args:
        attention_mask: ``[B, P + T]``, 0 for left padding. Zeros on the right are padding too, which no token
            sees.
        position_ids: ``[B or 1, T]``. Without a mask and a cache, a document begins wherever they do not
            increase by 1.
        document_ids: ``[B, T]``, equal within a document; documents follow one another.
        packed: ``[B, T]``, ``starts`` of documents from ``Packed.starts``, in the place of document_ids.
        past: P; a tensor if only the device knows it. Positions are then filled: P > 0.
    """
    first = isinstance(past, int) and past == 0
    padding = None if attention_mask is None else _padding(attention_mask, batch, past + new)
    documents = packed
    if packed is not None and document_ids is not None:
        raise UserError("document_ids and cu_seqlens are both given; pass one of them")
    if document_ids is not None:
        _check_shape("document_ids", document_ids, (batch, new))
        if not first:
            raise UserError(
                "document_ids cannot be given with a filled cache; decode each document with a cache of its "
                "own"
            )
        documents = _document_starts(document_ids[:, 1:] != document_ids[:, :-1])
    elif packed is None and position_ids is not None and attention_mask is None and first:
        position_ids = position_ids.expand(batch, -1)
        _check_shape("position_ids", position_ids, (batch, new))
        documents = _document_starts(position_ids[:, 1:] != position_ids[:, :-1] + 1)
        known = not torch.compiler.is_compiling() and documents.device.type == "cpu"
        if known and not documents.any():
            documents = None
    if documents is None or padding is None:
        return padding if documents is None else documents
    return torch.maximum(
        documents, torch.minimum(padding[:, None], torch.arange(1, new + 1, device=padding.device))
    )


class Packed(NamedTuple):
    """Packed sequences by their cumulative lengths (our name and those of transformers) or numbers."""

    cu_seqlens: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | None = None
    max_length_k: int | None = None
    seq_idx: Tensor | None = None

    def starts(self, x: Tensor, *, past: int | Tensor) -> Tensor | None:
        """Return ``starts`` ``[1, T]`` of the positions ``x`` ``[1, T, D]``; None if nothing is given.

        ``max_length_q`` must be at least the length of the longest sequence; it has no other effect. The
        numbers ``seq_idx`` ``[B, T]`` of the sequences alone are enough, for any number of rows.
        """
        given = {name: value for name, value in self._asdict().items() if value is not None}
        lengths = {name: value for name, value in given.items() if name.startswith("cu_")}
        if not lengths and self.seq_idx is None:
            if given:
                raise UserError(f"{', '.join(given)} without cu_seq_lens_q; pass the cumulative lengths too")
            return None
        if not (isinstance(past, int) and past == 0):
            raise UserError(
                f"{next(iter(given))} cannot be given with a filled cache; decode each sequence with a "
                "cache of its own"
            )
        numbered = None
        if self.seq_idx is not None:
            _check_shape("seq_idx", self.seq_idx, (x.shape[0], x.shape[1]))
            numbered = _document_starts(self.seq_idx[:, 1:] != self.seq_idx[:, :-1])
        if not lengths:
            return numbered
        for value in lengths.values():
            check_cu_seqlens_form(value, x)
        longest = [given[name] for name in ("max_length_q", "max_length_k") if name in given]
        for value in longest:
            require("max_length_q", value, is_integer(value) and value > 0, "a positive integer")
        new, most = x.shape[1], min(longest, default=-1)
        starts, *others = [packed_starts(value, new, new, most) for value in lengths.values()]
        for other in others:
            what = f"{' and '.join(lengths)} differ, but queries and keys are the same positions"
            raise_where(other != starts, what, "the same lengths for both", other)
        if numbered is not None:
            what = f"seq_idx and {next(iter(lengths))} differ"
            raise_where(numbered != starts, what, "the same sequences in both", numbered)
        return starts


def _check_shape(name: str, x: Tensor, shape: tuple[int, int]) -> None:
    if tuple(x.shape) != shape:
        raise UserError(f"{name} has shape {list(x.shape)}; it must be {list(shape)}")


def _padding(mask: Tensor, batch: int, total: int | Tensor) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        given = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise UserError(
            f"attention_mask has {given}; it must be a tensor [batch, positions], 1 for tokens and 0 for "
            "padding"
        )
    _check_shape("attention_mask", mask, (batch, mask.shape[1] if isinstance(total, Tensor) else total))
    seen = mask != 0
    starts = (seen.cumsum(dim=1) == 0).sum(dim=1)
    if torch.compiler.is_compiling():
        return starts
    raise_where(
        seen & (mask != 1),
        "attention_mask has a value other than 0 and 1",
        "1 for tokens and 0 for padding (several documents in a row: document_ids)",
        mask,
    )
    runs = (seen[:, 1:] & ~seen[:, :-1]).sum(dim=1) + seen[:, 0]
    raise_where(
        runs > 1,
        "attention_mask has zeros between ones: the number of runs of ones in a sequence",
        "1, with padding on the left or on the right",
        runs,
    )
    # Elsewhere than on a CPU, asking whether there is padding would wait for the device.
    return starts if mask.device.type != "cpu" or bool(starts.any()) else None


def _document_starts(begins: Tensor) -> Tensor:
    """Return ``starts`` ``[B, T]``.

    ``begins`` ``[B, T - 1]`` states whether a document begins at positions 1, 2, ...
    """
    positions = torch.arange(1, begins.shape[1] + 1, device=begins.device)
    starts = torch.where(begins, positions, 0)
    return torch.nn.functional.pad(starts, (1, 0)).cummax(dim=1).values
