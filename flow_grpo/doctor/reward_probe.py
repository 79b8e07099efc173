"""What a reward measures: its values on original and changed images, its time, whether it repeats its values, and what they mean.

The doctor and `flow-grpo rewards test` measure a reward in the same way and come to the same results.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.data.grid import ImageInfo, from_bytes, save_grid, to_bytes
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult, Status, section_table
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, depends_on_group
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.rewards.gradients import RHO, against, energy_share
from flow_grpo.rewards.scopes import evenly_spaced, rows_by_group
from flow_grpo.text import escape_markup, short_name

NUM_WITH_GRADIENT = 4
SATURATED = 0.9  # share of the images with the highest, or lowest, value
SAME = 1e-5  # share of the standard deviation over all images that is rounding
MIN_WITHIN_SHARE = 0.05  # of the standard deviation over all images; a reward with less rates prompts
PROMPT_EFFECT = 4  # times the difference of two calls that another prompt's effect must have
STANDARD_ERRORS = 2  # a smaller mean change by wrong prompts can't be told from 0
MAX_SLOPE_ERROR = 0.5  # of the predicted slope
ORIGINAL, BLURRED, NOISY, WRONG_PROMPT = "original", "blurred", "noisy", "wrong prompt"
NUM_BINS, BAR_WIDTH = 10, 32  # of the histogram


def mismatched(inputs: RewardInputs) -> dict[str, RewardInputs]:
    """Each image with the prompt of another one. Empty if there is one prompt only."""
    different = list(dict.fromkeys(inputs.prompts))
    if len(different) < 2:
        return {}
    following = dict(zip(different, different[1:] + different[:1], strict=True))
    next_inputs = inputs.take([inputs.prompts.index(following[prompt]) for prompt in inputs.prompts])
    return {WRONG_PROMPT: RewardInputs(inputs.images, next_inputs.prompts, next_inputs.metadata)}


def perturbed(inputs: RewardInputs) -> dict[str, RewardInputs]:
    """The images blurred, noisy, and each with the prompt of another one, if there is more than one prompt."""
    radius = max(1.0, min(inputs.images.shape[-2:]) / 32)
    blurred = [Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)) for pixels in to_bytes(inputs.images)]
    noise = torch.randn(inputs.images.shape, generator=torch.Generator().manual_seed(0))
    return {
        BLURRED: RewardInputs(from_bytes(np.stack([np.asarray(s) for s in blurred])), inputs.prompts, inputs.metadata),
        NOISY: RewardInputs((inputs.images + 0.1 * noise).clamp(0, 1), inputs.prompts, inputs.metadata),
        **mismatched(inputs),
    }


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

    def at(images: Tensor) -> rewards.ValueAndGradient:
        return rewards.value_and_gradient(name, reward, images, some.prompts, some.metadata)

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
    """The results of a reward on B images.

    Attributes:
        values: (B,) of the original images and of each variant.
        again: (B,) of a second call on the original images.
        seconds: of a call on the original images, for each image.
        depends_on_group, gradient: the values of `depends_on_group` and `gradient_stats`.
    """

    prompts: list[str]
    values: dict[str, Tensor]
    again: Tensor
    seconds: float
    depends_on_group: bool | str = False
    gradient: GradientStats | str | None = None

    @property
    def original(self) -> Tensor:
        """The values (B,) of the original images."""
        return self.values[ORIGINAL]

    @property
    def constant(self) -> bool:
        return bool(self.original.min() == self.original.max())

    @property
    def finite(self) -> bool:
        return bool(self.original.isfinite().all())

    @property
    def prompt_effect(self) -> tuple[float, float]:
        """The mean change by another image's prompt, and its standard error."""
        change = self.values[WRONG_PROMPT] - self.original
        return change.mean().item(), change.std().item() / math.sqrt(len(change))

    @property
    def reads_prompt(self) -> bool:
        """Whether the prompt changes the values clearly more than two calls differ."""
        if WRONG_PROMPT not in self.values:
            return False
        effect, noise = ((other - self.original).abs().mean() for other in (self.values[WRONG_PROMPT], self.again))
        return bool(effect > PROMPT_EFFECT * noise)

    @property
    def std_within_prompts(self) -> float | None:
        """The mean standard deviation of the images of a prompt, which a run learns from; None if no prompt has two images."""
        groups = [rows for rows in rows_by_group(self.prompts) if len(rows) > 1 and self.prompts[rows[0]]]
        stds = [self.original[rows].std(correction=0) for rows in groups]
        return torch.stack(stds).mean().item() if stds else None


def score_once(name: str, reward: rewards.Reward, inputs: RewardInputs) -> RewardStats:
    """Score the images by one call. FlowGRPOError as in `rewards.call_reward`."""
    started = time.perf_counter()
    values = rewards.call_reward(name, reward, inputs.images, inputs.prompts, inputs.metadata)
    seconds = (time.perf_counter() - started) / len(inputs.prompts)
    return RewardStats(inputs.prompts, {ORIGINAL: values}, values, seconds)


