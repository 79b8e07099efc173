"""Measures what `flow_grpo.doctor.result` judges, by the very parts of a run: its machine, prompts, rewards, rollouts and updates.

Nothing is written. An adapter is trained by two steps and forgotten.
"""

import importlib.metadata
import os
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_overlap import benchmark_overlap
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.doctor import model as contract
from flow_grpo.doctor import result
from flow_grpo.doctor import rewards as reward_checkup
from flow_grpo.doctor.result import Verdict
from flow_grpo.doctor.reward_probe import Glance
from flow_grpo.doctor.rewards import PERSON, by_brightness
from flow_grpo.evaluation.evaluator import NUM_DIVERSITY_PROMPTS
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.evaluation.group_dependence import RewardInputs
from flow_grpo.methods import takes_each_reward
from flow_grpo.plan.estimate import StepEstimate, StepEstimator
from flow_grpo.plan.hardware import matmul_speed
from flow_grpo.policy.devices import DTYPES
from flow_grpo.policy.memory import peak_memory
from flow_grpo.policy.policy import Policy
from flow_grpo.text import counted
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.losses import ClipRange, StepLoss
from flow_grpo.training.offline import load_examples
from flow_grpo.training.rollouts import RolloutSource
from flow_grpo.training.state import is_begun
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import Experience, PromptBatch, Trajectory

MOST = 128  # images that are looked at, of whole groups
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
SPENT = ("rollout", "decode", "reward", "update", "step")  # what a step's metrics have the seconds of
Section = tuple[str, list[Verdict]]


def examine(args: FlowGRPOConfig) -> Iterator[Section]:
    """A look at the whole run, section by section: titles and verdicts. It ends early where a run would.

    Raises:
        ValueError: the run could not even begin.
    """
    trainer = FlowGRPOTrainer(args=args)
    speed = matmul_speed(trainer.policy.device, trainer.policy.dtype)
    yield "machine", machine(trainer.policy, speed)
    yield "prompts", prompts(trainer)
    ask_nobody(trainer)
    steps: list[dict[str, float]] = []
    looks: dict[str, Glance] = {}  # at the rewards, which are the same in all stages
    for number, (begin, part) in enumerate(trainer.state.stages, 1):
        trainer.state.step = begin
        yield from stage(trainer, looks, steps, f" of stage {number}, {part.objective.name}" if args.stages else "")
        if len(steps) < number:
            return
    scoring = sum(look.seconds for look in looks.values())
    try:
        yield "what it takes", costs(trainer, steps, scoring)
    except torch.OutOfMemoryError as error:
        yield "what it takes", [result.stopped("an evaluation", error)]


def stage(
    trainer: FlowGRPOTrainer, looks: dict[str, Glance], steps: list[dict[str, float]], title: str
) -> Iterator[Section]:
    """A look at the part of the run that the trainer's step belongs to.

    Args:
        looks: at the rewards, if they were looked at; else filled here.
        steps: get the metrics of this part's training step, if it gets over it.
    """
    try:
        trainer.state.enter_stage(trainer.step)
        scored = not isinstance(trainer.stage.source, RolloutSource) or (
            yield from rollout(trainer, trainer.stage.source, looks, title)
        )
    except (ValueError, torch.OutOfMemoryError) as error:
        yield f"groups{title}", [result.stopped("a rollout", error)]
        return
    if not scored:
        return
    metrics, found = update(trainer)
    yield f"an update{title}", found
    if metrics is not None:
        steps.append(metrics)


def rollout(
    trainer: FlowGRPOTrainer, source: RolloutSource, looks: dict[str, Glance], title: str
) -> Generator[Section, None, bool]:
    """A look at the images of a step; returns whether its rewards can score them. `looks` as for `stage`."""
    drawn, seen = draw(trainer, source), None
    if not looks:
        own, found = scores(trainer, drawn)
        looks |= own
        yield "rewards", found
        if not can_score(trainer, looks):
            return False
        seen = {name: look.values for name, look in looks.items()}
    yield f"groups{title}", groups(trainer, source, drawn, seen)
    return True


