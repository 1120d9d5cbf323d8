"""The subcommands of ``hypermlp``, one module each: ``add_arguments(parser)`` and ``main(args)``."""
