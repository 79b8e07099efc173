"""The report of a dry run."""

from dataclasses import dataclass, field

from flow_grpo.rewards.downloads import hub_is_reachable

NUM_NOISE_IMAGES = 2  # on which a dry run calls each reward


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
