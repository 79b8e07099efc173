"""What a reward likes, seen before anyone trains on it: pictures as they are and spoiled, its time, its memory, its whims."""

import inspect
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import rewards
from flow_grpo.data.grid import ImageInfo, from_bytes, save_grid, to_bytes
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs, depends_on_group
from flow_grpo.progress import phase
from flow_grpo.text import counted
from rewards import user_code

BINS, BAR = 10, 32
AGAIN = 32  # pictures that `look_at` scores once more
PLAIN = "as they are"


def mismatched(inputs: RewardInputs) -> RewardInputs | None:
    """Each image with the prompt of another one. None if there is one prompt only."""
    different = list(dict.fromkeys(inputs.prompts))
    if len(different) < 2:
        return None
    following = dict(zip(different, different[1:] + different[:1], strict=True))
    others = inputs.take([inputs.prompts.index(following[prompt]) for prompt in inputs.prompts])
    return RewardInputs(inputs.images, others.prompts, others.columns)


def perturbed(inputs: RewardInputs) -> dict[str, RewardInputs]:
    """The images blurred, noisy, and each with the prompt of another one, if there is more than one prompt."""
    radius = max(1.0, min(inputs.images.shape[-2:]) / 32)
    soft = [Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)) for pixels in to_bytes(inputs.images)]
    noise = torch.randn(inputs.images.shape, generator=torch.Generator().manual_seed(0))
    found = {
        "blurred": RewardInputs(from_bytes(np.stack([np.asarray(s) for s in soft])), inputs.prompts, inputs.columns),
        "noisy": RewardInputs((inputs.images + 0.1 * noise).clamp(0, 1), inputs.prompts, inputs.columns),
    }
    wrong = mismatched(inputs)
    if wrong is not None:
        found["wrong prompt"] = wrong
    return found


@dataclass(frozen=True)
class Findings:
    """Values (B,) of the pictures as they are and spoiled; seconds and megabytes; whether it repeats itself."""

    values: dict[str, Tensor]
    seconds_alone: float  # one picture, the median of five
    seconds_together: float  # all pictures
    megabytes: float  # how much the most that this process ever took grew, by loading and scoring
    repeats: bool  # the same pictures twice give the same bits
    batch_matters: float  # the largest difference between a picture alone and among the others
    by_group: bool  # a picture's value depends on the other pictures of its prompt


def examine(name: str, load: Callable[[], rewards.Reward], pictures: RewardInputs) -> Findings:
    """Loads a reward and measures it. ValueError as of `rewards.score`."""
    before = _most_megabytes()
    with phase(f"loading reward {name}"):
        reward = load()
    with phase(f"scoring {counted(len(pictures.prompts), 'image')} by {name}, as they are and spoiled"):
        plain = pictures.score(name, reward)  # the first call loads what it needs
        seconds, again = _timed(lambda: pictures.score(name, reward))
        few = [pictures.take([i]) for i in range(min(5, len(plain)))]
        alone = [_timed(lambda one=one: one.score(name, reward)) for one in few]  # type: ignore[misc]
        values = {PLAIN: plain, **{how: wrong.score(name, reward) for how, wrong in perturbed(pictures).items()}}
    return Findings(
        values,
        statistics.median(s for s, _ in alone),
        seconds,
        _most_megabytes() - before,
        torch.equal(plain, again),
        float((torch.cat([v for _, v in alone]) - plain[: len(alone)]).abs().max()),
        depends_on_group(name, reward, pictures),
    )


@dataclass(frozen=True)
class Glance:
    """What a reward says of B images, by one call."""

    values: Tensor  # (B,)
    seconds: float  # an image
    changed: bool  # it wrote into its images
    gradient: bool  # its values carry one
    settings: tuple[str, ...]  # of the whole process, that it changed

    @property
    def constant(self) -> bool:
        return bool(self.values.min() == self.values.max())

    @property
    def usable(self) -> bool:
        return bool(self.values.isfinite().all())


@dataclass(frozen=True)
class Look(Glance):
    """And of n of them: twice, and with the prompts of others."""

    once: Tensor  # (n,)
    again: Tensor  # (n,)
    mismatched: Tensor | None  # (n,), if there is more than one prompt
    by_group: bool  # a picture's value depends on the other pictures of its prompt

    @property
    def reads(self) -> bool:
        """Whether the prompt moves it, by more than chance does."""
        if self.mismatched is None:
            return False
        return bool((self.mismatched - self.once).abs().mean() > 2 * (self.again - self.once).abs().mean())


