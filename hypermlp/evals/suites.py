"""Suites: which tasks of the harness, and which of their numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.evals.paper import COLUMNS, Column

TASKS = Path(__file__).with_name("tasks")
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
RULER = ("niah_single_1", "niah_multikey_2", "ruler_fwe")  # those that make their own data
RULER_WORDS = (
    "ruler_vt",
    "ruler_cwe",
)  # these too, but with a tokenizer of few tokens the harness never ends making it
FEW_TOKENS = 10_000
LOCAL = (
    Column("bits per byte", "hypermlp_text", 0, "bits_per_byte", higher_is_better=False),
    Column("continuation", "hypermlp_continuation", 0, "acc"),
    Column("recall", "hypermlp_recall", 0, "acc"),
)
SUITES = ("local", "paper")


def ruler_length(context: int) -> int | None:
    """The longest of RULER's lengths that a context has room for."""
    return max((length for length in RULER_LENGTHS if length <= context), default=None)


def columns(suite: str, *, context: int, vocab_size: int) -> tuple[Column, ...]:
    """Those that a model with this context and tokenizer can be asked."""
    if suite == "paper":
        return COLUMNS
    ruler = ruler_length(context)
    if ruler is None:
        return LOCAL
    tasks = RULER if vocab_size < FEW_TOKENS else RULER + RULER_WORDS
    return LOCAL + tuple(
        Column(f"{task.removeprefix('ruler_')}, {ruler} tokens", task, 0, str(ruler)) for task in tasks
    )


def load_tasks(
    wanted: tuple[Column, ...], *, tokenizer: str = "", context: int = 0, tell: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    """The harness's task manager, and its tasks by name with their data; what cannot be had is said at once, with how to get it."""
    import lm_eval.tasks

    metadata = {"tokenizer": tokenizer, "max_seq_lengths": [ruler_length(context)]}
    local = [str(TASKS), str(Path(lm_eval.tasks.__file__).parent / "ruler")]
    include: dict[str, Any] = (
        {} if wanted == COLUMNS else {"include_path": local, "include_defaults": False}
    )  # to index all of theirs takes long
    manager = lm_eval.tasks.TaskManager(**include, metadata=metadata)
    tasks: dict[str, Any] = {}
    missing: dict[str, Exception] = {}
    for name in dict.fromkeys(column.task for column in wanted):
        try:
            loaded = manager.load([name])
            tasks[name] = loaded["groups"].get(name) or loaded["tasks"][name]
        except (OSError, ImportError, ValueError) as error:  # no network is an OSError
            missing[name] = error
        if wanted == COLUMNS:  # fetching takes long, and so does finding out that there is no network
            tell(f"{name}: {'cannot be had' if name in missing else 'here'}")
    if missing:
        raise UserError(_what_to_do(missing))
    return manager, tasks


def _what_to_do(missing: dict[str, Exception]) -> str:
    lines = ["nothing was run, because data or packages are missing:"]
    lines += [f"  {name}: {str(error).splitlines()[0]}" for name, error in missing.items()]
    if any(isinstance(error, ImportError) for error in missing.values()):
        lines.append("packages: pip install 'lm_eval[hf,math,ifeval]' wonderwords")
    if any(isinstance(error, OSError) for error in missing.values()):
        lines.append(
            "data, once, with a network: hypermlp eval --fetch --suite paper; afterwards it lies in Hugging Face's cache"
        )
    return "\n".join(lines)
