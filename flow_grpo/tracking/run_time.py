"""How long a run takes, from the seconds of its steps and evaluations."""

from collections.abc import Callable
from dataclasses import dataclass

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.text import counted, duration


@dataclass(frozen=True)
class RunTime:
    """The time that a run takes, or the rest of one.

    Attributes:
        steps, evaluations: how many there are.
        seconds: until the end.
        evaluated: the training step of the first evaluation among them after step 0; None if there is none.
        seconds_to_evaluation: until that evaluation has ended.
    """

    steps: int
    evaluations: int
    seconds: float
    evaluated: int | None
    seconds_to_evaluation: float

    @classmethod
    def of(
        cls,
        args: FlowGRPOConfig,
        step_seconds: Callable[[FlowGRPOConfig], float],
        evaluation_seconds: float,
        done: int | None = None,
    ) -> "RunTime":
        """The time of a config's run.

        Args:
            step_seconds: returns the seconds of a training step of a stage.
            evaluation_seconds: of an evaluation; 0 if the run has no held-out prompts.
            done: training steps that are done, with their evaluations but that of the last one; None before the first evaluation.
        """
        stages = [(stage.steps, step_seconds(stage)) for _, stage in args.resolved_stages()]
        first = done or 0
        due = [step for step in args.evaluated_steps if done is None or step >= max(done, 1)]
        evaluated = due if evaluation_seconds else []
        after_start = [step for step in evaluated if step > 0]

        def seconds_until(step: int) -> float:
            """Of the training steps from the first one on, and of the evaluations up to that of `step`."""
            training = _seconds_of(stages, step) - _seconds_of(stages, first)
            return training + evaluation_seconds * sum(place <= step for place in evaluated)

        return cls(
            steps=args.steps - first,
            evaluations=len(evaluated),
            seconds=seconds_until(args.steps),
            evaluated=after_start[0] if after_start else None,
            seconds_to_evaluation=seconds_until(after_start[0]) if after_start else 0.0,
        )

    def __str__(self) -> str:
        evaluations = f" and {counted(self.evaluations, 'evaluation')}" if self.evaluations else ""
        text = f"{counted(self.steps, 'step')}{evaluations} take {duration(self.seconds)}"
        if self.evaluations < 2 or self.evaluated is None:
            return text
        return f"{text}; the evaluation at step {self.evaluated} ends after {duration(self.seconds_to_evaluation)}"


def _seconds_of(stages: list[tuple[int, float]], steps: int) -> float:
    """Seconds of the first `steps` training steps; stages are given by their number of steps and the seconds of each."""
    total = 0.0
    for count, seconds in stages:
        total += seconds * min(steps, count)
        steps = max(0, steps - count)
    return total
