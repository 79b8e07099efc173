"""What a reward measures: its values on original and perturbed images, its time and memory, whether it repeats its values.

`measure` and `show` are `flow-grpo rewards test`; `call_once` and `probe` are the doctor's.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.data.grid import ImageInfo, from_bytes, save_grid, to_bytes
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs, depends_on_group
from flow_grpo.progress import phase
from flow_grpo.rewards import user_code
from flow_grpo.rewards.gradients import RHO, against, energy_share
from flow_grpo.rewards.scopes import IMAGE, evenly_spaced, rows_by_group, scope_of, signature, with_attributes_of
from flow_grpo.text import counted, escape_markup

NUM_TIMED = 5  # images that `measure` scores one by one
NUM_REPEATED = 32  # images that `probe` scores several times
NUM_WITH_GRADIENT = 4
SATURATED = 0.9  # share of the images with the highest, or lowest, value
SAME = 1e-5  # share of the standard deviation over all images that is rounding
ORIGINAL, BLURRED, NOISY, WRONG_PROMPT = "original", "blurred", "noisy", "wrong prompt"
NUM_BINS, BAR_WIDTH = 10, 32  # of the histogram


def mismatched(inputs: RewardInputs) -> RewardInputs | None:
    """Each image with the prompt of another one. None if there is one prompt only."""
    different = list(dict.fromkeys(inputs.prompts))
    if len(different) < 2:
        return None
    following = dict(zip(different, different[1:] + different[:1], strict=True))
    next_inputs = inputs.take([inputs.prompts.index(following[prompt]) for prompt in inputs.prompts])
    return RewardInputs(inputs.images, next_inputs.prompts, next_inputs.columns)


def perturbed(inputs: RewardInputs) -> dict[str, RewardInputs]:
    """The images blurred, noisy, and each with the prompt of another one, if there is more than one prompt."""
    radius = max(1.0, min(inputs.images.shape[-2:]) / 32)
    blurred = [Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)) for pixels in to_bytes(inputs.images)]
    noise = torch.randn(inputs.images.shape, generator=torch.Generator().manual_seed(0))
    variants = {
        BLURRED: RewardInputs(from_bytes(np.stack([np.asarray(s) for s in blurred])), inputs.prompts, inputs.columns),
        NOISY: RewardInputs((inputs.images + 0.1 * noise).clamp(0, 1), inputs.prompts, inputs.columns),
    }
    wrong = mismatched(inputs)
    if wrong is not None:
        variants[WRONG_PROMPT] = wrong
    return variants


@dataclass(frozen=True)
class GradientStats:
    """The gradient g of a differentiable reward on some images, each a mean over them."""

    slope: float  # |g|, the slope of the value along the gradient that it predicts
    measured: float  # by a central difference, on steps of length RHO
    energy: float  # the share of the squared gradient that lies in 1 % of the positions
    sharpness: float  # S1 of arXiv 2603.21175: by how much the value falls on a step of length RHO against the gradient

    @property
    def ratio(self) -> float:
        """The measured slope over the predicted one, 1 for a right gradient; NaN for a gradient of 0."""
        return self.measured / self.slope if self.slope else math.nan


def gradient_stats(name: str, reward: rewards.Reward, inputs: RewardInputs) -> GradientStats | str | None:
    """Measure the gradient on four of the images; None if the reward offers none, and a sentence if it can't be taken."""
    if not getattr(reward, "differentiable", False):
        return None
    some = inputs.take(evenly_spaced(NUM_WITH_GRADIENT, len(inputs.prompts)))
    images = some.images.float()

    def at(images: Tensor) -> rewards.RewardGradient:
        return rewards.reward_gradient(name, reward, images, some.prompts, some.columns)

    try:
        here = at(images)
        step = against(here.gradient, RHO)
        below, above = at(images + step).value, at(images - step).value
    except ValueError as error:
        return str(error)
    frames = here.gradient.flatten(0, -4)  # of images: themselves
    return GradientStats(
        slope=here.gradient.flatten(1).norm(dim=1).mean().item(),
        measured=((above - below) / (2 * RHO)).mean().item(),
        energy=energy_share(frames).nanmean().item(),
        sharpness=(here.value - below).mean().item(),
    )


