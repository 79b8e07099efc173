"""What a number says of a run before it starts: for each check one pure function, from what was measured to a verdict.

`flow_grpo.doctor.run` measures, `flow_grpo.doctor.show` shows. P prompts with G images each; rewards of them are (P, G).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flow_grpo.data.prompt_overlap import held_out_overlap

Level = Literal["fine", "warning", "wrong"]
FINE: Level = "fine"
WARNING: Level = "warning"
WRONG: Level = "wrong"
FEW_IMAGES = 4  # of a prompt: fewer hardly tell good from lucky
FEW_HELD_OUT = 8  # prompts, below which the monitor can't tell a change from noise
OFTEN = 50  # times that a prompt can come up before its pictures may be learnt by heart
UNEVEN = 100.0  # times that a step's ratio moves further than another's
SLOW = 3.0  # times the predicted seconds of a step
GB = 1e9


@dataclass(frozen=True)
class Verdict:
    """check: what was looked at; number: what was found; says: what it means and, unless it is fine, what to do."""

    check: str
    number: str
    level: Level
    says: str = ""


def conclusion(verdicts: Iterable[Verdict]) -> str:
    """One sentence on all of them."""
    count = {level: sum(v.level == level for v in verdicts) for level in (WARNING, WRONG)}
    warnings = f"{count[WARNING]} warning" + "s" * (count[WARNING] != 1)
    if count[WRONG]:
        return f"{count[WRONG]} of the checks {'is' if count[WRONG] == 1 else 'are'} wrong, {warnings}: mend that before you train."
    return f"Nothing is wrong, {warnings}: it can be trained."


# -- the machine ----------------------------------------------------------------------------------------------------


def device(kind: str, dtype: str, speed: float, plain: float, has_gpu: bool) -> Verdict:
    """speed, plain: floating point operations a second of a matrix product in `dtype` and in fp32."""
    check, number = "device", f"{kind} in {dtype}"
    says = f"{speed / 1e12:.3g} TFLOP/s in large matrix products"
    if has_gpu and kind == "cpu":
        return Verdict(check, number, WARNING, "there is a GPU: leave `device` out.")
    if speed < plain / 2:
        return Verdict(check, number, WARNING, f"{says}; fp32 is {plain / speed:.0f} times as fast here: set dtype=fp32.")
    return Verdict(check, number, FINE, says)


def threads(count: int, allowed: int, physical: int | None) -> Verdict:
    """Of torch on a CPU. allowed: logical cores that the process may use; physical: cores of the machine, if they are known."""
    cores = min(allowed, physical or allowed)  # two threads on one core compute no faster than one
    number = f"{count} on {cores} cores"
    if count >= cores:
        return Verdict("threads", number, FINE)
    return Verdict("threads", number, WARNING, f"set the environment variable OMP_NUM_THREADS={cores}.")


# -- the prompts ----------------------------------------------------------------------------------------------------


def repeated(prompts: list[str]) -> Verdict:
    count = len(prompts) - len(_texts(prompts))
    if not count:
        return Verdict("prompts that come twice", "0", FINE)
    return Verdict("prompts that come twice", f"{count} of {len(prompts)}", WARNING, "leave them out: each counts again.")


def leaked(prompts: list[str], held_out: list[str]) -> Verdict:
    """Held-out prompts that are trained on."""
    count = held_out_overlap(prompts, held_out)
    if not count:
        return Verdict("held-out prompts trained on", "0", FINE)
    level = WRONG if 2 * count >= len(held_out) else WARNING
    says = "leave them out of `prompts`: what they measure is memory."
    return Verdict("held-out prompts trained on", f"{count} of {len(held_out)}", level, says)


def benchmarks(overlap: dict[str, int]) -> Verdict:
    """overlap: of each test set with a name, the prompts that are trained on."""
    if not overlap:
        return Verdict("test sets trained on", "none", FINE)
    number = ", ".join(f"{count} of {name}" for name, count in overlap.items())
    says = "leave them out of `prompts`: results on these sets can't be compared with others'."
    return Verdict("test sets trained on", number, WARNING, says)


def held_out(count: int) -> Verdict:
    if count >= FEW_HELD_OUT:
        return Verdict("held-out prompts", f"{count}", FINE)
    what = f"set evaluation.prompts to a file of at least {FEW_HELD_OUT}"
    return Verdict("held-out prompts", f"{count}", WARNING, f"{what}: nothing else shows a reward that is cheated.")


def enough(count: int, per_step: int, steps: int) -> Verdict:
    """per_step of `count` prompts are dealt in each of `steps` steps."""
    times = per_step * steps / count
    if times <= OFTEN and count >= 2 * per_step:
        says = (
            f"each comes up {times:.1f} times in the run" if times >= 1 else f"the run takes {per_step * steps} of them once"
        )
        return Verdict("training prompts", f"{count}", FINE, says)
    if times > OFTEN:
        says = f"each comes up {times:.0f} times in the run, and may be learnt by heart: add some, or set fewer steps."
    else:
        says = (
            f"a step takes {per_step} of them, so that all steps are much the same: add some, or set prompts_per_step lower."
        )
    return Verdict("training prompts", f"{count}", WARNING, says)


def end_is_read(longest: str, read: bool) -> Verdict:
    """read: whether the prompt's last word makes any difference to what the text encoders return."""
    number = f"{len(longest)} letters"
    if read:
        return Verdict("the longest prompt's end", number, FINE, "is read")
    says = "is cut off: set pipeline.max_sequence_length higher, or shorten the prompts."
    return Verdict("the longest prompt's end", number, WARNING, says)


