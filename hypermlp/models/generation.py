"""What ``generate`` of transformers needs to know about our caches and lengths."""

from typing import Any

from torch import Tensor
from transformers.utils import logging

from hypermlp.models.cache import is_static
from hypermlp.models.configuration_hypermlp import HyperMLPConfig

logger = logging.get_logger(__name__)


class Generation:
    """Methods that ``generate`` calls, to be inherited before ``GenerationMixin``."""

    config: HyperMLPConfig

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Drop the mask of a decoding step with a static cache, which has the prompt's padding already.

        The mask grows with every token and would change the shapes of the step.
        """
        is_step = kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration")
        cache = kwargs.get("past_key_values")
        if is_step and cache is not None and is_static(cache):
            kwargs["attention_mask"] = None
        return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **_kwargs: Any) -> Tensor | None:
        """Return the mask as it is; transformers would make a dense one for a static cache."""
        return attention_mask

    def _get_static_cache_init_shape(self) -> None:
        """Make ``generate`` leave the allocation of a static cache to the first call of the mixers."""
        return

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Limit the length to the context, where the learned slots end."""
        prepared = super()._prepare_generated_length(*args, **kwargs)  # type: ignore[misc]
        context = self.config.max_position_embeddings
        if prepared.max_length > context:
            logger.warning_once(
                f"asked for up to {prepared.max_length} tokens; generation ends at the context of {context}"
            )
            prepared.max_length = context
        return prepared
