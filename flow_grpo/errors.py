"""The errors that a user can fix, and those that go away by themselves."""

import errno

from flow_grpo.text import visible

# Exit statuses: what the user must fix; what a retry may fix, EX_TEMPFAIL of sysexits.h; a process that ends because of another
# one of its run; Ctrl-C, as a shell's
USER_ERROR, TEMPORARY, PEER_LOST, INTERRUPTED = 2, 75, 76, 130
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk that may have space later


class FlowGRPOError(ValueError):
    """Something that the user can fix, said in one sentence: a setting, a file, a reward.

    The command line prints the sentence alone. Any other exception is a bug, or comes from a library, and keeps its traceback.
    """

    def __init__(self, sentence: object = "") -> None:
        lines = (line.strip() for line in str(sentence).split("\n"))
        # it may quote a file: no second line, no command to a terminal, no password
        super().__init__(visible(" ".join(lines)))


class RetryableError(FlowGRPOError):
    """An error that may not happen again with the same command: a reward server is down, a hub can't be reached, a folder is in use."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class PeerLost(RetryableError):
    """Another process of the run has failed or is gone, which ends this one.

    Attributes:
        prints_error: whether this process prints it, one for each host.
    """

    def __init__(self, sentence: object = "", prints_error: bool = False) -> None:
        super().__init__(sentence)
        self.prints_error = prints_error


def is_retryable(error: BaseException | None) -> bool:
    """Whether the same command may succeed later: by the error, or by what caused it, such as a full disk."""
    while error is not None:
        if isinstance(error, RetryableError) or getattr(error, "errno", None) in FULL:
            return True
        error = error.__cause__
    return False
