"""lm-evaluation-harness's own program with the model ``hypermlp`` known: ``python -m hypermlp.evals.harness --model hypermlp ...``.

The harness finds no plugins by itself; it knows the model too where it is given a folder of this project's tasks: docs/evaluation.md.
"""

from hypermlp.evals import checkpoint  # noqa: F401  (registers the model)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
