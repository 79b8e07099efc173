"""The loop: sample images, score them, compare them within their groups, update the policy.

CONTRIBUTING.md follows a step through the files.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import Prompts
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.evaluation.evaluator import Evaluator
from flow_grpo.policy.devices import keep_compile_seconds
from flow_grpo.report import page
from flow_grpo.rewards.threads import background
from flow_grpo.run_folder import layout, opening
from flow_grpo.tracking.tracker import Tracker
from flow_grpo.training.callbacks import CallbackList
from flow_grpo.training.group_advantages import experience_of
from flow_grpo.training.setup import build_run
from flow_grpo.training.signals import handle_signals
from flow_grpo.training.start_checks import sentences
from flow_grpo.training.state import RunState, Stage
from flow_grpo.types import Evaluation, Experience


class FlowGRPOTrainer:
    """Fine-tunes a flow-matching text-to-image model with rewards. The shape is that of TRL's `GRPOTrainer`.

    Args:
        model: a folder, hub id or bundled name, by default `args.model`; a pipeline of diffusers, which is trained in place; or a `Policy`,
            which keeps its own size, guidance, dtype and LoRA: the run's config then has these.
        reward_funcs: a reward or a list of them: names, import paths, functions, objects that can be called, or classes; by default
            `args.rewards`. The settings of a name in `args.rewards`, such as its weight and options, are used; the run's config then has
            these rewards in place of `args.rewards`.
        args: the run's settings.
        train_dataset: prompts: a file, folder or data set by name, a `PromptSet`, or a `datasets.Dataset`, list, generator or another
            iterable of texts or of dicts by column, which are metadata for rewards; by default `args.prompts`.
        eval_dataset: held-out prompts, likewise; by default `args.evaluation.prompts`.
        callbacks: objects with methods such as `on_step_end`, see flow_grpo/training/callbacks.py; a `transformers.TrainerCallback` is one.

    Raises:
        FlowGRPOError: an invalid argument or setting, in one sentence.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: FlowGRPOConfig | None = None,
        train_dataset: Prompts | None = None,
        eval_dataset: Prompts | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        if not isinstance(args, FlowGRPOConfig | None):
            raise FlowGRPOError(
                f"args is of type {type(args).__name__}: give FlowGRPOConfig(...), or FlowGRPOConfig.from_yaml(...)."
            )
        run = build_run(model, reward_funcs, args or FlowGRPOConfig(), train_dataset, eval_dataset)
        self.args, self.policy, self.processes = run.args, run.policy, run.processes
        self.train_set, self.eval_set, self.prompt_sampler = run.train_set, run.eval_set, run.prompt_sampler
        self.rewards, self.eval_rewards = run.rewards, run.eval_rewards
        self.start_checks, self.headline = run.start_checks, run.headline
        self.callbacks = CallbackList(callbacks, self.args, self.policy, self.processes, self.eval_set is not None)
        self.folder = Path(self.args.output_dir)
        self.state = RunState(run.args, run.policy, run.prompt_sampler, run.rewards, run.processes, inputs=run.inputs)
        self.evaluator = Evaluator(
            run.policy,
            self.args.held_out,
            run.eval_set,
            run.eval_rewards,
            folder=self.folder,
            model=self.args.model,
            last_step=self.args.steps,
            processes=run.processes,
        )

    def train(self, resume: bool | str | Path | None = None) -> dict[str, float]:
        """Run to the last step; returns the last evaluation's numbers.

        Afterwards the process group is destroyed, if the run created it.

        Args:
            resume: True goes on from the newest checkpoint of `args.output_dir`; the folder of one of its checkpoints, from that one;
                "auto" goes on if there is a checkpoint, else starts. By default a new run is started, or "auto" under a launcher that
                restarts processes (torchrun --max-restarts, a requeued SLURM job).

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, with a checkpoint saved. A second Ctrl-C ends a command at once.
            PeerLost: another process of the run has failed or is gone.
            FlowGRPOError: a reward failed, or the ratio check, or the gradient is not finite; or something could not be written. A
                checkpoint is saved, unless weights have changed within the step or are sharded.
        """
        self.processes.stop_requested = False
        with (
            self.processes.together(to_the_end=True),
            opening.explain_write_errors(self.folder),
            ExitStack() as lock,
            Tracker(self.folder, self.args.steps, silent=not self.processes.is_main, on_log=self.callbacks.log) as tracker,
            handle_signals(self._interrupt),
        ):
            self._start_or_resume(tracker, resume, lock)
            self.callbacks.begin(self.step)
            try:
                self._loop(tracker)
            except (Interrupted, Exception) as error:
                self.state.save_on_error(error, self.save)
                raise
            trained = self.state.save_weights()
            self.callbacks.call("on_train_end")
            return tracker.finish(trained, page.write_report(self.folder)) if self.processes.is_main else {}

    def _loop(self, tracker: Tracker) -> None:
        self._evaluate(tracker)
        times: list[float] = []
        while self.step < self.args.steps:
            if self.processes.any_process(self.processes.stop_requested):
                raise Interrupted
            self.callbacks.call("on_step_begin")
            metrics = self.training_step()
            tracker.log(self.step, metrics)
            times.append(metrics["time/step"])
            if len(times) == 1 + self.policy.compiled:  # the first step that does not compile
                tracker.say_run_time(self.args, self.step, times)
                if self.policy.compiled and self.processes.is_main:
                    keep_compile_seconds(self.args.model, self.policy.device, times[0] - times[1])
            self.callbacks.call("on_step_end")
            requested = self.callbacks.requested()
            self.state.report_warnings(tracker.warn)
            if not self.stage.has_advantage:
                tracker.warn_no_signal(self.step, by_gradient=metrics.get("frac_gradient_zero") == 1)
            is_saved = self.step == self.args.steps or self.step % self.args.save_every == 0 or requested.should_save
            if is_saved:
                self.save()
            self._evaluate(tracker, requested.should_evaluate)
            requested_then = self.callbacks.requested()  # by `on_evaluate` and `on_save`
            stops = requested.should_training_stop or requested_then.should_training_stop
            if requested_then.should_save or (stops and not is_saved):
                self.save()
            if stops:
                break

    def training_step(self) -> dict[str, float]:
        """Sample a group of images for each prompt, score them, compare them within groups, update the policy. Returns metrics."""
        self.state.enter_stage(self.step)
        for attempt in self.stage.attempts():  # one; another one with half the micro-batch if memory ran out
            experience: Experience | None = None  # else a failed attempt's would keep a GPU's memory
            with attempt:
                experience = self.experience()
                metrics = self.stage.update(experience, self.step)  # losses -> gradients -> optimizer
        assert experience is not None
        metrics = self.stage.finish_step(self.step, experience, metrics)
        self.state.step += 1
        if self.step == 1 or self._evaluation_is_due:
            self.evaluator.record_groups(self.step, experience)
        return metrics

    def experience(self) -> Experience:
        """The experience of the current training step: images with rewards and advantages, or given images of a data set."""
        stage, args = self.stage, self.stage.args
        if stage.given_images is not None:
            return stage.given_images.experience(self.step, stage.microbatch)
        batch = self.prompt_sampler.sample(self.step, args.prompts_per_step, args.images_per_prompt)
        with background(self.processes.should_stop) as thread:  # on a GPU, images are scored while the next ones are sampled
            trajectory, futures = stage.sampler.sample(batch, self.step, thread)
            scores = stage.sampler.gather_scores(futures, batch.group)
        with self.policy.meter.timed("advantage"):
            compared = stage.compare(batch, trajectory, scores)
        return experience_of(batch, trajectory, scores, compared, args=args, processes=self.processes)

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return self.state.step

    @property
    def stage(self) -> Stage:
        """The stage of the last training step; its settings are `stage.args`."""
        return self.state.stage

    def evaluate(self) -> Evaluation:
        """Generate the held-out images with the averaged weights, and measure them."""
        return self.evaluator.evaluate(self.stage.microbatch)

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on. Every process must call it; the main one writes."""
        if self.state.save():
            self.callbacks.call("on_save")

    def save_model(self, output_dir: str | Path) -> Path:
        """Write the trained weights (their moving average, if the run keeps one) as diffusers loads them.

        Returns the LoRA's file, or the folder of the whole transformer. Every process must call this; the main one writes.
        """
        with self.policy.ema.applied():
            return self.policy.save(output_dir, self.processes.is_main)

    def push_to_hub(self, repo_id: str, private: bool = False, best: bool = False) -> str:
        """Upload the finished run's LoRA with its model card, as `flow-grpo export RUN --push` does; returns the page's address.

        A repository that does not exist is created. `best` takes the weights of the best evaluation in place of the last ones.

        Raises:
            FlowGRPOError: the run is not finished, there is no token, or the hub refuses.
        """
        from flow_grpo.export.export import export_and_push

        return export_and_push(self.folder, repo_id, private=private, best=best)

    def _interrupt(self) -> None:
        self.processes.stop_requested = True

    def _start_or_resume(self, tracker: Tracker, resume: bool | str | Path | None, lock: ExitStack) -> None:
        """Create the run folder, or go on from its newest checkpoint, or from the one that `resume` is the folder of."""
        main = self.processes.is_main
        resumes, step = self.processes.on_main(lambda: opening.how_to_resume(self.folder, resume))
        self.processes.on_main(lambda: self.state.open_folder(resumes, lock, tracker.info))
        if not resumes:
            self.processes.on_main(lambda: self._start(tracker))
            self.save()  # a run that is lost before its first checkpoint can be resumed too
            return
        self.state.resume(tracker.info, step)
        tracker.resume(self.step)
        if main:
            self.evaluator.start_recording()
            tracker.open_services(self.args, self.step)
        nothing_left = "" if self.step < self.args.steps else ": nothing is left to train; `steps` sets how many there are"
        tracker.info(f"resumed at step {self.step} of {self.args.steps}, in {self.folder}{nothing_left}")

    def _start(self, tracker: Tracker) -> None:
        self.evaluator.start_recording()
        tracker.open_services(self.args)
        tracker.info(self.headline)
        for note in dict.fromkeys([*self.train_set.notes, *(self.eval_set.notes if self.eval_set else ())]):
            tracker.info(note)
        for sentence in sentences(self.start_checks):
            tracker.warn(0, sentence)

    @property
    def _evaluation_is_due(self) -> bool:
        """Whether the current step is the first, the last, or one of every `evaluation.every`."""
        every = self.args.evaluation.every
        return self.step in (0, self.args.steps) or bool(every and self.step % every == 0)

    def _evaluate(self, tracker: Tracker, requested: bool = False) -> None:
        """Evaluate if it is due or requested, but not again what a resumed run has in its metrics."""
        due = self.eval_set is not None and (requested or self._evaluation_is_due)
        if due and not self.processes.all_gather(tracker.has_evaluation(self.step))[0]:
            self.evaluator.evaluate_and_record(
                self.step, self.stage.microbatch, tracker, partial(self.state.save_weights, layout.BEST)
            )
            self.state.report_warnings(tracker.warn, "in the evaluation: ")
            if self.processes.is_main:
                page.write_report(self.folder)
