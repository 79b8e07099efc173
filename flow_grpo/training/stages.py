"""A stage of a run: its settings, where its images come from, and what updates the policy."""

import copy
import time
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.critic import Critic
from flow_grpo.training.group_advantages import explain_small_share, logged_shares
from flow_grpo.training.interrupt import Interrupted
from flow_grpo.training.offline import OfflineSource
from flow_grpo.training.rollouts import RolloutSource
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.training.windows import trained_steps
from flow_grpo.types import Experience


class Stage:
    """The training steps from `start` on, with an optimizer, a critic and a window of their own.

    Args:
        start: the first training step.
        args: the settings; `microbatch` is reduced in place to that of one process.
        rewards: the trained ones.

    Attributes:
        source: `collect(step)` returns an `Experience`.
        update: takes an `Experience` and updates the policy.
        warnings: pending warnings.
        has_advantage: whether any image of the last training step had an advantage.

    Raises:
        FlowGRPOError: sizes that the processes can't share.
    """

    def __init__(
        self,
        start: int,
        args: FlowGRPOConfig,
        policy: Policy,
        prompt_sampler: PromptSampler,
        rewards: WeightedSum,
        *,
        processes: Processes,
    ) -> None:
        self.start, self.args, self.policy, self.prompt_sampler = start, args, policy, prompt_sampler
        self.rewards, self.processes = rewards, processes
        self.warnings: list[str] = []
        self.has_advantage = True
        self.set_microbatch(args.microbatch)
        self.update = PolicyUpdate(policy, args, start, processes)
        self.critic = self._critic() if args.objective.needs.critic else None
        self.source: RolloutSource | OfflineSource
        if args.dataset is not None:
            self.source = OfflineSource(policy, args, processes)
        else:
            self.source = RolloutSource(
                policy,
                args,
                prompt_sampler,
                rewards,
                critic=self.critic,
                window=self.window,
                processes=processes,
            )
        for name in args.objective.policy_copies:
            policy.lora.update_copy(name, 0.0)  # decay 0: a copy of the present policy

    def collect_and_update(self, step: int) -> tuple[Experience, dict[str, float]]:
        """Collect the experience of a training step and update the policy on it. Returns it with the step's metrics.

        A failed step is rolled back. If memory ran out, it is repeated with half the micro-batch, and `warnings` says so.
        """
        started = time.perf_counter()
        while True:
            before = self.loop_state()
            try:
                experience, metrics = self._attempt(step)
                if step == self.start:
                    self._warn_of_small_share(step, metrics)
                return experience, metrics | self._speed(time.perf_counter() - started, metrics)
            except (Interrupted, Exception) as error:
                self.restore_loop_state(before)
                self.update.discard()
                if not isinstance(error, torch.OutOfMemoryError) or not self._halve_microbatch():
                    raise
            self.policy.free_memory()  # after the except clause, which held the tensors of the failed step

    def _attempt(self, step: int) -> tuple[Experience, dict[str, float]]:
        with self.policy.meter.step():
            experience = self.source.collect(step)  # prompts -> images -> rewards -> advantages
            started = time.perf_counter()
            metrics = self.update(experience, step)  # losses -> gradients -> optimizer
        self.has_advantage = experience.has_advantage
        metrics |= {"time/update": time.perf_counter() - started, "speed/tflop": self._total_flops() / 1e12}
        phases = {f"time/{name}": seconds for name, seconds in self.policy.meter.seconds().items()}
        return experience, {**experience.metrics, **metrics, **phases}

    def _warn_of_small_share(self, step: int, metrics: dict[str, float]) -> None:
        """Add a warning if a trained reward has almost no effect. All processes have the same metrics, and the main one warns."""
        message = explain_small_share(logged_shares(metrics), self.args.objective.advantage)
        if message is not None and self.processes.is_main:
            self.warnings.append(f"in step {step + 1} the reward {message}")

    def _speed(self, seconds: float, metrics: dict[str, float]) -> dict[str, float]:
        """The step's time and speed. The main process's numbers are logged, and it alone measures the device."""
        meter, tflop = self.policy.meter, metrics["speed/tflop"] * self.processes.is_main
        speed = meter.speed(seconds, metrics["images"], tflop, dtype=self.policy.dtype, processes=self.processes.world_size)
        return {"time/step": seconds, **speed}

    def _total_flops(self) -> int:
        """Operations of the step, of all processes; 0 if they are not counted."""
        return sum(self.processes.all_gather(self.policy.meter.flops))

    def set_microbatch(self, microbatch: int) -> None:
        """Set the micro-batch of one process, at most that large."""
        args = self.args
        args.microbatch = self.processes.local_microbatch(
            args.prompts_per_step,
            args.images_per_prompt,
            microbatch=microbatch,
            updates=args.updates,
            pairs=args.objective.needs.rows_per_pair == 2,
        )

    def _halve_microbatch(self) -> bool:
        """Continue with smaller micro-batches after memory ran out, if there are any.

        False too if half of a step is done, or if there are several processes, which would disagree.
        """
        previous = self.args.microbatch
        if previous <= self.args.objective.needs.rows_per_pair or self.update.mid_step or self.processes.world_size > 1:
            return False
        self.set_microbatch(previous // 2)
        self.warnings.append(f"memory ran out with microbatch={previous}; the run goes on with {self.args.microbatch}.")
        return True

    def loop_state(self) -> dict[str, Any]:
        """What training steps change besides the weights and the optimizer."""
        return {
            "prompts": self.prompt_sampler.state_dict(),
            "clip": dict(self.update.clip.state),
            "microbatch": self.args.microbatch,
            "critic": None if self.critic is None else copy.deepcopy(self.critic.training_state()),
        }

    def restore_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `loop_state` returned."""
        self.prompt_sampler.load_state_dict(state["prompts"])
        self.args.microbatch = state["microbatch"]
        self.update.clip.state = dict(state["clip"])
        if self.critic is not None:
            self.critic.load_training_state(state["critic"])

    def _critic(self) -> Critic:
        _, latent_shape = self.policy.schedule(self.args.sampling.steps)
        text_width = self.policy.encode(self.prompt_sampler.prompts.prompts[:1]).pooled().shape[1]
        return Critic(latent_shape, text_width, self.args.objective.critic, self.args.seed)

    def window(self, step: int) -> list[int]:
        """The sampling steps that are trained in a training step; none on final latents."""
        return trained_steps(self.args.sampling, step, self.args.seed) if self.args.stepwise else []
