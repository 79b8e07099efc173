"""Call rewards: one reward, or a weighted sum of several, of which a prompt may name some (its metadata column `rewards`)."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards import scopes
from flow_grpo.rewards.calls import (
    ROWS,
    accepted_metadata,
    as_values,
    check_inputs,
    check_metadata,
    copied,
    finished,
    is_concurrent,
    is_ours,
    takes_rows,
)
from flow_grpo.rewards.gradients import NoGradient, RewardGradient, check_differentiable, gradient_of, smoothed
from flow_grpo.rewards.images import SOURCE, SOURCES, first_sources, has_sources
from flow_grpo.rewards.interrupt import in_thread
from flow_grpo.rewards.scopes import ALL, frame_indices, frames_of, is_video
from flow_grpo.rewards.user_code import UserCodeError, UserCodeMemoryError, guarded, one_sentence

MAX_PROMPT_LENGTH = 200  # characters of a prompt in an error
REWARDS_COLUMN = "rewards"  # metadata of a prompt of several sets: the weights of its set's rewards by name


class Reward(Protocol):
    """A callable that scores images: values (B,), larger is better. `rewards.calls` has the other shapes of an answer."""

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> Any: ...


def score(
    name: str,
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    group: Sequence[int] | None = None,
    /,
    **metadata: Any,
) -> Tensor:
    """Call a reward and check its values; returns (B,) float32 on the CPU.

    Args:
        group: which group each image belongs to, for a reward that sees several images; by default images of one prompt are a group.

    Raises:
        FlowGRPOError: the reward raised, or returned NaN, infinity or the wrong shape, or sees several images and a group has one. The
            message names the reward and the prompt.
    """
    values = call_reward(name, reward, images, prompts, metadata, group=group)
    _check_finite(name, values, prompts)
    return values


def _check_finite(name: str, values: Tensor, prompts: list[str]) -> None:
    for value, prompt in zip(values.tolist(), prompts, strict=True):
        if not math.isfinite(value):
            shown = prompt[:MAX_PROMPT_LENGTH]
            raise FlowGRPOError(f"reward {name} returned {value} for the prompt {shown!r}; every reward must be finite.")


def reward_gradient(
    name: str, reward: Reward, images: Tensor, prompts: list[str], metadata: dict[str, Any], rho: float = 0.0
) -> RewardGradient:
    """The values of a differentiable reward and their gradients, by one call and one backward pass; values may be NaN, as of `call_reward`.

    Args:
        images: (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1].
        rho: above 0, the gradient of the flattened reward (`gradients.smoothed`), by two of each.

    Raises:
        FlowGRPOError: the reward raised, offers no gradient (NoGradient), or has one that is not finite where its value is.
    """
    check_differentiable(name, reward)

    def at(images: Tensor) -> RewardGradient:
        leaf = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            values = call_reward(name, reward, leaf, prompts, metadata, graph=True)
        return RewardGradient(values.detach(), gradient_of(name, values, leaf))

    result = smoothed(at, images, rho) if rho > 0 else at(images)
    broken = (~result.gradient.flatten(1).isfinite().all(1)).nonzero()
    if len(broken):
        prompt = prompts[int(broken[0])][:MAX_PROMPT_LENGTH]
        raise FlowGRPOError(f"reward {name} has a gradient that is not finite for the prompt {prompt!r}.")
    return result


def call_reward(
    name: str,
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    metadata: dict[str, Any],
    *,
    group: Sequence[int] | None = None,
    graph: bool = False,
) -> Tensor:
    """Call a reward as `score` does, but allow values that are not finite. A reward of the user gets copies of its inputs.

    Args:
        graph: of a differentiable reward: keep the graph that leads to the images.
    """
    if not prompts:
        return images.flatten(1).sum(1).cpu()  # no values, with the graph that `graph` asks for
    frames = frames_of(reward)
    if is_video(images) and frames != ALL:
        indices = frame_indices(frames, images.shape[1])
        by_frame = [call_reward(name, reward, images[:, i], prompts, metadata, group=group, graph=graph) for i in indices]
        return torch.stack(by_frame).mean(0)
    if frames == ALL and not is_video(images):
        raise FlowGRPOError(f"reward {name} sees whole videos (B, F, 3, H, W), and these are images: leave it out.")
    batch = _Images(images, prompts, metadata)
    scope = scopes.scope_of(reward)
    if scope == scopes.IMAGE:
        return _call(name, reward, batch, graph)
    members = scopes.rows_by_group(prompts if group is None else group)
    single = next((rows[0] for rows in members if len(rows) < 2), None)
    if single is not None:
        raise FlowGRPOError(
            f"reward {name} sees the images of a prompt together, but there is one of {prompts[single][:MAX_PROMPT_LENGTH]!r}: "
            "give it two or more."
        )
    if hasattr(reward, "score_groups"):  # it passes whole groups on
        group_of_row = {row: i for i, rows in enumerate(members) for row in rows}
        return _call(name, partial(reward.score_groups, [group_of_row[row] for row in range(len(prompts))]), batch)
    if scope == scopes.PAIR:
        opponents = scopes.opponents_of(reward)
        pairs = [pair for rows in members for pair in scopes.pairs_of(rows, opponents)]
        return scopes.win_rates(len(prompts), pairs, _first_wins(name, reward, batch, pairs))
    values = torch.empty(len(prompts))
    for rows in members:
        values[rows] = _call(name, reward, batch.take(rows))
    return values


@dataclass(frozen=True)
class _Images:
    """The inputs of a reward call: B images, or B pairs of images, of which these are the first."""

    images: Tensor
    prompts: list[str]
    metadata: dict[str, list]
    second: Tensor | None = None
    group: Sequence[int] | None = None

    def take(self, rows: list[int]) -> "_Images":
        metadata = {key: [column[i] for i in rows] for key, column in self.metadata.items()}
        second = None if self.second is None else self.second[rows]
        group = None if self.group is None else [self.group[i] for i in rows]
        return _Images(self.images[rows], [self.prompts[i] for i in rows], metadata, second, group)

    def keywords(self, reward: Reward, inputs: int) -> dict[str, Any]:
        """The metadata that the reward takes after its first `inputs` arguments, with `source` where prompts have images.

        A parameter `metadata` gets the columns as one dict for each image, as in flow_grpo, unless a column has that name.
        Where some prompts have none, a reward that names `source` cannot be called; one that takes any metadata goes without it.
        """
        named = SOURCE in scopes.signature(reward).parameters
        shows_sources = has_sources(self.metadata) and (named or all(self.metadata[SOURCES]))
        columns = {**self.metadata, SOURCE: None} if shows_sources else self.metadata
        keywords = dict(accepted_metadata(reward, columns, inputs))
        if shows_sources and SOURCE in keywords:
            keywords[SOURCE] = first_sources(self.metadata[SOURCES], self.images)
        if takes_rows(reward) and ROWS not in self.metadata:
            keywords[ROWS] = [{key: column[i] for key, column in self.metadata.items()} for i in range(len(self.prompts))]
        return keywords

    def pairs(self, first: list[int], second: list[int]) -> "_Images":
        """Pairs of these images by their rows."""
        return replace(self.take(first), second=self.images[second])

    def with_second(self) -> "_Images":
        """The 2 B images, each first one followed by its second one, as a group."""
        assert self.second is not None
        rows = [i for i in range(len(self.prompts)) for _ in range(2)]
        both = torch.stack([self.images, self.second.to(self.images)], 1).flatten(0, 1)
        return replace(self.take(rows), images=both, second=None, group=rows)


def _first_wins(name: str, reward: Reward, batch: _Images, pairs: list[tuple[int, int]]) -> Tensor:
    """The probability (n,) that the first image of each pair of rows beats the second, the mean of asking in both orders.

    A preference for one of the two positions then cancels. A reward with `symmetric = True`, which has none, is asked once.
    """
    parts = []
    for start in range(0, len(pairs), scopes.PAIRS_PER_CALL):
        part = pairs[start : start + scopes.PAIRS_PER_CALL]
        first, second = [i for i, _ in part], [j for _, j in part]
        wins = _checked_probabilities(name, _call(name, reward, batch.pairs(first, second)))
        if not getattr(reward, "symmetric", False):
            wins = (wins + 1 - _checked_probabilities(name, _call(name, reward, batch.pairs(second, first)))) / 2
        parts.append(wins)
    return torch.cat(parts)


def _checked_probabilities(name: str, values: Tensor) -> Tensor:
    invalid = values[(values < 0) | (values > 1)]
    if len(invalid):
        raise FlowGRPOError(
            f"reward {name} returned {invalid[0].item():g} for a pair of images; it must return the probability, 0 to 1, that the "
            "first wins."
        )
    return values


def _call(name: str, reward: Any, batch: _Images, graph: bool = False) -> Tensor:
    """The values (B,) of one call. FlowGRPOError if it raised, returned another shape, or can't be called so."""
    prompts = batch.prompts
    kind = "images" if batch.second is None else "pairs of images"
    on = f"on {len(prompts)} {kind}" + (f", the first for the prompt {prompts[0][:MAX_PROMPT_LENGTH]!r}" if prompts else "")
    inputs: list[Any] = [batch.images, prompts] if batch.second is None else [batch.images, batch.second, prompts]
    check_inputs(name, reward, len(inputs))
    keywords = batch.keywords(reward, len(inputs))
    check_metadata(name, reward, keywords, len(inputs))
    if not is_ours(reward):
        inputs, keywords = copied((inputs, keywords))
    guard = one_sentence if is_concurrent(reward) else partial(guarded, f"reward {name}")
    try:
        with guard(lambda error: f"reward {name} raised {error} {on}"), torch.set_grad_enabled(graph):
            returned = finished(reward(*inputs, **keywords), graph)
    except UserCodeError as error:
        if isinstance(error.__cause__, AttributeError) and "'Tensor' object" in str(error):
            hint = "images are a tensor: decorate it with flow_grpo.rewards.takes_pil if it takes PIL images."
            raise UserCodeError(f"{error}; {hint}") from error.__cause__
        raise
    return as_values(name, returned, len(prompts), kind)


