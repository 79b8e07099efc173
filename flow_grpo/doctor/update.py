"""Does the ratio start at 1, how far does one update move it, do gradients arrive, and does Adam's eps let them act?

Measured in two updates of the run itself: one without warmup, then a training step.
"""

import torch
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective import is_custom
from flow_grpo.config.stepwise_objectives import Clip, Reinforce, Stepwise
from flow_grpo.distributed.processes import Processes
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult
from flow_grpo.policy.policy import Policy
from flow_grpo.training.anchors import References
from flow_grpo.training.losses import ClipRange, StepLoss
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import RATIO_DEVIATION, Experience, Trajectory

MAX_STEP_IMBALANCE = 100.0  # times that an update moves the ratio of one step further than another's
MIN_ADAM_STEP = 0.9  # share of Adam's step that its eps should leave


def single_update(policy: Policy, stage: FlowGRPOConfig, experience: Experience, step: int, processes: Processes) -> None:
    """One optimizer step of a new optimizer on all rows, without warmup."""
    optimizer = stage.optimizer.model_copy(update={"warmup_steps": 0})
    single = stage.model_copy(update={"updates": 1, "epochs": 1, "optimizer": optimizer})
    PolicyUpdate(policy, single, step, processes)(experience, step)


@torch.no_grad()
def measure_ratio_drift(policy: Policy, stage: FlowGRPOConfig, experience: Experience, microbatch: int) -> dict[int, Tensor]:
    """Measure |ratio - 1| (n,) of each trained step, as the objective sees it, on the rows of at most two micro-batches.

    A custom objective may need gradients: it gets the ratio of log-probabilities, as reinforce does.
    """
    trajectory, rows = experience.trajectory, experience.rows[: 2 * microbatch]
    own = Reinforce() if is_custom(stage.objective.name) else stage.objective
    if not trajectory.steps or not len(rows) or not isinstance(own, Stepwise):
        return {}
    objective = own.model_copy(update={"kl_weight": 0.0, "anchors": []})
    conditioning, references = policy.encode(experience.batch.prompts), References(policy, objective, 0)
    loss = StepLoss(experience, conditioning, references, objective=objective, clip=ClipRange())
    chunks = [list(loss.losses(chunk, chunk >= 0)) for chunk in rows.split(microbatch)]
    return {
        step: torch.cat([chunk_loss.metrics[RATIO_DEVIATION] for chunk_loss in step_losses])
        for step, step_losses in zip(trajectory.steps, zip(*chunks, strict=True), strict=True)
    }


