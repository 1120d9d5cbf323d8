"""The model ``hypermlp`` of lm-evaluation-harness: any Hugging Face checkpoint, or a run of ``hypermlp train``.

The harness finds no plugins by itself. ``python -m hypermlp.evals.harness`` is its own program with the model known, and its
own program knows the model too where it is given a folder of this project's tasks: docs/evaluation.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import hypermlp.models  # noqa: F401  (so that transformers knows the model without remote code)
from hypermlp.train.sample import model_folder


@register_model("hypermlp")
class CheckpointLM(HFLM):  # type: ignore[misc]
    """The harness's own model class, which takes runs as well."""

    def __init__(self, pretrained: Any, **settings: Any):
        if isinstance(pretrained, str) and Path(pretrained).is_dir():
            pretrained = str(model_folder(pretrained))
        super().__init__(pretrained=pretrained, **settings)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
