"""lm-evaluation-harness's own program with the model ``hypermlp`` registered.

    python -m hypermlp.evals.harness --model hypermlp ...

The harness does not look for plugins. It also registers the model if it is given a folder of this project's
tasks: docs/evaluation.md.
"""

from hypermlp.evals import checkpoint  # noqa: F401  (registers the model)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
