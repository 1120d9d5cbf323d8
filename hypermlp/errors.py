"""The one exception for what a user can fix."""


class UserError(ValueError):
    """The input is wrong. The message states the offending value, the allowed values and what to do.

    The command line prints the message alone; any other exception is a bug and keeps its traceback.
    """
