"""Checks a whole run before it starts, with the run's own machine, prompts, rewards, rollouts and updates.

It writes no file. The run's adapter is trained for two steps and discarded.
"""

from collections.abc import Iterator

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor import groups, resources, rewards, update
from flow_grpo.doctor.result import OK, WARNING, CheckResult, CheckSection, failed
from flow_grpo.plan.fit import held_out_images
from flow_grpo.trainer import FlowGRPOTrainer


def run_checks(args: FlowGRPOConfig) -> Iterator[CheckSection]:
    """Check the run section by section, and end early where the run would fail.

    Raises:
        FlowGRPOError: the run could not start.
    """
    return RunChecks(FlowGRPOTrainer(args=args.without_auto_compile())).sections()


def start_results(found: dict[str, list[str]]) -> list[CheckResult]:
    """What the checks of the run's start found, all of which it has passed."""
    return [CheckResult(name, "", WARNING if sentences else OK, " ".join(sentences)) for name, sentences in found.items()]


class RunChecks:
    """The checks of one run.

    Attributes:
        reward_checks: of the rewards, which are the same in all stages. None before the first stage with rollouts.
        step_metrics: of one training step of each stage so far.
    """

    def __init__(self, trainer: FlowGRPOTrainer) -> None:
        self.trainer = trainer
        self.reward_checks: rewards.RewardChecks | None = None
        self.step_metrics: list[dict[str, float]] = []

    def sections(self) -> Iterator[CheckSection]:
        """The sections of checks, each computed when it is asked for."""
        trainer = self.trainer
        yield "machine", resources.check_machine(trainer.policy.device, trainer.policy.dtype)
        yield "start", start_results(trainer.start_checks)
        yield "prompts", self.check_prompts()
        rewards.replace_human_reward(trainer.rewards)
        for number, (start, stage) in enumerate(trainer.state.stages, 1):
            trainer.state.step = start
            yield from self._stage(f" of stage {number}, {stage.objective.name}" if trainer.args.stages else "")
            if len(self.step_metrics) < number:
                return
        try:
            yield "cost", self.check_cost()
        except torch.OutOfMemoryError as error:
            yield "cost", [failed("an evaluation", error)]

    def _stage(self, of_stage: str) -> Iterator[CheckSection]:
        """Check the stage that the trainer's step belongs to, up to where the run would fail."""
        trainer = self.trainer
        try:
            trainer.state.enter_stage(trainer.step)
            if trainer.stage.given_images is None:
                yield from self._rollout(of_stage)
        except (ValueError, torch.OutOfMemoryError) as error:
            yield f"groups{of_stage}", [failed("a rollout", error)]
            return
        if self.reward_checks is None or self.reward_checks.can_score(trainer.rewards):
            yield f"update{of_stage}", self.check_update()

    def _rollout(self, of_stage: str) -> Iterator[CheckSection]:
        trainer, values = self.trainer, None
        sampled = groups.sample_groups(trainer.stage, trainer.step, trainer.train_set)
        if self.reward_checks is None:
            self.reward_checks = self.check_rewards(sampled)
            yield "rewards", self.reward_checks.results
            if not self.reward_checks.can_score(trainer.rewards):
                return
            values = self.reward_checks.values(len(sampled.batch.prompts))
        yield f"groups{of_stage}", groups.check_groups(trainer.stage, sampled, values)

    def check_prompts(self) -> list[CheckResult]:
        """Check the prompts of all stages."""
        trainer = self.trainer
        return groups.check_prompts(
            stages=[stage for _, stage in trainer.state.stages],
            policy=trainer.policy,
            train_prompts=trainer.train_set.prompts,
            num_held_out=0 if trainer.eval_set is None else len(trainer.eval_set),
        )

    def check_rewards(self, sampled: groups.SampledGroups) -> rewards.RewardChecks:
        """Check all rewards of the run, those of evaluations too."""
        trainer = self.trainer
        return rewards.check_rewards(
            rewards=trainer.eval_rewards,
            in_rollouts=trainer.rewards.rewards,
            inputs=sampled.reward_inputs,
            sampling_seconds=sampled.seconds,
        )

    def check_update(self) -> list[CheckResult]:
        """A single update, its effect on the ratios, and a training step, whose metrics go to `step_metrics` unless it fails."""
        trainer, policy, stage, step = self.trainer, self.trainer.policy, self.trainer.stage.args, self.trainer.step
        try:
            experience = trainer.experience()
            update.single_update(policy, stage, experience, step, trainer.processes)
            drift = update.measure_ratio_drift(policy, stage, experience, trainer.stage.microbatch)
            gradients = update.GradientStats(policy.trainable_parameters(), trainer.stage.update.optimizer.adamw)
            metrics = trainer.training_step()
        except (ValueError, torch.OutOfMemoryError) as error:
            return [failed("a training step", error)]
        self.step_metrics.append(metrics)
        return update.check_update(stage, experience, drift, gradients, metrics)

    def check_cost(self) -> list[CheckResult]:
        """Check time, memory and the run folder."""
        trainer, args, policy = self.trainer, self.trainer.args, self.trainer.policy
        stages = [stage for _, stage in trainer.state.stages]
        estimates = [resources.estimate(stage, policy.device.type == "cuda") for stage in stages]
        steps = [
            resources.step_time(f"a step of stage {number}" if args.stages else "a step", metrics, estimate and estimate[1])
            for number, (metrics, estimate) in enumerate(zip(self.step_metrics, estimates, strict=True), 1)
        ]
        return [
            *steps,
            resources.run_time(args, self.step_metrics, self._evaluation_seconds()),
            resources.check_memory(policy.device, self.step_metrics, estimates),
            resources.check_disk(policy, args.keep_checkpoints, trainer.folder),
            resources.run_folder(trainer.folder),
        ]

    def _evaluation_seconds(self) -> float:
        """Seconds of an evaluation, with its rewards."""
        trainer = self.trainer
        if trainer.eval_set is None:
            return 0.0
        first_prompts = trainer.eval_set.prompts[: trainer.stage.microbatch]
        settings = trainer.args.held_out
        sampling = resources.sampling_seconds(trainer.policy.with_guidance(settings.guidance), first_prompts, settings.steps)
        num_models = 2 if trainer.eval_rewards.has_pairs else 1
        images = num_models * held_out_images(trainer.args, len(trainer.eval_set))
        return images * (sampling + (self.reward_checks.seconds if self.reward_checks else 0.0))
