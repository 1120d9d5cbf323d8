"""MAD: synthetic tasks that tell architectures apart. ``mad.generate(task, split="train")`` gives inputs and targets."""

from hypermlp.mad.tasks import IGNORED, TASKS, Task, generate

__all__ = ["IGNORED", "TASKS", "Task", "generate"]