def _texts(prompts: list[str]) -> set[str]:
    """The different ones, up to case and spaces."""
    return {" ".join(prompt.casefold().split()) for prompt in prompts}


# -- the groups -----------------------------------------------------------------------------------------------------


def group_size(images: int) -> Verdict:
    if images >= FEW_IMAGES:
        return Verdict("images of a prompt", f"{images}", FINE)
    says = f"so few hardly tell good from lucky: set images_per_prompt={FEW_IMAGES} or more."
    return Verdict("images of a prompt", f"{images}", WARNING, says)


def signal(speaks: Tensor, reward: Tensor) -> Verdict:
    """speaks (P,) bool: the groups whose images differ in reward; reward (P, G)."""
    silent = 1 - speaks.float().mean().item()
    check, number = "groups without signal", f"{silent:.0%} of {len(speaks)}"
    if silent < 0.5:
        return Verdict(check, number, FINE)
    level, quiet = WRONG if silent == 1 else WARNING, reward[~speaks].amax(1)
    if reward.min() < reward.max() and (quiet == reward.max()).float().mean() > 0.5:
        return Verdict(
            check, number, level, "most of them are solved: take harder prompts, or let those rest (resting.after)."
        )
    if reward.min() < reward.max() and (quiet == reward.min()).float().mean() > 0.5:
        return Verdict(
            check, number, level, "most of them are hopeless: take easier prompts, or fine-tune first (`stages`)."
        )
    says = "set more images_per_prompt, more noise, or resample=2, which draws further prompts."
    return Verdict(check, number, level, says)


def shares(share: dict[str, float]) -> Verdict:
    """Of each of several rewards that differ in the advantage, see `flow_grpo.advantages.shares`."""
    name, least = min(share.items(), key=lambda item: item[1])
    number = ", ".join(f"{one} {value:.0%}" for one, value in share.items())
    if least >= 0.05:
        return Verdict("shares of the advantage", number, FINE)
    says = f"{name} has next to no say: raise its weight, or set objective.advantage=gdpo."
    return Verdict("shares of the advantage", number, WARNING, says)


def steps_matter(noisy: Tensor, plain: Tensor) -> Verdict:
    """noisy, plain (P, G): rewards of images drawn with the trained steps' noise and, from the same starts, without it.

    The number is the variance that this noise makes, of all within groups: only what it makes can be learnt from.
    """
    check = "made by the trained steps"
    parts = [(one - one.mean(1, keepdim=True)).square().sum().item() for one in (noisy - plain, noisy, plain)]
    share = parts[0] / max(parts[1] + parts[2], 1e-12)
    number = f"{share:.0%} of differences"
    if share >= 0.05:
        return Verdict(check, number, FINE)
    says = "images of a prompt differ by their start alone, and steps learn chance: raise sampling.noise_level."
    return Verdict(check, number, WRONG if share < 0.01 else WARNING, says)


