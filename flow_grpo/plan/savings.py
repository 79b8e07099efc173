"""What would make a run fit: settings that are not on already, and what each saves."""

from dataclasses import dataclass

from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan.estimate import StepEstimator

# what costs little first; the last two exclude each other
SETTINGS = (
    "objective.keep_graphs=false",
    "memory.cuda_graphs=false",
    "memory.offload_text_encoders=true",
    "memory.gradient_checkpointing=true",
    "memory.offload_trajectories=true",
    "optimizer.name=adamw_8bit",
)
SMALLER_WEIGHTS = ("memory.quantize=nf4", "memory.offload=groups")
LEAST = 0.01  # share of the peak that a setting must save to be named, unless the run fits with it


@dataclass(frozen=True)
class Fit:
    """What makes a run fit, each with a micro-batch of one.

    Attributes:
        missing: bytes that the run takes beyond the memory.
        savings: settings that are not on, each with the bytes that it saves alone; the largest first.
        together: settings with which it fits; if it fits with none of ours, those with which it takes least.
        left: bytes that are missing with these; 0 if it fits.
    """

    missing: float
    savings: dict[str, float]
    together: list[str]
    left: float


class Savings:
    """Tries settings on a config that does not fit.

    Args:
        estimator: of the config.
        memory, base: bytes of the device, and of what else is in it.
    """

    def __init__(self, estimator: StepEstimator, memory: float, base: float = 0.0) -> None:
        self.estimator, self.memory, self.base = estimator, memory, base
        self._traces = {
            estimator.args.memory.gradient_checkpointing: estimator.trace
        }  # all that the model's code depends on here
        self.usable = [setting for setting in (*SETTINGS, *SMALLER_WEIGHTS) if self._changes(setting)]

    def fit(self) -> Fit:
        """What each setting saves, and which ones make the run fit."""
        peak = self._peak([])
        assert peak is not None
        saved = {setting: peak - (self._peak([setting]) or peak) for setting in self.usable}
        together, left = self._together()
        by_size = sorted(saved.items(), key=lambda item: -item[1])
        named = {name: size for name, size in by_size if name in together or size > LEAST * peak}
        return Fit(peak - self.memory, named, together, left)

    def _together(self) -> tuple[list[str], float]:
        """The fewest of the settings with which it fits, and the bytes that are missing with them."""
        cheap = [setting for setting in SETTINGS if setting in self.usable]
        choices = [cheap, *([*cheap, setting] for setting in SMALLER_WEIGHTS if setting in self.usable)]
        peaks = {tuple(choice): peak for choice in choices if (peak := self._peak(choice)) is not None}
        chosen = next(
            (choice for choice, peak in peaks.items() if peak <= self.memory), min(peaks, key=lambda choice: peaks[choice])
        )
        target, kept = max(peaks[chosen], self.memory), list(chosen)
        for setting in reversed(chosen):
            fewer = [other for other in kept if other != setting]
            peak = self._peak(fewer)
            if peak is not None and peak <= target:
                kept = fewer
        return kept, max(0.0, target - self.memory)

    def _changes(self, setting: str) -> bool:
        """Whether the config goes together with a setting that it does not have."""
        try:
            changed = self.estimator.args.with_overrides([setting])
        except FlowGRPOError:
            return False
        return changed.model_dump() != self.estimator.args.model_dump()

    def _peak(self, settings: list[str]) -> float | None:
        """Bytes of the peak with these settings; None if they do not go together."""
        try:
            args = self.estimator.args.with_overrides(settings)
            checkpointing = args.memory.gradient_checkpointing
            changed = StepEstimator(args, self.estimator.cuda, self.estimator.count, self._traces.get(checkpointing))
        except FlowGRPOError:
            return None
        self._traces[checkpointing] = changed.trace
        return changed.estimate(1, self.base).peak
