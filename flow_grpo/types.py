"""The data that flows through a training step. P prompts, G images each, B = P G rows, K trained steps.

PromptBatch  --policy.encode-->     conditioning
conditioning --sampling.rollout-->  Trajectory
Trajectory   --policy.decode-->     images, float32 RGB (B, 3, H, W) in [0, 1]
images       --rewards-->           Scores
Scores       --group_advantages-->  advantage (B,)
advantage    --objective-->         Loss
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# A metric of objectives with a ratio: |ratio - 1| of each row; what is reported is the largest. The update checks that it is 0 before
# the first update, and `auto` clip ranges are set by it.
RATIO_DEVIATION = "ratio/max_deviation"


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself if it is float64, else `x` in float32."""
    return x if x.dtype == torch.float64 else x.float()


def broadcast_rows(values: Tensor, like: Float[Tensor, "n ..."]) -> Tensor:
    """Values (n,), one for each row, or a single one (), in a shape that broadcasts over the rows of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def take_rows(
    values: Float[Tensor, "B ..."], rows: Int[Tensor, " n"], device: torch.device | None = None
) -> Float[Tensor, "n ..."]:
    """`values[rows]` on `device`, by default where the values are; `rows` is on the CPU. Does not wait for a GPU."""
    taken = values.index_select(0, rows.to(values.device, non_blocking=True))
    # a copy to the CPU must be waited for: its values are read at once
    return taken if device is None else taken.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True)
class PromptBatch:
    """B rows, the images of a prompt next to each other: a group. Row b is image `image[b]` of prompt `group[b]`.

    Where several processes share a step, the groups of one have gaps in their numbers.
    """

    prompts: list[str]
    metadata: list[dict]
    group: Int[Tensor, " B"]
    image: Int[Tensor, " B"]  # 0..G-1

    def columns(self) -> dict[str, list]:
        """Keyword arguments for rewards: the metadata, and as `sources` the decoded images of each prompt, if there are any."""
        sources = [[image.open() for image in getattr(prompt, "images", ())] for prompt in self.prompts]
        return {**self.metadata_columns(), "sources": sources} if any(sources) else self.metadata_columns()

    def metadata_columns(self) -> dict[str, list]:
        """The metadata as one list of B values per key."""
        keys = sorted({key for row in self.metadata for key in row})
        return {key: [row.get(key) for row in self.metadata] for key in keys}

    def take(self, rows: Int[Tensor, " n"]) -> "PromptBatch":
        """These rows, whose groups keep their numbers."""
        indices = rows.tolist()
        prompts, metadata = [self.prompts[i] for i in indices], [self.metadata[i] for i in indices]
        return PromptBatch(prompts, metadata, self.group[rows], self.image[rows])


@dataclass(frozen=True)
class Schedule:
    """The pipeline's pairs of timestep (the network's input) and sigma (the noise level)."""

    timesteps: Float[Tensor, " T"]
    sigmas: Float[Tensor, " T+1"]  # falling from about 1 to 0
    shift: Float[Tensor, "M 3"] | None = None
    """The scheduler's shift of noise levels: rows of a level before it, falling from 1 to 0, its timestep and its sigma; linear between
    them. None: step i of T is at 1 - i / T."""

    def __len__(self) -> int:
        return len(self.timesteps)

    def at(self, level: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Timestep and sigma of noise levels in [0, 1] before the shift."""
        table = self._pairs() if self.shift is None else self.shift
        levels, timesteps, sigmas = table.flip(0).unbind(1)
        high = torch.searchsorted(levels.contiguous(), level.contiguous()).clamp(1, len(levels) - 1)
        share = ((level - levels[high - 1]) / (levels[high] - levels[high - 1])).clamp(0, 1)
        return timesteps[high - 1].lerp(timesteps[high], share), sigmas[high - 1].lerp(sigmas[high], share)

    def _pairs(self) -> Float[Tensor, "M 3"]:
        """The schedule's own pairs as a shift."""
        rises = self.timesteps[-1] > self.timesteps[0]  # of a pipeline whose timesteps are 1 - sigma
        own = 1 - self.sigmas if rises else self.sigmas
        end = self.timesteps[-1:] * own[-1:] / own[-2:-1]
        return torch.stack([torch.linspace(1, 0, len(self) + 1), torch.cat([self.timesteps, end]), self.sigmas], 1)


