"""The commands of ``hypermlp``, one module per command or group of commands.

``main`` in a module, or ``run_command`` for ``hypermlp GROUP run``, is decorated with the command's
arguments: see ``command`` in hypermlp/commands/shared.py.
"""
