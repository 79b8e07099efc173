"""What one update minimises: the policy's predictions for the rows of a batch, and the run's objective of them.

`StepLoss` replays the trained transitions, `ForwardProcessLoss` adds new noise to the final latents. Both yield one `Loss` for each
of their `count` trained steps or noise levels; `PolicyUpdate` weights the rows and runs backward on each before it takes the next,
so only one graph is in memory. `LossMetrics` averages what the losses report.
"""

import functools
import math
from collections.abc import Callable, Iterator
from inspect import signature

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import methods, objectives, sampling, sde
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.conditioning import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.training.custom import custom_loss
from flow_grpo.types import Experience, Loss, NoisedImage, TrainedStep


class ClipRange:
    """Clip ranges calibrated from observed ratios, one for each step of the schedule.

    A range is the moving average of a quantile of |ratio - 1|. A step without observed ratios is not clipped.
    """

    DECAY = 0.9

    def __init__(self, quantile: float | None) -> None:
        self.quantile = quantile
        self.state: dict[int, float] = {}
        self._seen: dict[int, list[Tensor]] = {}

    def range_at(self, step: int) -> float:
        return self.state.get(step, math.inf)

    def observe(self, step: int, deviation: Float[Tensor, " n"]) -> None:
        """Records |ratio - 1| of an update's rows."""
        self._seen.setdefault(step, []).append(deviation)

    def update(self, processes: Processes) -> None:
        """Update the ranges from what all processes observed. Ratios of exactly 1 (before the first update) are ignored."""
        seen: dict[int, list[Tensor]] = {}
        for one in processes.all_gather(self._seen):
            for step, parts in one.items():
                seen.setdefault(step, []).extend(parts)
        for step, parts in sorted(seen.items()):
            deviation = torch.cat(parts)
            deviation = deviation[deviation.isfinite()]  # fp16 may overflow
            if deviation.any():
                assert self.quantile is not None
                found = deviation.quantile(self.quantile).item()
                former = self.state.get(step, found)
                self.state[step] = self.DECAY * former + (1 - self.DECAY) * found
        self.reset()

    def reset(self) -> None:
        """Discard what was observed since the last update."""
        self._seen = {}

    def metrics(self) -> dict[str, float]:
        return {f"clip_range/step_{step}": value for step, value in sorted(self.state.items())}


class StepLoss:
    """The loss of an objective on per-step log-probabilities: one `Loss` per trained step."""

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        experience: Experience,
        conditioning: Conditioning,
        clip: ClipRange,
    ) -> None:
        trajectory, advantage = experience.trajectory, experience.advantage
        self.policy, self.objective, self.sampling = policy, args.objective, args.sampling
        self.loss = objective_function(args)
        self.velocity = policy.velocity_fn(trajectory.schedule, conditioning)
        self.trajectory, self.clip = trajectory, clip
        self.count = len(trajectory.steps)
        self.advantage = advantage if advantage.ndim == 2 else advantage[:, None].expand(-1, self.count)

    has_ratio = True  # to the rollout's probabilities, which the update must reproduce exactly

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """One loss per trained step, its values those of `rows`; only the rows marked in `is_real` are calibrated on."""
        for k, i in enumerate(self.trajectory.steps):
            v, step = self._step(k, rows)
            loss = self._objective(i, step, self.advantage[rows, k])
            if self.objective.has_auto_clip:
                self.clip.observe(i, loss.metrics["ratio/max_deviation"][is_real])
            if self.objective.weighs_by_std:
                loss = Loss(loss.value * step.std.flatten(1)[:, 0], loss.metrics)
            if self.objective.kl_weight:
                loss = _with_kl(loss, self._kl(k, rows, v, step), self.objective.kl_weight)
            yield loss

    def _step(self, k: int, rows: Int[Tensor, " n"]) -> tuple[Tensor, TrainedStep]:
        """Velocity and transition of the k-th trained step under the current policy."""
        t, i = self.trajectory, self.trajectory.steps[k]
        s = self.sampling
        v, mean, std = sampling.replay(self.velocity, t, k, rows, transition=s.transition, noise_level=s.noise_level)
        log_prob = sde.LOG_PROBS[self.sampling.log_prob](t.x_next[rows, k], mean, std)
        delta = t.schedule.sigmas[i + 1] - t.schedule.sigmas[i]
        return v, TrainedStep(log_prob, t.log_prob_BK[rows, k], mean, t.mean[rows, k], std=std, delta=delta)

    def _objective(self, i: int, step: TrainedStep, advantage: Float[Tensor, " n"]) -> Loss:
        calibrated = {name: self.clip.range_at(i) for name in methods.CLIP if getattr(self.objective, name, None) == "auto"}
        return self.loss(step, advantage, **calibrated)

    def _kl(self, k: int, rows: Int[Tensor, " n"], v: Tensor, step: TrainedStep) -> Float[Tensor, " n"]:
        with torch.no_grad(), self.policy.reference():
            v_ref, reference = self._step(k, rows)
        if self.objective.kl == "velocity":
            return objectives.velocity_kl(v, v_ref)
        if self.objective.kl == "k3":
            return objectives.k3(step.log_prob, reference.log_prob)
        gaussian = sde.kl(step.mean, reference.mean, step.std)
        if self.objective.kl == "flow_grpo":
            return gaussian * -step.delta  # the paper divides by g^2, a Gaussian's KL by std^2 = g^2 (-delta)
        return gaussian


