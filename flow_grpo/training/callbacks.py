"""Callbacks of a run: objects with methods such as `on_step_end(args, state, control, **kwargs)`, the shape of transformers' and TRL's.

A `transformers.TrainerCallback` works as it is, and so does any object that has one of the methods in `EVENTS`. The calls are made on
the main process; what a callback asks for in `control` is done by all processes. What a callback raises ends the run, with a checkpoint
and the callback's traceback.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


@dataclass
class TrainerState:
    """How far a run is. The names are those of transformers.

    Attributes:
        global_step: training steps that are done.
        log_history: the rows of metrics that this process has logged, `eval/...` among them.
        best_metric: the highest held-out reward that this process has logged, before the current evaluation; None if there is none.
    """

    global_step: int = 0
    max_steps: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    best_metric: float | None = None
    log_history: list[dict[str, float]] = field(default_factory=list)


class CallbackArguments:
    """The run's settings, with what transformers' own callbacks read of their `TrainingArguments`: the metric is the held-out reward."""

    metric_for_best_model, greater_is_better, load_best_model_at_end = "reward", True, True

    def __init__(self, settings: FlowGRPOConfig, is_evaluated: bool) -> None:
        self._settings = settings
        self.eval_strategy = "steps" if is_evaluated else "no"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no settings yet
            raise AttributeError(name)
        return getattr(self._settings, name)


@dataclass
class TrainerControl:
    """The requests of a callback, for the end of the step: set a field to True. The trainer resets it."""

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False


class CallbackList:
    """The callbacks of a run, called in turn.

    Args:
        is_evaluated: whether the run has held-out prompts.

    Raises:
        FlowGRPOError: a callback without any of the methods in `EVENTS`, or with one that takes other arguments.
    """

    def __init__(
        self,
        callbacks: Sequence[Any] | None,
        args: FlowGRPOConfig,
        model: Any,
        processes: Processes,
        is_evaluated: bool = False,
    ) -> None:
        if not isinstance(callbacks, Iterable | None):
            raise FlowGRPOError(f"callbacks is of type {type(callbacks).__name__}: give a list of objects.")
        self.callbacks, self.model, self.processes = list(callbacks or ()), model, processes
        self.args = CallbackArguments(args, is_evaluated)
        self.state = TrainerState(max_steps=args.steps, is_world_process_zero=processes.is_main)
        self.control = TrainerControl()
        for callback in self.callbacks:
            if isinstance(callback, type) or not any(hasattr(callback, event) for event in EVENTS):
                raise FlowGRPOError(
                    f"the callback {callback!r} has none of the methods {', '.join(EVENTS)}: give an object of a class that has one."
                )
            for event in EVENTS:
                _check_arguments(callback, event)

    def call(self, event: str, **details: dict[str, float]) -> None:
        """Call the method `event` of all callbacks that have it, each with a copy of `details`, dicts, as keyword arguments."""
        if not self.processes.is_main:
            return
        self.processes.in_callback = True
        try:
            for callback in self.callbacks:
                method = getattr(callback, event, None)
                if method is not None:
                    copies = {name: dict(detail) for name, detail in details.items()}
                    method(self.args, self.state, self.control, model=self.model, **copies)
        finally:
            self.processes.in_callback = False

    def begin(self, step: int) -> None:
        """Call `on_train_begin`; `step` is the number of training steps that a resumed run has done."""
        self.state.global_step = step
        self.call("on_train_begin")

    def log(self, step: int, metrics: dict[str, float], evaluation: bool = False) -> None:
        """Record a row of metrics and call `on_log`; for an evaluation also `on_evaluate`."""
        self.state.global_step = step
        self.state.log_history.append({"step": step, **metrics})
        self.call("on_log", logs=metrics)
        if evaluation:
            reward = metrics["eval/reward"]
            self.call("on_evaluate", metrics={**metrics, "eval_reward": reward})  # transformers' name of it
            self.state.best_metric = max(reward, self.state.best_metric if self.state.best_metric is not None else reward)

    def requested(self) -> TrainerControl:
        """The requests of the callbacks since the last call, equal on all processes. Every process must call it."""
        control, self.control = self.control, TrainerControl()
        return self.processes.all_gather(control)[0] if self.callbacks else control


def _check_arguments(callback: Any, event: str) -> None:
    """Raise FlowGRPOError if a callback's method can't be called as `CallbackList` calls it."""
    method, details = getattr(callback, event, None), {"on_log": ("logs",), "on_evaluate": ("metrics",)}
    if not callable(method):
        return
    takes = inspect.signature(method)
    try:
        takes.bind(None, None, None, **dict.fromkeys(("model", *details.get(event, ()))))
    except TypeError:
        raise FlowGRPOError(
            f"{event} of the callback {type(callback).__name__} takes {takes}: let it take (args, state, control, **kwargs)."
        ) from None
