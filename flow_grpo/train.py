"""The loop: deal prompts, roll out, score, compare within groups, update the adapter."""

import copy
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo import checkpoint, sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.critic import Critic
from flow_grpo.evaluate import before_after, build_rewards, evaluate
from flow_grpo.experience import Interrupted, Rollouts
from flow_grpo.explore import best_window, owned_variance
from flow_grpo.pairs import GivenImages
from flow_grpo.policy import Policy, load_policy
from flow_grpo.prompts import Dealer, PromptSet, load_prompts
from flow_grpo.terms import ClipRange, FinalTerms, Means, StepTerms, own_function
from flow_grpo.tracking import Tracker, plot_curves, read_metrics
from flow_grpo.types import Experience

PREVIEWS = 16  # held-out prompts in the before and after grids


class FlowGRPOTrainer:
    """Fine-tunes a flow-matching text-to-image model with rewards.

    Args:
        model: a folder, hub id or shipped name, by default `args.model`; or a `Policy`, which is then called as it says itself.
        reward_funcs: rewards by name, or a list of names, import paths or callables; by default `args.rewards`.
        args: the run's settings.
        train_dataset: prompts: a `PromptSet`, a list of strings or a file; by default `args.prompts`.
        eval_dataset: held-out prompts, likewise; by default `args.evaluation.prompts`.

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
    ) -> None:
        args = args or FlowGRPOConfig()
        if isinstance(model, str):
            args = args.model_copy(update={"model": model})
        self.args = args
        self.held_out, trained = build_rewards(args, reward_funcs)
        self.rewards = self.held_out.only(trained)
        self.train_set = _prompts(train_dataset if train_dataset is not None else args.prompts)
        wanted = eval_dataset if eval_dataset is not None else args.evaluation.prompts
        self.eval_set = None if wanted is None else _prompts(wanted).head(args.evaluation.limit)
        self.parts = args.parts()
        if isinstance(model, Policy):
            self.policy = model
        else:
            self.policy = load_policy(args.model, args.device, args.dtype, args.lora.start, **args.call())
        if not self.policy.has_lora:
            self.policy.add_lora(args.lora.rank, args.lora.alpha, args.lora.targets, args.seed)
        if args.ema_decay:
            self.policy.start_ema()
        if any(part.objective.name == "nft" for _, part in self.parts):
            self.policy.add_copy("old")
        self.scaler = torch.amp.GradScaler(self.policy.device.type, enabled=self.policy.dtype == torch.float16)
        self.dealer = Dealer(self.train_set, args.seed, args.resting.after, args.resting.steps)
        self.folder = Path(args.output)
        self.step = 0
        self._stopping = False
        self._within_updates = False  # whether the adapter has moved in a step that is not over
        for begin, part in reversed(self.parts):  # each says at once what does not fit; the first is the one to begin with
            self._enter(begin, part)

    def _enter(self, begin: int, part: FlowGRPOConfig) -> None:
        """Begins a part of the run: its objective, what it learns from, and an optimizer that knows nothing of the last one's."""
        self.begin, self.part, objective = begin, part, part.objective
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters().values(),
            lr=part.optimizer.lr,
            betas=part.optimizer.betas,
            eps=part.optimizer.eps,
            weight_decay=part.optimizer.weight_decay,
        )
        self.clip = ClipRange(objective.clip_quantile)
        self.critic: Critic | None = None
        if objective.name == "ppo":
            _, shape = self.policy.schedule(part.sampling.steps)
            text = self.policy.encode([""]).pooled().shape[1]
            self.critic = Critic(shape, text, objective.critic, part.seed)
        self.source: Rollouts | GivenImages
        if objective.data is not None:
            self.source = GivenImages(self.policy, part)
        else:
            self.source = Rollouts(
                self.policy, part, self.dealer, self.rewards, self.critic, self._window, lambda: self._stopping
            )
            Dealer(self.train_set, part.seed).deal(0, part.prompts_per_step, 1)  # says at once if there are too few prompts
        if objective.name == "nft":
            self.policy.follow("old", 0.0)  # whatever was trained before, its old policy begins as the one of now
        own_function("objective", objective.name)
        self.window_place: int | None = None  # where an `auto` window lies, once measured
        self._ratio_checked = False

    # -- the run ----------------------------------------------------------------------------------------------------

    def train(self, resume: bool = False) -> dict[str, float]:
        """Runs to the last step, from the newest checkpoint if `resume`; returns the last evaluation's numbers.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, with a checkpoint saved.
            ValueError: a reward failed, or the ratio check, or the gradient is not finite, with a checkpoint saved.
        """
        with Tracker(self.folder, self.args.steps) as tracker, self._signals():
            self._begin(tracker, resume)
            try:
                self._loop(tracker)
            except (Interrupted, ValueError):
                if not self._within_updates:  # else the last checkpoint stays: half a step can't be resumed
                    self.save()
                raise
            return self._finish(tracker)

    def _loop(self, tracker: Tracker) -> None:
        self._evaluate_if_due(tracker)
        while self.step < self.args.steps:
            if self._stopping:
                raise Interrupted
            tracker.log(self.step + 1, self.training_step())
            while self.rewards.dropped:
                tracker.say(f"warning: {self.rewards.dropped.pop(0)}")
            if self.step == self.args.steps or self.step % self.args.save_every == 0:
                self.save()
            self._evaluate_if_due(tracker)

    def training_step(self) -> dict[str, float]:
        """One step: rollout, rewards, advantages, updates. Returns its metrics and counts `self.step` up."""
        started = time.perf_counter()
        self._enter_at(self.step)
        memory = self._memory()
        try:
            experience = self.source.collect(self.step)
            collected = time.perf_counter()
            metrics = self._update(experience)
        except (Interrupted, ValueError):  # this step has not happened
            self._recall(memory)
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self._within_updates = False
        finished = time.perf_counter()
        self.step += 1
        return {
            **experience.metrics,
            **metrics,
            "time/update": finished - collected,
            "time/step": finished - started,
        }

    def _memory(self) -> dict[str, Any]:
        """What steps leave behind beside the adapter and its optimizer."""
        critic = None if self.critic is None else copy.deepcopy(self.critic.state())
        return {"prompts": self.dealer.state(), "clip": dict(self.clip.state), "window": self.window_place, "critic": critic}

    def _recall(self, memory: dict[str, Any]) -> None:
        self.dealer.load(memory["prompts"])
        self.clip.state, self.window_place = dict(memory["clip"]), memory["window"]
        if self.critic is not None:
            self.critic.load(memory["critic"])

    def _enter_at(self, step: int) -> None:
        begin, part = [one for one in self.parts if one[0] <= step][-1]
        if part is not self.part:
            self._enter(begin, part)

    def save(self) -> Path:
        """Writes a checkpoint of everything that the next step depends on."""
        state = {
            "step": self.step,
            "adapter": self.policy.adapter_state(),
            "ema": self.policy.ema,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "begin": self.begin,
            "memory": self._memory(),
        }
        if "old" in self.policy.adapters:
            state["old"] = self.policy.adapter_state("old")
        return checkpoint.save(self.folder / "checkpoints", self.step, state, self.args.keep)

    def _begin(self, tracker: Tracker, resume: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            if read_metrics(self.folder):
                raise ValueError(
                    f"{self.folder} already holds a run: go on with it by --resume, or set another folder by output=..."
                )
            (self.folder / "config.yaml").write_text(self.args.dump())
            args, policy = self.args, self.policy
            tracker.say(
                f"{args.model} on {policy.device} in {str(policy.dtype).removeprefix('torch.')}: {args.steps} steps of "
                f"{args.prompts_per_step} prompts x {args.images_per_prompt} images; run folder {self.folder}"
            )
            self.save()  # a run that is lost before its first checkpoint can be resumed too
            return
        state, warnings = checkpoint.latest(self.folder / "checkpoints")
        for warning in warnings:
            tracker.say(f"warning: {warning}")
        if state is None:
            raise ValueError(
                f"{self.folder} has no checkpoint to resume from; delete the folder and start the run without --resume."
            )
        self._same_settings()
        if "memory" not in state:
            raise ValueError(
                f"{self.folder} was written by flow-grpo 0.1, which this version can't go on with: start a new run."
            )
        self.restore(state)
        checkpoint.drop_after(self.folder / "checkpoints", self.step)
        tracker.resume(self.step)
        tracker.say(f"resumed at step {self.step} of {self.args.steps}")

    def restore(self, state: dict[str, Any]) -> None:
        """Puts the run where a checkpoint left it."""
        self.step = state["step"]
        self._enter_at(state["begin"])  # between two parts, the optimizer may be the former's or the latter's
        self.policy.load_adapter_state(state["adapter"])
        self.policy.ema = {name: value.to(self.policy.device) for name, value in state["ema"].items()}
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._recall(state["memory"])
        if "old" in state:
            self.policy.load_adapter_state(state["old"], "old")

    def _same_settings(self) -> None:
        """ValueError if a setting that changes the numbers is not what the run folder's config says."""
        file = self.folder / "config.yaml"
        former = FlowGRPOConfig.read(file) if file.exists() else self.args
        free = {"steps", "output", "save_every", "keep", "device", "evaluation"}
        then, now = former.model_dump(exclude=free), self.args.model_dump(exclude=free)
        changed = [name for name in now if now[name] != then[name]]
        if changed:
            raise ValueError(
                f"{self.folder} was begun with {changed[0]}={then[changed[0]]!r}, not {now[changed[0]]!r}: resume it with the "
                "same settings, or start another run by output=..."
            )

    def _finish(self, tracker: Tracker) -> dict[str, float]:
        with self.policy.averaged():
            lora = self.policy.save_lora(self.folder / "lora")
        curve = plot_curves(self.folder)
        rows = [row for row in read_metrics(self.folder) if any(key.startswith("eval/") for key in row)]
        if not rows:
            tracker.say(f"LoRA: {lora}")
            return {}
        first, last = ({k[5:]: v for k, v in row.items() if k.startswith("eval/")} for row in (rows[0], rows[-1]))
        tracker.table("held-out prompts", {"before": first, "after": last})
        tracker.say(f"LoRA: {lora}\npictures: {self.folder / 'before_after.png'}" + (f"\ncurve: {curve}" if curve else ""))
        return last

    def _evaluate_if_due(self, tracker: Tracker) -> None:
        """Before the first step, after the last, and every so often; not again what a resumed run has in its metrics."""
        settings, steps = self.args.evaluation, (0, self.args.steps)
        due = self.step in steps or (settings.every and self.step % settings.every == 0)
        if self.eval_set is None or not due or tracker.evaluated(self.step):
            return
        images, values = self.evaluate()
        tracker.evaluation(self.step, values)
        if self.step in steps:
            shown = self.eval_set.prompts[:PREVIEWS]
            before_after(self.folder, self.step == 0, images[:PREVIEWS], shown, settings.seed, self.args.model)

    def evaluate(self) -> tuple[Tensor, dict[str, float]]:
        """Pictures of the held-out prompts by the averaged adapter, and each measure's mean over them."""
        if self.eval_set is None:
            raise ValueError("there are no held-out prompts: set evaluation.prompts.")
        settings = self.args.evaluation
        with self.policy.averaged():
            images, by_name = evaluate(
                self.policy, self.eval_set, self.held_out, settings.steps, settings.seed, self.args.microbatch
            )
        return images, {name: values.nanmean().item() for name, values in by_name.items()}

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Within it, Ctrl-C and SIGTERM end the run in order; a second Ctrl-C ends it at once."""

        def stop(number: int, frame: Any) -> None:
            self._stopping = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        try:
            former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there handles signals
            former = {}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _window(self, step: int) -> list[int]:
        """The steps of the schedule that are stochastic and trained."""
        s, w = self.part.sampling, self.part.sampling.window
        if s.transition == "ode":
            return []
        if w.kind == "auto":
            if self.window_place is None:
                parts = (self.policy, self.part, self.train_set, self.rewards)
                owned = owned_variance(*parts, s.transition, s.noise_level, lambda: self._stopping)
                self.window_place = best_window(owned, w.size)
            return list(range(self.window_place, self.window_place + w.size))
        last = s.steps - 2 if w.last is None else w.last
        return sampling.window(w.kind, s.steps, w.size, w.first, last, w.every, self.part.seed, step)

    def _update(self, experience: Experience) -> dict[str, float]:
        """The optimizer steps on one rollout, each on an equal share of its groups."""
        part, batch = self.part, experience.batch
        terms = self._terms(experience)
        totals = Means()
        groups = torch.arange(int(batch.group.max()) + 1)
        for share in list(groups.chunk(part.updates)) * part.epochs:
            rows = experience.rows[torch.isin(batch.group[experience.rows], share)]
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            for chunk, weight in self._chunks(rows, len(share) * experience.rows_per_group):
                for loss in terms.losses(chunk, weight > 0):
                    value = (loss.value * weight).sum() / terms.count
                    self.scaler.scale(value.to(self.policy.device)).backward()
                    totals.add(loss, weight / terms.count)
            if "ratio/first_update_max_deviation" not in totals.numbers:
                self._check_ratio(totals)
            if len(rows):
                totals.numbers.update(self._optimizer_step())
                self.clip.learn()
        if part.objective.name == "nft":
            self.policy.follow("old", part.objective.old_decay)
        return {
            "loss": totals.loss / (part.updates * part.epochs),
            **totals.metrics(),
            **self.clip.metrics(),
            "lr": self._learning_rate(),
        }

    def _terms(self, experience: Experience) -> StepTerms | FinalTerms:
        batch, trajectory, advantage = experience.batch, experience.trajectory, experience.advantage
        conditioning = self.policy.encode(batch.prompts)
        if self.part.sampling.transition != "ode":
            return StepTerms(self.policy, self.part, conditioning, trajectory, advantage, self.clip)
        return FinalTerms(self.policy, self.part, conditioning, trajectory, advantage, batch, self.step)

    def _chunks(self, rows: Tensor, total: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`rows` in chunks of the micro-batch size, and each row's weight in the mean over `total` rows.

        The last chunk is filled up with rows of weight 0: the rollout's shape, so that the same numbers come out.
        """
        size = self.part.microbatch
        for chunk in rows.split(size) if len(rows) else ():
            missing = size - len(chunk)
            weight = torch.cat([torch.full((len(chunk),), 1 / total), torch.zeros(missing)])
            yield torch.cat([chunk, chunk[:1].expand(missing)]), weight

    def _check_ratio(self, totals: Means) -> None:
        deviation = totals.largest.get("ratio/max_deviation")
        if deviation is None:
            return
        totals.numbers["ratio/first_update_max_deviation"] = deviation
        if deviation != 0 and not self._ratio_checked:  # NaN is not 0 either
            raise ValueError(
                f"before the first update the ratio of new to old probability deviates from 1 by {deviation:.1e}: the update "
                "does not compute what the rollout did. Look for dropout or train mode, another dtype or batch shape, or a "
                "compiled model; dtype=fp32 tells rounding from a mistake."
            )
        self._ratio_checked = True

    def _learning_rate(self) -> float:
        o, step = self.part.optimizer, self.step - self.begin
        warm = min(1.0, (step + 1) / o.warmup) if o.warmup else 1.0
        return o.lr * warm * (1 - (1 - o.final_lr) * min(1.0, step / max(1, self.part.steps - 1)))

    def _optimizer_step(self) -> dict[str, float]:
        parameters = list(self.policy.parameters().values())
        self.scaler.unscale_(self.optimizer)
        count = sum(p.numel() for p in parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.part.optimizer.max_grad_norm).item()
        finite = math.isfinite(norm)
        if not finite and not self.scaler.is_enabled():
            raise ValueError(
                f"the gradient of step {self.step + 1} is not finite: look at the last lines of metrics.jsonl, and set a smaller "
                "optimizer.lr or dtype=fp32."
            )
        self._within_updates = True
        self.scaler.step(self.optimizer)  # which passes over a step whose fp16 gradients overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.args.ema_decay and finite:
            self.policy.update_ema(min(self.args.ema_decay, (1 + self.step) / (10 + self.step)))
        return {"grad_norm": norm, "grad_rms": norm / count**0.5} if finite else {"grad_overflow": 1.0}


def _prompts(source: Any) -> PromptSet:
    return source if isinstance(source, PromptSet) else load_prompts(source)
