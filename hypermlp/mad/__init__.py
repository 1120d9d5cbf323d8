"""The MAD benchmark: six synthetic tasks that distinguish sequence mixers.

``mad.generate(task, split="train")`` returns inputs and targets; ``mad.benchmark(mixer)`` trains and scores
a mixer.
"""

from hypermlp.mad.settings import IGNORED
from hypermlp.mad.tasks import TASKS, Task, generate
from hypermlp.mad.training import benchmark

__all__ = ["IGNORED", "TASKS", "Task", "benchmark", "generate"]