class ForwardProcessLoss:
    """The loss of an objective on final latents: one `Loss` per noise level. A group shares its noise levels and noise."""

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        experience: Experience,
        conditioning: Conditioning,
        step: int,
    ) -> None:
        self.policy, self.objective, self.advantage = policy, args.objective, experience.advantage
        self.method, self.loss = args.method, objective_function(args)
        self.conditioning, self.x0 = conditioning, experience.trajectory.final
        self.count = self.objective.num_noise_levels
        self.draws = [self._draw(experience, args.seed, step, draw) for draw in range(self.count)]
        off_policy = args.updates * args.epochs > 1 and self.method.ratio
        self.v_rollout = self._rollout_velocities(args.microbatch) if off_policy else None
        self.has_ratio = off_policy

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """One loss per noise level, its values those of `rows`."""
        for draw in range(self.count):
            image = self._image(draw, rows)
            loss = self.loss(image, self.advantage[rows])
            if self.objective.kl_weight:
                assert image.v_ref is not None
                loss = _with_kl(loss, objectives.velocity_kl(image.v, image.v_ref), self.objective.kl_weight)
            yield loss

    def _image(self, draw: int, rows: Int[Tensor, " n"]) -> NoisedImage:
        eps, timestep, sigma = (t[rows] for t in self.draws[draw])
        noised = NoisedImage(self.x0[rows], eps, sigma, eps, eps)  # the velocities follow

        def velocity() -> Tensor:
            return self.policy.velocity(noised.x, timestep, self.conditioning, rows).cpu()

        v, v_old, v_ref = velocity(), None, None
        with torch.no_grad():
            if self.method.old_policy:
                with self.policy.lora.use("old"):
                    v_old = velocity()
            if self.objective.kl_weight or self.method.reference:
                with self.policy.reference():
                    v_ref = velocity()
        v_rollout = v.detach() if self.v_rollout is None else self.v_rollout[draw][rows]
        return NoisedImage(noised.x0, eps, sigma, v=v, v_rollout=v_rollout, v_old=v_old, v_ref=v_ref)

    def _draw(self, experience: Experience, seed: int, step: int, draw: int) -> tuple[Tensor, ...]:
        """Noise (B, ...), timestep (B,) and sigma (B,) of one noise level, drawn uniformly from the schedule's range."""
        trajectory, batch = experience.trajectory, experience.batch
        eps = sampling.batch_noise(trajectory.final.shape[1:], batch, seed, "eps", step, draw, shared=True)
        low, high = self.objective.sigma_range
        normal = sampling.batch_noise((), batch, seed, "sigma", step, draw, shared=True)
        u = low + (high - low) * torch.special.ndtr(normal)  # uniform in the range
        return eps, *trajectory.schedule.at((1 - u) * len(trajectory.schedule))

    def _rollout_velocities(self, microbatch: int) -> list[Tensor]:
        """The velocity (B, ...) at each noise level under the policy that sampled the images."""
        chunks = torch.arange(len(self.x0)).split(microbatch)
        self.v_rollout = None
        with torch.set_grad_enabled(self.policy.compiled):  # a compiled model may use another kernel without gradients
            return [torch.cat([self._image(draw, chunk).v.detach() for chunk in chunks]) for draw in range(self.count)]


class LossMetrics:
    """Weighted means and largest values of the numbers that losses report."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.weight = 0.0
        self.numbers: dict[str, float] = {}

    def add(self, loss: Loss, weight: Float[Tensor, " n"]) -> None:
        self.loss += (loss.value * weight).sum().item()
        self.weight += weight.sum().item()
        for name, values in loss.metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + (values * weight).sum().item()
            largest = values[weight > 0].max()
            self.largest[name] = torch.maximum(largest, largest.new_tensor(self.largest.get(name, 0.0))).item()  # NaN stays

    @staticmethod
    def merge(parts: "list[LossMetrics]") -> "LossMetrics":
        """The metrics of several processes as one."""
        whole = LossMetrics()
        for part in parts:
            whole.loss, whole.weight = whole.loss + part.loss, whole.weight + part.weight
            for name, value in part.sums.items():
                whole.sums[name] = whole.sums.get(name, 0.0) + value
            _merge_max(whole.largest, part.largest)
            _merge_max(whole.numbers, part.numbers)
        return whole

    def metrics(self) -> dict[str, float]:
        means = {name: total / self.weight for name, total in self.sums.items() if not name.endswith("max_deviation")}
        largest = {name: value for name, value in self.largest.items() if name.endswith("max_deviation")}
        return {**means, **largest, **self.numbers}


def _merge_max(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """The larger number of each name, or NaN."""
    for name, value in theirs.items():
        if name not in ours or value > ours[name] or math.isnan(value):
            ours[name] = value


def objective_function(args: FlowGRPOConfig) -> Callable[..., Loss]:
    """The run's objective as a function of rows and advantages, with its settings bound; keywords override them."""
    o, method = args.objective, args.method
    if ":" in o.name:
        return functools.partial(custom_loss, o)
    function = getattr(objectives, method.function or o.name)
    takes = signature(function).parameters
    settings = {name: getattr(o, name) for name in takes if hasattr(o, name) and name != "advantage"}

    def loss(rows: TrainedStep | NoisedImage, advantage: Float[Tensor, " n"], **more: float) -> Loss:
        given = {"advantage": advantage} if "advantage" in takes else {}
        return function(rows, **given, **{**settings, **more})

    return loss


def _with_kl(loss: Loss, kl: Float[Tensor, " n"], weight: float) -> Loss:
    return Loss(loss.value + weight * kl, {**loss.metrics, "kl": kl.detach()})
