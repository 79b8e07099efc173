"""Sample the images of a batch of prompts, and score them, here or in the background."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.reward_gradient_objectives import RewardGradient
from flow_grpo.config.stepwise_objectives import Stepwise, WindowConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.threads import DaemonThread, wait_for
from flow_grpo.training.reward_gradients import Endpoint, EndpointGradients, ImageMover
from flow_grpo.types import GradientStates, PromptBatch, Scores, StochasticSteps, Trajectory, take_rows


class ImageSampler:
    """Samples images by the settings of a stage and scores them.

    Args:
        processes: those that share each step; each samples the images that it owns. If they are asked to stop, the rollout
            raises `Interrupted`: before a forward pass, if there is one process, and while it waits for rewards.
        mover: moves the images; only for `mend` and `opsd`.

    Attributes:
        microbatch: images per forward pass.
        score_in_background: whether a part of the images is scored while the next part is sampled.
    """

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        rewards: WeightedSum,
        processes: Processes,
        mover: ImageMover | None = None,
    ) -> None:
        self.policy, self.args, self.rewards, self.processes, self.mover = policy, args, rewards, processes, mover
        self.microbatch, self.adapter = args.microbatch, args.objective.sampling_adapter
        self.schedule, self.latent_shape = policy.schedule(args.sampling.steps)
        # On a CPU, sampling and scoring would compete for the cores: there only remote rewards run in the background.
        self.score_in_background = policy.device.type != "cpu" or all(
            reward.remote is not None for reward in args.rewards.values()
        )

    @property
    def model(self) -> FlowPipeline:
        """The model that samples: the policy, or the same weights with the rollout's own guidance."""
        return self.policy.with_guidance(self.args.sampling.guidance)

    def window(self, step: int) -> list[int]:
        """The sampling steps that are trained in a training step; none on final latents."""
        objective = self.args.objective
        if not isinstance(objective, Stepwise):
            return []
        return trained_steps(objective.window, self.args.sampling.steps, step, self.args.seed)

    def sample(self, batch: PromptBatch, step: int, thread: DaemonThread) -> tuple[Trajectory, list[Future[Scores]]]:
        """Sample the images that this process owns, part by part, and submit each part to the scoring thread.

        A part has whole micro-batches, and whole groups, unless the processes split them. Returns the trajectory, and what will be the
        scores of its parts.
        """
        batch, window = batch.take(self.processes.owns(batch.group, self.args.updates).nonzero()[:, 0]), self.window(step)
        trajectories, futures = [], list[Future[Scores]]()
        with self.policy.meter.timed("encode"):
            for model in dict.fromkeys((self.model, self.policy)):
                # all at once, in full passes of the text encoders; the parts find them cached
                model.encode(batch.prompts)
        part_size = (
            math.lcm(self.microbatch, self.args.images_per_prompt) if self.score_in_background else len(batch.prompts)
        )
        objective = self.args.objective
        keep_graphs = isinstance(objective, Stepwise) and objective.keep_graphs
        for rows in torch.arange(len(batch.prompts)).split(part_size):
            part = batch.take(rows)
            if isinstance(objective, RewardGradient):
                trajectory, scores = self._sample_with_gradients(step, part, thread, objective)
                trajectories.append(trajectory)
                futures.append(scores)
                continue
            with self.policy.meter.timed("rollout"):
                trajectories.append(self.trajectory(step, part, window, keep_graphs=keep_graphs))
            with phase(f"step {step + 1}, decoding"), self.policy.meter.timed("decode"):
                latents = trajectories[-1].final
                images = self.policy.meter.decoding(latents, partial(self.policy.decode, latents, self.microbatch))
            futures.append(thread.submit(self.begin_scoring(part, images)))
        return Trajectory.join(trajectories), futures

    def _sample_with_gradients(
        self, step: int, batch: PromptBatch, thread: DaemonThread, objective: RewardGradient
    ) -> tuple[Trajectory, Future[Scores]]:
        """Sample images along the ODE; in the thread, since rewards may hang, find the gradients of their rewards and score them."""
        derivatives = sampling.endpoint_derivatives(self.schedule, sampling.SOLVERS[self.args.sampling.solver])
        generator = sampling.generator(self.args.seed, "trained states", step)

        def draw(weights: list[float], count: int) -> list[int]:
            return torch.multinomial(torch.tensor(weights), count, generator=generator).tolist()

        states = objective.trained_states(self.schedule.sigmas.tolist(), derivatives, draw)
        gradients = EndpointGradients(self.policy, self.args, objective, self.rewards)
        visited: dict[int, list[tuple[Tensor, Tensor]]] = {state.step: [] for state in states if state.copy_number is None}
        with self.policy.meter.timed("rollout"):
            trajectory = self.trajectory(step, batch, [], visited=visited)
        joined = {i: (torch.cat([x for x, _ in parts]), torch.cat([v for _, v in parts])) for i, parts in visited.items()}

        def find() -> tuple[GradientStates, Tensor, Scores | None]:
            found, images = gradients(trajectory, states, joined, batch, step=step, microbatch=self.microbatch)
            if self.mover is None:
                return found, images, None
            scores = self.score(batch, images)
            [(_, v)] = joined.values()
            end = Endpoint(
                batch,
                trajectory.final,
                v,
                reward=scores.total,
                rewards_of=partial(self._rewards, batch),
                gradient_at=partial(gradients.weighted, batch=batch, microbatch=self.microbatch),
            )
            return replace(found, moves=self.mover.moves(found, end)), images, scores

        try:
            with phase(f"step {step + 1}, gradients of rewards"), self.policy.meter.timed("decode"):
                gradient_states, images, scores = wait_for(thread.submit(find), self.processes.should_stop)
        except FlowGRPOError as error:
            failed = Future[Scores]()
            failed.set_exception(error)  # raised with the scores, on all processes together
            return trajectory, failed
        scored = partial(self.score, batch, images) if scores is None else lambda: scores
        return replace(trajectory, gradient_states=gradient_states), thread.submit(scored)

    def _rewards(self, batch: PromptBatch, latents: Tensor, rows: Tensor) -> Tensor:
        """The rewards (n,) of latents (n, ...) of some rows (n,) of the batch."""
        return self.score(batch.take(rows), self.policy.decode(latents, self.microbatch)).total

    def gather_scores(self, futures: list[Future[Scores]], group: Tensor) -> Scores:
        """The scores of the rows of all processes, each of which scores its own. group is (B,)."""

        def local_scores() -> Scores:
            with self.policy.meter.timed("reward"):  # the images that were not scored while others were sampled
                return Scores.join([wait_for(future, self.processes.should_stop) for future in futures])

        with phase("scoring images"), self.policy.meter.timed("wait"):
            scores = Scores.join(self.processes.gather_or_raise(local_scores, (FlowGRPOError, Interrupted)))
        order = self.processes.owner(group, self.args.updates).argsort(stable=True).argsort()
        return scores.take(order)

    def trajectory(
        self,
        training_step: int,
        batch: PromptBatch,
        window: list[int],
        keep_graphs: bool = False,
        visited: dict[int, list[tuple[Tensor, Tensor]]] | None = None,
    ) -> Trajectory:
        """Sample B images, one micro-batch at a time; the group numbers of the batch name their noise.

        Args:
            window: the sampling steps that add noise and are recorded.
            keep_graphs: as in `sampling.rollout`.
            visited: by steps of the schedule, lists to which the state and the velocity there are added for each micro-batch.
        """
        stepwise = self.args.objective if isinstance(self.args.objective, Stepwise) else None
        shared = stepwise is not None and stepwise.shared_initial_noise
        with self.policy.meter.timed("encode"):
            conditioning, own_conditioning = (model.encode(batch.prompts) for model in (self.model, self.policy))
        start, noise = self._noise(batch, training_step, window, shared)
        rollout = partial(
            sampling.rollout,
            schedule=self.schedule,
            stochastic=StochasticSteps(window, stepwise.transition, stepwise.noise_level) if stepwise and window else None,
            solver=sampling.SOLVERS[self.args.sampling.solver],
            keep_graphs=keep_graphs,
        )
        first = window[0] if shared and window else 0  # the steps before it are computed once for each group
        count = len(start) if len(start) > self.microbatch else None  # of one micro-batch there is nothing to count
        parts = list[Trajectory]()
        with self.policy.lora.use(self.adapter), phase(f"step {training_step + 1}, sampling", count, "images") as sampled:
            if first:
                start = self._shared_start(start, batch.group, conditioning, partial(rollout, steps=range(first)))
            for rows in torch.arange(len(start)).split(self.microbatch):
                of_rows = partial(self._velocity, rows=rows, window=window, keep_graphs=keep_graphs)
                part = rollout(
                    of_rows(self.model, conditioning, visited=visited),
                    x=take_rows(start, rows),
                    noise={i: take_rows(values, rows) for i, values in noise.items()}.__getitem__,
                    steps=range(first, len(self.schedule)),
                    # off-policy: the guided velocity samples what the trained one is to learn from
                    trained=None if self.model is self.policy else of_rows(self.policy, own_conditioning),
                )
                sampled.advance(len(rows))
                parts.append(part.to(torch.device("cpu")) if self.args.memory.offload_trajectories else part)
        return Trajectory.join(parts)

    def _noise(
        self, batch: PromptBatch, training_step: int, window: list[int], shared: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The noise (B, ...) that images start from, and that of each sampling step of the window, on the device."""
        draw = partial(sampling.batch_noise, self.latent_shape, batch, self.args.seed)
        drawn = [draw("start", training_step, shared=shared), *(draw("step", training_step, i) for i in window)]
        # copied before the first pass, since a copy waits for what a GPU computes
        start, *noise = [tensor.to(self.policy.device, non_blocking=True) for tensor in drawn]
        return start, dict(zip(window, noise, strict=True))

    def _shared_start(
        self, start: Tensor, group: Tensor, conditioning: Conditioning, rollout: Callable[..., Trajectory]
    ) -> Tensor:
        """The states (B, ...) before the window of images that start from the noise of their group: one rollout for each group."""
        leaders, inverse = first_rows(group)
        states = [
            rollout(self._velocity(self.model, conditioning, rows), x=take_rows(start, rows)).final
            for rows in leaders.split(self.microbatch)
        ]
        return take_rows(torch.cat(states), inverse)

    def _velocity(
        self,
        model: FlowPipeline,
        conditioning: Conditioning,
        rows: Tensor,
        window: list[int] | None = None,
        keep_graphs: bool = False,
        visited: dict[int, list[tuple[Tensor, Tensor]]] | None = None,
    ) -> sampling.Velocity:
        """A model's velocity of these rows. It raises `Interrupted` if the run is asked to stop."""
        # a compiled kernel with gradients differs in the last bit: a step that is replayed with them is sampled with them
        with_gradients = set(window or []) if self.policy.compiled or keep_graphs else set()

        def velocity(x: Tensor, i: int) -> Tensor:
            if self.processes.should_stop_alone():  # nothing of this step has touched the adapter yet
                raise Interrupted
            with torch.set_grad_enabled(i in with_gradients):
                v = model.velocity(x, self.schedule.timesteps[i], conditioning, rows)
            if visited and i in visited:
                visited[i].append((x, v.detach()))
            return v if keep_graphs else v.detach()  # here, so that its graph is gone before the next micro-batch's

        return velocity

    def score(self, batch: PromptBatch, images: Tensor) -> Scores:
        """Scores of B images (B, 3, H, W) in [0, 1]."""
        return self.begin_scoring(batch, images)()

    def begin_scoring(self, batch: PromptBatch, images: Tensor) -> Callable[[], Scores]:
        """Start what other machines score of B images (B, 3, H, W) in [0, 1]; the function scores the rest and returns all."""
        finish = self.rewards.begin(images, batch.prompts, batch.group.tolist(), **batch.columns())

        def scores() -> Scores:
            total, by_name = finish()
            return Scores(total, by_name)

        return scores


def trained_steps(window: WindowConfig, sampling_steps: int, training_step: int, seed: int) -> list[int]:
    """The sampling steps that are stochastic and trained in a training step; the others are the ODE's.

    Args:
        training_step: what a random window depends on, with the seed. `random` windows are Flow-GRPO-Fast's.
    """
    last = min(window.last_of(sampling_steps), sampling_steps - 1)
    if window.schedule == "all":
        return list(range(window.first_step, last + 1))
    num_positions = last - window.first_step - window.size + 2
    if num_positions < 1:
        raise FlowGRPOError(f"a window of {window.size} steps does not fit into steps {window.first_step} to {last}.")
    start = window.first_step
    if window.schedule == "random":
        start += int(torch.randint(num_positions, (1,), generator=sampling.generator(seed, "window", training_step)))
    return list(range(start, start + window.size))


def first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    """The first row (P,) of each group, in the order of the rows, and for each row (B,) the number of its group in that order."""
    numbers = {number: i for i, number in enumerate(dict.fromkeys(group.tolist()))}
    inverse = torch.tensor([numbers[number] for number in group.tolist()])
    return torch.tensor([group.tolist().index(number) for number in numbers]), inverse