def survives(noisy: Tensor, plain: Tensor) -> Verdict:
    """noisy, plain (P, G): as in `steps_matter`. Noise may cost reward, as long as a group's best image is as good as without."""
    check, number = "reward with and without noise", f"{noisy.mean():.3g} and {plain.mean():.3g}"
    lost = plain.mean(1) - noisy.mean(1)
    certain = lost.mean() > 3 * lost.std() / len(lost) ** 0.5
    best = (noisy.amax(1) >= plain.mean(1)).float().mean()
    if not certain or (best >= 0.5 and lost.mean() <= plain.std()):
        return Verdict(check, number, FINE)
    says = "noise destroys the pictures: lower sampling.noise_level, let sampling.window leave out late steps, or use cps."
    return Verdict(check, number, WRONG if best < 0.25 else WARNING, says)


# -- an update ------------------------------------------------------------------------------------------------------


def batch_free(off: float, close: float) -> Verdict:
    """off: largest difference of a pixel in [0, 1] between micro-batches; close: what rounding may do."""
    check, number = "another micro-batch", f"off by {off:.1e}"
    if off <= close:
        return Verdict(check, number, FINE, "rounding")
    return Verdict(check, number, WARNING, "a picture depends on those beside it: look for batch statistics in the model.")


def ratio(deviation: float) -> Verdict:
    check, number = "ratio before the first update", f"off by {deviation:.1e}"
    if deviation == 0:
        return Verdict(check, "exactly 1", FINE)
    return Verdict(
        check, number, WRONG, "the update does not compute what the rollout did: look for dropout, or set dtype=fp32."
    )


def clip_range(moved: Tensor, low: float, high: float, passes: int) -> Verdict:
    """moved (n,): |ratio - 1| after one update, of all trained steps; low, high: what clips it; passes: updates on a rollout."""
    check, usual = "clip range", moved.quantile(0.9).item()
    number, clip = f"{low:.0e}" if low == high else f"{low:.0e}, {high:.0e}", min(low, high)
    if not moved.any():
        says = "one update moves no ratio at all: raise optimizer.lr, or see the gradient below."
        return Verdict(check, number, WARNING, says)
    if passes == 1:
        return Verdict(check, number, FINE, "of no effect: with one update on a rollout the ratio is always 1")
    beyond, advice = (moved > clip).float().mean(), f"set clip_low and clip_high near {usual:.0e}, or to auto."
    if beyond > 0.5:
        says = f"one update moves {beyond:.0%} of the ratios beyond it, and the others learn little: {advice}"
        return Verdict(check, number, WRONG if beyond > 0.9 else WARNING, says)
    if clip > 10 * (passes - 1) * moved.max():
        return Verdict(check, number, WARNING, f"no ratio comes near it, so nothing holds updates back: {advice}")
    return Verdict(check, number, FINE, f"{beyond:.0%} of the ratios are beyond it after one update")


def drift(step: int, sigma: float, moved: Tensor, clip: float | None) -> Verdict:
    """moved (n,): |ratio - 1| of a trained step after one update; clip: its clip range, if it has one."""
    usual = moved.quantile(0.9).item()
    says = f"{usual / clip:.2g} of its clip range" if clip else ""
    return Verdict(f"step {step} at sigma {sigma:.2f}", f"ratio {usual:.1e} off", FINE, says)


def even(moved: dict[int, Tensor], weighed: bool) -> Verdict:
    """moved: as in `drift`, by step; weighed: whether step_weight makes up for steps that move further than others."""
    usual = {step: values.quantile(0.9).item() for step, values in moved.items()}
    most, least = max(usual, key=lambda step: usual[step]), min(usual, key=lambda step: usual[step])
    times = usual[most] / max(usual[least], 1e-12)
    check, number = "the furthest step", f"{times:.2g} x the nearest"
    if times < UNEVEN or weighed:
        return Verdict(check, number, FINE)
    says = (
        f"step {most} drowns step {least}: leave it out by sampling.window, or set objective.step_weight=std or grpo_guard."
    )
    return Verdict(check, number, WARNING, says)


