"""Sample the images of a batch of prompts, and score them, here or in the background."""

import math
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.interrupt import DaemonThread
from flow_grpo.text import counted
from flow_grpo.training.interrupt import Interrupted, background, interruptible, wait_for
from flow_grpo.types import PromptBatch, Scores, StochasticSteps, Trajectory, take_rows


class ImageSampler:
    """Samples images by the settings of a stage and scores them.

    Args:
        processes: those that share each step; each samples the groups that it owns. If they are asked to stop, `Interrupted` leaves
            the rollout: before a forward pass, if there is one process, and while it waits for rewards.

    Attributes:
        score_in_background: whether a part of the images is scored while the next part is sampled.
    """

    def __init__(self, policy: Policy, args: FlowGRPOConfig, rewards: WeightedSum, processes: Processes) -> None:
        self.policy, self.args, self.rewards, self.processes = policy, args, rewards, processes
        self.schedule, self.latent_shape = policy.schedule(args.sampling.steps)
        # On a CPU, sampling and scoring would compete for the cores: there only remote rewards run in the background.
        self.score_in_background = policy.device.type != "cpu" or all(
            reward.remote is not None for reward in args.rewards.values()
        )

    def sample_and_score(self, batch: PromptBatch, window: list[int], step: int) -> tuple[Trajectory, Scores]:
        """Sample the images of the groups that this process owns. Returns their trajectory, and the scores of the whole batch."""
        local_batch = batch.take(self.processes.owns(batch.group).nonzero()[:, 0])
        with background(self.processes.should_stop) as thread:
            trajectory, futures = self._sample(local_batch, window, step, thread)
            return trajectory, self._gather_scores(futures, batch.group)

    def trajectory(self, step: int, batch: PromptBatch, window: list[int], keep_graphs: bool = False) -> Trajectory:
        """Sample B images, one micro-batch at a time; the group numbers of the batch name their noise.

        Args:
            window: the steps that add noise and are recorded.
            keep_graphs: as of `sampling.rollout`.
        """
        settings, seed, shape = self.args.sampling, self.args.seed, self.latent_shape
        with self.policy.meter.phase("encode"):
            conditioning = self.policy.encode(batch.prompts)
        shared = settings.shared_initial_noise
        start = sampling.batch_noise(shape, batch, seed, "start", step, shared=shared)
        noise = {i: sampling.batch_noise(shape, batch, seed, "step", step, i) for i in window}
        # copied before the first pass, since a copy waits for what a GPU computes
        start, *values = (tensor.to(self.policy.device, non_blocking=True) for tensor in (start, *noise.values()))
        noise = dict(zip(noise, values, strict=True))
        stochastic = StochasticSteps(window, settings.transition, settings.noise_level) if window else None
        rollout = partial(sampling.rollout, schedule=self.schedule, solver=sampling.SOLVERS[settings.solver])

        def sample(rows: Tensor, x: Tensor, steps: range) -> Trajectory:
            velocity = self._velocity(conditioning, rows, window, keep_graphs)
            own_noise = lambda i: take_rows(noise[i], rows)  # noqa: E731
            sampled = rollout(velocity, x=x, stochastic=stochastic, noise=own_noise, steps=steps, keep_graphs=keep_graphs)
            return sampled.to(torch.device("cpu")) if self.args.memory.offload_trajectories else sampled

        first = 0
        with self.policy.lora.use(self.args.objective.sampling_adapter):
            if shared and window:  # what comes before the window is computed once for each group
                first = window[0]
                leaders, inverse = first_rows(batch.group)
                parts = [
                    sample(rows, take_rows(start, rows), range(first)).final for rows in leaders.split(self.args.microbatch)
                ]
                start = take_rows(torch.cat(parts), inverse)
            rows_of_parts = torch.arange(len(start)).split(self.args.microbatch)
            steps = range(first, len(self.schedule))
            return Trajectory.join([sample(rows, take_rows(start, rows), steps) for rows in rows_of_parts])

    def _velocity(self, conditioning: Conditioning, rows: Tensor, window: list[int], keep_graphs: bool) -> sampling.Velocity:
        """The policy's velocity of these rows, which is left at once if the run is asked to stop."""
        velocity = self.policy.velocity_fn(self.schedule, conditioning, rows)

        def sampled(x: Tensor, i: int) -> Tensor:
            # a compiled kernel with gradients differs in the last bit: a step that is replayed with them is sampled with them
            with torch.set_grad_enabled((self.policy.compiled or keep_graphs) and i in window):
                v = velocity(x, i)
            return v if keep_graphs else v.detach()  # here, so that its graph is gone before the next micro-batch's

        return interruptible(sampled, self.processes.should_stop_alone)  # nothing of this step has touched the adapter yet

    def score(self, batch: PromptBatch, images: Tensor) -> Scores:
        """Scores of B images (B, 3, H, W) in [0, 1]."""
        total, by_name = self.rewards(images, batch.prompts, batch.group.tolist(), **batch.columns())
        return Scores(total, by_name)

    def _sample(
        self, batch: PromptBatch, window: list[int], step: int, thread: DaemonThread
    ) -> tuple[Trajectory, list[Future[Scores]]]:
        """Sample images part by part, each of whole groups and micro-batches, and submit each part to the scoring thread."""
        trajectories, futures = [], []
        with self.policy.meter.phase("encode"):
            self.policy.encode(batch.prompts)  # all at once, in full passes of the text encoders; the parts find them cached
        in_one_part = not self.score_in_background
        size = len(batch.prompts) if in_one_part else math.lcm(self.args.microbatch, self.args.images_per_prompt)
        for rows in torch.arange(len(batch.prompts)).split(size):
            part = batch.take(rows)
            with phase(f"step {step + 1}, sampling {counted(len(part.prompts), 'image')}"):
                with self.policy.meter.phase("rollout"):
                    trajectories.append(self.trajectory(step, part, window, self.args.sampling.keep_graphs))
                with self.policy.meter.phase("decode"):
                    latents = trajectories[-1].final
                    images = self.policy.meter.decoding(latents, partial(self.policy.decode, latents, self.args.microbatch))
            futures.append(thread.submit(partial(self.score, part, images)))
        return Trajectory.join(trajectories), futures

    def _gather_scores(self, futures: list[Future[Scores]], group: Tensor) -> Scores:
        """The scores of all rows, from those that each process gives to its own groups."""

        def local_scores() -> Scores:
            with self.policy.meter.phase("reward"):  # what was not done while sampling
                return Scores.join([wait_for(future, self.processes.should_stop) for future in futures])

        with phase(f"scoring {counted(len(group), 'image')}"), self.policy.meter.phase("wait"):
            scores = Scores.join(self.processes.gather_or_raise(local_scores, (FlowGRPOError, Interrupted)))
        order = self.processes.owner(group).argsort(stable=True).argsort()
        return scores.take(order)


def first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    """The first row (P,) of each group, in the order of the rows, and for each row (B,) the number of its group in that order."""
    numbers = {number: i for i, number in enumerate(dict.fromkeys(group.tolist()))}
    inverse = torch.tensor([numbers[number] for number in group.tolist()])
    return torch.tensor([group.tolist().index(number) for number in numbers]), inverse