def glance_at(name: str, reward: rewards.Reward, pictures: RewardInputs) -> Glance:
    """Scores the pictures once. ValueError as of `rewards.call_reward`."""
    given, notes = pictures.images.clone(), {"gradient": False}
    seconds, values = _timed(
        lambda: rewards.call_reward(name, _noting(reward, notes), given, pictures.prompts, pictures.columns)
    )
    changed = not torch.equal(given, pictures.images)
    settings = tuple(user_code.changed.get(f"reward {name}", ()))
    return Glance(values, seconds / len(pictures.prompts), changed, notes["gradient"], settings)


def look_at(name: str, reward: rewards.Reward, pictures: RewardInputs) -> Look:
    """Scores the pictures a few times. ValueError as of `rewards.call_reward`."""
    count = len(pictures.prompts)
    some = pictures.take(list(range(0, count, -(-count // AGAIN))))
    mixed = mismatched(some)
    # the first call loads what it needs, the last one is timed
    once, again, *wrong, whole = [glance_at(name, reward, of) for of in (some, some, mixed, pictures) if of is not None]
    seen = [once, again, *wrong, whole]
    changed, gradient = any(one.changed for one in seen), any(one.gradient for one in seen)
    mismatch = wrong[0].values if wrong else None
    return Look(
        values=whole.values,
        seconds=whole.seconds,
        changed=changed,
        gradient=gradient,
        settings=whole.settings,
        once=once.values,
        again=again.values,
        mismatched=mismatch,
        by_group=depends_on_group(name, reward, pictures),
    )


def _noting(reward: rewards.Reward, notes: dict[str, bool]) -> rewards.Reward:
    """The reward, which notes whether its values carry a gradient."""

    def call(images: Tensor, prompts: list[str], **metadata: Any) -> Any:
        found = reward(images, prompts, **metadata)
        notes["gradient"] |= isinstance(found, Tensor) and found.requires_grad
        return found

    what = reward.forward if isinstance(reward, torch.nn.Module) else reward
    call.__signature__ = inspect.signature(what)  # type: ignore[attr-defined]  # it says which metadata the reward takes
    return call


def show(console: Console, title: str, found: Findings) -> None:
    """The values in a table and as a histogram, and what it costs."""
    plain = found.values[PLAIN]
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "mean", "std", "lowest", "highest", "fell for"):
        table.add_column(column, justify="right" if column else "left")
    for how, values in found.values.items():
        numbers = (values.mean(), values.std(correction=0), values.min(), values.max())
        fell = "" if how == PLAIN else f"{(values < plain).float().mean():.0%}"
        table.add_row(how, *(f"{number:.4f}" for number in numbers), fell)
    console.print(table)
    console.print()
    for low, high, count in histogram(plain):
        bar = "█" * round(BAR * count / len(plain)) or ("▏" if count else "")
        console.print(f"{low:10.4f} … {high:<10.4f} [cyan]{bar}[/cyan] {count or ''}", highlight=False)
    count = len(plain)
    lines = [
        f"one picture {found.seconds_alone * 1000:.1f} ms, {count} together {count / found.seconds_together:.1f} a second",
        f"{found.megabytes:.0f} MB more memory",
        "the same pictures give the same values" if found.repeats else "[bold]the same pictures give other values[/bold]",
        f"a picture alone differs from itself in a batch by at most {found.batch_matters:.2g}",
    ]
    if found.by_group:
        lines.append(f"[bold]warning: {GROUP_DEPENDENT}[/bold]")
    console.print("\n" + "\n".join(lines), highlight=False)


def histogram(values: Tensor) -> list[tuple[float, float, int]]:
    """Lower end, upper end and count of each bin; one bin if all values are the same."""
    low, high = values.min().item(), values.max().item()
    bins = BINS if high > low else 1
    edges = torch.linspace(low, high, bins + 1).tolist()
    places = (
        ((values - low) / (high - low) * bins).long().clamp(max=bins - 1) if high > low else torch.zeros(len(values)).long()
    )
    counts = torch.bincount(places, minlength=bins).tolist()
    return list(zip(edges[:-1], edges[1:], counts, strict=True))


def sheet(path: Path, name: str, pictures: RewardInputs, names: list[str], values: Tensor) -> None:
    """The pictures from the best to the worst, each with its value."""
    order = values.argsort(descending=True, stable=True).tolist()
    cells = [ImageInfo(pictures.prompts[i], i, names[i]) for i in order]
    notes = [f"{name} {values[i]:.4f}" for i in order]
    save_grid(path, pictures.images[order], cells, columns=min(8, len(order)), notes=notes)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _most_megabytes() -> float:
    """The most memory that this process, or the accelerator for it, has held so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    accelerator = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + accelerator) / 1e6
