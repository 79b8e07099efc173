"""The result of one check, a sentence about all results, and the report of a dry run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from rewards.downloads import hub_is_reachable

Status = Literal["ok", "warning", "error"]
OK: Status = "ok"
WARNING: Status = "warning"
ERROR: Status = "error"
NUM_NOISE_IMAGES = 2  # on which a dry run calls each reward


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


@dataclass
class DryRunReport:
    """What a dry run found.

    Attributes:
        rewards: those that returned valid values.
        missing: what is not downloaded yet, so that it could not be checked.
        notes: sentences on the cost of a step, and warnings.
    """

    checked: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text, the verdict last."""
        called = f"; rewards {', '.join(self.rewards)}, each on {NUM_NOISE_IMAGES} images of noise" if self.rewards else ""
        lines = [f"checked: {', '.join(self.checked)}{called}", *self.notes]
        if not self.missing:
            return [*lines, "The settings go together; nothing was trained."]
        reason = "the run will download it" if hub_is_reachable() else "the hub can't be reached"
        lines.append(f"not checked, as it is not in the cache and {reason}: {', '.join(self.missing)}")
        return [*lines, "The settings go together, as far as they could be checked; nothing was trained."]
