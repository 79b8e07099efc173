"""The loop: deal prompts, roll out, score, compare within groups, update what is trained."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data import prompt_overlap
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.data.prompts import PromptSampler, PromptSet, load_prompts
from flow_grpo.distributed.processes import Processes
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.evaluation.group_dependence import group_dependence_warnings
from flow_grpo.evaluation.held_out import evaluate, save_before_after
from flow_grpo.files import WriteError, atomic_folder, remove, write_atomic
from flow_grpo.policy import hub
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.report import page
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.run_folder.lock import locked
from flow_grpo.run_folder.metrics_file import has_metrics
from flow_grpo.run_folder.samples import SampleRecorder
from flow_grpo.text import counted, first_line
from flow_grpo.tracking import services
from flow_grpo.tracking.tracker import Tracker
from flow_grpo.training import early_checks
from flow_grpo.training.callbacks import CallbackList
from flow_grpo.training.critic import Critic
from flow_grpo.training.interrupt import Interrupted, signals
from flow_grpo.training.offline import OfflineSource
from flow_grpo.training.rewards import build_rewards
from flow_grpo.training.rollouts import Rollouts
from flow_grpo.training.setup import loaded, make_trainable
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.training.windows import best_window, owned_variance
from flow_grpo.types import Evaluation

NUM_SAMPLES = 8  # prompts in a grid of RUN/samples
PREVIEWS = 16  # held-out prompts in the before and after grids
TWICE = 16  # held-out prompts that are drawn twice, to see how much the pictures of one differ


class FlowGRPOTrainer:
    """Fine-tunes a flow-matching text-to-image model with rewards.

    Args:
        model: a folder, hub id or shipped name, by default `args.model`; or a `Policy`, which is then called as it says itself.
        reward_funcs: rewards by name, or a list of names, import paths or callables; by default `args.rewards`.
        args: the run's settings.
        train_dataset: prompts: a `PromptSet`, a list of strings or a file; by default `args.prompts`.
        eval_dataset: held-out prompts, likewise; by default `args.evaluation.prompts`.
        callbacks: objects with methods such as `on_step_end`, see flow_grpo/training/callbacks.py; a `transformers.TrainerCallback` is one.

    Raises:
        ValueError: in one sentence, whatever does not fit.
    """

    def __init__(
        self,
        model: str | Policy | None = None,
        reward_funcs: Any = None,
        args: FlowGRPOConfig | None = None,
        train_dataset: PromptSet | list[str] | str | None = None,
        eval_dataset: PromptSet | list[str] | str | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        args = args or FlowGRPOConfig()
        named = args.with_model(hub.model_name(model.pipe) if isinstance(model, Policy) else model or args.model)
        prompts = named.training_prompts if train_dataset is None else train_dataset
        self.train_set, self.train_source = load_prompts(prompts), prompts if isinstance(prompts, str) else None
        self.args = args = (named if isinstance(model, str) else args).with_launcher_settings()
        wanted = eval_dataset if eval_dataset is not None else args.evaluation.prompts
        self.eval_set = None if wanted is None else load_prompts(wanted).head(args.evaluation.limit)
        self.parts = args.resolved_stages()
        self.processes = Processes.from_environment(args.device)
        early_checks.check_settings(args, self.processes.world_size)
        early_checks.check_prompts(args, self.train_set, self.eval_set, self.processes.world_size)
        self.held_out, trained = build_rewards(args, reward_funcs, monitored=self.eval_set is not None)
        self.rewards = self.held_out.subset(trained)
        if isinstance(model, Policy):
            self.policy = model
        else:
            held_out = [] if self.eval_set is None else self.eval_set.prompts
            self.policy = loaded(args, self.processes.device, [*self.train_set.prompts, *held_out])
        make_trainable(self.policy, args, self.processes)
        self.callbacks = CallbackList(callbacks, args, self.policy, self.processes)
        self.prompt_sampler = PromptSampler(self.train_set, args.seed, args.resting.after, args.resting.steps)
        self.folder = Path(args.output)
        self.step = 0
        self.notes: list[str] = []  # what the console is still to say
        self.record: SampleRecorder | None = None  # of the process that writes, once it trains
        self._stopping = False
        for begin, part in reversed(self.parts):  # each says at once what does not fit; the first is the one to begin with
            self._enter(begin, part)

    def _enter(self, begin: int, part: FlowGRPOConfig) -> None:
        """Begins a part of the run: its objective, what it learns from, and an optimizer that knows nothing of the last one's."""
        self._fit(part, part.microbatch)
        self.begin, self.part, objective = begin, part, part.objective
        self.update = PolicyUpdate(self.policy, part, begin, self.processes)
        self.critic: Critic | None = None
        if part.method.critic:
            _, shape = self.policy.schedule(part.sampling.steps)
            text = self.policy.encode(self.train_set.prompts[:1]).pooled().shape[1]
            self.critic = Critic(shape, text, objective.critic, part.seed)
        self.source: Rollouts | OfflineSource
        if objective.data is not None:
            self.source = OfflineSource(self.policy, part, self.processes)
        else:
            ours = (self.policy, part, self.prompt_sampler, self.rewards, self.critic)
            self.source = Rollouts(*ours, self._window, self._asked_to_stop, self.processes)
        if part.method.old_policy:
            self.policy.update_adapter_copy(
                "old", 0.0
            )  # whatever was trained before, its old policy begins as the one of now
        self.window_place: int | None = None  # where an `auto` window lies, once measured

    def _fit(self, part: FlowGRPOConfig, microbatch: int) -> None:
        """Gives a part the micro-batch of a process, at most that large."""
        pairs = part.method.rows_per_pair == 2
        sizes = (part.prompts_per_step, part.images_per_prompt, microbatch, part.updates)
        part.microbatch = self.processes.local_microbatch(*sizes, pairs)

    # -- the run ----------------------------------------------------------------------------------------------------

    def train(self, resume: bool = False) -> dict[str, float]:
        """Runs to the last step, from the newest checkpoint if `resume`; returns the last evaluation's numbers.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, with a checkpoint saved. A second Ctrl-C ends a command at once.
            ValueError: a reward failed, or the ratio check, or the gradient is not finite, with a checkpoint saved; or something
                could not be written.
        """
        silent, self._stopping = not self.processes.is_main, False
        self.record = None if silent else SampleRecorder(self.folder, self.args.evaluation.pictures)
        with (
            self._disk(),
            ExitStack() as lock,
            Tracker(self.folder, self.args.steps, silent=silent) as tracker,
            signals(self._stop),
        ):
            tracker.on_log = self.callbacks.log
            self._begin(tracker, resume, lock)
            self.callbacks.state.global_step = self.step
            self.callbacks.call("on_train_begin")
            try:
                self._loop(tracker)
            except (Interrupted, ValueError) as error:
                together = isinstance(error, Interrupted) or not self.update.is_sharded  # one process alone can't gather
                whole = not self.update.mid_step  # half a step can't be resumed
                if together and whole and not isinstance(error, WriteError):
                    self._save_after(error)
                raise
            return self._finish(tracker)

    def _loop(self, tracker: Tracker) -> None:
        self._evaluate_if_due(tracker)
        while self.step < self.args.steps:
            if self.processes.any(self._stopping):
                raise Interrupted
            self.callbacks.call("on_step_begin")
            tracker.log(self.step + 1, self.training_step())
            self.callbacks.call("on_step_end")
            asked = self.callbacks.requested()
            for notes in self.processes.all_gather([*self.rewards.drop_messages, *self.notes]):
                for note in notes:
                    tracker.warn(self.step, note)
            self.rewards.drop_messages.clear()
            self.notes.clear()
            if self.step == self.args.steps or self.step % self.args.save_every == 0 or asked.should_save:
                self.save()
            self._evaluate_if_due(tracker, asked.should_evaluate)
            self._draw_samples_if_due()
            if asked.should_training_stop:
                break

    def training_step(self) -> dict[str, float]:
        """One step: rollout, rewards, advantages, updates. Returns its metrics and counts `self.step` up."""
        started = time.perf_counter()
        self.enter_at(self.step)
        metrics: dict[str, float] | None = None
        while metrics is None:
            memory = self._memory()
            try:
                experience = self.source.collect(self.step)
                collected = time.perf_counter()
                with phase(f"step {self.step + 1}, updating"):
                    metrics = self.update(experience, self.step)
            except (Interrupted, ValueError, torch.OutOfMemoryError) as error:  # this step has not happened
                self._recall(memory)
                self.update.discard()
                if not isinstance(error, torch.OutOfMemoryError) or not self._halve():
                    raise
            if metrics is None and self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # the error is gone, and with it what it held
        finished = time.perf_counter()
        self.step += 1
        if self.record is not None and (self.step == 1 or self._due()):
            self.record.save_groups(self.step, experience, self.policy.decode)
        return {
            **experience.metrics,
            **metrics,
            "time/update": finished - collected,
            "time/step": finished - started,
        }

    def _halve(self) -> bool:
        """After memory ran out: smaller micro-batches from here on. False if there are none, or others would not know of it."""
        former, least = self.part.microbatch, self.part.method.rows_per_pair
        if former <= least or self.update.mid_step or self.processes.world_size > 1:
            return False
        self._fit(self.part, former // 2)
        self.notes.append(f"memory ran out with microbatch={former}; the run goes on with {self.part.microbatch}.")
        return True

    def _memory(self) -> dict[str, Any]:
        """What steps leave behind beside the adapter and its optimizer."""
        critic = None if self.critic is None else copy.deepcopy(self.critic.training_state())
        return {
            "prompts": self.prompt_sampler.state_dict(),
            "clip": dict(self.update.clip.state),
            "window": self.window_place,
            "microbatch": self.part.microbatch,
            "critic": critic,
        }

    def _recall(self, memory: dict[str, Any]) -> None:
        self.prompt_sampler.load_state_dict(memory["prompts"])
        self.part.microbatch = memory["microbatch"]
        self.update.clip.state, self.window_place = dict(memory["clip"]), memory["window"]
        if self.critic is not None:
            self.critic.load_training_state(memory["critic"])

    def enter_at(self, step: int) -> None:
        """Goes over to the part of the run that this step belongs to."""
        begin, part = [one for one in self.parts if one[0] <= step][-1]
        if part is not self.part:
            self._enter(begin, part)

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on. All hold the same, or a share of it, and one writes."""
        if not self.processes.is_main and not self.update.is_sharded:
            return
        keep = self.processes.is_main
        state = {
            "step": self.step,
            "adapter": self.policy.adapter_state(keep=keep),
            "ema": self.policy.ema_state(keep),
            **self.update.state_dict(keep),
            "begin": self.begin,
            "memory": self._memory(),
        }
        if "old" in self.policy.adapters:
            state["old"] = self.policy.adapter_state("old")
        if keep:
            checkpoint.save(self.folder / layout.CHECKPOINTS, self.step, state, self.args.keep)
            self.callbacks.call("on_save")

    def _save_after(self, error: Exception) -> None:
        """Saves on the way out, and keeps what the error says if there is no room."""
        try:
            self.save()
        except WriteError as full:
            raise WriteError(f"{error} {full}".strip()) from error

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Says what is left of the run when something could not be written within it."""
        try:
            yield
        except (WriteError, OSError) as error:
            what = str(error) if isinstance(error, WriteError) else f"the system refused to read or write: {error}."
            saved = checkpoint.steps(self.folder / layout.CHECKPOINTS)
            lost = f"What came after the checkpoint of step {saved[0]} is lost" if saved else "Nothing is saved yet"
            again = "go on with --resume" if saved else "start the run again"
            raise ValueError(f"{what} {lost}: when it can be written, {again}.") from error

    def _stop(self) -> None:
        self._stopping = True

    def _asked_to_stop(self) -> bool:
        return self._stopping

    def _begin(self, tracker: Tracker, resume: bool, lock: ExitStack) -> None:
        self.processes.gather_or_raise(lambda: self._open(tracker, resume, lock) if self.processes.is_main else None)
        if resume:
            self._resume(tracker)
        else:
            self.save()  # a run that is lost before its first checkpoint can be resumed too

    @property
    def begun(self) -> bool:
        """Whether the run folder holds a run: metrics, readable or not, or a checkpoint after the start."""
        return has_metrics(self.folder) or any(checkpoint.steps(self.folder / layout.CHECKPOINTS))

    def _open(self, tracker: Tracker, resume: bool, lock: ExitStack) -> None:
        """Makes the run folder, or sees that there is one to go on with, and takes its lock until `lock` is left."""
        if resume and not checkpoint.steps(self.folder / layout.CHECKPOINTS):
            again = "set another folder by output=..." if self.begun else "start the run without --resume"
            raise ValueError(f"{self.folder} has no checkpoint to resume from: {again}, or see whether output=... is right.")
        lock.enter_context(locked(self.folder, tracker.info))
        if not resume:
            if self.begun:
                raise ValueError(
                    f"{self.folder} already holds a run: go on with it by --resume, or set another folder by output=..."
                )
            write_atomic(self.folder / layout.CONFIG, self.args.to_yaml())
            assert self.record
            self.record.start(self.policy, self.processes.world_size)
            args, policy = self.args, self.policy
            tracker.attach(services.open_services(self.folder, args, tracker.info))
            tracker.info(
                f"{args.model} on {policy.device} in {str(policy.dtype).removeprefix('torch.')}: {counted(args.steps, 'step')} of "
                f"{counted(args.prompts_per_step, 'prompt')} x {counted(args.images_per_prompt, 'image')}; run folder {self.folder}"
            )
            for sentence in self._overlaps():
                tracker.warn(0, sentence)

    def _overlaps(self) -> list[str]:
        """Sentences on prompts that the run both trains on and is measured by."""
        if all(part.objective.data is not None for _, part in self.parts):  # given images have prompts of their own
            return []
        held_out = [] if self.eval_set is None else self.eval_set.prompts
        return prompt_overlap.sentences(self.train_set.prompts, held_out, self.train_source)

    def _resume(self, tracker: Tracker) -> None:
        state, warnings = checkpoint.latest(self.folder / layout.CHECKPOINTS)
        for warning in warnings:
            tracker.info(f"warning: {warning}")
        if state is None:
            raise ValueError(f"all checkpoints of {self.folder} are damaged: start another run by output=...")
        self._same_settings()
        if "microbatch" not in state.get("memory", {}):
            raise ValueError(
                f"{self.folder} was written by flow-grpo 0.2 or before, which this version can't go on with: start a new run."
            )
        self.restore(state)
        self.processes.all_gather(None)  # all have read
        if self.processes.is_main:
            checkpoint.delete_after(self.folder / layout.CHECKPOINTS, self.step)
            if self.step < self.args.steps:  # what an end at an earlier step has left is no longer the last
                remove(self.folder / self._result)
            write_atomic(self.folder / layout.CONFIG, self.args.to_yaml())  # some settings may change
        tracker.resume(self.step)
        if self.record is not None:
            self.record.delete_after(self.step)
            if self.record.used_other_noise:
                tracker.info("note: flow-grpo 0.3 drew the evaluations so far from other noise than those to come.")
            tracker.attach(services.open_services(self.folder, self.args, tracker.info, self.step))
        tracker.info(f"resumed at step {self.step} of {self.args.steps}")

    def restore(self, state: dict[str, Any]) -> None:
        """Puts the run where a checkpoint left it. ValueError if it is one of other settings."""
        try:
            self._restore(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            said = first_line(error).rstrip(".")
            raise ValueError(
                f"the checkpoint of step {state['step']} is not one of this run's settings ({said}): resume with the settings "
                "that it was written with, or start another run by output=..."
            ) from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.enter_at(state["begin"])  # between two parts, the optimizer may be the former's or the latter's
        self.policy.load_adapter_state(state["adapter"])
        self.policy.load_ema_state(state["ema"])
        self.update.load_state_dict(state)
        self._recall(state["memory"])
        self._fit(self.part, self.part.microbatch)  # it may have been saved by fewer processes
        if "old" in state:
            self.policy.load_adapter_state(state["old"], "old")

    def _same_settings(self) -> None:
        """ValueError if a setting that changes the numbers is not what the run folder's config says."""
        file = self.folder / layout.CONFIG
        former = FlowGRPOConfig.from_yaml(file) if file.exists() else self.args
        for name, (then, now) in former.differences(self.args).items():
            raise ValueError(
                f"{self.folder} was begun with {name}={then!r}, not {now!r}: resume it with the same settings, or start another "
                "run by output=..."
            )

    def save_model(self, output_dir: str | Path) -> Path:
        """Writes the trained weights (their moving average, if the run keeps one) as diffusers loads them.

        With several processes every one must call it, and the main one writes.

        Returns:
            The LoRA's file, or the folder of the whole transformer.
        """
        with self.policy.ema_weights():
            return self.policy.save(Path(output_dir), self.processes.is_main)

    def push_to_hub(self, repo_id: str, private: bool = False, best: bool = False) -> str:
        """Uploads the finished run's LoRA with its model card, as `flow-grpo export RUN --push` does; returns the page's address.

        Args:
            repo_id: user/name. It is created where there is none.
            best: the weights of the best evaluation in place of the last ones.

        Raises:
            ValueError: the run is not finished, there is no token, or the hub refuses.
        """
        from flow_grpo.export import export

        export.check_push(repo_id)
        out = self.folder / layout.EXPORT
        export.export(self.folder, out, best=best, repo=repo_id)
        return export.push(out, repo_id, private)

    def _finish(self, tracker: Tracker) -> dict[str, float]:
        trained = self._save_trained(self._result)
        self.callbacks.call("on_train_end")
        if not self.processes.is_main:
            return {}
        return tracker.finish(trained, page.write([self.folder], self.folder / layout.REPORT))

    def _save_trained(self, name: str) -> Path:
        """Writes the moving average of what is trained to that folder of the run; returns the file, or the folder of several."""
        folder = self.folder / name
        with self.policy.ema_weights():
            if not self.processes.is_main:
                return self.policy.save(folder, write=False)
            with atomic_folder(folder) as made:
                return folder / self.policy.save(made).relative_to(made)

    @property
    def _result(self) -> str:
        """Name of the folder that a finished run leaves."""
        return layout.TRANSFORMER if self.policy.is_full_finetuning else layout.LORA

    def _due(self) -> bool:
        """Whether this step is evaluated: the first, the last, and every so many."""
        every = self.args.evaluation.every
        return self.step in (0, self.args.steps) or bool(every and self.step % every == 0)

    def _draw_samples_if_due(self) -> None:
        """Draws a grid of the first prompts with fixed seeds, every `sample_every` steps."""
        if not self.args.sample_every or self.step % self.args.sample_every:
            return
        prompts = (self.eval_set or self.train_set).prompts[:NUM_SAMPLES]
        steps = self.args.evaluation.steps
        with self.policy.ema_weights():  # on every process: they may hold shares of the weights
            alone = self.processes.world_size == 1
            images = generate_images(
                self.policy,
                prompts,
                seeds=list(range(len(prompts))),
                steps=steps,
                microbatch=self.part.microbatch,
                stopping=lambda: alone and self._stopping,
            )
        if self.processes.is_main:
            cells = [ImageInfo(prompt, seed, f"{self.args.model}, step {self.step}") for seed, prompt in enumerate(prompts)]
            save_grid(self.folder / layout.SAMPLES / layout.sample_grid(self.step), images, cells, columns=4)

    def _evaluate_if_due(self, tracker: Tracker, asked: bool = False) -> None:
        """Not again what a resumed run has in its metrics."""
        due = self.eval_set is not None and (asked or self._due())
        if not due or self.processes.all_gather(tracker.evaluated(self.step))[0]:
            return
        started = time.perf_counter()
        found = self.evaluate()
        seconds = time.perf_counter() - started
        assert self.eval_set
        prompts = self.eval_set.prompts
        seeds = [image_seed(self.args.evaluation.seed, place) for place in range(len(prompts))]
        trained = [name for name, weight in self.held_out.weights.items() if weight]
        kept = self.record.save_evaluation(self.step, found, prompts, seeds, trained) if self.record else []
        history = hacking.read_history(kept)
        if self.processes.all_gather(bool(history) and hacking.best(history) == self.step)[0]:  # before the metrics name it
            self._save_trained(layout.BEST)
        first = self.step == 0 and self.record is not None
        by_group = self.processes.gather_or_raise(lambda: self._by_group(found) if first else [], (ValueError, Interrupted))[
            0
        ]
        if self.record is not None:
            self._note(tracker, found, history, seconds, by_group)

    def _note(
        self, tracker: Tracker, found: Evaluation, history: list[hacking.Reading], seconds: float, by_group: list[str]
    ) -> None:
        """Writes and says what an evaluation found."""
        assert self.record
        assert self.eval_set
        prompts, seed = self.eval_set.prompts, self.args.evaluation.seed
        if self.step in (0, self.args.steps):
            save_before_after(self.folder, self.step == 0, found.pictures, prompts[:PREVIEWS], seed, self.args.model)
        more = {**hacking.numbers(history), "time/evaluation": seconds}
        tracker.evaluation(self.step, found.means(), more, self.record.preview_images(self.step, prompts))
        for name, sentence in hacking.warnings(history).items():
            tracker.warn(self.step, sentence, fallen=name)
        for sentence in by_group:
            tracker.warn(self.step, sentence)
        page.write([self.folder], self.folder / layout.REPORT)

    def _by_group(self, found: Evaluation) -> list[str]:
        """A sentence for each reward whose held-out values mean nothing, since they depend on other images of a prompt."""
        assert self.eval_set
        return group_dependence_warnings(self.held_out.rewards, self.eval_set, found.pictures, self._asked_to_stop)

    def evaluate(self) -> Evaluation:
        """The held-out prompts, drawn by the averaged adapter and measured."""
        if self.eval_set is None:
            raise ValueError("there are no held-out prompts: set evaluation.prompts.")
        settings = self.args.evaluation
        with self.policy.ema_weights():
            drawn = (self.policy, self.eval_set, self.held_out, settings.steps, settings.seed, self.part.microbatch)
            keep = max(PREVIEWS, settings.pictures)
            return evaluate(*drawn, self.processes, keep, TWICE, self._asked_to_stop)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _window(self, step: int) -> list[int]:
        """The steps of the schedule that are stochastic and trained."""
        s, w = self.part.sampling, self.part.sampling.window
        if not self.part.method.stepwise:
            return []
        if w.kind == "auto":
            if self.window_place is None:
                self.window_place = self.processes.gather_or_raise(self._best_window, (ValueError, Interrupted))[0]
            return list(range(self.window_place, self.window_place + w.size))
        last = s.steps - 2 if w.last is None else w.last
        place = step - self.begin if w.kind == "sliding" else step
        return sampling.window(w.kind, s.steps, w.size, w.first, last, w.every, self.part.seed, place)

    def _best_window(self) -> int:
        """Where the steps begin that own the most variance of the reward."""
        parts, s = (self.policy, self.part, self.train_set, self.rewards), self.part.sampling
        owned = owned_variance(*parts, s.transition, s.noise_level, self._asked_to_stop, self.processes)
        return best_window(owned, s.window.size)