@dataclass(frozen=True)
class RewardStats:
    """The results of a reward on probe images, and their cost."""

    prompts: list[str]  # B
    values: dict[str, Tensor]  # (B,) for the original images and each perturbation
    seconds_per_image: float  # scored one by one, the median
    seconds_per_batch: float  # scored together, for the first time
    megabytes: float  # by which loading and scoring raised the peak memory of the process
    deterministic: bool  # the same images give the same bits
    batch_difference: float  # the largest difference between an image alone and in a batch
    depends_on_group: bool
    gradient: GradientStats | str | None  # the value of `gradient_stats`


def measure(name: str, load: Callable[[], rewards.Reward], inputs: RewardInputs) -> RewardStats:
    """Load a reward and measure it. FlowGRPOError as of `rewards.score`."""
    memory_before = _peak_megabytes()
    with phase(f"loading reward {name}"):
        reward = load()
    with phase(f"scoring {counted(len(inputs.prompts), 'image')} by {name}, original and perturbed"):
        variants = perturbed(inputs)
        values = {BLURRED: variants.pop(BLURRED).score(name, reward)}  # the first call loads what it needs
        # A reward may keep what it found in the images of its last call: the timed call is the first one on these, and the second one
        # is on a copy.
        seconds, original = _timed(lambda: inputs.score(name, reward))
        again = inputs.take(list(range(len(original)))).score(name, reward)
        units = smallest_calls(reward, inputs.prompts)[:NUM_TIMED]
        one_by_one = [_timed(lambda rows=rows: inputs.take(rows).score(name, reward)) for rows in units]  # type: ignore[misc]
        values = {
            ORIGINAL: original,
            **values,
            **{variant: variant_inputs.score(name, reward) for variant, variant_inputs in variants.items()},
        }
    alone = torch.cat([value for _, value in one_by_one])
    return RewardStats(
        prompts=inputs.prompts,
        values=values,
        seconds_per_image=statistics.median(s / len(value) for s, value in one_by_one),
        seconds_per_batch=seconds,
        megabytes=_peak_megabytes() - memory_before,
        deterministic=torch.equal(original, again),
        batch_difference=float((alone - original[[row for rows in units for row in rows]]).abs().max()),
        depends_on_group=depends_on_group(name, reward, inputs),
        gradient=gradient_stats(name, reward, inputs),
    )


def smallest_calls(reward: rewards.Reward, prompts: list[str]) -> list[list[int]]:
    """The rows of the images that a reward can be called with alone: one image, or if it sees several those of a prompt."""
    return rows_by_group(range(len(prompts)) if scope_of(reward) == IMAGE else prompts)


@dataclass(frozen=True)
class RewardCall:
    """The result of one call on B images, and its side effects."""

    values: Tensor  # (B,)
    seconds: float  # for each image
    has_gradient: bool
    settings: tuple[str, ...]  # of the whole process, that it changed

    @property
    def constant(self) -> bool:
        return bool(self.values.min() == self.values.max())

    @property
    def finite(self) -> bool:
        return bool(self.values.isfinite().all())


@dataclass(frozen=True)
class RewardProbe(RewardCall):
    """A `RewardCall` plus values of repeated calls on n of the images, with their own prompts and with mismatched ones."""

    repeated: list[Tensor]  # (n,) of two calls, or of three if the values of two differ
    mismatched: Tensor | None  # (n,), if there is more than one prompt
    depends_on_group: bool
    sees_groups: bool = False  # as its scope says
    gradient: GradientStats | str | None = None  # the value of `gradient_stats`

    @property
    def reads_prompt(self) -> bool:
        """Whether the prompt changes the values clearly more than any of the repeated calls differ."""
        if self.mismatched is None:
            return False
        noise = max((a - b).abs().mean() for a, b in combinations(self.repeated, 2))
        return bool(min((self.mismatched - values).abs().mean() for values in self.repeated) > 2 * noise)


