"""Generation from prompts with padding on any side.

Shapes: B batch, T positions of the prompt.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from hypermlp.errors import UserError

ALIGNED = ("input_ids", "inputs_embeds", "position_ids")  # have one entry per position of the prompt


class PaddedGenerationMixin(GenerationMixin):
    """``generate`` for prompts with padding on any side: masked positions are moved to the left.

    A decoding step must follow the last token of its prompt. The prompts come back as they were given.
    """

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``GenerationMixin.generate`` of transformers documents it."""
        arguments = kwargs | ({} if inputs is None else {"input_ids": inputs})
        if isinstance(inputs, str | list):
            raise UserError(
                f"generate has a {type(inputs).__name__}; it takes a tensor of token ids, "
                "such as tokenizer(text, return_tensors='pt').input_ids"
            )
        if arguments.get("attention_mask") is None:
            arguments["attention_mask"] = self._inferred_mask(arguments, *args[:1])
        mask, ids = arguments["attention_mask"], arguments.get("input_ids")
        order = _order(mask, arguments.get("past_key_values"))
        if order is None or mask is None:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        for name in ("attention_mask", *ALIGNED):
            if isinstance(arguments.get(name), Tensor) and arguments[name].shape[1] == mask.shape[1]:
                arguments[name] = _rearranged(arguments[name], order)
        out: Any = super().generate(None, *args, **arguments)  # type: ignore[misc]
        sequences = out if isinstance(out, Tensor) else out.sequences
        if ids is not None and ids.shape[1] == mask.shape[1]:
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0)
        return out

    def _inferred_mask(self, arguments: dict[str, Any], generation_config: Any = None) -> Tensor | None:
        """Return the mask that transformers infers from padding tokens; None if it infers none."""
        ids = arguments.get("input_ids")
        configs = (generation_config, arguments.get("generation_config"), self.generation_config)

        def setting(name: str) -> Any:
            values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in values if value is not None), None)

        pad, end = setting("pad_token_id"), setting("eos_token_id")
        if ids is None or pad is None or pad in (end if isinstance(end, list) else [end]):
            return None
        mask: Tensor = (ids != pad).long()
        return mask


def _order(mask: Tensor | None, cache: Any) -> Tensor | None:
    """Return the positions in the order masked ones, then the others, ``[B, T]``; None if it changes nothing.

    Positions in a cache stay where they are, so a mask with later zeros is left alone.
    """
    if mask is None or mask.dim() != 2:
        return None
    seen = mask != 0
    past = 0 if cache is None else cache.get_seq_length()
    if not (seen[:, :-1] & ~seen[:, 1:]).any() or (past > 0 and not bool(seen[:, past:].all())):
        return None
    return seen.long().argsort(dim=1, stable=True)


def _rearranged(x: Tensor, order: Tensor) -> Tensor:
    """Return the entries of ``x``, ``[B or 1, T, ...]``, in the order of positions ``[B, T]``."""
    index = order.to(x.device).view(*order.shape, *([1] * (x.dim() - 2))).expand(-1, -1, *x.shape[2:])
    return torch.gather(x.expand(order.shape[0], *x.shape[1:]), 1, index)
