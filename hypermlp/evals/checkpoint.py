"""The model ``hypermlp`` of lm-evaluation-harness: any Hugging Face checkpoint, or a run of ``hypermlp train``, checked as it is loaded."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import hypermlp.models  # noqa: F401  (so that transformers knows the model without remote code)
from hypermlp.errors import UserError
from hypermlp.models.loading import model_folder, require_whole

LEAST_CONTEXT = 64  # tokens: the longest answers have 40 characters


@register_model("hypermlp")
class CheckpointLM(HFLM):  # type: ignore[misc]
    """The harness's own model class, which takes runs as well, and refuses what would give scores that mean nothing."""

    def __init__(self, pretrained: Any, **settings: Any):
        if isinstance(pretrained, str) and Path(pretrained).is_dir():
            pretrained = str(model_folder(pretrained))
        super().__init__(pretrained=pretrained, **settings)
        self._check()

    def _create_model(self, pretrained: str, **settings: Any) -> None:
        if any(settings.get(name) for name in ("peft", "delta", "autogptq", "gptqmodel")):
            super()._create_model(pretrained, **settings)
            return
        super()._create_model(pretrained, **settings, output_loading_info=True)
        self._model, info = vars(self)["_model"]
        require_whole(pretrained, self._model, info)

    def _check(self) -> None:
        """What the harness would only stumble over, or not at all."""
        if self.tokenizer.bos_token_id is None and self.tokenizer.eos_token_id is None:
            raise UserError(
                "its tokenizer has neither a bos_token nor an eos_token to begin texts with; set one and save it"
            )
        rows = self.model.get_input_embeddings().weight.shape[0]
        if len(self.tokenizer) > rows:
            raise UserError(
                f"its tokenizer has {len(self.tokenizer)} tokens, its model {rows}: they do not belong together"
            )
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and self.max_length > context:
            raise UserError(f"--max-length is {self.max_length}; the model's context has {context}")
        if self.max_length < LEAST_CONTEXT:
            raise UserError(
                f"its context, or --max-length, is {self.max_length}; questions need {LEAST_CONTEXT} tokens at least"
            )

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of the text's own tokens: what a tokenizer puts before and after is no part of it."""
        with mock.patch.object(
            self, "tok_encode", functools.partial(self.tok_encode, add_special_tokens=False)
        ):
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return found


def check_device(name: str) -> None:
    """The harness would take another one and say nothing."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device is {name!r}, which cannot be used: {str(error).splitlines()[0]}"
        ) from error