@dataclass(frozen=True)
class StochasticSteps:
    """The steps of a rollout that add noise and are recorded; the others follow the ODE."""

    steps: list[int]  # indices into the schedule, rising
    transition: str  # a name of `sde.TRANSITIONS`
    noise_level: float


@dataclass(frozen=True)
class ReplayedTransition:
    """A stochastic step of n rows under the current policy, with the gradient if it was computed with one."""

    v: Float[Tensor, "n *state"]
    mean: Float[Tensor, "n *state"]
    std: Float[Tensor, "#n ..."]  # broadcastable to mean
    log_prob: Float[Tensor, " n"]


@dataclass(frozen=True)
class RecordedTransition:
    """One stochastic step of a rollout, for n rows."""

    x: Float[Tensor, "n *state"]  # float32, the state before it
    x_next: Float[Tensor, "n *state"]  # float32, the state after it: the tensor that was scored and stepped from
    mean: Float[Tensor, "n *state"]  # float32, the mean of the transition that drew it
    log_prob: Float[Tensor, " n"]
    graph: ReplayedTransition | None = None  # the same with its graph, if the rollout keeps it


@dataclass(frozen=True)
class ImageMoves:
    """For `mend` and `opsd`: the images, of B, that were moved by the gradient of their reward, and the velocities that lead to them."""

    target: Float[Tensor, "B *latent"]  # of an image that stays, the velocity of the rollout
    tried: Bool[Tensor, " B"]  # on the CPU, as is `moved`
    moved: Bool[Tensor, " B"]
    away: Float[Tensor, "B *latent"] | None = None  # of opsd, to the image that was moved against the gradient
    v_old: Float[Tensor, "B *latent"] | None = None  # of opsd, velocity of the slowly moving copy, which sampled the images

    @property
    def _given(self) -> dict[str, Tensor]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def join(parts: "Sequence[ImageMoves]") -> "ImageMoves | None":
        """The moves of several batches as one; None for an empty list."""
        if not parts:
            return None
        return ImageMoves(**{name: torch.cat([part._given[name] for part in parts]) for name in parts[0]._given})


@dataclass(frozen=True)
class GradientStates:
    """States of B images at which the velocity is trained by the gradient of rewards at an endpoint: K states, E endpoints, no graphs.

    An endpoint is what was decoded and scored: the final latents, or the image that a velocity predicts.
    """

    x: Float[Tensor, "B K *latent"]
    steps: list[int]  # K indices into the schedule
    factor: list[float]  # K derivatives of the endpoint by the velocity at the state
    endpoint: list[int]  # K, the endpoint of each state
    gradient: dict[str, Float[Tensor, "B E *latent"]]  # of each trained reward at each endpoint
    # how much the reward falls on a short step against its gradient, if that was measured
    fall: dict[str, Float[Tensor, "B E"]]
    moves: "ImageMoves | None" = None

    @staticmethod
    def join(parts: "Sequence[GradientStates]") -> "GradientStates":
        """The states of several batches of one training step as one."""
        gradient, fall = (
            {name: torch.cat([getattr(part, kind)[name] for part in parts]) for name in getattr(parts[0], kind)}
            for kind in ("gradient", "fall")
        )
        moves = ImageMoves.join([part.moves for part in parts if part.moves is not None])
        return replace(parts[0], x=torch.cat([part.x for part in parts]), gradient=gradient, fall=fall, moves=moves)

    def weighted(self, weights: dict[str, Float[Tensor, " B"]]) -> Float[Tensor, "B E *latent"]:
        """The weighted sum of the rewards' gradients."""
        return weighted_gradients(self.gradient, weights)


def weighted_gradients(
    gradients: dict[str, Float[Tensor, "B *shape"]], weights: dict[str, Float[Tensor, " B"]]
) -> Float[Tensor, "B *shape"]:
    """The sum of rewards' gradients, each row by its weight."""
    return torch.stack([broadcast_rows(weights[name], g).to(g) * g for name, g in gradients.items()]).sum(0)


