"""The one exception for what a user can fix."""


class UserError(ValueError):
    """The input is wrong. The message states the offending value, the allowed values and what to do.

    The package raises it for wrong values of arguments, before any work starts. It is a ``ValueError``, so
    ``except ValueError`` catches it too. The command line prints the message alone; any other exception is a
    bug and keeps its traceback.

    Example::

        from hypermlp import HyperGLU
        from hypermlp.errors import UserError

        try:
            HyperGLU(hidden_size=63, max_length=128)
        except UserError as error:
            print(error)
    """