def measure(name: str, reward: rewards.Reward, inputs: RewardInputs, variants: dict[str, RewardInputs]) -> RewardStats:
    """Score the images and their variants, and the images again. FlowGRPOError as in `rewards.call_reward`."""
    score_once(name, reward, inputs.take(rows_by_group(inputs.prompts)[0]))  # which loads what the reward needs
    # a reward may keep what it found in the images of its last call: the timed one is the first on all, and the second one on a copy
    first = score_once(name, reward, inputs)
    again = score_once(name, reward, inputs.take(list(range(len(inputs.prompts)))))
    of_variants = {variant: score_once(name, reward, changed).original for variant, changed in variants.items()}
    return RewardStats(
        prompts=inputs.prompts,
        values={ORIGINAL: first.original, **of_variants},
        again=again.original,
        seconds=first.seconds,
        depends_on_group=depends_on_group(name, reward, inputs),
        gradient=gradient_stats(name, reward, inputs),
    )


# -- evaluating -------------------------------------------------------------------------------------------------------


def results(name: str, stats: RewardStats, others: Collection[RewardStats] = (), drops: bool = False) -> list[CheckResult]:
    """What the measurements mean for training on the reward, together with `others`; `drops` if its on_error drops groups."""
    alone = all(other.constant for other in others)
    found = [value_range(name, stats.original, drops, if_constant=ERROR if alone else WARNING)]
    if stats.finite and not stats.constant:
        found += [*group_std(name, stats), determinism(name, stats)]
    if stats.finite and WRONG_PROMPT in stats.values:
        found.append(reads_prompt(name, stats, another=any(other.reads_prompt for other in others)))
    if depends := stats.depends_on_group:
        value, message = ("unknown", depends) if isinstance(depends, str) else ("yes", GROUP_DEPENDENT)
        found.append(CheckResult(f"{name}: depends on other images", value, WARNING, message))
    return [*found, *gradient(name, stats.gradient)]


def value_range(name: str, scores: Tensor, drops: bool, if_constant: Status) -> CheckResult:
    """Range of the scores (B,) of images of several prompts; `if_constant` is the status if all are equal."""
    check, finite = f"{name}: values", scores[scores.isfinite()]
    missing = len(scores) - len(finite)
    if missing:
        status = WARNING if drops and len(finite) else ERROR
        message = "are not finite: " + ("those groups are left out." if drops else "fix it, or set its on_error=drop.")
        return CheckResult(check, f"{missing} of {len(scores)}", status, message)
    low, high = scores.min(), scores.max()
    if low == high:
        message = "all are equal: return a number that differs between images; if it is clamped, widen its range."
        return CheckResult(check, f"{low:.3g}", if_constant, "all are equal" if if_constant == OK else message)
    value, at_high, at_low = f"{low:.3g} to {high:.3g}", (scores == high).float().mean(), (scores == low).float().mean()
    if if_constant != OK and at_high >= SATURATED:
        message = f"{at_high:.0%} have the highest: use harder prompts or a stricter reward, or raise its cap."
        return CheckResult(check, value, WARNING, message)
    if if_constant != OK and at_low >= SATURATED:
        message = (
            f"{at_low:.0%} have the lowest: use easier prompts or a milder reward, or fine-tune the model first (`stages`)."
        )
        return CheckResult(check, value, WARNING, message)
    return CheckResult(check, value, OK, f"mean {scores.mean():.3g}")


def group_std(name: str, stats: RewardStats) -> list[CheckResult]:
    """Spread within prompts of values that are not all equal: the policy learns from differences between the images of a prompt."""
    check, within, overall = f"{name}: std within groups", stats.std_within_prompts, stats.original.std(correction=0)
    if within is None:
        return []
    if within > MIN_WITHIN_SHARE * overall:
        return [CheckResult(check, f"{within:.2g}", OK, f"of {overall:.2g} over all images")]
    if within > SAME * overall:
        message = (
            f"only {within / overall:.1%} of the {overall:.2g} over all images: images of one prompt hardly differ in it."
        )
        return [CheckResult(check, f"{within:.2g}", WARNING, message)]
    message = "the images of a prompt all get the same value, so that nothing can be learned: return finer values."
    return [CheckResult(check, f"{within:.2g}", ERROR, message)]