@dataclass(frozen=True)
class Trajectory:
    """A rollout as the update needs it: K stochastic steps of each of B images, and their final latents.

    `graphs`, where the rollout kept them, has the K steps of each micro-batch by its first row; a graph is removed when it is used.
    """

    schedule: Schedule
    stochastic: StochasticSteps | None  # None without stochastic steps
    x: Float[Tensor, "B K *state"]  # see RecordedTransition
    x_next: Float[Tensor, "B K *state"]
    mean: Float[Tensor, "B K *state"]
    log_prob: Float[Tensor, "B K"]
    final: Float[Tensor, "B ..."]  # float32 latents of the images
    graphs: dict[int, list[ReplayedTransition]] = field(default_factory=dict)
    gradient_states: GradientStates | None = None  # of objectives by reward gradients

    @property
    def steps(self) -> list[int]:
        """The K stochastic steps, indices into the schedule."""
        return [] if self.stochastic is None else self.stochastic.steps

    @staticmethod
    def from_records(
        schedule: Schedule,
        stochastic: StochasticSteps | None,
        records: list[RecordedTransition],
        final: Float[Tensor, "n ..."],
    ) -> "Trajectory":
        """Stack one record per stochastic step of a micro-batch; without any the tensors are (n, 0)."""
        if not records:
            empty = final.new_zeros(len(final), 0)
            return Trajectory(schedule, None, x=empty, x_next=empty, mean=empty, log_prob=empty, final=final)
        columns: dict[str, Any] = {
            name: torch.stack([getattr(record, name) for record in records], 1)
            for name in ("x", "x_next", "mean", "log_prob")
        }
        kept = [record.graph for record in records if record.graph is not None]
        return Trajectory(schedule, stochastic, final=final, graphs={0: kept} if kept else {}, **columns)

    def take(self, rows: Int[Tensor, " n"]) -> "Trajectory":
        """These rows, without graphs and gradient states."""
        taken = self._with_rows({name: values[rows] for name, values in self._rows().items()})
        return replace(taken, gradient_states=None)

    def to(self, device: torch.device) -> "Trajectory":
        """The same with its records on that device; graphs and final latents stay."""
        moved = {name: values.to(device) for name, values in self._rows().items() if name != "final"}
        return replace(self._with_rows(moved), graphs=self.graphs)

    @staticmethod
    def join(parts: "Sequence[Trajectory]") -> "Trajectory":
        """The trajectories of several micro-batches as one."""
        starts = accumulate([len(part.final) for part in parts], initial=0)
        graphs = {start + row: kept for start, part in zip(starts, parts, strict=False) for row, kept in part.graphs.items()}
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0]._rows()}
        states = [part.gradient_states for part in parts if part.gradient_states is not None]
        return replace(
            parts[0]._with_rows(columns), graphs=graphs, gradient_states=GradientStates.join(states) if states else None
        )

    def _with_rows(self, columns: dict[str, Any]) -> "Trajectory":
        """These tensors in place of its own, without graphs."""
        return replace(self, **columns, graphs={})

    def _rows(self) -> dict[str, Tensor]:
        """The tensors with a row for each image."""
        return {name: getattr(self, name) for name in ("x", "x_next", "mean", "log_prob", "final")}


def self_weighted(error: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
    """Mean square of each row's error over its mean absolute value, which has no gradient and is at least 1e-5."""
    return error.square().flatten(1).mean(1) / error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)


@dataclass(frozen=True)
class GradientState:
    """A trained state of n rows: the velocity there, and the gradient of the rewards at its endpoint."""

    v: Float[Tensor, "n *latent"]  # with the gradient
    # the weighted sum over the rewards, each of rms 1; None where images were moved
    gradient: Float[Tensor, "n *latent"] | None
    factor: float  # derivative of the endpoint by the velocity
    target: Float[Tensor, "n *latent"] | None = None  # velocity that leads to the moved image
    away: Float[Tensor, "n *latent"] | None = None  # of opsd, velocity that leads to the image moved against the gradient
    v_old: Float[Tensor, "n *latent"] | None = None  # of opsd, velocity of the slowly moving copy, which sampled the images


@dataclass(frozen=True)
class TrainedStep:
    """One trained transition of n rows: under the current policy and, with `old_`, under the policy that sampled it."""

    log_prob: Float[Tensor, " n"]  # with the gradient
    old_log_prob: Float[Tensor, " n"]
    mean: Float[Tensor, "n *state"]  # with the gradient
    old_mean: Float[Tensor, "n *state"]
    std: Float[Tensor, "#n ..."]  # broadcastable to mean
    delta: Float[Tensor, ""]  # sigma_next - sigma < 0


