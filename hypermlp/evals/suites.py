"""Suites: tasks of the harness, and which of their numbers become columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.errors import UserError

TASKS = Path(__file__).with_name("tasks")
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
RULER = ("niah_single_1", "niah_multikey_2", "ruler_fwe")  # the tasks that generate their own data
# These generate their own data too, but with a small vocabulary the harness never finishes generating it.
RULER_WORDS = ("ruler_vt", "ruler_cwe")
SMALL_VOCABULARY = 10_000
HOW_TO_GET = """to install the packages: pip install 'lm_eval[hf,math,ifeval]' wonderwords
to download the data into Hugging Face's cache, with a network: hypermlp eval --fetch --suite paper"""


class Column(NamedTuple):
    """One column of an evaluation: a metric of a task of lm-evaluation-harness."""

    title: str
    task: str
    shots: int
    """Few-shot examples; 0 leaves the task's own number, which is 0 unless its file says otherwise."""
    metric: str
    higher_is_better: bool = True


LOCAL = (
    Column("bits per byte", "hypermlp_text", 0, "bits_per_byte", higher_is_better=False),
    Column("continuation", "hypermlp_continuation", 0, "acc"),
    Column("recall", "hypermlp_recall", 0, "acc"),
)
PAPER = (  # the paper's table; its printed values are in hypermlp/paper/evaluations.py
    Column("MMLU-P", "leaderboard_mmlu_pro", 5, "acc"),
    Column("GPQA", "leaderboard_gpqa", 0, "acc_norm"),
    Column("BBH", "leaderboard_bbh", 3, "acc_norm"),
    Column("MATH", "leaderboard_math_hard", 4, "exact_match"),
    Column("MuSR", "leaderboard_musr", 0, "acc_norm"),
    Column("IFE-I", "leaderboard_ifeval", 0, "inst_level_strict_acc"),
    Column("IFE-P", "leaderboard_ifeval", 0, "prompt_level_strict_acc"),
    Column("ARC-C", "arc_challenge", 0, "acc_norm"),
    Column("ARC-E", "arc_easy", 0, "acc_norm"),
    Column("HS", "hellaswag", 0, "acc_norm"),
    Column("PIQA", "piqa", 0, "acc_norm"),
    Column("BoolQ", "boolq", 0, "acc"),
    Column("WinoG", "winogrande", 0, "acc"),
    Column("COPA", "copa", 0, "acc"),
    Column("OBQA", "openbookqa", 0, "acc_norm"),
    Column("SciQ", "sciq", 0, "acc_norm"),
)
SUITES = {"local": LOCAL, "paper": PAPER}
NOTES = {  # printed below the scores
    "local": "The texts are the documents of Python's standard library that `data.source: stdlib` holds out; "
    "a model that was trained on other data may have seen them. Chance is 0.25 in continuation and 0.125 in "
    "recall. `hypermlp eval RUN --by-position` scores a run on the texts that the run itself held out."
}


def ruler_length(context: int) -> int | None:
    """Return the longest of RULER's lengths that fits into a context; None if none does."""
    return max((length for length in RULER_LENGTHS if length <= context), default=None)


def columns(suite: str, *, context: int, vocab_size: int) -> tuple[Column, ...]:
    """Return the columns of a suite that a model with this context and vocabulary can be evaluated on."""
    ruler = ruler_length(context)
    if suite == "paper" or ruler is None:
        return SUITES[suite]
    tasks = RULER if vocab_size < SMALL_VOCABULARY else RULER + RULER_WORDS
    return LOCAL + tuple(
        Column(f"{task.removeprefix('ruler_')}, {ruler} tokens", task, 0, str(ruler)) for task in tasks
    )


def load_tasks(
    wanted: tuple[Column, ...], *, tokenizer: str = "", context: int = 0, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the harness's tasks with their data, by name, each as ``lm_eval.evaluate`` takes it.

    Raises UserError with every missing data set and package, and how to get them. ``report`` is called with a
    progress line for each task of the paper's suite.
    """
    import lm_eval.tasks

    local = [str(TASKS), str(Path(lm_eval.tasks.__file__).parent / "ruler")]
    # Without a network the index of all of the harness's tasks is not needed, and it takes long.
    include = {} if wanted == PAPER else {"include_path": local, "include_defaults": False}
    manager = lm_eval.tasks.TaskManager(
        **include, metadata={"tokenizer": tokenizer, "max_seq_lengths": [ruler_length(context)]}
    )
    tasks: dict[str, Any] = {}
    missing: dict[str, Exception] = {}
    for name in dict.fromkeys(column.task for column in wanted):
        try:
            tasks[name] = manager.load([name])
        except (OSError, ImportError, ValueError) as error:  # no network is an OSError
            missing[name] = error
        if wanted == PAPER:  # downloads take long, and so do attempts without a network
            report(f"{name}: {'missing' if name in missing else 'ready'}")
    if missing:
        reasons = [f"  {name}: {str(error).splitlines()[0]}" for name, error in missing.items()]
        raise UserError(
            "\n".join(["nothing was run, because data or packages are missing:", *reasons, HOW_TO_GET])
        )
    return tasks
