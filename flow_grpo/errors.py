"""The error that a user can mend."""


class FlowGRPOError(ValueError):
    """Something that the user can mend, said in one sentence: a setting, a file, a reward.

    The command line prints the sentence alone. Any other exception is a bug, or comes from a library, and keeps its traceback.
    """
