"""The MAD benchmark: six synthetic tasks that distinguish sequence mixers.

MAD is from Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures" (2024). ``generate`` returns
inputs and targets of a task, ``benchmark`` trains and scores a mixer. ``TASKS`` maps the names to ``Task``:

    in-context-recall         give the value of a key that occurred before in the sequence
    noisy-in-context-recall   the same with noise tokens in between
    fuzzy-in-context-recall   the same with keys and values of one to three tokens
    memorization              give the value of a key from a fixed map that is learned in training
    compression               rebuild all tokens from the output at the last position
    selective-copying         repeat the content tokens in order, without the blanks between them

``IGNORED`` (-100) is the target of a position that is not scored.
"""

from hypermlp.mad.settings import IGNORED
from hypermlp.mad.tasks import TASKS, Task, generate
from hypermlp.mad.training import benchmark

__all__ = ["IGNORED", "TASKS", "Task", "benchmark", "generate"]
