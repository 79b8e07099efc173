"""What a training step learns from: prompts dealt, images drawn, scored and compared, until there is enough to say.

`Rollouts` draws images; `flow_grpo.training.offline.OfflineSource` takes given ones. Both `collect(step)` an `Experience`.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from flow_grpo import advantages, sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.methods import takes_each_reward
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.text import counted
from flow_grpo.training.critic import Critic
from flow_grpo.training.custom import load_custom_function
from flow_grpo.training.interrupt import Interrupted, background, interruptible, wait
from flow_grpo.types import Experience, PromptBatch, Scores, Trajectory
from rewards import WeightedSum
from rewards.interrupt import DaemonThread


class Rollouts:
    """Draws and scores the images of training steps.

    Args:
        window: the steps of the schedule that are stochastic and trained, for a training step.
        stopping: whether the run is to stop. `Interrupted` then leaves the rollout: before a forward pass, if there is one process
            alone, and while it waits for rewards.
        processes: those that share each step; all get the same prompts dealt and draw the groups that are theirs.
    """

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        prompt_sampler: PromptSampler,
        rewards: WeightedSum,
        critic: Critic | None,
        window: Callable[[int], list[int]],
        stopping: Callable[[], bool],
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes()
        self.policy, self.args, self.prompt_sampler, self.rewards, self.critic = (
            policy,
            args,
            prompt_sampler,
            rewards,
            critic,
        )
        self.window, self.stopping = window, stopping
        self.schedule, self.state_shape = policy.schedule(args.sampling.steps)
        self.solver = policy.heun_solver(self.schedule) if args.sampling.solver == "heun" else None
        self.method = load_custom_function("advantage", args.objective.advantage) or args.objective.advantage
        # On a CPU both would want all cores: beside it goes only what is scored on other machines.
        self.beside = policy.device.type != "cpu" or all(reward.remote is not None for reward in args.rewards.values())
        self.seconds = {"rollout": 0.0, "decode": 0.0, "reward": 0.0}

    def collect(self, step: int) -> Experience:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        batch, trajectory, scores, chosen, metrics = self._enough(step)
        own = self.processes.owns(batch.group)
        started = time.perf_counter()
        whole = _whole_groups(scores.total, batch.group) & chosen
        compare = self._by_group if self.critic is None else self._by_critic
        advantage, signal, more = compare(batch, trajectory, scores, whole)
        rows, per_group = chosen_rows(self.args.method.rows, scores.total, batch.group, signal)
        self.seconds["reward"] += time.perf_counter() - started
        metrics |= {**more, **{f"time/{name}": value for name, value in self.seconds.items()}}
        groups, place = batch.group[whole].unique(), own.cumsum(0) - 1  # where a row is among our own
        mine = batch.take(own.nonzero()[:, 0])
        ours = place[rows[own[rows]]]
        return Experience(mine, trajectory, advantage[own], ours, per_group, groups, metrics, scores.take(own))

    def _by_group(
        self, batch: PromptBatch, trajectory: Trajectory, scores: Scores, whole: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Advantage (B,) against the own group, 0 outside the rows of `whole`; the rows that have a loss; metrics."""
        advantage, signal = torch.zeros(len(whole)), torch.zeros(len(whole), dtype=torch.bool)
        if not whole.any():
            return advantage, signal, {}
        weighed = [name for name in scores.by_name if self.rewards.weights[name] != 0]
        seen = torch.stack([scores.by_name[name][whole] for name in weighed], 1)
        weights, group = torch.tensor([self.rewards.weights[name] for name in weighed]), batch.group[whole]
        advantage[whole] = advantages.group_advantages(seen, group, self.method, weights=weights)
        if self.args.trains_on_zero_std_groups:
            signal = whole
        elif self.args.method.rows != "all":  # images are chosen of groups in which the sum differs
            signal = whole & _signal(scores, batch.group)
        else:
            shown = seen if takes_each_reward(self.args.objective.advantage) else scores.total[whole]
            signal[whole] = advantages.has_signal(shown, group, self.method)
        return advantage, signal, self._shares(weighed, seen, weights, group)

    def _by_critic(
        self, batch: PromptBatch, trajectory: Trajectory, scores: Scores, whole: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The same by the critic: an advantage (B, K) of each trained step, and all rows of `whole` have signal."""
        assert self.critic is not None
        advantage = torch.zeros_like(trajectory.log_prob_BK)
        if not whole.any():
            return advantage, whole, {}
        text = self.policy.encode(batch.prompts).pooled()
        rows = whole.nonzero()[:, 0]
        advantage[whole], metrics = self.critic.advantages(trajectory.take(rows), scores.total[rows], text[rows])
        return advantage, whole, metrics

    def trajectory(self, step: int, batch: PromptBatch, window: list[int]) -> Trajectory:
        """The images' way from noise, its streams of noise named by the batch's group numbers."""
        s, seed = self.args.sampling, self.args.seed
        velocity = self.policy.velocity_fn(self.schedule, self.policy.encode(batch.prompts))

        def detached(x: Tensor, i: int, rows: Tensor) -> Tensor:
            # what is replayed with gradients is drawn with them, where that is another kernel
            with torch.set_grad_enabled(self.policy.compiled and i in window):
                return velocity(x, i, rows).detach()

        start = sampling.batch_noise(self.state_shape, batch, seed, "start", step, shared=s.shared_start)
        return sampling.rollout(
            interruptible(detached, self.may_stop_alone),  # nothing of this step has touched the adapter yet
            self.schedule,
            start,
            microbatch=self.args.microbatch,
            trained=window,
            transition=s.transition,
            noise_level=s.noise_level,
            step_noise=lambda i: sampling.batch_noise(self.state_shape, batch, seed, "step", step, i),
            log_prob=s.log_prob,
            group=batch.group.unique(return_inverse=True)[1] if s.shared_start else None,
            solver=None if window else self.solver,
        )

    def may_stop_alone(self) -> bool:
        """Whether to leave a rollout between two forward passes. Several processes stop together, where they talk."""
        return self.processes.world_size == 1 and self.stopping()

    def score(self, batch: PromptBatch, images: Tensor) -> Scores:
        return Scores(*self.rewards(images, batch.prompts, **batch.columns()))

    def _enough(self, step: int) -> tuple[PromptBatch, Trajectory, Scores, Tensor, dict[str, float]]:
        """Rounds of prompts until all groups of a step have signal, or the rounds are over; the rest fills the step up.

        Returns all that was drawn, by all processes but for the trajectory, which has the rows of our own; a mask (B,) of the rows
        that make the step; and metrics.
        """
        args = self.args
        wanted, images = args.prompts_per_step, args.images_per_prompt
        unit = (
            self.processes.world_size * math.lcm(args.microbatch, images) // images
        )  # prompts whose images fill micro-batches
        rounds, missing, drawn = [], wanted, 0
        for _ in range(1 + args.resample):
            count = min(wanted, -(-missing // unit) * unit)
            batch = self.prompt_sampler.sample(step, count, images, first_group=drawn)
            own = batch.take(self.processes.owns(batch.group).nonzero()[:, 0])
            with background(self.stopping) as scorer:
                trajectory, scored = self._drawn(step, own, scorer)
                scores = self._together(scored, batch.group)
            rounds.append((batch, trajectory, scores))
            drawn += count
            signal, whole = _signal(scores, batch.group), _whole_groups(scores.total, batch.group).nonzero()[:, 0]
            self.prompt_sampler.observe_signal(
                step, batch.take(whole), signal[whole]
            )  # no score is neither speech nor silence
            missing -= int(signal.sum()) // images
            if missing <= 0:
                break
        batches, trajectories, parts = zip(*rounds, strict=True)
        batch, trajectory, scores = PromptBatch.join(batches), Trajectory.join(trajectories), Scores.join(parts)
        metrics = {**_reward_metrics(scores, batch.group), "images": float(len(batch.prompts))}
        if args.resample:
            metrics["resample/rounds"] = float(len(rounds))
        if self.prompt_sampler.patience:
            metrics["prompts_resting"] = float(self.prompt_sampler.num_skipped(step + 1))
        silent, lost = ~_signal(scores, batch.group), ~_whole_groups(scores.total, batch.group)
        first = (silent.int() + lost.int()).sort(stable=True).indices  # groups with signal first, without a score last
        chosen = torch.zeros(len(batch.prompts), dtype=torch.bool)
        chosen[first[: wanted * images]] = True
        return batch, trajectory, scores, chosen, metrics

    def _drawn(self, step: int, own: PromptBatch, scorer: DaemonThread) -> tuple[Trajectory, list[Future[Scores]]]:
        """Images drawn part by part, each of whole groups and micro-batches, and scored while the next part is drawn."""
        window, trajectories, scored = self.window(step), [], []
        size = math.lcm(self.args.microbatch, self.args.images_per_prompt) if self.beside else len(own.prompts)
        for rows in torch.arange(len(own.prompts)).split(size):
            part, started = own.take(rows), time.perf_counter()
            with phase(f"step {step + 1}, drawing {counted(len(part.prompts), 'image')}"):
                trajectories.append(self.trajectory(step, part, window))
                drawn = time.perf_counter()
                images = self.policy.decode(trajectories[-1].final, self.args.microbatch)
            scored.append(scorer.submit(partial(self.score, part, images)))
            self.seconds["rollout"] += drawn - started
            self.seconds["decode"] += time.perf_counter() - drawn
        return Trajectory.join(trajectories), scored

    def _together(self, scored: list[Future[Scores]], group: Tensor) -> Scores:
        """The scores of all rows, from those that each process gives to the groups of its own."""
        started = time.perf_counter()

        def awaited() -> Scores:
            return Scores.join([wait(part, self.stopping) for part in scored])

        with phase(f"scoring {counted(len(group), 'image')}"):
            parts = Scores.join(self.processes.gather_or_raise(awaited, (ValueError, Interrupted)))
        self.seconds["reward"] += time.perf_counter() - started  # what was not done beside the drawing
        order = self.processes.owner(group).argsort(stable=True).argsort()
        return parts.take(order)

    def _shares(self, names: list[str], by_reward: Tensor, weights: Tensor, group: Tensor) -> dict[str, float]:
        """How much of the advantage each of several rewards makes, and how they agree."""
        if len(names) < 2:
            return {}
        share, correlation = advantages.shares(by_reward, weights, group, self.method)
        pairs = [(i, j) for i in range(len(names)) for j in range(i)]
        return {
            **{f"advantage/share/{name}": value for name, value in zip(names, share.tolist(), strict=True)},
            **{f"advantage/correlation/{names[j]}/{names[i]}": correlation[i, j].item() for i, j in pairs},
        }


def chosen_rows(rows_of_group: str, reward: Tensor, group: Tensor, signal: Tensor) -> tuple[Tensor, int]:
    """The rows that an objective trains on, and how many rows a group of `signal` (B,) gives.

    Args:
        rows_of_group: "best", the best image of each group; "best_and_worst", these two in turns; "all" images of these groups.
    """
    if rows_of_group == "all":
        return signal.nonzero()[:, 0], int((group == group[0]).sum())
    rows = []
    for g in group[signal].unique().tolist():
        members = (group == g).nonzero()[:, 0]
        best = members[reward[members].argmax()]
        rows += [best] if rows_of_group == "best" else [best, members[reward[members].argmin()]]
    chosen = torch.stack(rows) if rows else torch.zeros(0, dtype=torch.long)
    return chosen, 1 if rows_of_group == "best" else 2


def _whole_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(B,) bool: the rows of groups in which every reward is a number; a dropped one takes its group with it."""
    spoiled = group[~torch.isfinite(reward)].unique()
    return ~torch.isin(group, spoiled)


def _signal(scores: Scores, group: Tensor) -> Tensor:
    """(B,) bool: the rows of groups whose trained rewards are all numbers and differ."""
    return _whole_groups(scores.total, group) & advantages.has_signal(scores.total.nan_to_num(), group)


def _reward_metrics(scores: Scores, group: Tensor) -> dict[str, float]:
    """Of all images that a step has drawn."""
    whole = _whole_groups(scores.total, group)
    metrics = {} if whole.all() else {"frac_reward_dropped": 1 - whole.float().mean().item()}
    if whole.any():
        metrics["frac_reward_zero_std"] = 1 - _signal(scores, group)[whole].float().mean().item()
        groups = scores.total[whole].view(len(group[whole].unique()), -1)
        metrics["reward"] = scores.total[whole].mean().item()
        metrics["reward_std"] = groups.std(1, correction=0).mean().item()
        metrics |= {f"rewards/{name}/mean": values[whole].nanmean().item() for name, values in scores.by_name.items()}
    return metrics