class GradientStats:
    """The gradients of an optimizer's latest step.

    Attributes:
        norm: by parameter name; empty before the first step.
        count: the number of trained weights.
        adam_step_share: the share of Adam's first step that its eps leaves, mean over the gradients that are not 0.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], adam: torch.optim.Optimizer) -> None:
        self.parameters, self.eps = parameters, adam.param_groups[0]["eps"]
        self.count, self.adam_step_share = sum(p.numel() for p in parameters.values()), 1.0
        self.norm: dict[str, float] = {}
        adam.register_step_pre_hook(lambda *_: self._record())

    @property
    def rms(self) -> float:
        """Root mean square of the gradient over all trained weights."""
        return (sum(norm**2 for norm in self.norm.values()) / self.count) ** 0.5

    @torch.no_grad()
    def _record(self) -> None:
        shares, nonzero = 0.0, 0
        for name, parameter in self.parameters.items():
            size = parameter.new_zeros(1) if parameter.grad is None else parameter.grad.abs()
            self.norm[name] = size.norm().item()
            shares, nonzero = shares + (size / (size + self.eps)).nansum().item(), nonzero + int(size.count_nonzero())
        self.adam_step_share = shares / max(1, nonzero)


def check_update(
    stage: FlowGRPOConfig,
    experience: Experience,
    drift: dict[int, Tensor],
    gradients: GradientStats,
    metrics: dict[str, float],
) -> list[CheckResult]:
    """The results of a training step on an experience with these metrics; `drift` is from `measure_ratio_drift`."""
    results = []
    if "ratio/first_update_max_deviation" in metrics:
        results.append(initial_ratio(metrics["ratio/first_update_max_deviation"]))
    if experience.metrics.get("frac_gradient_zero") == 1:
        message = "the gradient of the rewards is 0 at all images, so that the policy learns nothing: see the rewards."
        return [*results, CheckResult("gradient", "0", ERROR, message)]
    if not experience.has_advantage:  # whatever the cause, it is not in the update
        message = "no group has signal, so that the policy learns nothing from the rewards: see the groups."
        return [*results, CheckResult("gradient", "not checked", WARNING, message)]
    results += _check_drift(stage, experience.trajectory, drift)
    results.append(gradient_size(gradients, overflow="grad_overflow" in metrics))
    if gradients.norm:
        results.append(gradient_coverage(gradients.norm, full_finetuning=stage.lora is None))
    return results


def _check_drift(stage: FlowGRPOConfig, trajectory: Trajectory, drift: dict[int, Tensor]) -> list[CheckResult]:
    clip, results = None, []
    if drift and isinstance(stage.objective, Clip):
        low, high = stage.objective.clip_low, stage.objective.clip_high
        if low == "auto" or high == "auto":
            results.append(CheckResult("clip range", "auto", OK, "calibrated at each step"))
        else:
            passes = stage.updates * stage.epochs
            clip = min(low, high) if passes > 1 else None  # of the only pass every ratio is 1
            results.append(clip_range(torch.cat(list(drift.values())), low, high, passes))
    if len(drift) > 1:
        results.append(step_balance(drift, weighted=stage.objective.weighs_by_std))
    sigmas = trajectory.schedule.sigmas.tolist()
    return [*results, *(ratio_drift(step, sigmas[step], values, clip) for step, values in drift.items())]


# -- evaluating -------------------------------------------------------------------------------------------------------


def _typical(drift: Tensor) -> float:
    return drift.quantile(0.9).item()


def initial_ratio(deviation: float) -> CheckResult:
    """Evaluate how far the ratio before the first update is from 1."""
    name = "ratio before the first update"
    if deviation == 0:
        return CheckResult(name, "exactly 1", OK)
    message = "the update does not compute what the rollout computed: look for dropout, or set dtype=fp32."
    return CheckResult(name, f"deviates from 1 by {deviation:.1e}", ERROR, message)


def clip_range(drift: Tensor, low: float, high: float, passes: int) -> CheckResult:
    """Whether the clip range fits the drift (n,): |ratio - 1| of all trained steps after one of `passes` updates on a rollout."""
    name, value = "clip range", f"{low:.0e}" if low == high else f"{low:.0e}, {high:.0e}"
    if not drift.any():
        return CheckResult(
            name, value, WARNING, "one update does not move any ratio: raise optimizer.lr, or see the gradient."
        )
    if passes == 1:
        return CheckResult(name, value, OK, "inactive: one update per rollout, so the ratio is always 1")
    clip, advice = min(low, high), f"set clip_low and clip_high near {_typical(drift):.0e}, or to auto."
    clipped = (drift > clip).float().mean().item()
    if clipped > 0.5:
        message = f"one update moves {clipped:.0%} of the ratios out of it, so later updates learn little: {advice}"
        return CheckResult(name, value, ERROR if clipped > 0.9 else WARNING, message)
    if clip > 10 * (passes - 1) * drift.max():
        return CheckResult(name, value, WARNING, f"no ratio comes near it, so it does not limit the updates: {advice}")
    return CheckResult(name, value, OK, f"{clipped:.0%} of the ratios are outside after one update")


def ratio_drift(step: int, sigma: float, drift: Tensor, clip: float | None) -> CheckResult:
    """The drift (n,), |ratio - 1| of a trained step after one update, and its clip range, if it has one."""
    message = f"{_typical(drift) / clip:.2g} of its clip range" if clip else ""
    return CheckResult(f"step {step} at sigma {sigma:.2f}", f"ratio drift {_typical(drift):.1e}", OK, message)


def step_balance(drift: dict[int, Tensor], weighted: bool) -> CheckResult:
    """How evenly steps move: their drift, as in `ratio_drift`; `weighted` if step_weight compensates for steps that move further."""
    typical = {step: _typical(values) for step, values in drift.items()}
    largest, smallest = max(typical, key=lambda step: typical[step]), min(typical, key=lambda step: typical[step])
    times = typical[largest] / max(typical[smallest], 1e-12)
    name, value = "ratio drift, largest/smallest step", f"{times:.2g}x"
    if times < MAX_STEP_IMBALANCE or weighted:
        return CheckResult(name, value, OK)
    message = (
        f"step {largest} dominates step {smallest}: exclude it by objective.window, or set objective.step_weight=std or "
        "objective.name=grpo_guard."
    )
    return CheckResult(name, value, WARNING, message)


def gradient_size(gradients: GradientStats, overflow: bool) -> CheckResult:
    """The size of the gradient; `overflow` if one in fp16 overflowed, so that there was no step."""
    name = "gradient vs Adam's eps"
    if overflow:
        return CheckResult(
            name, "overflow", WARNING, "fp16 skips such steps while it adapts its loss scale: bf16 and fp32 don't."
        )
    if not gradients.norm:
        return CheckResult(name, "none", ERROR, "there was no update.")
    value = f"RMS {gradients.rms:.1e}"
    eps, share = gradients.eps, gradients.adam_step_share
    if share >= MIN_ADAM_STEP:
        return CheckResult(name, value, OK, f"eps is {eps:.0e}")
    message = f"eps={eps:.0e} removes {1 - share:.0%} of the step: set optimizer.eps={1e-3 * gradients.rms:.0e} or less."
    return CheckResult(name, value, ERROR if share < 0.5 else WARNING, message)


def gradient_coverage(norm: dict[str, float], full_finetuning: bool) -> CheckResult:
    """The share of parameters that receive gradient, from the norm of each one's gradient by name."""
    zero = [name for name, value in norm.items() if not value > 0]
    name = f"{'weights' if full_finetuning else 'LoRA parameters'} receiving gradient"
    value = f"{len(norm) - len(zero)} of {len(norm)}"
    if not zero:
        return CheckResult(name, value, OK)
    module = zero[0].partition(".lora_")[0]
    if len(zero) <= 0.2 * len(norm):
        return CheckResult(name, value, OK, f"{len(zero)} get none, as at {module}: the velocity does not depend on them")
    advice = (
        "check whether the model uses them."
        if full_finetuning
        else "set lora.targets to modules that the velocity depends on."
    )
    return CheckResult(name, value, ERROR if len(zero) == len(norm) else WARNING, f"none at {module}: {advice}")
