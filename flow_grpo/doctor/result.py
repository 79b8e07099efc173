"""The result of one check, and a sentence about all results."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Status = Literal["ok", "warning", "error"]
OK: Status = "ok"
WARNING: Status = "warning"
ERROR: Status = "error"


@dataclass(frozen=True)
class CheckResult:
    """One line of the doctor's table.

    Attributes:
        name: what was checked.
        value: what was measured.
        message: what it means and, unless the status is ok, what to do.
    """

    name: str
    value: str
    status: Status
    message: str = ""


CheckSection = tuple[str, list[CheckResult]]  # title, results


def failed(name: str, error: Exception) -> CheckResult:
    """A check that ended with an error: out of memory, or one with a sentence of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return CheckResult(name, "out of memory", ERROR, "set a smaller microbatch, or memory.gradient_checkpointing.")
    return CheckResult(name, "fails", ERROR, str(error))


def conclusion(results: Iterable[CheckResult], passed: str = "the run can be started") -> str:
    """One sentence about all results.

    Args:
        passed: what follows if no check failed.
    """
    statuses = [result.status for result in results]
    errors, warnings = statuses.count(ERROR), statuses.count(WARNING)
    also = f"{warnings} warning" + "s" * (warnings != 1)
    if errors:
        return f"{errors} of the checks failed, {also}: fix this before you train."
    return f"No check failed, {also}: {passed}."
