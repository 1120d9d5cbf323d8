"""The harness's model ``hypermlp``: a run of ``hypermlp train`` or any Hugging Face checkpoint, checked."""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import hypermlp.models  # noqa: F401  (registers the model with transformers)
from hypermlp.errors import UserError
from hypermlp.models.loading import is_local, model_folder, require_whole

LEAST_CONTEXT = 64  # tokens: the longest answers have 40 characters


@register_model("hypermlp")
class CheckpointLM(HFLM):  # type: ignore[misc]
    """The harness's Hugging Face model. It also loads runs, and rejects damaged or unsuitable checkpoints."""

    add_bos_token: bool | None  # of HFLM: whether special tokens are added, None for the tokenizer's default

    def __init__(self, pretrained: Any, **settings: Any):
        if isinstance(pretrained, str) and is_local(pretrained):
            pretrained = str(model_folder(pretrained))
        super().__init__(pretrained=pretrained, **settings)
        # The harness would report these problems badly, or not at all.
        tokenizer, length = self.tokenizer, self.max_length
        rows = self.model.get_input_embeddings().weight.shape[0]
        context = getattr(self.model.config, "max_position_embeddings", None) or length
        problems = {
            "its tokenizer has no bos_token and no eos_token to begin a text with; set one and save it": (
                tokenizer.bos_token_id is None and tokenizer.eos_token_id is None
            ),
            f"its tokenizer has {len(tokenizer)} tokens, its model {rows}; save it with its own tokenizer": (
                len(tokenizer) > rows
            ),
            f"--max-length is {length}; the model's context is {context}, use at most that": length > context,
            f"its context, or --max-length, is {length}; questions need {LEAST_CONTEXT} tokens at least": (
                length < LEAST_CONTEXT
            ),
        }
        for problem, present in problems.items():
            if present:
                raise UserError(problem)

    def _create_model(self, pretrained: str, **settings: Any) -> None:
        if any(settings.get(name) for name in ("peft", "delta", "autogptq", "gptqmodel")):
            super()._create_model(pretrained, **settings)
            return
        super()._create_model(pretrained, **settings, output_loading_info=True)
        self._model, info = vars(self)["_model"]
        require_whole(pretrained, self._model, info)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, without special tokens that the tokenizer would add."""
        kept, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = kept