def determinism(name: str, stats: RewardStats) -> CheckResult:
    """Whether two calls give the same images the same values, compared with the standard deviation within a prompt."""
    check, within = f"{name}: deterministic", stats.std_within_prompts or 0.0
    if torch.equal(stats.original, stats.again):
        return CheckResult(check, "yes", OK)
    noise = ((stats.original - stats.again).square().mean() / 2).sqrt().item()
    value = f"no, noise std {noise:.2g}"
    if noise**2 > 0.5 * within**2:
        message = "most of the difference between images is its own noise: seed it, or average several calls."
        return CheckResult(check, value, ERROR, message)
    return CheckResult(check, value, WARNING, f"std within groups is {within:.2g}: seed it if you can.")


def reads_prompt(name: str, stats: RewardStats, another: bool) -> CheckResult:
    """Whether the reward reads prompts; `another` if another trained reward does."""
    check = f"{name}: reads the prompt"
    if stats.reads_prompt:
        mean, error = stats.prompt_effect
        unsure = f", too small to tell from 0 by {len(stats.original)} images" if abs(mean) < STANDARD_ERRORS * error else ""
        return CheckResult(check, "yes", OK, f"{mean:+.2g} with a wrong prompt{unsure}")
    if another:
        return CheckResult(check, "no", OK, "another reward does")
    message = "the images may stop matching their prompts: add a reward that reads it, such as clip, or a kl_weight."
    return CheckResult(check, "no", WARNING, message)


def gradient(name: str, stats: GradientStats | str | None) -> list[CheckResult]:
    """Whether the gradient of a reward predicts its values, how much of it is in a few positions, and how sharp the reward is."""
    check = f"{name}: gradient"
    if stats is None:
        return []
    if isinstance(stats, str):
        return [CheckResult(check, "none", WARNING, f"objectives by its gradient can't use it: {stats}")]
    if not stats.slope > 0:
        message = "it is 0, so that nothing can be learned from it: is the reward constant or clipped on these images?"
        return [CheckResult(check, f"{stats.slope:.2g}", WARNING, message)]
    right = abs(stats.ratio - 1) <= MAX_SLOPE_ERROR
    message = "of the predicted slope" if right else (
        f"the value changes by {stats.measured:.2g} a unit along the gradient, which predicts {stats.slope:.2g}: is a part of the "
        "reward left out of the graph?"
    )  # fmt: skip
    return [
        CheckResult(check, f"{stats.ratio:.2f}", OK if right else WARNING, message),
        CheckResult(
            f"{check} in 1% of the image", f"{stats.energy:.0%}", OK, "of its energy; 1% if it were the same everywhere"
        ),
        CheckResult(
            f"{name}: sharpness S1", f"{stats.sharpness:.2g}", OK, "it rises while a reward is hacked, by arXiv 2603.21175"
        ),
    ]


# -- `flow-grpo rewards test` -----------------------------------------------------------------------------------------


def show(console: Console, title: str, name: str, stats: RewardStats) -> list[CheckResult]:
    """Print the finite values as a table and a histogram, the time of an image, and the results, if there are images to compare.

    Returns the results.
    """
    table = Table(title=escape_markup(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "mean", "std", "lowest", "highest", "share lower"):
        table.add_column(column, justify="right" if column else "left")
    for variant, values in stats.values.items():
        own, both = values[values.isfinite()], values.isfinite() & stats.original.isfinite()
        numbers = (own.mean(), own.std(correction=0), own.min(), own.max()) if len(own) else ()
        is_compared = variant != ORIGINAL and both.any()
        lower = f"{(values < stats.original)[both].float().mean():.0%}" if is_compared else ""
        table.add_row(variant, *([_decimals(number) for number in numbers] or ["–"] * 4), lower)
    console.print(table)
    console.print()
    finite = stats.original[stats.original.isfinite()].numpy()
    counts, edges = np.histogram(finite, NUM_BINS) if len(finite) else (np.zeros(0), np.zeros(1))
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "█" * round(BAR_WIDTH * count / len(stats.original)) or ("▏" if count else "")
        console.print(f"{_decimals(low):>10} … {_decimals(high):<10} [cyan]{bar}[/cyan] {count or ''}", highlight=False)
    console.print(f"\n{1000 * stats.seconds:,.1f} ms per image in a batch\n", highlight=False)
    found = results(short_name(name), stats) if len(stats.original) > 1 else []
    if found:
        console.print(section_table(console, "", found))
    return found


def save_ranked(path: Path, name: str, inputs: RewardInputs, labels: list[str], values: Tensor) -> None:
    """Write the images from the highest value to the lowest, each with its value, as one grid."""
    order = values.nan_to_num(-math.inf, math.inf, -math.inf).argsort(descending=True, stable=True).tolist()
    infos = [ImageInfo(inputs.prompts[i], i, labels[i]) for i in order]
    notes = [f"{name} {_decimals(values[i])}" for i in order]
    save_grid(path, inputs.images[order], infos, columns=min(8, len(order)), notes=notes)


def _decimals(value: Tensor | float) -> str:
    """Four decimals, without the sign of a zero."""
    return f"{round(float(value), 4) + 0.0:.4f}"
