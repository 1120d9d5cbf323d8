"""Run a checkpoint through a suite."""

import contextlib
import io
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError, first_line
from hypermlp.evals import suites
from hypermlp.evals.suites import Column
from hypermlp.models.loading import MODEL_NAMES

SEED = 1234  # of few-shot examples: the harness's own default


def evaluate(
    checkpoint: str,
    suite: str,
    *,
    batch_size: int,
    max_length: int | None,
    limit: int | None,
    device: str,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Return the scores of one checkpoint, as a row of a record.

    Args:
        checkpoint: a folder with a model, a run of ``hypermlp train``, or a name on the hub.
        suite: one of ``suites.SUITES``.
        batch_size: sequences per forward pass; does not change scores.
        max_length: context to use, None for the model's own.
        limit: evaluate only this many questions of each task, None for all.
        device: such as "cpu" or "cuda".
        report: called with progress lines.
    """
    import lm_eval

    lm = _load(checkpoint, batch_size=batch_size, max_length=max_length, device=device)
    context = lm.max_length
    wanted = suites.columns(suite, context=context, vocab_size=len(lm.tokenizer))
    with quiet():
        tasks = suites.load_tasks(wanted, tokenizer=lm.tokenizer.name_or_path, context=context, report=report)
    report(f"{checkpoint}: {len(tasks)} tasks, context {context}")
    if suite == "local" and suites.ruler_length(context) is None:
        report(f"{checkpoint}: RULER is left out, it needs a context of {suites.RULER_LENGTHS[0]} tokens")
    began = time.monotonic()
    scores: dict[str, dict[str, Any]] = {}
    for number, (name, loaded) in enumerate(tasks.items(), 1):
        columns = [column for column in wanted if column.task == name]
        with quiet():
            prepare_tasks(loaded, columns[0].shots)
            results = lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=100, log_samples=False)
        for column in columns:
            score = scores[column.title] = _score(results, column)
            progress = f"{checkpoint}: {number}/{len(tasks)}, {time.monotonic() - began:.0f} s"
            report(f"{progress}, {column.title} {score['value']:.4g}")
    return {
        "checkpoint": checkpoint,
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "context": context,
        "seconds": time.monotonic() - began,
        "scores": scores,
    }


def _load(checkpoint: str, **settings: Any) -> Any:
    from hypermlp.evals.checkpoint import CheckpointLM

    try:
        with quiet():
            return CheckpointLM(pretrained=checkpoint, **settings)
    except Exception as error:  # transformers, safetensors and the harness raise many types
        here = Path(checkpoint).exists()
        where = "" if here else " is not a folder here, and"
        advice = "" if here else f"; allowed: {MODEL_NAMES}, or a name on the hub, with a network"
        raise UserError(f"{checkpoint}{where} cannot be evaluated: {first_line(error)}{advice}") from error


def prepare_tasks(loaded: dict[str, Any], shots: int) -> None:
    """Set the few-shot examples of tasks, by the rules of ``lm_eval.simple_evaluate``.

    That function cannot be used: for each task it also runs git, which prints errors outside a repository,
    and lists the whole environment.
    """
    for task in loaded["tasks"].values():
        usual = task.get_config("num_fewshot")
        if usual is None or (shots and usual != 0):  # a task whose file says 0 stays at 0
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(SEED)


def _score(results: dict[str, Any], column: Column) -> dict[str, Any]:
    """Return a column's score. The harness names it ``metric,filter``; a group has one for all its tasks."""
    numbers = results.get("groups", {}).get(column.task) or results["results"][column.task]
    keys = [key for key in numbers if key.split(",")[0] == column.metric]
    if len(keys) != 1:
        raise UserError(f"{column.task} has no single {column.metric!r}; it has {', '.join(numbers)}")
    metric, _, kind = keys[0].partition(",")
    value, error = numbers[keys[0]], numbers.get(f"{metric}_stderr,{kind}")
    if not math.isfinite(value):
        raise UserError(f"{column.title} is {value}: the model's outputs are non-finite; is it damaged?")
    return {
        "value": float(value),
        "error": float(error) if isinstance(error, float) and math.isfinite(error) else None,
        "questions": sum(count["effective"] for count in results.get("n-samples", {}).values()),
        "task": column.task,
        "metric": column.metric,
        "shots": column.shots,
        "higher_is_better": column.higher_is_better,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the harness's output: prints, progress bars, warnings, and log messages below ERROR.

    Exceptions pass, and logged errors still reach the standard error.
    """
    errors = logging.StreamHandler(sys.stderr)  # the real one, not the one below
    disabled = logging.root.manager.disable
    logging.root.addHandler(errors)
    logging.disable(logging.WARNING)
    hidden = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(hidden),
            contextlib.redirect_stdout(hidden),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        logging.root.removeHandler(errors)