# -- the machine and the prompts --------------------------------------------------------------------------------------


def machine(policy: Policy, speed: float) -> list[Verdict]:
    """speed: floating point operations a second of a large matrix product in the policy's dtype."""
    kind, dtype = policy.device.type, next(name for name, value in DTYPES.items() if value == policy.dtype)
    plain = speed if policy.dtype == torch.float32 else matmul_speed(policy.device, torch.float32)
    found = [result.device(kind, dtype, speed, plain, torch.cuda.is_available())]
    if kind == "cpu":
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found.append(result.threads(torch.get_num_threads(), allowed, psutil.cpu_count(logical=False)))
    there = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return [*found, Verdict("packages", "", result.FINE, there)]


def prompts(trainer: FlowGRPOTrainer) -> list[Verdict]:
    """Of the prompts that are dealt, and of those that given images bring with them."""
    parts = [part for _, part in trainer.state.stages]
    dealing = [part for part in parts if part.dataset is None]
    dealt = trainer.train_set.prompts if dealing else []
    given = [prompt for part in parts if part.dataset is not None for prompt in _given(part)]
    held_out = [] if trainer.eval_set is None else trainer.eval_set.prompts
    found = []
    if dealt:
        longest = max(part.prompts_per_step for part in dealing)
        found += [
            result.enough(len(dealt), longest, sum(part.steps for part in dealing)),
            result.repeated(dealt),
        ]
    found.append(result.held_out(len(held_out)))
    if held_out:
        found.append(result.leaked([*dealt, *given], held_out))
    found.append(result.benchmarks(benchmark_overlap([*dealt, *given], held_out, trainer.train_source if dealt else None)))
    text = max([*dealt, *given], key=len)
    if trainer.args.memory.embeddings is None and len(text.split()) > 1:  # else the encoders may not be there
        found.append(result.end_is_read(text, end_is_read(trainer.policy, text)))
    return found


def _given(part: FlowGRPOConfig) -> list[str]:
    assert part.dataset
    return load_examples(part.dataset, part.method.rows_per_pair).prompts


def end_is_read(policy: Policy, prompt: str) -> bool:
    """Whether the text encoders return something else without the prompt's last word."""
    one, other = policy.encode([prompt, prompt.rsplit(None, 1)[0]]).encoder_outputs
    pairs = list(zip(_tensors(one), _tensors(other), strict=False))
    return any(a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in pairs)