@dataclass(frozen=True)
class NoisedImage:
    """Final latents of n rows noised afresh, `x = (1 - sigma) x0 + sigma eps`, and the policy's velocities there."""

    x0: Float[Tensor, "n *latent"]  # latents of the images, float32 or better, as then are all errors
    eps: Float[Tensor, "n *latent"]  # standard normal, shared within a group unless objective.shared_noise is false
    sigma: Float[Tensor, " n"]  # in (0, 1], shared as eps is
    v: Float[Tensor, "n *latent"]  # velocity now, with the gradient
    v_rollout: Float[Tensor, "n *latent"]  # velocity of the policy that sampled the images
    v_old: Float[Tensor, "n *latent"] | None = None  # velocity of the slowly moving copy, for nft and crd
    v_ref: Float[Tensor, "n *latent"] | None = None  # velocity of the base model, where the objective or its KL asks for it
    group_mean: Float[Tensor, " n"] | None = None  # mean over the row's group of the number that crd or dgpo needs, detached

    @property
    def column(self) -> Float[Tensor, "n ..."]:
        """sigma, broadcastable to x0."""
        return broadcast_rows(self.sigma, self.x0)

    @property
    def x(self) -> Float[Tensor, "n ..."]:
        """The noised latents."""
        return (1 - self.column) * self.x0 + self.column * self.eps

    def error(self, v: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
        """Mean squared error of a velocity against the true one, eps - x0."""
        return (v - (self.eps - self.x0)).square().flatten(1).mean(1)

    def adaptive_error(self, v: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
        """`self_weighted` of the error of a velocity."""
        return self_weighted(v - (self.eps - self.x0))


@dataclass(frozen=True)
class Scores:
    """Rewards of B images, float32: the weighted sum, and each reward alone."""

    total: Float[Tensor, " B"]
    by_name: dict[str, Float[Tensor, " B"]]

    def take(self, rows: Int[Tensor, " n"] | Bool[Tensor, " n"]) -> "Scores":
        """The scores of some rows."""
        return Scores(self.total[rows], {name: values[rows] for name, values in self.by_name.items()})

    @staticmethod
    def join(parts: "Sequence[Scores]") -> "Scores":
        """The scores of several batches as one."""
        names = parts[0].by_name
        return Scores(
            torch.cat([s.total for s in parts]), {name: torch.cat([s.by_name[name] for s in parts]) for name in names}
        )


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, whose images are generated with fixed seeds and scored; B of them."""

    values: dict[str, Float[Tensor, " B"]]  # by reward, `reward` their weighted sum
    high_frequency_power: Float[Tensor, " B"]  # see flow_grpo/evaluation/image_metrics.py
    diversity: Float[Tensor, " n"]  # of the first n prompts, which have two images each
    images: dict[int, Tensor]  # (3, H, W) in [0, 1] by the prompt's index: the first ones, the best and the worst

    def means(self) -> dict[str, float]:
        """The mean of each metric over its finite values."""
        return {name: values.nanmean().item() for name, values in self.values.items()}


@dataclass(frozen=True)
class Experience:
    """The data of a training step: a batch, the latents of its images, and their advantages. Only this process's rows."""

    batch: PromptBatch
    trajectory: Trajectory
    advantage: Float[Tensor, "B *K"]  # a column for each trained step if each has its own
    rows: Int[Tensor, " n"]  # the rows of the batch that have a loss; for dpo winner, loser, winner, loser, ...
    rows_per_group: int  # rows with a loss, of a group that has any
    groups: Int[Tensor, " P"]  # groups that enter the mean, over all processes; dropped groups are excluded
    metrics: dict[str, float]
    scores: Scores | None = None  # given images have none
    # whether an image of any process has an advantage, and a gradient if the objective needs one; given images need neither
    has_advantage: bool = True
    # at the endpoints of the trajectory's gradient_states, weighted
    reward_gradient: Float[Tensor, "B E *latent"] | None = None


@dataclass(frozen=True)
class Loss:
    """A value to minimise for each row, and detached numbers to report.

    Rows, not their mean: the trainer weighs them, so that the micro-batch size changes nothing.
    """

    value: Float[Tensor, " n"]
    metrics: dict[str, Float[Tensor, " n"]] = field(default_factory=dict)