def call_once(name: str, reward: rewards.Reward, inputs: RewardInputs) -> RewardCall:
    """Score the images once. FlowGRPOError as of `rewards.call_reward`."""
    gradient = {"reached": False}
    watched = _watching_gradient(reward, gradient)
    seconds, values = _timed(lambda: rewards.call_reward(name, watched, inputs.images, inputs.prompts, inputs.columns))
    return RewardCall(
        values=values,
        seconds=seconds / len(inputs.prompts),
        has_gradient=gradient["reached"],
        settings=tuple(user_code.changed.get(f"reward {name}", ())),
    )


def probe(name: str, reward: rewards.Reward, inputs: RewardInputs) -> RewardProbe:
    """Score the images several times. FlowGRPOError as of `rewards.call_reward`."""
    count = len(inputs.prompts)
    units = smallest_calls(reward, inputs.prompts)
    subset = inputs.take([row for rows in units[:: -(-count // NUM_REPEATED)] for row in rows])
    wrong = mismatched(subset)
    # the first call loads what it needs, the last one is timed
    repeated = [call_once(name, reward, subset) for _ in range(2)]
    if not torch.equal(repeated[0].values, repeated[1].values):
        repeated.append(call_once(name, reward, subset))  # two calls tell too little about the noise
    mismatch = None if wrong is None else call_once(name, reward, wrong)
    everything = call_once(name, reward, inputs)
    calls = [call for call in (*repeated, mismatch, everything) if call is not None]
    return RewardProbe(
        values=everything.values,
        seconds=everything.seconds,
        has_gradient=any(call.has_gradient for call in calls),
        settings=everything.settings,
        repeated=[call.values for call in repeated],
        mismatched=None if mismatch is None else mismatch.values,
        depends_on_group=depends_on_group(name, reward, inputs),
        sees_groups=scope_of(reward) != IMAGE,
        gradient=gradient_stats(name, reward, inputs),
    )


def _watching_gradient(reward: rewards.Reward, gradient: dict[str, bool]) -> rewards.Reward:
    """The reward, which sets gradient["reached"] if its values carry a gradient."""

    if hasattr(reward, "score_groups"):
        return reward  # its values come from another process

    def call(*inputs: Any, **metadata: Any) -> Any:
        values = reward(*inputs, **metadata)
        gradient["reached"] |= isinstance(values, Tensor) and values.requires_grad
        return values

    call.__signature__ = signature(reward)  # type: ignore[attr-defined]  # names the metadata that it takes
    return with_attributes_of(reward, call)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _peak_megabytes() -> float:
    """Peak memory of this process so far, plus its peak on the accelerator."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    accelerator = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + accelerator) / 1e6


def show(console: Console, title: str, stats: RewardStats) -> None:
    """Print the values as a table and a histogram, the costs, and the conclusions."""
    original = stats.values[ORIGINAL]
    table = Table(title=escape_markup(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "mean", "std", "lowest", "highest", "share lower"):
        table.add_column(column, justify="right" if column else "left")
    for variant, values in stats.values.items():
        numbers = (values.mean(), values.std(correction=0), values.min(), values.max())
        lower = "" if variant == ORIGINAL else f"{(values < original).float().mean():.0%}"
        table.add_row(variant, *map(_decimals, numbers), lower)
    console.print(table)
    console.print()
    for low, high, count in histogram(original):
        bar = "█" * round(BAR_WIDTH * count / len(original)) or ("▏" if count else "")
        console.print(f"{_decimals(low):>10} … {_decimals(high):<10} [cyan]{bar}[/cyan] {count or ''}", highlight=False)
    per_second = len(original) / stats.seconds_per_batch
    lines = [
        f"{_short(stats.seconds_per_image * 1000)} ms per image one by one, {_short(per_second)} images per second in a batch",
        f"{stats.megabytes:.0f} MB more memory",
        "deterministic: " + ("yes" if stats.deterministic else "[bold]no, the same images get other values[/bold]"),
        f"largest difference between an image alone and in a batch: {stats.batch_difference:.2g}",
    ]
    if stats.depends_on_group:
        lines.append(f"[bold]warning: {GROUP_DEPENDENT}[/bold]")
    lines += prompt_lines(stats) + gradient_lines(stats.gradient)
    lines += [f"[bold]{line}[/bold]" for line in conclusions(stats)]
    console.print("\n" + "\n".join(lines), highlight=False)


def std_within_prompts(stats: RewardStats) -> float | None:
    """The mean standard deviation of the images of a prompt, which a run learns from; None if no prompt has two images."""
    groups = [rows for rows in rows_by_group(stats.prompts) if len(rows) > 1 and stats.prompts[rows[0]]]
    stds = [stats.values[ORIGINAL][rows].std(correction=0) for rows in groups]
    return torch.stack(stds).mean().item() if stds else None


def prompt_lines(stats: RewardStats) -> list[str]:
    """How much the values differ within a prompt, and whether they depend on the prompt."""
    values, within = stats.values[ORIGINAL], std_within_prompts(stats)
    lines = []
    if within is not None:
        lines.append(f"std within a prompt: {_decimals(within)} (of {_decimals(values.std(correction=0))} over all images)")
    if WRONG_PROMPT not in stats.values:
        reason = "all images have the same prompt" if any(stats.prompts) else "the images have no prompts"
        lines.append(f"{WRONG_PROMPT}: not measured, {reason}")
    elif torch.equal(stats.values[WRONG_PROMPT], values) and values.min() < values.max():
        lines.append("reads the prompt: no, wrong prompts have the same values; that is fine if another reward reads it")
    return lines


def gradient_lines(gradient: GradientStats | str | None) -> list[str]:
    """The checks of the gradient; none for a reward without one."""
    if gradient is None:
        return []
    if isinstance(gradient, str):
        return [f"gradient: none, {escape_markup(gradient)}"]
    return [
        f"gradient: predicts a slope of {_decimals(gradient.slope)}, measured {_decimals(gradient.measured)}",
        f"share of the gradient's energy in 1% of the image: {gradient.energy:.0%} (1% if it were the same everywhere)",
        f"sharpness S1: {_decimals(gradient.sharpness)}, which rises while a reward is hacked, by arXiv 2603.21175",
    ]


def conclusions(stats: RewardStats) -> list[str]:
    """Sentences on what the values mean for training; none for a single image, since it has nothing to be compared with."""
    values, within = stats.values[ORIGINAL], std_within_prompts(stats)
    count, low, high = len(values), values.min(), values.max()
    if count > 1 and low == high:
        return [f"constant: all {count} images have the value {_decimals(low)}, so there is nothing to learn."]
    lines = []
    for extreme, name, advice in (
        (high, "highest", "harder prompts or a stricter"),
        (low, "lowest", "easier prompts or a milder"),
    ):
        reached = int((values == extreme).sum())
        if count > 1 and reached >= SATURATED * count:
            lines.append(f"saturated: {reached} of {count} images have the {name} value; use {advice} reward.")
    if within is not None and within <= SAME * values.std(correction=0):
        lines.append("depends on the prompt only: the images of a prompt have the same value, so there is nothing to learn.")
    if within is not None and stats.deterministic and not lines:
        lines.append("The images of a prompt have different values, which a run can learn from.")
    return lines


def histogram(values: Tensor) -> list[tuple[float, float, int]]:
    """Lower end, upper end and count of each bin; one bin if all values are equal."""
    low, high = values.min().item(), values.max().item()
    bins = NUM_BINS if high > low else 1
    edges = torch.linspace(low, high, bins + 1).tolist()
    bin_indices = (
        ((values - low) / (high - low) * bins).long().clamp(max=bins - 1) if high > low else torch.zeros(len(values)).long()
    )
    counts = torch.bincount(bin_indices, minlength=bins).tolist()
    return list(zip(edges[:-1], edges[1:], counts, strict=True))


def save_ranked(path: Path, name: str, inputs: RewardInputs, labels: list[str], values: Tensor) -> None:
    """Write the images from the highest value to the lowest, each with its value, as one grid."""
    order = values.argsort(descending=True, stable=True).tolist()
    infos = [ImageInfo(inputs.prompts[i], i, labels[i]) for i in order]
    notes = [f"{name} {_decimals(values[i])}" for i in order]
    save_grid(path, inputs.images[order], infos, columns=min(8, len(order)), notes=notes)


def _decimals(value: Tensor | float) -> str:
    """Four decimals, without the sign of a zero."""
    text = f"{float(value):.4f}"
    return text if float(text) else text.removeprefix("-")


def _short(value: float) -> str:
    """One decimal, none from 100 on."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
