"""Call rewards and check what they return: one reward, or a weighted sum of several."""

import inspect
import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from rewards.user_code import guarded

SHOWN = 200  # characters of a prompt in an error


class Reward(Protocol):
    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor | list[float]: ...


def score(name: str, reward: Reward, images: torch.Tensor, prompts: list[str], /, **metadata: Any) -> torch.Tensor:
    """The reward's values, (B,) float32 on the CPU, checked.

    Raises:
        ValueError: a sentence with the reward's name and the prompt, if it raises, returns NaN or infinity, or has the
            wrong shape.
    """
    values = call_reward(name, reward, images, prompts, metadata)
    for value, prompt in zip(values.tolist(), prompts, strict=True):
        if not math.isfinite(value):
            raise ValueError(f"reward {name} returned {value} for the prompt {prompt!r}; every reward must be finite.")
    return values


def call_reward(
    name: str, reward: Reward, images: torch.Tensor, prompts: list[str], metadata: dict[str, Any]
) -> torch.Tensor:
    """As `score`, but a value need not be finite."""
    on = f"on {len(prompts)} images" + (f", the first for the prompt {prompts[0][:SHOWN]!r}" if prompts else "")
    with guarded(f"reward {name}", lambda kind: f"reward {name} raised {kind} {on}"), torch.no_grad():
        given = reward(images, prompts, **accepted_metadata(reward, metadata))
        values = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach()
    if values.shape != (len(prompts),):
        raise ValueError(
            f"reward {name} returned shape {tuple(values.shape)} for {len(prompts)} images; it must return one number each."
        )
    return values


class WeightedSum:
    """Several rewards at once: their weighted sum, and each alone. A weight of 0 only reports.

    Attributes:
        drop_messages: what rewards of `drop_on_error` said when they failed, a sentence each; whoever reports them empties the list.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float],
        drop_on_error: Iterable[str] = (),
        drop_messages: list[str] | None = None,
    ) -> None:
        self.rewards, self.weights, self.drop_on_error = rewards, weights, set(drop_on_error)
        self.drop_messages = [] if drop_messages is None else drop_messages

    def subset(self, names: Iterable[str]) -> "WeightedSum":
        """The sum of these rewards alone, the very same objects."""
        return WeightedSum(
            {name: self.rewards[name] for name in names}, self.weights, self.drop_on_error, self.drop_messages
        )

    def __call__(
        self, images: torch.Tensor, prompts: list[str], /, **metadata: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum (B,) and each reward (B,) by name. ValueError as in `score`; one of `drop_on_error` is NaN where it failed."""
        by_name = {name: self._one(name, images, prompts, metadata) for name in self.rewards}
        weighed = {name: values for name, values in by_name.items() if self.weights[name] != 0}
        total = sum((self.weights[name] * values for name, values in weighed.items()), torch.zeros(len(prompts)))
        return total, by_name

    def _one(self, name: str, images: torch.Tensor, prompts: list[str], metadata: dict[str, Any]) -> torch.Tensor:
        reward = self.rewards[name]
        if name not in self.drop_on_error:
            return score(name, reward, images, prompts, **metadata)
        try:
            values = call_reward(name, reward, images, prompts, metadata)
        except ValueError as error:
            self.drop_messages.append(f"{error} All of them were left out.")
            return torch.full((len(prompts),), math.nan)
        missing = int((~values.isfinite()).sum())
        if missing:
            self.drop_messages.append(
                f"reward {name} gave no finite number for {missing} of {len(prompts)} images, whose groups were left out."
            )
        return values.where(values.isfinite(), math.nan)


def accepted_metadata(reward: Reward, metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata that the reward's signature names, or all of it if it takes any."""
    parameters = inspect.signature(reward.forward if isinstance(reward, torch.nn.Module) else reward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return metadata
    return {key: value for key, value in metadata.items() if key in parameters}