def _tensors(structure: Any) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for part in structure:
            yield from _tensors(part)


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Images of a training step, drawn as it draws them."""

    batch: PromptBatch
    trajectory: Trajectory
    images: Tensor
    seconds: float


def draw(trainer: FlowGRPOTrainer, source: RolloutSource, window: list[int] | None = None) -> Drawn:
    """The first images of the step that the trainer is at, at most 128; `window` in place of its own."""
    part, started = trainer.stage.args, time.perf_counter()
    count = max(1, min(part.prompts_per_step, MOST // part.images_per_prompt))
    batch = PromptSampler(trainer.train_set, part.seed).sample(trainer.step, count, part.images_per_prompt)
    trajectory = source.image_sampler.trajectory(
        trainer.step, batch, source.window(trainer.step) if window is None else window
    )
    images = trainer.policy.decode(trajectory.final, part.microbatch)
    return Drawn(batch, trajectory, images, time.perf_counter() - started)


def ask_nobody(trainer: FlowGRPOTrainer) -> None:
    """A person who is a reward has no part in the look: no picture of it is to be ranked, and no vote on one is kept."""
    if PERSON in trainer.rewards.rewards:
        trainer.rewards.rewards[PERSON] = by_brightness


def scores(trainer: FlowGRPOTrainer, drawn: Drawn) -> tuple[dict[str, Glance], list[Verdict]]:
    """What each reward says of the images, those of evaluation too, and the verdicts on all."""
    pictures, images = (
        RewardInputs(drawn.images, drawn.batch.prompts, drawn.batch.columns()),
        trainer.stage.args.images_per_prompt,
    )
    return reward_checkup.scores(trainer.eval_rewards, trainer.rewards.rewards, pictures, images, drawn.seconds)


def can_score(trainer: FlowGRPOTrainer, looks: dict[str, Glance]) -> bool:
    """Whether a rollout would get over its rewards."""
    called = [name for name in trainer.rewards.rewards if name != PERSON]
    return all(name in looks and (looks[name].usable or name in trainer.eval_rewards.drop_on_error) for name in called)


# -- groups -----------------------------------------------------------------------------------------------------------


def groups(
    trainer: FlowGRPOTrainer, source: RolloutSource, drawn: Drawn, values: dict[str, Tensor] | None = None
) -> list[Verdict]:
    """Whether there is something to learn in the images of a prompt, and from what it comes.

    values: of the images, (B,) by reward, if they are scored already.
    """
    weights = {name: trainer.rewards.weights[name] for name in trainer.rewards.rewards if trainer.rewards.weights[name]}
    if PERSON in weights:  # nobody knows what the person will say
        return [batch_free(trainer, source, drawn)]
    if values is None:
        values = source.image_sampler.score(drawn.batch, drawn.images).by_name
    seen = torch.stack([values[name] for name in weights], 1)
    weight, images = torch.tensor(list(weights.values())), trainer.stage.args.images_per_prompt
    total = advantages.weighted_sum(seen, weight).view(-1, images)
    whole = total.isfinite().all(1)  # without the groups of a reward that was dropped
    found = []
    if trainer.stage.critic is None and whole.any():
        rows = whole.repeat_interleave(images)
        found += _signal(trainer, source, seen[rows], weight, drawn.batch.group[rows], list(weights))
    if drawn.trajectory.steps:
        plain = draw(trainer, source, window=[])
        noiseless = source.image_sampler.score(plain.batch, plain.images).total.view(-1, images)
        both = whole & noiseless.isfinite().all(1)
        noisy, noiseless = total[both], noiseless[both]
        if both.any() and (noisy.std(1) + noiseless.std(1)).any():
            found += [result.steps_matter(noisy, noiseless), result.survives(noisy, noiseless)]
    return [*found, batch_free(trainer, source, drawn)]


def _signal(
    trainer: FlowGRPOTrainer, source: RolloutSource, seen: Tensor, weight: Tensor, group: Tensor, names: list[str]
) -> list[Verdict]:
    """seen (n, R): of whole groups, by the rewards of these names."""
    o, images = trainer.stage.args.objective, trainer.stage.args.images_per_prompt
    found, total = [], advantages.weighted_sum(seen, weight)
    if trainer.stage.args.method.rows == "all":  # others choose the best of a group, or best and worst
        found.append(result.group_size(images))
    speaks = advantages.has_signal(seen if takes_each_reward(o.advantage) else total, group, source.method)
    found.append(result.signal(speaks.view(-1, images)[:, 0], total.view(-1, images)))
    share, _ = advantages.shares(seen, weight, group, source.method)
    differ = seen.amax(0) > seen.amin(0)
    several = {name: one for name, one, differs in zip(names, share.tolist(), differ.tolist(), strict=True) if differs}
    if len(several) > 1:
        found.append(result.shares(several))
    return found


def batch_free(trainer: FlowGRPOTrainer, source: RolloutSource, drawn: Drawn) -> Verdict:
    """Two of the images again, in micro-batches of another size."""
    size = 2 if trainer.stage.args.microbatch == 1 else 1
    part, rows = trainer.stage.args.model_copy(update={"microbatch": size}), torch.arange(2)
    other = RolloutSource(trainer.policy, part, source.prompt_sampler, source.rewards, window=source.window)
    final = other.image_sampler.trajectory(trainer.step, drawn.batch.take(rows), drawn.trajectory.steps).final
    off = (trainer.policy.decode(final, size) - drawn.images[rows]).abs().max().item()
    return result.batch_free(off, contract.CLOSE[trainer.policy.dtype])


# -- an update --------------------------------------------------------------------------------------------------------


def update(trainer: FlowGRPOTrainer) -> tuple[dict[str, float] | None, list[Verdict]]:
    """A single update, what it does to the ratios, and a training step: its metrics, None if it failed, and the verdicts."""
    begin, part = trainer.step, trainer.stage.args
    o = part.optimizer.model_copy(update={"warmup": 0})
    single = part.model_copy(update={"updates": 1, "epochs": 1, "optimizer": o})
    try:
        experience = trainer.stage.source.collect(begin)
        PolicyUpdate(trainer.policy, single, begin, trainer.processes)(experience, begin)
        moved = drift(trainer, experience)
        gradients = Gradients(trainer)
        metrics = trainer.training_step()
    except (ValueError, torch.OutOfMemoryError) as error:
        return None, [result.stopped("a training step", error)]
    found = []
    if "ratio/first_update_max_deviation" in metrics:
        found.append(result.ratio(metrics["ratio/first_update_max_deviation"]))
    found += judge_drift(part, experience.trajectory, moved)
    overflow = "grad_overflow" in metrics
    found.append(result.gradient(gradients.norm, gradients.count, part.optimizer.eps, gradients.kept, overflow))
    reached = [result.reach(gradients.norm, trainer.policy.is_full_finetuning)] if gradients.norm else []
    return metrics, [*found, *reached]


@torch.no_grad()
def drift(trainer: FlowGRPOTrainer, experience: Experience) -> dict[int, Tensor]:
    """|ratio - 1| (n,) of each trained step, as the objective sees it, on the rows of at most two micro-batches.

    One of the user's own, which may want gradients, gets the ratio of log-probabilities, as reinforce does.
    """
    part, trajectory, found = trainer.stage.args, experience.trajectory, {}
    own = {"name": "reinforce"} if ":" in part.objective.name else {}
    o = part.objective.model_copy(update={"kl_weight": 0.0, **own})
    rows = experience.rows[: 2 * part.microbatch]
    if trajectory.steps and len(rows):
        conditioning = trainer.policy.encode(experience.batch.prompts)
        settings, clip = part.model_copy(update={"objective": o}), ClipRange(getattr(o, "clip_quantile", None))
        loss = StepLoss(trainer.policy, settings, experience, conditioning, clip)
        parts = [list(loss.losses(chunk, chunk >= 0)) for chunk in rows.split(part.microbatch)]
        for step, losses in zip(trajectory.steps, zip(*parts, strict=True), strict=True):
            found[step] = torch.cat([loss.metrics["ratio/max_deviation"] for loss in losses])
    return found


def judge_drift(part: FlowGRPOConfig, trajectory: Trajectory, moved: dict[int, Tensor]) -> list[Verdict]:
    """moved: of each trained step, as `drift` has it."""
    o, found, clip = part.objective, [], None
    if moved and part.method.auto_clip:
        low, high = o.clip_low, o.clip_high
        if low == "auto" or high == "auto":
            found.append(Verdict("clip range", "auto", result.FINE, "calibrated at each step"))
        else:
            clip = min(low, high)
            found.append(result.clip_range(torch.cat(list(moved.values())), low, high, part.updates * part.epochs))
    sigmas = trajectory.schedule.sigmas
    if len(moved) > 1:
        found.append(result.even(moved, o.weighs_by_std))
    return [*found, *(result.drift(step, sigmas[step].item(), values, clip) for step, values in moved.items())]


class Gradients:
    """What the trainer's optimizer is given in its next step.

    Attributes:
        norm: of each trained parameter's gradient, by name; empty as long as there was no step.
        count: numbers in all of them.
        kept: the share of Adam's first step that its eps leaves, mean over the gradients that are not 0.
    """

    def __init__(self, trainer: FlowGRPOTrainer) -> None:
        self.norm: dict[str, float] = {}
        self.parameters, self.eps = trainer.policy.trainable_parameters(), trainer.stage.args.optimizer.eps
        self.count, self.kept = sum(p.numel() for p in self.parameters.values()), 1.0
        trainer.stage.update.optimizer.adamw.register_step_pre_hook(lambda *_: self._note())

    @torch.no_grad()
    def _note(self) -> None:
        kept, moving = 0.0, 0
        for name, parameter in self.parameters.items():
            size = parameter.new_zeros(1) if parameter.grad is None else parameter.grad.abs()
            self.norm[name] = size.norm().item()
            kept, moving = kept + (size / (size + self.eps)).nansum().item(), moving + int(size.count_nonzero())
        self.kept = kept / max(1, moving)


# -- what it takes ----------------------------------------------------------------------------------------------------


def costs(trainer: FlowGRPOTrainer, steps: list[dict[str, float]], scoring: float) -> list[Verdict]:
    """steps: metrics of one of each part; scoring: seconds that all rewards take for an image."""
    args, policy, device = trainer.args, trainer.policy, trainer.policy.device
    parts, cuda, found = [part for _, part in trainer.state.stages], device.type == "cuda", []
    forecasts = [forecast_of(part, cuda) for part in parts]
    for number, (step, forecast) in enumerate(zip(steps, forecasts, strict=True), 1):
        seconds = {name: step[f"time/{name}"] for name in SPENT if f"time/{name}" in step}
        predicted = None if forecast is None else forecast[1]
        found.append(result.step_time(f"a step of stage {number}" if args.stages else "a step", seconds, predicted))
    training = sum(part.steps * step["time/step"] for part, step in zip(parts, steps, strict=True))
    evaluating, times = evaluations(trainer, scoring)
    says = counted(args.steps, "step") + (f" and {counted(times, 'evaluation')}" if times else "") + ", on this one process"
    found.append(Verdict("the run", counted(round((training + evaluating) / 60), "minute"), result.FINE, says))
    there = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    predicted = max((one[0].peak - one[0].persistent.get("CUDA", 0.0) for one in forecasts if one is not None), default=None)
    found.append(result.memory(peak_memory(device), there, predicted, alone=not cuda))
    adapter = 4 * sum(parameter.numel() for parameter in policy.trainable_parameters().values())
    copies = 3 + bool(policy.ema.average) + ("old" in policy.lora.adapters)  # with Adam's two moments
    folder = next(place for place in (trainer.folder, *trainer.folder.resolve().parents) if place.is_dir())
    found.append(result.disk(adapter * (copies * (args.keep + 1) + 2), shutil.disk_usage(folder).free))
    return [*found, result.run_folder(str(args.output), is_begun(trainer.folder))]


def forecast_of(part: FlowGRPOConfig, cuda: bool) -> tuple[StepEstimate, float] | None:
    """And the seconds of a step by it; None for a model that `plan` can't follow."""
    try:
        plan = StepEstimator(part, cuda)
    except (ValueError, OSError):
        return None
    forecast = plan.estimate(part.microbatch)
    return forecast, forecast.seconds(plan.rates(part.microbatch))


def evaluations(trainer: FlowGRPOTrainer, scoring: float) -> tuple[float, int]:
    """Seconds that all evaluations of the run will take, and their number. scoring: seconds that all rewards take for an image."""
    settings, steps = trainer.args.evaluation, trainer.args.steps
    if trainer.eval_set is None:
        return 0.0, 0
    texts = trainer.eval_set.prompts[: trainer.stage.args.microbatch]
    seconds = {}
    for count in (1, 1, 3):  # the first encodes the prompts
        started = time.perf_counter()
        generate_images(trainer.policy, texts, list(range(len(texts))), count, len(texts))
        seconds[count] = time.perf_counter() - started
    image = (seconds[1] + (settings.steps - 1) * (seconds[3] - seconds[1]) / 2) / len(texts) + scoring
    times = len({0, steps, *(range(0, steps, settings.every) if settings.every else ())})
    return times * image * (len(trainer.eval_set) + min(NUM_DIVERSITY_PROMPTS, len(trainer.eval_set))), times