def _without_gradient(images: Tensor, rho: float) -> RewardGradient:
    """Of B images without a value: values NaN, gradients 0."""
    missing = torch.full((len(images),), math.nan)
    return RewardGradient(missing, torch.zeros_like(images), missing.clone() if rho > 0 else None)


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
        return self._begin(_Images(images, prompts, metadata, others, group), self._score_against)()

    def gradients(
        self, images: Tensor, prompts: list[str], rho: float = 0.0, /, **metadata: Any
    ) -> dict[str, RewardGradient]:
        """The values and gradients of each trained reward by name, without its weight, one reward and its backward pass after another.

        Where a reward of `drop_on_error` failed, and where a prompt's set does not name the reward, its value is NaN and its gradient 0.

        Args:
            images: (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1], on any device.
            rho: above 0, the gradient is that of the flattened reward, see `gradients.smoothed`, and `fall` has what S1 is the mean of.

        Raises:
            FlowGRPOError: a trained reward offers no gradient, or one failed, as in `score`.
        """
        self.check_differentiable()
        batch, weights = _Images(images, prompts, metadata), self.row_weights(metadata)
        if weights is None:
            return {name: self._gradient_of_one(name, batch, rho) for name in self.trained_weights}
        by_name = {}
        for name, column in zip(self.trained_weights, weights.unbind(1), strict=True):
            rows = column.nonzero()[:, 0].tolist()
            by_name[name] = whole = _without_gradient(images, rho)
            if not rows:
                continue
            part = self._gradient_of_one(name, batch.take(rows), rho)
            whole.value[rows], whole.gradient[rows] = part.value, part.gradient
            if whole.fall is not None and part.fall is not None:
                whole.fall[rows] = part.fall
        return by_name

    def check_differentiable(self) -> None:
        """Raise FlowGRPOError if a trained reward offers no gradient; the message says what to use instead."""
        for name in self.trained_weights:
            check_differentiable(name, self.rewards[name])

    def row_weights(self, metadata: dict[str, list]) -> Tensor | None:
        """The weight (B, R) of each trained reward for each image, if prompt sets name rewards. FlowGRPOError as of `row_weights`."""
        return row_weights(metadata.get(REWARDS_COLUMN), self.trained_weights, self.names)

    @property
    def trained_weights(self) -> dict[str, float]:
        """The weights that are not 0."""
        return {name: self.weights[name] for name in self.rewards if self.weights[name] != 0}

    def begin(
        self, images: Tensor, prompts: list[str], group: Sequence[int] | None = None, /, **metadata: Any
    ) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
        """Start what other machines score, and return a function that scores the rest here and returns what a call does."""
        return self._begin(_Images(images, prompts, metadata, group=group), self._score_one)

    def _begin(
        self, batch: _Images, score_one: Callable[[str, _Images], Tensor]
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

    def _score_against(self, name: str, batch: _Images) -> Tensor:
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

    def _score_one(self, name: str, batch: _Images) -> Tensor:
        if name not in self.drop_on_error or scopes.scope_of(self.rewards[name]) == scopes.IMAGE:
            return self._score_part(name, batch)
        values = torch.empty(len(batch.prompts))
        for rows in scopes.rows_by_group(batch.prompts if batch.group is None else batch.group):
            values[rows] = self._score_part(name, batch.take(rows))  # the group that fails is dropped alone
        return values

    def _score_part(self, name: str, batch: _Images) -> Tensor:
        with self._dropping(name):
            values = call_reward(name, self.rewards[name], batch.images, batch.prompts, batch.metadata, group=batch.group)
            return self._finite(name, values, batch.prompts)
        return torch.full((len(batch.prompts),), math.nan)

    def _gradient_of_one(self, name: str, batch: _Images, rho: float) -> RewardGradient:
        with self._dropping(name):
            result = reward_gradient(name, self.rewards[name], batch.images, batch.prompts, batch.metadata, rho=rho)
            return result._replace(value=self._finite(name, result.value, batch.prompts))
        return _without_gradient(batch.images, rho)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Context in which an error of a reward of `drop_on_error` becomes a message, and what follows the context runs."""
        try:
            yield
        except (UserCodeMemoryError, NoGradient):
            raise  # with less memory in use it may succeed; without a gradient it never does
        except ValueError as error:
            if name not in self.drop_on_error:
                raise
            self.drop_messages.append(f"{error} All of them were left out.")

    def _finite(self, name: str, values: Tensor, prompts: list[str]) -> Tensor:
        """The values, NaN where they are not finite and the reward is of `drop_on_error`. FlowGRPOError for any other reward."""
        if name not in self.drop_on_error:
            _check_finite(name, values, prompts)
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
