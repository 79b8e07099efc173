"""The loop: deal prompts, roll out, score, compare within groups, update the adapter."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rewards as reward_kit
from flow_grpo import checkpoint, objectives, sampling
from flow_grpo.advantages import group_advantages, has_signal
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.evaluate import before_after, evaluate
from flow_grpo.policy import Conditioning, Policy, load_policy
from flow_grpo.prompts import PromptSet, load_prompts
from flow_grpo.terms import FinalTerms, Means, StepTerms
from flow_grpo.tracking import Tracker, plot_curves, read_metrics
from flow_grpo.types import PromptBatch, Scores, Trajectory

PREVIEWS = 16  # held-out prompts in the before and after grids


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the run is saved."""


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
        self.train_set.deal(0, args.prompts_per_step, 1, args.seed)  # says at once if there are too few prompts
        self.batch_size = args.prompts_per_step * args.images_per_prompt
        self.microbatch = min(args.microbatch, self.batch_size)
        if self.batch_size % self.microbatch:
            raise ValueError(
                f"microbatch={args.microbatch} does not divide prompts_per_step x images_per_prompt = {self.batch_size}: "
                "all forward passes need one shape."
            )
        if isinstance(model, Policy):
            self.policy = model
        else:
            self.policy = load_policy(args.model, args.device, args.dtype, args.lora.start, **args.call())
        if not self.policy.has_lora:
            self.policy.add_lora(args.lora.rank, args.lora.alpha, args.lora.targets, args.seed)
        if args.ema_decay:
            self.policy.start_ema()
        if args.objective.name == "nft":
            self.policy.add_copy("old")
        self.schedule, self.state_shape = self.policy.schedule(args.sampling.steps)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters().values(),
            lr=args.optimizer.lr,
            betas=args.optimizer.betas,
            eps=args.optimizer.eps,
            weight_decay=args.optimizer.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(self.policy.device.type, enabled=self.policy.dtype == torch.float16)
        self.folder = Path(args.output)
        self.step = 0
        self._ratio_checked = False
        self._stopping = False

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
                self.save()
                raise
            return self._finish(tracker)

    def _loop(self, tracker: Tracker) -> None:
        self._evaluate_if_due(tracker)
        while self.step < self.args.steps:
            tracker.log(self.step + 1, self.training_step())
            if self.step == self.args.steps or self.step % self.args.save_every == 0:
                self.save()
            self._evaluate_if_due(tracker)

    def training_step(self) -> dict[str, float]:
        """One step: rollout, rewards, advantages, updates. Returns its metrics and counts `self.step` up."""
        args, started = self.args, time.perf_counter()
        batch = self.train_set.deal(self.step, args.prompts_per_step, args.images_per_prompt, args.seed)
        conditioning = self.policy.encode(batch.prompts)
        trajectory = self._rollout(batch, conditioning)
        rolled_out = time.perf_counter()
        images = self.policy.decode(trajectory.final, self.microbatch)
        decoded = time.perf_counter()
        scores = Scores(*self.rewards(images, batch.prompts, **batch.columns()))
        advantage = group_advantages(scores.total, batch.group, args.objective.advantage)
        signal = has_signal(scores.total, batch.group, args.objective.advantage)
        scored = time.perf_counter()
        metrics = self._update(batch, conditioning, trajectory, advantage, signal)
        finished = time.perf_counter()
        self.step += 1
        return {
            **_reward_metrics(scores, batch.group, signal),
            **metrics,
            "time/rollout": rolled_out - started,
            "time/decode": decoded - rolled_out,
            "time/reward": scored - decoded,
            "time/update": finished - scored,
            "time/step": finished - started,
        }

    def save(self) -> Path:
        """Writes a checkpoint of everything that the next step depends on."""
        state = {
            "step": self.step,
            "adapter": self.policy.adapter_state(),
            "ema": self.policy.ema,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        if self.args.objective.name == "nft":
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
        self.step = state["step"]
        self.policy.load_adapter_state(state["adapter"])
        self.policy.ema = {name: value.to(self.policy.device) for name, value in state["ema"].items()}
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if "old" in state:
            self.policy.load_adapter_state(state["old"], "old")
        checkpoint.drop_after(self.folder / "checkpoints", self.step)
        tracker.resume(self.step)
        tracker.say(f"resumed at step {self.step} of {self.args.steps}")

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
        plot_curves(self.folder)
        rows = [row for row in read_metrics(self.folder) if any(key.startswith("eval/") for key in row)]
        if not rows:
            tracker.say(f"LoRA: {lora}")
            return {}
        first, last = ({k[5:]: v for k, v in row.items() if k.startswith("eval/")} for row in (rows[0], rows[-1]))
        tracker.table("held-out prompts", {"before": first, "after": last})
        tracker.say(f"LoRA: {lora}\npictures: {self.folder / 'before_after.png'}\ncurve: {self.folder / 'reward.png'}")
        return last

    def _evaluate_if_due(self, tracker: Tracker) -> None:
        """Before the first step, after the last, and every so often; not again what a resumed run has in its metrics."""
        settings, steps = self.args.evaluation, (0, self.args.steps)
        due = self.step in steps or (settings.every and self.step % settings.every == 0)
        if self.eval_set is None or not due or tracker.evaluated(self.step):
            return
        with self.policy.averaged():
            images, by_name = evaluate(
                self.policy, self.eval_set, self.held_out, settings.steps, settings.seed, self.args.microbatch
            )
        tracker.evaluation(self.step, {name: values.mean().item() for name, values in by_name.items()})
        if self.step in steps:
            shown = self.eval_set.prompts[:PREVIEWS]
            before_after(self.folder, self.step == 0, images[:PREVIEWS], shown, settings.seed, self.args.model)

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

    # -- rollout ----------------------------------------------------------------------------------------------------

    def _rollout(self, batch: PromptBatch, conditioning: Conditioning) -> Trajectory:
        s, seed, step = self.args.sampling, self.args.seed, self.step
        w = s.window
        per_step = self.args.objective.name in objectives.ON_STEPS
        last = s.steps - 2 if w.last is None else w.last
        window = sampling.window(w.kind, s.steps, w.size, w.first, last, w.every, seed, step) if per_step else []
        velocity = self.policy.along(self.schedule, conditioning)

        def interruptible(x: Tensor, i: int, rows: Tensor) -> Tensor:
            if self._stopping:  # nothing of this step has touched the adapter yet
                raise Interrupted
            return velocity(x, i, rows)

        start = sampling.batch_noise(self.state_shape, batch, seed, "start", step, shared=s.shared_start)
        return sampling.rollout(
            interruptible,
            self.schedule,
            start,
            window,
            s.transition,
            s.noise_level,
            lambda i: sampling.batch_noise(self.state_shape, batch, seed, "step", step, i),
            self.microbatch,
            batch.group if s.shared_start else None,
            s.log_prob,
        )

    # -- update -----------------------------------------------------------------------------------------------------

    def _update(
        self, batch: PromptBatch, conditioning: Conditioning, trajectory: Trajectory, advantage: Tensor, signal: Tensor
    ) -> dict[str, float]:
        """The optimizer steps on one rollout, each on an equal share of its prompts."""
        args = self.args
        terms: StepTerms | FinalTerms
        if args.objective.name in objectives.ON_STEPS:
            terms = StepTerms(self.policy, args, conditioning, trajectory, advantage)
        else:
            terms = FinalTerms(self.policy, args, conditioning, trajectory, advantage, batch, self.step)
        totals = Means()
        for update, groups in enumerate(torch.arange(args.prompts_per_step).chunk(args.updates)):
            share = torch.isin(batch.group, groups)
            rows = (share & signal).nonzero()[:, 0]
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            for chunk, weight in self._chunks(rows, int(share.sum())):
                for loss in terms.losses(chunk):
                    value = (loss.value * weight).sum() / terms.count
                    self.scaler.scale(value.to(self.policy.device)).backward()
                    totals.add(loss, weight / terms.count)
            if update == 0:
                self._check_ratio(totals)
            if len(rows):
                totals.numbers.update(self._optimizer_step())
        if args.objective.name == "nft":
            self.policy.follow("old", args.objective.old_decay)
        return {"loss": totals.loss / args.updates, **totals.metrics(), "lr": self._learning_rate()}

    def _chunks(self, rows: Tensor, total: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`rows` in chunks of the micro-batch size, and each row's weight in the mean over `total` rows.

        The last chunk is filled up with rows of weight 0: the rollout's shape, so that the same numbers come out.
        """
        for chunk in rows.split(self.microbatch) if len(rows) else ():
            missing = self.microbatch - len(chunk)
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
        o = self.args.optimizer
        warm = min(1.0, (self.step + 1) / o.warmup) if o.warmup else 1.0
        return o.lr * warm * (1 - (1 - o.final_lr) * self.step / max(1, self.args.steps - 1))

    def _optimizer_step(self) -> dict[str, float]:
        parameters = list(self.policy.parameters().values())
        self.scaler.unscale_(self.optimizer)
        count = sum(p.numel() for p in parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.args.optimizer.max_grad_norm).item()
        finite = math.isfinite(norm)
        if not finite and not self.scaler.is_enabled():
            raise ValueError(
                f"the gradient of step {self.step + 1} is not finite, and the adapter was left as it was: look at the last lines "
                "of metrics.jsonl, and set a smaller optimizer.lr or dtype=fp32."
            )
        self.scaler.step(self.optimizer)  # which passes over a step whose fp16 gradients overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.args.ema_decay and finite:
            self.policy.update_ema(min(self.args.ema_decay, (1 + self.step) / (10 + self.step)))
        return {"grad_norm": norm, "grad_rms": norm / count**0.5} if finite else {"grad_overflow": 1.0}


def build_rewards(args: FlowGRPOConfig, given: Any = None) -> tuple[reward_kit.WeightedSum, list[str]]:
    """All rewards that an evaluation measures, and the names of those that are trained on. Each is built once.

    The sum is the trained reward: the others have weight 0 in it. `given` are a trainer's `reward_funcs`.
    """
    if given is None:
        trained: dict[str, Any] = {name: (name, setting.options) for name, setting in args.rewards.items()}
    else:
        items = given if isinstance(given, list) else [given]
        trained = {i if isinstance(i, str) else getattr(i, "__name__", type(i).__name__): (i, {}) for i in items}
        if len(trained) < len(items):
            raise ValueError("two of reward_funcs have one name: give each function or class a name of its own.")
    measured = {name: (name, setting.options) for name, setting in args.evaluation.rewards.items()}
    loaded = {
        name: reward_kit.load(item, **options) if isinstance(item, str) else item
        for name, (item, options) in {**measured, **trained}.items()
    }
    weights = {name: args.rewards[name].weight if name in args.rewards else float(name in trained) for name in loaded}
    return reward_kit.WeightedSum(loaded, {name: weights[name] if name in trained else 0.0 for name in loaded}), list(
        trained
    )


def _prompts(source: Any) -> PromptSet:
    return source if isinstance(source, PromptSet) else load_prompts(source)


def _reward_metrics(scores: Scores, group: Tensor, signal: Tensor) -> dict[str, float]:
    groups = scores.total.view(int(group.max()) + 1, -1)
    return {
        "reward": scores.total.mean().item(),
        "reward_std": groups.std(1, correction=0).mean().item(),
        "frac_reward_zero_std": 1 - signal.float().mean().item(),
        **{f"rewards/{name}/mean": values.mean().item() for name, values in scores.by_name.items()},
    }
