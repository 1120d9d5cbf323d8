"""Checks of the arguments of a Hugging Face model.

Shapes: B batch, T new positions, P positions in the cache.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.validation import near_miss

MODEL_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "document_ids",
    "past_key_values",
    "inputs_embeds",
    "use_cache",
)
CAUSAL_ARGUMENTS = (*MODEL_ARGUMENTS, "labels", "logits_to_keep", "skip_logits")
PASSED = (  # arguments of transformers that a model receives as keywords
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "num_items_in_batch",
    "shift_labels",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "tokenizer",  # generate passes these two on when it is given them, for stop strings
    "assistant_tokenizer",
)


def embed(embedding: Callable[..., Tensor], ids: Any) -> Tensor:
    """Return the embeddings of token ids; on a CPU, an id that has none is named."""
    if torch.compiler.is_compiling():
        return embedding(ids)
    if not isinstance(ids, Tensor):
        raise UserError(
            f"input_ids is a {type(ids).__name__}; it must be a tensor of token ids, "
            "such as tokenizer(text, return_tensors='pt').input_ids"
        )
    if ids.dim() != 2 or ids.is_floating_point():
        raise UserError(
            f"input_ids has shape {list(ids.shape)} and dtype {ids.dtype}; it must be integers "
            "[batch, tokens]; one sequence: ids[None]"
        )
    try:
        return embedding(ids)
    except IndexError as error:
        size = getattr(embedding, "num_embeddings", None)
        wrong = ids.max() if size is not None and ids.max() >= size else ids.min()
        raise UserError(
            f"input_ids has the token id {int(wrong)}; ids must be 0 or more and below the size of the "
            f"vocabulary, {size}"
        ) from error


def check_arguments(given: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raise for an argument of ``forward`` that the model does not have, and for attention maps.

    Args:
        given: what ``forward`` received beyond its own arguments. transformers passes None for some names.
        own: the names of the arguments of ``forward``.
    """
    for name, value in given.items():
        if name not in PASSED and value is not None:
            allowed = [*own, *PASSED]
            raise UserError(
                f"the model has no argument {name!r}{near_miss(name, allowed)}; allowed: {', '.join(allowed)}"
            )
    if given.get("output_attentions"):
        raise UserError(
            "output_attentions is True, but the model has no attention maps: its scores are mixed along the "
            "sequence; leave it out, and look at the memory with `hypermlp inspect`"
        )


def check_context(context: int | None, starts: Tensor | None, state: Any, *, new: int) -> None:
    """Raise if one of the ``new`` tokens sees more than ``context`` tokens; None is any number.

    Where only the device knows the numbers, the operators check them.

    Args:
        starts: the first position that each token sees, ``[B]`` or ``[B, T]``; None: as in the state.
        state: the decoding state that the tokens continue, or None.
    """
    past = 0 if state is None else state.past
    if context is None or isinstance(past, Tensor) or past + new <= context:
        return
    seen = past + new
    starts = state.following_starts() if starts is None and state is not None else starts
    if starts is not None:
        if torch.compiler.is_compiling() or starts.device.type != "cpu":
            return
        rows = starts[:, None] if starts.dim() == 1 else starts
        seen = int((torch.arange(past + 1, past + new + 1) - rows).max())
    if seen > context:
        raise UserError(
            f"{seen} tokens in a row, but the model's context is {context} (max_position_embeddings); "
            "shorten the input, give the model a sliding_window, or extend its context: model.extend_context"
        )
