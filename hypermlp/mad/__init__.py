"""MAD: synthetic tasks that tell architectures apart. ``mad.generate(task, split="train")`` gives inputs and targets."""

from hypermlp.mad.run import benchmark
from hypermlp.mad.settings import IGNORED
from hypermlp.mad.tasks import TASKS, Task, generate

__all__ = ["IGNORED", "TASKS", "Task", "benchmark", "generate"]
