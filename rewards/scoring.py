"""A weighted sum of several rewards, of which a prompt may name some (its metadata column `rewards`)."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards import scopes
from flow_grpo.rewards.calls import Reward, RewardInputs, call_reward, check_finite, is_concurrent
from flow_grpo.rewards.gradients import (
    NoGradient,
    ValueAndGradient,
    check_differentiable,
    value_and_gradient,
    without_gradient,
)
from flow_grpo.rewards.threads import in_thread
from flow_grpo.rewards.user_code import UserCodeMemoryError

REWARDS_COLUMN = "rewards"  # metadata of a prompt of several sets: the weights of its set's rewards by name


class WeightedSum:
    """Several rewards: their weighted sum, and the values of each. A reward with weight 0 is only reported.

    Attributes:
        drop_on_error: names of rewards that return NaN when they fail; the others raise.
        drop_messages: one sentence for each failure of such a reward; the caller that reports them clears the list.
        names: the rewards by the names that prompt sets may give them, their own ones among them.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float],
        drop_on_error: Iterable[str] = (),
        drop_messages: list[str] | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        self.rewards, self.weights, self.drop_on_error = rewards, weights, set(drop_on_error)
        self.drop_messages = [] if drop_messages is None else drop_messages
        self.names = {**{name: name for name in rewards}, **(names or {})}
        self._concurrent = {name for name, reward in rewards.items() if is_concurrent(reward)}

    def subset(self, names: Iterable[str]) -> "WeightedSum":
        """The weighted sum of some of the rewards; the objects and drop_messages are shared."""
        kept = {name: self.rewards[name] for name in names}
        return WeightedSum(kept, self.weights, self.drop_on_error, self.drop_messages, self.names)

    def __call__(
        self, images: Tensor, prompts: list[str], group: Sequence[int] | None = None, /, **metadata: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum (B,) and each reward (B,) by name, NaN where one of `drop_on_error` failed. FlowGRPOError as in `score`.

        Where the column `rewards` of the metadata names rewards, those of them with a weight score the image: the sum is over them, and
        the others are NaN.
        """
        return self.begin(images, prompts, group, **metadata)()

    def against(
        self,
        others: Tensor | None,
        images: Tensor,
        prompts: list[str],
        group: Sequence[int] | None = None,
        /,
        **metadata: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Score images; pair rewards compare each with the image of `others` (B, 3, H, W) in the same row, not with its group.

        FlowGRPOError if there is a pair reward and `others` is None.
        """
        return self._begin(RewardInputs(images, prompts, metadata, others, group), self._score_against)()

    def gradients(
        self, images: Tensor, prompts: list[str], rho: float = 0.0, /, **metadata: Any
    ) -> dict[str, ValueAndGradient]:
        """The values and gradients of each trained reward by name, without its weight, one reward and its backward pass after another.

        Where a reward of `drop_on_error` failed, and where a prompt's set does not name the reward, its value is NaN and its gradient 0.

        Args:
            images: (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1], on any device.
            rho: above 0, the gradient is that of the reward, times the sign of its weight, flattened by `gradients.smoothed`, and
                `fall` has what S1 is the mean of.

        Raises:
            FlowGRPOError: a trained reward offers no gradient, or one failed, as in `score`.
        """
        self.check_differentiable()
        batch, weights = RewardInputs(images, prompts, metadata), self.row_weights(metadata)
        if weights is None:
            trained = self.trained_weights.items()
            return {name: self._gradient_of_one(name, batch, math.copysign(rho, weight)) for name, weight in trained}
        by_name = {}
        for name, column in zip(self.trained_weights, weights.unbind(1), strict=True):
            rows = column.nonzero()[:, 0].tolist()
            by_name[name] = whole = without_gradient(images, rho)
            if not rows:
                continue
            part = self._gradient_of_one(name, batch.take(rows), rho * column[rows].sign())
            whole.value[rows], whole.gradient[rows] = part.value, part.gradient
            if whole.fall is not None and part.fall is not None:
                whole.fall[rows] = part.fall
        return by_name

    def check_differentiable(self) -> None:
        """Raise FlowGRPOError if a trained reward offers no gradient; the message says what to use instead."""
        for name in self.trained_weights:
            check_differentiable(name, self.rewards[name])

    def row_weights(self, metadata: dict[str, list]) -> Tensor | None:
        """The weight (B, R) of each trained reward for each image, if prompt sets name rewards. FlowGRPOError as in `row_weights`."""
        return row_weights(metadata.get(REWARDS_COLUMN), self.trained_weights, self.names)

    @property
    def trained_weights(self) -> dict[str, float]:
        """The weights that are not 0."""
        return {name: self.weights[name] for name in self.rewards if self.weights[name] != 0}

    def begin(
        self, images: Tensor, prompts: list[str], group: Sequence[int] | None = None, /, **metadata: Any
    ) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
        """Start what other machines score, and return a function that scores the rest here and returns what a call does."""
        return self._begin(RewardInputs(images, prompts, metadata, group=group), self._score_one)

    def _begin(
        self, batch: RewardInputs, score_one: Callable[[str, RewardInputs], Tensor]
    ) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
        count, trained = len(batch.prompts), list(self.trained_weights)

        def values(name: str) -> Tensor:
            weights = self.row_weights(batch.metadata)
            if weights is None or name not in trained:
                return score_one(name, batch)
            rows = weights[:, trained.index(name)].nonzero()[:, 0].tolist()
            whole = torch.full((count,), math.nan)
            if rows:
                whole[rows] = score_one(name, batch.take(rows))
            return whole

        started = {name: in_thread(partial(values, name)) for name in self.rewards if name in self._concurrent}

        def finish() -> tuple[Tensor, dict[str, Tensor]]:
            by_name = {name: values(name) for name in self.rewards if name not in started}
            by_name = {name: started[name].result() if name in started else by_name[name] for name in self.rewards}
            weights = self.row_weights(batch.metadata)
            if weights is None:
                return sum((self.weights[name] * by_name[name] for name in trained), torch.zeros(count)), by_name
            parts = [weight * by_name[name] for name, weight in zip(trained, weights.unbind(1), strict=True)]
            return torch.stack(parts, 1).where(weights != 0, 0).sum(1), by_name

        return finish

    def _score_against(self, name: str, batch: RewardInputs) -> Tensor:
        if not self.is_pair(name):
            return self._score_one(name, batch)
        if batch.second is None:
            raise FlowGRPOError(
                f"reward {name} compares images of one prompt and seed with the base model's, and there are none here: measure "
                "a model, or leave the reward out."
            )
        return self._score_one(name, batch.with_second())[::2]

    def is_pair(self, name: str) -> bool:
        return scopes.scope_of(self.rewards[name]) == scopes.PAIR

    @property
    def has_pairs(self) -> bool:
        """Whether a reward compares pairs of images."""
        return any(map(self.is_pair, self.rewards))

    def _score_one(self, name: str, batch: RewardInputs) -> Tensor:
        if name not in self.drop_on_error or scopes.scope_of(self.rewards[name]) == scopes.IMAGE:
            return self._score_part(name, batch)
        values = torch.empty(len(batch.prompts))
        for rows in scopes.rows_by_group(batch.prompts if batch.group is None else batch.group):
            values[rows] = self._score_part(name, batch.take(rows))  # the group that fails is dropped alone
        return values

    def _score_part(self, name: str, batch: RewardInputs) -> Tensor:
        with self._dropping(name, batch):
            values = call_reward(name, self.rewards[name], batch.images, batch.prompts, batch.metadata, group=batch.group)
            return self._finite(name, values, batch.prompts)
        return torch.full((len(batch.prompts),), math.nan)

    def _gradient_of_one(self, name: str, batch: RewardInputs, rho: float | Tensor) -> ValueAndGradient:
        with self._dropping(name, batch):
            result = value_and_gradient(name, self.rewards[name], batch.images, batch.prompts, batch.metadata, rho=rho)
            return result._replace(value=self._finite(name, result.value, batch.prompts))
        return without_gradient(batch.images, rho)

    @contextmanager
    def _dropping(self, name: str, batch: RewardInputs) -> Iterator[None]:
        """Context in which an error of a reward of `drop_on_error` becomes a message, and what follows the context runs."""
        try:
            yield
        except (UserCodeMemoryError, NoGradient):
            raise  # with less memory in use it may succeed; without a gradient it never does
        except ValueError as error:
            if name not in self.drop_on_error:
                raise
            self.drop_messages.append(f"{str(error).rstrip('.')}. Images that were left out: {len(batch.prompts)}.")

    def _finite(self, name: str, values: Tensor, prompts: list[str]) -> Tensor:
        """The values, NaN where they are not finite and the reward is of `drop_on_error`. FlowGRPOError for any other reward."""
        if name not in self.drop_on_error:
            check_finite(name, values, prompts)
        missing = int((~values.isfinite()).sum())
        if missing:
            self.drop_messages.append(
                f"reward {name} gave no finite number for {missing} of {len(values)} images, whose groups were left out."
            )
        return values.where(values.isfinite(), math.nan)


def row_weights(column: list | None, weights: dict[str, float], names: dict[str, str]) -> Tensor | None:
    """The weight (B, R) of each of R trained rewards for each of B images, 0 where it does not score the image; None for all images alike.

    Args:
        column: for each image the weights of its prompt set's rewards by name (None is the reward's own weight); None in place of
            them means all rewards.
        weights: the rewards' own weights by name.
        names: the rewards by the names that a prompt set may give them.

    Raises:
        FlowGRPOError: a prompt set names a reward that is not there, or none that has a weight.
    """
    if column is None or not weights or all(entry is None for entry in column):
        return None
    return torch.tensor([list(_weights_of(entry, weights, names).values()) for entry in column])


def _weights_of(entry: dict[str, float | None] | None, weights: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    if entry is None:
        return weights
    selected = dict.fromkeys(weights, 0.0)
    for name, weight in entry.items():
        if name not in names:
            raise FlowGRPOError(
                f"a prompt set names the reward {name}, but the run has {', '.join(names)}: add it to `rewards`."
            )
        if names[name] in weights:
            selected[names[name]] = weights[names[name]] if weight is None else weight
    if not any(selected.values()):
        raise FlowGRPOError(
            f"a prompt set names no reward to train on, but {', '.join(entry) or 'none'}: name one of {', '.join(weights)}."
        )
    return selected
