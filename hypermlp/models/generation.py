"""What ``generate`` of transformers needs to know about our caches and lengths."""

from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import logging

from hypermlp.errors import UserError
from hypermlp.layers.registry import BASELINES
from hypermlp.models.cache import is_static
from hypermlp.models.configuration_hypermlp import HyperMLPConfig

logger = logging.get_logger(__name__)


class Generation:
    """Methods that ``generate`` calls, to be inherited before ``GenerationMixin``."""

    config: HyperMLPConfig

    def prepare_inputs_for_generation(
        self, input_ids: Any, *, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        """Drop the mask of a decoding step with a static cache or a window: the state knows the padding.

        The mask grows with every token: it would change the shapes of the step, and its cost.
        """
        is_step = kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration")
        cache = kwargs.get("past_key_values")
        if is_step and cache is not None and (is_static(cache) or self.config.sliding_window is not None):
            kwargs["attention_mask"] = None
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **_kwargs: Any) -> Tensor | None:
        """Return the mask as it is; transformers would make a dense one for a static cache."""
        return attention_mask

    def _get_static_cache_init_shape(self) -> None:
        """Make ``generate`` leave the allocation of a static cache to the first call of the mixers."""
        return

    @property
    def is_endless(self) -> bool:
        """Whether ``generate`` may go past the context: every label has a sliding window, some layer has one,
        and no learned positions end.
        """
        config = self.config
        layers = list(zip(config.mixers, config.windows, strict=True))
        bounded = config.learned_positions or any(
            window is None and name not in BASELINES for name, window in layers
        )
        return not bounded and any(window is not None for _, window in layers)

    def _prepare_generated_length(
        self,
        generation_config: Any,
        *,
        has_default_max_length: bool,
        input_ids_length: int,
        inputs_tensor: Tensor,
        **rest: Any,
    ) -> Any:
        """Limit the length to the context, where the learned slots end, unless sliding windows avoid that."""
        asked = generation_config.max_length
        prepared = super()._prepare_generated_length(  # type: ignore[misc]
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **rest,
        )
        context = self.config.max_position_embeddings
        if self.is_endless:
            if has_default_max_length and prepared.max_new_tokens is None:  # transformers ends at the context
                prepared.max_length = asked + input_ids_length
            return prepared
        prompt = inputs_tensor.shape[1]
        last = context - prompt + input_ids_length  # a prompt of embeddings does not count in max_length
        some = any(window is not None for window in self.config.windows)
        windows = "a sliding_window in every layer" if some else "a sliding_window"
        windows = "" if self.config.learned_positions else f"load the model with {windows}, or "
        ways = f"{windows}extend the context: model.extend_context({max(prompt + 1, prepared.max_length)})"
        if prompt >= context:
            raise UserError(
                f"the prompt has {prompt} tokens, but the model's context is {context} "
                f"(max_position_embeddings), and new tokens need room in it; shorten the prompt, {ways}"
            )
        if prepared.max_length > last:
            logger.warning_once(
                f"asked for up to {prepared.max_length} tokens; generation ends at the context of {context}. "
                f"To go on, {ways}"
            )
            prepared.max_length = last
        return prepared

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """Return the criteria; with windows, transformers' warning about the context does not apply."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        for criterion in criteria if self.is_endless else ():
            if isinstance(criterion, MaxLengthCriteria):
                criterion.max_position_embeddings = None
        return criteria
