"""Checkpoints through a suite, one after the other; a table of them side by side."""

import contextlib
import io
import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hypermlp.errors import UserError
from hypermlp.evals import suites
from hypermlp.evals.paper import Column, standings

Scores = dict[str, dict[str, Any]]  # title of a column -> value, error, questions


def evaluate(
    checkpoint: str,
    suite: str,
    *,
    batch_size: int,
    max_length: int | None,
    limit: int | None,
    device: str,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """A record's row for one checkpoint: what it is, and its scores."""
    import lm_eval

    lm = _load(checkpoint, batch_size=batch_size, max_length=max_length, device=device)
    context = lm.max_length
    wanted = suites.columns(suite, context=context, vocab_size=len(lm.tokenizer))
    with quiet():
        manager, tasks = suites.load_tasks(
            wanted, tokenizer=lm.tokenizer.name_or_path, context=context, tell=tell
        )
    tell(f"{checkpoint}: {len(tasks)} tasks, context {context}")
    if suite == "local" and suites.ruler_length(context) is None:
        tell(f"{checkpoint}: RULER is left out, its shortest length here is {suites.RULER_LENGTHS[0]} tokens")
    began = time.monotonic()
    scores: Scores = {}
    for number, (name, task) in enumerate(tasks.items(), 1):
        shots = next(column.shots for column in wanted if column.task == name)
        with quiet():
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[task],
                num_fewshot=shots or None,
                task_manager=manager,
                limit=limit,
                bootstrap_iters=100,
                log_samples=False,
            )
        for column in (column for column in wanted if column.task == name):
            scores[column.title] = _score(found, column)
            tell(
                f"{checkpoint}: {number}/{len(tasks)}, {column.title} {scores[column.title]['value']:.4g}, {time.monotonic() - began:.0f} s"
            )
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
    except Exception as error:  # transformers, safetensors and the harness have many kinds
        where = "" if Path(checkpoint).exists() else " is no folder here, and"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{checkpoint}{where} cannot be evaluated: {reason}") from error


def _score(found: dict[str, Any], column: Column) -> dict[str, Any]:
    """The harness names a number ``metric,filter``; a group has one for all its members."""
    numbers = found.get("groups", {}).get(column.task) or found["results"][column.task]
    keys = [key for key in numbers if key.split(",")[0] == column.metric]
    if len(keys) != 1:
        raise UserError(f"{column.task} has no single {column.metric!r}; it has {', '.join(numbers)}")
    metric, _, kind = keys[0].partition(",")
    if not math.isfinite(numbers[keys[0]]):
        raise UserError(
            f"{column.title} is {numbers[keys[0]]}: the model computes numbers that are not finite"
        )
    error = numbers.get(f"{metric}_stderr,{kind}")
    samples = found.get("n-samples", {})
    return {
        "value": float(numbers[keys[0]]),
        "error": float(error) if isinstance(error, float) and math.isfinite(error) else None,
        "questions": sum(count["effective"] for count in samples.values()),
        "task": column.task,
        "metric": column.metric,
        "shots": column.shots,
        "higher_is_better": column.higher_is_better,
    }


@contextlib.contextmanager
def quiet() -> Any:
    """The harness says much; its errors still come through."""
    logging.disable(logging.WARNING)
    try:
        # It asks git for its commit, and git complains by itself wherever there is none.
        no_commit = mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None)
        nowhere = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(nowhere),
            contextlib.redirect_stdout(nowhere),
            no_commit,
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a column for each checkpoint; the best of several is bold."""
    titles = list(dict.fromkeys(title for row in rows for title in row["scores"]))
    lines = ["| | " + " | ".join(_name(row, rows) for row in rows) + " |", "| --- |" + " ---: |" * len(rows)]
    for title in titles:
        lines.append(f"| {title} | " + " | ".join(_cells(title, rows)) + " |")
    shared = [title for title in titles if all(title in row["scores"] for row in rows)]
    if len(rows) > 1 and shared:
        placed = standings(
            {str(i): [_signed(row["scores"][title]) for title in shared] for i, row in enumerate(rows)}
        )
        lines.append(
            "| average rank | " + " | ".join(f"{each.average_rank:.2f}" for each in placed.values()) + " |"
        )
        lines.append("| bests | " + " | ".join(str(each.bests) for each in placed.values()) + " |")
    lines.append("| parameters | " + " | ".join(f"{row['parameters']:,}" for row in rows) + " |")
    return "\n".join(lines)


def _signed(score: dict[str, Any]) -> float:
    return float(score["value"] if score["higher_is_better"] else -score["value"])


def _cells(title: str, rows: list[dict[str, Any]]) -> list[str]:
    found = [row["scores"].get(title) for row in rows]
    best = max(_signed(score) for score in found if score)
    cells = []
    for score in found:
        text = (
            ""
            if score is None
            else f"{score['value']:.3f}" + (f" ± {score['error']:.3f}" if score["error"] else "")
        )
        cells.append(f"**{text}**" if score and len(rows) > 1 and _signed(score) == best else text)
    return cells


def _name(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """As short as tells them apart: the folder's own name, or the whole path."""
    short = [Path(each["checkpoint"]).name for each in rows]
    name = Path(row["checkpoint"]).name if len(set(short)) == len(rows) else row["checkpoint"]
    return name.replace("|", "\\|")
