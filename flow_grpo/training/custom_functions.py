"""A user's own objective or advantage: found by its import path or file, checked, and called without letting it end the run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flow_grpo import rewards as reward_kit
from flow_grpo.config.objective import CustomFunction, Objective, is_custom
from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.calls import copied
from flow_grpo.rewards.user_code import guarded
from flow_grpo.text import suggest
from flow_grpo.types import RATIO_DEVIATION, Loss, NoisedImage, TrainedStep


@functools.cache
def load_custom_function(kind: str, name: str) -> Callable | None:
    """The user's function at an import path or in a file, which raises only FlowGRPOError and gets copies; None for a built-in name.

    A function is kept until another run is built in this process, which reads the file again.
    """
    if not is_custom(name):
        return None
    function = reward_kit.locate(kind, name)
    if not callable(function):
        raise FlowGRPOError(f"{kind} {name} is not a function.")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with guarded(f"{kind} {name}", lambda error: f"{kind} {name} raised {error}"):
            return function(*copied(args), **copied(kwargs))

    return called


def check_custom_functions(objective: Objective) -> None:
    """Check that the user's objective and advantage are there and take their arguments. FlowGRPOError if not."""
    options = objective.options if isinstance(objective, CustomFunction) else {}
    for kind, name, own in (("objective", objective.name, options), ("advantage", objective.advantage, {})):
        function = load_custom_function(kind, name)
        if function is None:
            continue
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of some functions that are written in C
            continue
        try:
            signature.bind(None, None, **own)
        except TypeError as error:
            known = list(signature.parameters)[2:]
            hint = suggest(next((option for option in own if option not in known), ""), known)
            takes = f" Its options are {', '.join(known) or 'none'}." if kind == "objective" else " It gets (reward, group)."
            raise FlowGRPOError(f"{kind} {name}: {error}.{hint}{takes}") from error


def custom_loss(objective: CustomFunction, inputs: TrainedStep | NoisedImage, advantage: Tensor) -> Loss:
    """Call the user's objective, which returns a Loss or only its values (n,)."""
    function = load_custom_function("objective", objective.name)
    assert function
    result = function(inputs, advantage, **objective.options)
    value = result.value if isinstance(result, Loss) else result
    if not isinstance(value, Tensor) or value.shape != advantage.shape or not value.requires_grad:
        raise FlowGRPOError(
            f"objective {objective.name} must return a tensor of {len(advantage)} values that carries a gradient, one for each row, or a "
            "Loss of them."
        )
    metrics = dict(result.metrics) if isinstance(result, Loss) else {}
    for metric, numbers in metrics.items():
        if isinstance(numbers, Tensor) and numbers.ndim == 0:
            metrics[metric] = numbers = numbers.expand(len(advantage))
        if not isinstance(numbers, Tensor) or numbers.shape != advantage.shape:
            raise FlowGRPOError(
                f"objective {objective.name}: its metric {metric} must be a tensor of {len(advantage)} values, or of one."
            )
    if isinstance(inputs, TrainedStep):
        metrics[RATIO_DEVIATION] = (inputs.log_prob - inputs.old_log_prob).detach().exp().sub(1).abs()
    return Loss(value, metrics)
