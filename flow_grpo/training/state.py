"""`Stage`: the optimizer, the sampler and the advantages of one set of settings. `RunState`: a run's step, stage and checkpoints."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.reward_gradient_objectives import Mend, Opsd, RewardGradient
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.files import WriteError, atomic_folder, remove
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.run_folder import checkpoint, layout, opening
from flow_grpo.text import first_line
from flow_grpo.training.critic import Critic, CriticAdvantages
from flow_grpo.training.group_advantages import Comparer, GroupAdvantages, explain_small_share, logged_shares
from flow_grpo.training.offline import GivenImages
from flow_grpo.training.reward_gradients import GradientWeights, ImageMover, MendMover, OpsdMover
from flow_grpo.training.rollouts import ImageSampler
from flow_grpo.training.start_checks import local_microbatch
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import Experience


class Stage:
    """The optimizer, the sampler and the advantages of one set of settings, for the training steps from `start` on.

    Args:
        start: the first training step.
        rewards: the trained ones.

    Attributes:
        microbatch: images per forward pass of one process; less than that of the settings once memory ran out.
        sampler: samples and scores images.
        given_images: images of a data set in place of a rollout, if the settings name one.
        groups: compares the images of a group.
        compare: gives the advantages of scored images, by `groups` or by a critic, or the weights of their rewards' gradients.
        critic: of `ppo`.
        update: updates the policy from an `Experience`.
        warnings: pending warnings.
        has_advantage: as of the `Experience` of the last training step.

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
        self.processes = processes
        self.warnings: list[str] = []
        self.has_advantage = True
        self._started, self._succeeded = 0.0, True
        self.given_images = GivenImages(policy, args, processes) if args.dataset is not None else None
        self.groups = GroupAdvantages(args, rewards)
        self.compare, mover = self._comparer()
        self.sampler = ImageSampler(policy, args, rewards, processes, mover)
        self.update = PolicyUpdate(policy, args, start, processes)
        self.set_microbatch(args.microbatch)
        for name in [*self.update.policy_copies, *self.update.references.copies]:
            policy.lora.update_copy(name, 0.0)  # decay 0: a copy of the current policy

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Attempts at a training step: contexts to run it in, until one succeeds.

        A failed attempt is rolled back. If memory ran out, the next one has half the micro-batch, and `warnings` says so; any other
        error is raised.
        """
        self._started, self._succeeded = time.perf_counter(), False
        while True:
            yield self._attempt()
            if self._succeeded:
                return
            self.policy.free_memory()  # the context is left, so that nothing holds the tensors of the failed attempt

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        before = self.loop_state()
        try:
            with self.policy.meter.step():
                yield
            self._succeeded = True
        except (Interrupted, Exception) as error:
            self.restore_loop_state(before)
            self.update.discard()
            if not isinstance(error, torch.OutOfMemoryError) or not self._halve_microbatch():
                raise

    def finish_step(self, step: int, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """Set `has_advantage`, and warn after the stage's first step if a reward has no effect. Returns all metrics of the step.

        Args:
            metrics: of its update; those of its images, its time and its speed are added.
        """
        self.update.mid_step = True  # the weights have changed, and the step is not counted: an error must not save them
        self.has_advantage = experience.has_advantage or self.args.objective.needs.anchors
        meter, processes = self.policy.meter, self.processes
        tflop = sum(processes.all_gather(meter.flops)) / 1e12  # of all processes; 0 if they are not counted
        metrics = {**experience.metrics, **metrics, "speed/tflop": tflop}
        if step == self.start:
            self._warn_of_small_share(step, metrics)
        seconds = time.perf_counter() - self._started
        # the main process's numbers are logged, and it alone measures the device
        measured = tflop if processes.is_main else 0.0
        speed = meter.speed(seconds, metrics["images"], measured, dtype=self.policy.dtype, processes=processes.world_size)
        phases = {f"time/{name}": value for name, value in meter.seconds().items()}
        self.update.mid_step = False
        return {**metrics, "time/update": self.update.seconds, **phases, "time/step": seconds, **speed}

    def _warn_of_small_share(self, step: int, metrics: dict[str, float]) -> None:
        """Add a warning if a trained reward has almost no effect. All processes have the same metrics, and the main one warns."""
        message = explain_small_share(logged_shares(metrics), self.args.objective.advantage)
        if message is not None and self.processes.is_main:
            self.warnings.append(f"in step {step + 1} the reward {message}")

    def set_microbatch(self, microbatch: int) -> None:
        """Set the micro-batch of one process, at most that large."""
        self._use_microbatch(local_microbatch(self.args, self.processes.world_size, microbatch))

    def _use_microbatch(self, microbatch: int) -> None:
        self.microbatch = self.sampler.microbatch = self.update.microbatch = microbatch

    def _halve_microbatch(self) -> bool:
        """Continue with smaller micro-batches after memory ran out, if there are any.

        False too if half of a step is done, or if there are several processes, which would disagree.
        """
        previous = self.microbatch
        if previous <= self.args.objective.needs.rows_per_pair or self.update.mid_step or self.processes.world_size > 1:
            return False
        self.set_microbatch(previous // 2)
        self.warnings.append(f"memory ran out with microbatch={previous}; the run goes on with {self.microbatch}.")
        return True

    def loop_state(self) -> dict[str, Any]:
        """The state that training steps change, other than the weights and the optimizer's."""
        return {
            "prompts": self.prompt_sampler.state_dict(),
            "clip": self.update.clip.state_dict(),
            "compare": self.compare.state_dict(),
            "microbatch": self.microbatch,
        }

    def restore_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `loop_state` returned."""
        self.prompt_sampler.load_state_dict(state["prompts"])
        self._use_microbatch(state["microbatch"])
        self.update.clip.load_state_dict(state["clip"])
        self.compare.load_state_dict(state["compare"] if "compare" in state else state["critic"])  # 0.4 has the critic's

    @property
    def critic(self) -> Critic | None:
        return self.compare.critic if isinstance(self.compare, CriticAdvantages) else None

    def _comparer(self) -> tuple[Comparer, ImageMover | None]:
        """The objective's way to compare images, and its way to move them, if it has one."""
        objective = self.args.objective
        if objective.needs.critic:
            return CriticAdvantages(self.policy, self._new_critic(), self.groups), None
        if isinstance(objective, Mend):
            mover = MendMover(objective, self.groups, self.processes)
            return mover, mover
        if isinstance(objective, Opsd):
            return self.groups, OpsdMover(objective, self.groups)
        by_gradient = isinstance(objective, RewardGradient)
        return GradientWeights(self.groups, self.processes) if by_gradient else self.groups, None

    def _new_critic(self) -> Critic:
        _, latent_shape = self.policy.schedule(self.args.sampling.steps)
        text_width = self.policy.encode(self.prompt_sampler.prompts.prompts[:1]).pooled().shape[1]
        return Critic(latent_shape, text_width, self.args.seed)


