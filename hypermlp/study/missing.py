"""What a study should have and does not have yet."""

from collections import defaultdict

from hypermlp.mad.tasks import TASKS
from hypermlp.study.claims import CLAIMED
from hypermlp.study.summary import Study


def missing(study: Study) -> list[str]:
    """Return what is missing, in sentences; at no known size, only the rows that have no loss."""
    size = study.size
    reasons: dict[str, list[str]] = defaultdict(list)
    for row, reason in study.left_out.items():
        reasons[reason].append(row)
    found = [f"No loss for {', '.join(rows)}: {reason}." for reason, rows in reasons.items()]
    if size is None:
        return found
    if size.rates and not study.tuned:
        found.append("The learning rates were not tuned: all rows have the same one.")
    not_run = [row for row in study.labels if row not in study.rows and row not in study.left_out]
    if not_run:
        found.append(f"No language model was trained for {', '.join(not_run)}.")
    for row, known in study.rows.items():
        seeds = [seed for seed in size.reported_seeds(row, CLAIMED) if seed not in known.losses]
        if seeds and study.tuned and row in size.rows:
            found.append(f"{row} lacks seed {', '.join(map(str, seeds))}{_diverged(known.diverged)}.")
    if size.mad:
        tasks = size.mad_tasks or tuple(TASKS)
        some = [row for row in size.rows if not set(tasks) <= study.mad.scores.get(row, {}).keys()]
        if some:
            found.append(f"MAD is not complete for {len(some)} of {len(size.rows)} rows: {', '.join(some)}.")
    return found


def _diverged(count: int) -> str:
    return f" ({count} diverged)" if count else ""