def gradient(norm: dict[str, float], count: int, eps: float, kept: float, overflow: bool) -> Verdict:
    """What Adam was given.

    Args:
        norm: of each trained parameter's gradient, of `count` numbers in all; empty if there was no step.
        kept: the share of Adam's step that its eps leaves.
        overflow: whether an fp16 gradient overflowed, so that there was none.
    """
    check = "gradient against Adam's eps"
    if overflow:
        return Verdict(check, "overflow", WARNING, "fp16 passes over such steps while it scales: bf16 or fp32 do not.")
    if not norm:
        return Verdict(check, "none", WRONG, "no group had signal, so there was no update: see above.")
    rms = (sum(value**2 for value in norm.values()) / count) ** 0.5
    number = f"RMS {rms:.1e}"
    if kept >= 0.9:
        return Verdict(check, number, FINE, f"eps is {eps:.0e}")
    says = f"eps={eps:.0e} swallows {1 - kept:.0%} of the step: set optimizer.eps={1e-3 * rms:.0e} or below."
    return Verdict(check, number, WRONG if kept < 0.5 else WARNING, says)


def reach(norm: dict[str, float], whole: bool) -> Verdict:
    """norm: of each trained parameter's gradient, by name; whole: whether all weights are trained in place of a LoRA."""
    silent = [name for name, value in norm.items() if not value > 0]
    check, number = f"{'weights' if whole else 'LoRA parameters'} with gradient", f"{len(norm) - len(silent)} of {len(norm)}"
    if not silent:
        return Verdict(check, number, FINE)
    where = silent[0].partition(".lora_")[0]
    if len(silent) <= 0.2 * len(norm):
        return Verdict(check, number, FINE, f"none at {where}, whose output may not be used")
    says = "look whether the model uses them." if whole else "set lora.targets to modules that the velocity depends on."
    return Verdict(check, number, WRONG if len(silent) == len(norm) else WARNING, f"none at {where}: {says}")


def stopped(check: str, error: Exception) -> Verdict:
    """A part of the look that an error ended: for want of memory, or with a sentence of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return Verdict(check, "out of memory", WRONG, "set a smaller microbatch, or memory.checkpointing.")
    return Verdict(check, "fails", WRONG, str(error))


# -- what it takes --------------------------------------------------------------------------------------------------


def step_time(check: str, seconds: dict[str, float], predicted: float | None) -> Verdict:
    """seconds: of the parts of a step, `step` the whole; predicted: by `plan`, for all but the rewards."""
    whole = seconds["step"]
    shares = ", ".join(
        f"{name} {value / whole:.0%}" for name, value in seconds.items() if name != "step" and value > 0.005 * whole
    )
    if predicted is None or whole - seconds.get("reward", 0.0) < SLOW * predicted:
        return Verdict(check, f"{whole:.1f} s", FINE, shares)
    says = (
        f"but for rewards {predicted:.1f} s were expected ({shares}): see what else runs here, or set a larger microbatch."
    )
    return Verdict(check, f"{whole:.1f} s", WARNING, says)


def memory(used: float, there: float, predicted: float | None, alone: bool) -> Verdict:
    """Bytes: the most that a step took, what the device has, what `plan` predicts; `alone`: of the model without what is beside it."""
    number = f"{used / GB:.2f} of {there / GB:.0f} GB"
    says = "" if predicted is None else f"predicted{' for the model alone' if alone else ''}: {predicted / GB:.2f} GB"
    if used < 0.9 * there:
        return Verdict("memory", number, FINE, says)
    return Verdict("memory", number, WARNING, "hardly any is left: set a smaller microbatch, or memory.checkpointing.")


def disk(needed: float, free: float) -> Verdict:
    """Bytes: of the checkpoints that are kept, with one that is being written, and of the LoRAs."""
    check, number = "disk for checkpoints", f"{needed / GB:.2f} of {free / GB:.0f} GB"
    if needed < 0.9 * free:
        return Verdict(check, number, FINE)
    return Verdict(check, number, WRONG, "there is not enough: set `output` to another disk, or keep fewer (`keep`).")


def run_folder(folder: str, begun: bool) -> Verdict:
    if not begun:
        return Verdict("run folder", folder, FINE, "is free")
    return Verdict("run folder", folder, WARNING, "already holds a run: go on with it by --resume, or set another `output`.")