class RunState:
    """Where a run is: its step, its stage and the trained weights, saved to checkpoints and restored from them.

    Args:
        rewards: the trained ones.
        inputs: digests of what the settings name.

    Attributes:
        step: training steps that are done.
        stage: the stage of the last training step; `enter_stage` moves on.

    Raises:
        FlowGRPOError: a stage has sizes that the processes can't share.
    """

    def __init__(
        self,
        args: FlowGRPOConfig,
        policy: Policy,
        prompt_sampler: PromptSampler,
        rewards: WeightedSum,
        processes: Processes,
        inputs: dict[str, str],
    ) -> None:
        self.args, self.policy, self.rewards, self.processes = args, policy, rewards, processes
        self.inputs = inputs
        self.folder = Path(args.output_dir)
        self.step = 0
        self.stages = args.resolved_stages()
        self.prompt_sampler = prompt_sampler
        start, first = self.stages[0]
        self.stage = self._start_stage(start, first)

    def enter_stage(self, step: int) -> None:
        """Start the stage that this training step belongs to, unless it is the current one."""
        start, settings = [stage for stage in self.stages if stage[0] <= step][-1]
        if settings is not self.stage.args:
            self.stage = self._start_stage(start, settings)

    def _start_stage(self, start: int, settings: FlowGRPOConfig) -> Stage:
        return Stage(start, settings, self.policy, self.prompt_sampler, self.rewards, processes=self.processes)

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on, by the keys that 0.3 wrote.

        Where it is sharded, every process must call this; pass keep_on_this_rank=False on those that discard the result.
        """
        state = {
            "step": self.step,
            "adapter": self.policy.adapter_state(keep_on_this_rank=keep_on_this_rank),
            "ema": self.policy.ema.state_dict(keep_on_this_rank),
            **self.stage.update.optimizer.state_dict(keep_on_this_rank),
            "begin": self.stage.start,
            "memory": self.stage.loop_state(),
        }
        state.update({name: self.policy.adapter_state(name) for name in self.stage.args.objective.policy_copies})
        state["copies"] = {name: self.policy.adapter_state(name) for name in self.stage.update.references.copies}
        return state

    def open_folder(self, resume: bool, lock: ExitStack, info: Callable[[str], None]) -> None:
        """Create the run folder, or check that it can be resumed, and hold its lock until `lock` closes. On the main process.

        Raises:
            FlowGRPOError: as in `open_run_folder`.
        """
        opening.open_run_folder(self.args, self.inputs, resume, lock, info)
        if not resume:
            opening.write_machine(self.folder, self.policy.device, self.policy.dtype, self.processes.world_size)

    def resume(self, info: Callable[[str], None], step: int | None = None) -> None:
        """Restore the checkpoint of a step, by default the newest that rank 0 can read. Every process must call it.

        Raises:
            FlowGRPOError: it is damaged, or all are, or it is of other settings.
        """
        state: dict[str, Any] = {}

        def read_step(number: int | None) -> int:
            state.update(opening.read_checkpoint(self.folder, number, info))
            return state["step"]

        step = self.processes.on_main(lambda: read_step(step))
        self.processes.gather_or_raise(lambda: None if self.processes.is_main else read_step(step))
        self.load_state_dict(state)
        if self.processes.is_main:
            self._rewind(info)

    def _rewind(self, info: Callable[[str], None]) -> None:
        """Delete what the run wrote after the step that it resumes from, and the weights of an earlier end; write the settings."""
        moved = opening.rewind_run(self.folder, self.step)
        if moved:
            info(f"warning: {moved}")
        if self.step < self.args.steps:
            remove(self.folder / self._weights_folder)
        opening.write_settings(self.args, self.inputs)  # some settings may change

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint. FlowGRPOError if it was written with other settings."""
        self.step = state["step"]
        self.enter_stage(state.get("begin", self.step))  # between two stages, the optimizer may be either's
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FlowGRPOError(
                f"the checkpoint of step {state['step']} is not one of this run's settings ({first_line(error).rstrip('.')}): "
                "resume with the settings that it was written with, or start another run by output_dir=..."
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        self.policy.load_adapter_state(state["adapter"])
        self.policy.ema.load_state_dict(state["ema"])
        self.stage.update.optimizer.load_state_dict(state)
        self.stage.restore_loop_state(state["memory"])
        self.stage.set_microbatch(self.stage.microbatch)  # it may have been saved by fewer processes
        for name in state.keys() & self.stage.args.objective.policy_copies.keys():
            self.policy.load_adapter_state(state[name], name)
        for name, values in state.get("copies", {}).items():
            self.policy.load_adapter_state(values, name)

    def save(self) -> bool:
        """Write a checkpoint; returns whether this process wrote it. Every process must call it; the main one writes."""
        if not self.processes.is_main and not self.stage.update.optimizer.is_sharded:
            return False
        state = self.state_dict(keep_on_this_rank=self.processes.is_main)
        if self.processes.is_main:
            checkpoint.save(self.folder / layout.CHECKPOINTS, self.step, state, self.args.keep_checkpoints)
        return self.processes.is_main

    def report_warnings(self, warn: Callable[[int, str], object], where: str = "") -> None:
        """Call `warn` with the step for each warning of any process since the last call. Every process must call it.

        Args:
            where: the beginning of each sentence.
        """
        gathered = self.processes.all_gather([*self.rewards.drop_messages, *self.stage.warnings])
        self.rewards.drop_messages.clear()
        self.stage.warnings.clear()
        for warning in chain.from_iterable(gathered):
            warn(self.step, f"{where}{warning}")

    def save_on_error(self, error: Exception, save: Callable[[], object]) -> None:
        """Save on the way out of a failed run, and keep the error's message if the disk is full.

        Nothing is saved if half a step is done, which can't be resumed, or if one process alone has failed and holds a shard.
        An error that nobody foresaw, such as a GPU's, may make saving impossible, and is the one to be raised.
        """
        together = isinstance(error, Interrupted) or not self.stage.update.optimizer.is_sharded
        if not together or self.stage.update.mid_step or isinstance(error, WriteError):
            return
        if not isinstance(error, Interrupted | FlowGRPOError):
            with suppress(Exception):
                save()
            return
        try:
            save()
        except WriteError as write_error:
            raise WriteError(f"{error} {write_error}".strip()) from error

    def save_weights(self, name: str | None = None) -> Path:
        """Write the moving average of the trained weights to a folder of the run, by default the one that a finished run leaves.

        Returns the file, or the folder of several. Every process must call it; the main one writes.
        """
        folder = self.folder / (name or self._weights_folder)
        with self.policy.ema.applied():
            if not self.processes.is_main:
                return self.policy.save(folder, write=False)
            with atomic_folder(folder) as new_folder:
                return folder / self.policy.save(new_folder).relative_to(new_folder)

    @property
    def _weights_folder(self) -> str:
        return layout.TRANSFORMER if self.policy.is_full_finetuning else layout.LORA
