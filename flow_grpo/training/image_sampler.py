"""Sample the images of a batch of prompts, and score them, here or in the background."""

import math
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from flow_grpo import sampling, tree
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.solvers import ode_solver
from flow_grpo.progress import phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.interrupt import DaemonThread
from flow_grpo.text import counted
from flow_grpo.training.interrupt import Interrupted, background, interruptible, wait_for
from flow_grpo.types import PromptBatch, Scores, StepDistribution, Trajectory


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
        self.solver = ode_solver(args.sampling.solver, self.schedule)
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
        """Sample B images; the group numbers of the batch name their noise. `keep_graphs`: as of `sampling.rollout`."""
        settings, seed = self.args.sampling, self.args.seed
        branches = settings.tree(self.args.images_per_prompt)
        between = self.args.has_noise_between_images
        noise_shape = (1,) * len(self.latent_shape) if between else self.latent_shape
        noise_batches = tree.noise_batches(batch, branches, len(window))  # each branch has the noise of its first image
        with self.policy.meter.phase("encode"):
            velocity = self.policy.velocity_fn(self.schedule, self.policy.encode(batch.prompts))

        def sampled(x: Tensor, i: int, rows: Tensor) -> Tensor:
            # a compiled kernel with gradients differs in the last bit: a step that is replayed with them is sampled with them
            with torch.set_grad_enabled((self.policy.compiled or keep_graphs) and i in window):
                v = velocity(x, i, rows)
            return v if keep_graphs else v.detach()  # here, so that its graph is gone before the next micro-batch's

        start = sampling.batch_noise(self.latent_shape, batch, seed, "start", step, shared=bool(branches))
        stochastic = sampling.StochasticSteps(
            window,
            StepDistribution(settings.transition, settings.noise_level, settings.log_prob),
            noise=lambda i: sampling.batch_noise(noise_shape, noise_batches[window.index(i)], seed, "step", step, i),
            partners=(lambda i: sampling.partners(batch, seed, "partner", step, i)) if between else None,
            state_ids=tree.state_ids(batch, branches, len(window)) if branches else None,
        )
        rollout = partial(
            sampling.rollout,
            interruptible(sampled, self.processes.should_stop_alone),  # nothing of this step has touched the adapter yet
            self.schedule,
            start.to(self.policy.device, non_blocking=True),
            microbatch=self.args.microbatch,
            stochastic=stochastic,
            solver=self.solver,
            keep_graphs=keep_graphs,
            record_device=torch.device("cpu") if self.args.memory.offload_trajectories else None,
        )
        with self.policy.lora.use(self.args.objective.sampling_adapter):
            return rollout()

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
