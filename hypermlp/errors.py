"""The one exception for what a user can fix."""

LONGEST_LINE = 300  # characters of another library's message


class UserError(ValueError):
    """The input is wrong. The message states the offending value, the allowed values and what to do.

    The package raises it for wrong values of arguments, before the call changes anything. It is a
    ``ValueError``, so ``except ValueError`` catches it too. The command line prints the message alone; there,
    any other exception is a bug and keeps its traceback.

    Example::

        from hypermlp import HyperGLU
        from hypermlp.errors import UserError

        try:
            HyperGLU(hidden_size=63, max_length=128)
        except UserError as error:
            print(error)
    """


def describe(error: BaseException) -> str:
    """Return an error's message; that of a system call names the file first: "x.txt: No such file ..."."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, or the error's type if there is none.

    Messages of other libraries may contain whole tracebacks.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."
