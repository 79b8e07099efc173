"""A run on disk while it trains: its folder created or resumed, its checkpoints written and read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import WriteError, atomic_folder, remove
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.run_folder import checkpoint, layout, opening
from flow_grpo.text import first_line
from flow_grpo.training.interrupt import Interrupted
from flow_grpo.training.stages import Stage


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
        self._start_stage = partial(
            Stage, policy=policy, prompt_sampler=prompt_sampler, rewards=rewards, processes=processes
        )
        for start, settings in reversed(self.stages):  # each checks its sizes; the run starts with the first
            self.stage = self._start_stage(start, settings)

    def enter_stage(self, step: int) -> None:
        """Start the stage that this training step belongs to, unless it is the present one."""
        start, settings = [stage for stage in self.stages if stage[0] <= step][-1]
        if settings is not self.stage.args:
            self.stage = self._start_stage(start, settings)

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on, by the keys that 0.3 wrote.

        Where it is sharded, every process must call this; pass keep_on_this_rank=False on those that discard the result.
        """
        state = {
            "step": self.step,
            "adapter": self.policy.adapter_state(keep_on_this_rank=keep_on_this_rank),
            "ema": self.policy.ema.state_dict(keep_on_this_rank),
            **self.stage.update.state_dict(keep_on_this_rank),
            "begin": self.stage.start,
            "memory": self.stage.loop_state(),
        }
        state.update({name: self.policy.adapter_state(name) for name in self.stage.args.objective.policy_copies})
        state["copies"] = {name: self.policy.adapter_state(name) for name in self.stage.update.anchors.copies}
        return state

    def open_folder(self, resume: bool, lock: ExitStack, info: Callable[[str], None]) -> None:
        """Create the run folder, or check that it can be resumed, and hold its lock until `lock` closes. On the main process.

        Raises:
            FlowGRPOError: as of `open_run_folder`.
        """
        opening.open_run_folder(self.args, self.inputs, resume, lock, info)
        if not resume:
            opening.write_machine(self.folder, self.policy.device, self.policy.dtype, self.processes.world_size)

    def explain_write_errors(self) -> AbstractContextManager[None]:
        """Raise FlowGRPOError that says what is left of the run when something could not be written."""
        return opening.explain_write_errors(self.folder)

    def resume(self, info: Callable[[str], None], step: int | None = None) -> None:
        """Restore the checkpoint of a step, by default the newest readable one. Every process must call it.

        Raises:
            FlowGRPOError: it is damaged, or all are, or it is of other settings.
        """
        self.load_state_dict(opening.read_checkpoint(self.folder, step, info))
        self.processes.all_gather(None)  # all have read it
        if self.processes.is_main:
            self._rewind(info)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint. FlowGRPOError if it was written with other settings."""
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FlowGRPOError(
                f"the checkpoint of step {state['step']} is not one of this run's settings ({first_line(error).rstrip('.')}): "
                "resume with the settings that it was written with, or start another run by output_dir=..."
            ) from error

    def save(self) -> bool:
        """Write a checkpoint; returns whether this process wrote it. Every process must call it; the main one writes."""
        if not self.processes.is_main and not self.stage.update.is_sharded:
            return False
        state = self.state_dict(keep_on_this_rank=self.processes.is_main)
        if self.processes.is_main:
            checkpoint.save(self.folder / layout.CHECKPOINTS, self.step, state, self.args.keep_checkpoints)
        return self.processes.is_main

    def report_warnings(self, warn: Callable[[int, str], object]) -> None:
        """Call `warn` with the step for each warning of any process since the last call. Every process must call it."""
        gathered = self.processes.all_gather([*self.rewards.drop_messages, *self.stage.warnings])
        self.rewards.drop_messages.clear()
        self.stage.warnings.clear()
        for warning in chain.from_iterable(gathered):
            warn(self.step, warning)

    def save_on_error(self, error: Exception, save: Callable[[], object]) -> None:
        """Save on the way out of a failed run, and keep the error's message if the disk is full.

        Nothing is saved if half a step is done, which can't be resumed, or if one process alone has failed and holds a shard.
        An error that nobody foresaw, such as a GPU's, may make saving impossible, and is the one to be raised.
        """
        together = isinstance(error, Interrupted) or not self.stage.update.is_sharded
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

    def _rewind(self, info: Callable[[str], None]) -> None:
        """Delete what the run wrote after the step that it resumes from, and the weights of an earlier end; write the settings."""
        moved = opening.rewind_run(self.folder, self.step)
        if moved:
            info(f"warning: {moved}")
        if self.step < self.args.steps:
            remove(self.folder / self._weights_folder)
        opening.write_settings(self.args, self.inputs)  # some settings may change

    def save_best_weights(self) -> None:
        """Write the weights of the best evaluation so far. Every process must call it."""
        self.save_weights(layout.BEST)

    @property
    def _weights_folder(self) -> str:
        return layout.TRANSFORMER if self.policy.is_full_finetuning else layout.LORA

    def _load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.enter_stage(state["begin"])  # between two stages, the optimizer may be either's
        self.policy.load_adapter_state(state["adapter"])
        self.policy.ema.load_state_dict(state["ema"])
        self.stage.update.load_state_dict(state)
        self.stage.restore_loop_state(state["memory"])
        self.stage.set_microbatch(self.stage.args.microbatch)  # it may have been saved by fewer processes
        for name in state.keys() & self.stage.args.objective.policy_copies.keys():
            self.policy.load_adapter_state(state[name], name)
        for name, values in state.get("copies", {}).items():
            self.policy.load_adapter_state(values, name)
