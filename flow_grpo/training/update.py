"""The optimizer steps of one training step."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.profiler import record_function

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.anchor_config import decay_at
from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.reward_gradient_objectives import RewardGradient
from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.config.stepwise_objectives import Stepwise
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.weights import full_tensor, gather_to_cpu, shard_like
from flow_grpo.progress import phase
from flow_grpo.training.anchors import References
from flow_grpo.training.forward_process_loss import ForwardProcessLoss, draw_noise_levels
from flow_grpo.training.losses import BatchLoss, ClipRange, LossMetrics, StepLoss
from flow_grpo.training.reward_gradients import RewardGradientLoss
from flow_grpo.types import RATIO_DEVIATION, Experience

GRAD_NORM = "grad_norm"  # metric


class Optimizer:
    """AdamW, identical on every process, or on each process's shard of the weights (FSDP2).

    Attributes:
        is_sharded: whether `state_dict` gathers shards, so that every process must call it.
        synchronous_backward: whether all processes must run backward equally often.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig, processes: Processes) -> None:
        self.parameters = list(policy.trainable_parameters().values())
        self.max_norm, self.processes, self.meter = config.max_grad_norm, processes, policy.meter
        self.is_sharded, self.synchronous_backward = policy.is_sharded, policy.uses_fsdp
        self.adamw = adamw(self.parameters, config)
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=policy.device))  # initialised here, as there may be no row with signal

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a part of the loss."""
        with self.meter.timed("backward"):
            self.scaler.scale(loss).backward()

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients of all processes and clip them. Returns the norm before clipping, (), on the device, without a wait."""
        self.processes.all_reduce_gradients(self.parameters, self.is_sharded)
        self.scaler.unscale_(self.adamw)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        return full_tensor(norm) if self.is_sharded else norm

    def step(self, lr: float, norm: float) -> None:
        """Update the weights and clear the gradients. If their norm is not finite, no weight is changed.

        Args:
            norm: the value that `reduce_gradients` returned.

        Raises:
            FlowGRPOError: fp16 gradients keep overflowing.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if math.isfinite(norm) or self.scaler.is_enabled():
            self.scaler.step(self.adamw)  # skips the step if fp16 gradients overflowed
            self.scaler.update()
        self.adamw.zero_grad()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise FlowGRPOError("gradients in fp16 overflow however small the loss is scaled: set dtype=bf16 or fp32.")

    def zero_grad(self) -> None:
        """Clear accumulated gradients."""
        self.adamw.zero_grad()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())  # the same scale; allows `reduce_gradients` to be called again

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Any]:
        """The full (unsharded) state. If sharded, every process must call this; keep_on_this_rank=False on those that discard it."""
        optimizer, moments = self.adamw.state_dict(), {}
        for index, values in optimizer["state"].items():
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            moments[index] = {**values, **gather_to_cpu(tensors, keep_on_this_rank)}
        return {"optimizer": {**optimizer, "state": moments}, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on any number of processes."""
        parameters = self.parameters
        moments = {
            index: {
                n: shard_like(v, parameters[index]) if _same_shape(v, parameters[index]) else v for n, v in values.items()
            }
            for index, values in state["optimizer"]["state"].items()
        }
        self.adamw.load_state_dict({**state["optimizer"], "state": moments})
        self.scaler.load_state_dict(state["scaler"])


def _same_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def adamw(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names. FlowGRPOError if its package is not installed."""
    settings: Any = {"lr": config.lr, "eps": config.eps, "weight_decay": config.weight_decay}
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise FlowGRPOError(
            "optimizer.name=adamw_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes."
        ) from error
    return AdamW8bit(parameters, **settings)


@dataclass(frozen=True)
class Minibatch:
    """The part of a training step's batch that one optimizer step is made on.

    Attributes:
        rows: the rows with a loss, of this process.
        row_weight: the weight of each in the mean over the minibatch's groups, of all processes, with and without signal.
        batch_size: rows of this process's batch, with and without a loss.
    """

    rows: Int[Tensor, " n"]
    row_weight: float
    batch_size: int


class PolicyUpdate:
    """Updates the trained weights from collected experience, for one stage of a run.

    Attributes:
        microbatch: rows per forward pass.
        seconds: the time that the last call took.
        mid_step: whether weights have changed in a training step that is not finished.
    """

    def __init__(self, policy: Policy, args: FlowGRPOConfig, stage_start: int, processes: Processes) -> None:
        self.policy, self.args, self.stage_start, self.processes = policy, args, stage_start, processes
        self.optimizer = Optimizer(policy, args.optimizer, processes)
        self.references, self.policy_copies = References(policy, args.objective, stage_start), args.objective.policy_copies
        self.clip, self.calibrates_clip = ClipRange(), args.objective.has_auto_clip
        self.mid_step = False
        self.microbatch, self.seconds = args.microbatch, 0.0

    def __call__(self, experience: Experience, step: int) -> dict[str, float]:
        """Run the optimizer steps of training step `step`: one for each minibatch, in each epoch. Returns metrics.

        Raises:
            FlowGRPOError: the ratio before the first update is not 1, or a gradient is not finite.
        """
        started, self.mid_step = time.perf_counter(), False
        with phase(f"step {step + 1}, updating"), record_function("update"):
            batch_loss, totals = self._batch_loss(experience, step), LossMetrics()
            minibatches = self._minibatches(experience) * self.args.epochs
            for number, minibatch in enumerate(minibatches, self._steps_before(step) + 1):
                if self.processes.any_process(len(minibatch.rows) > 0):  # else there is nothing to learn from
                    self._compute_gradients(batch_loss, minibatch, totals)
                    totals.numbers.update(self._optimizer_step(step, number, totals))
            experience.trajectory.graphs.clear()  # of micro-batches without signal
            metrics = self._finish(totals, step, len(minibatches))
        self.seconds = time.perf_counter() - started
        return metrics

    def discard(self) -> None:
        """Discard gradients and recorded ratios of an aborted step."""
        self.optimizer.zero_grad()
        self.clip.reset()

    def _batch_loss(self, experience: Experience, step: int) -> BatchLoss:
        with self.policy.meter.timed("encode"):
            conditioning = self.policy.encode(experience.batch.prompts)
        with self.policy.meter.timed("forward"):
            return loss_of_batch(
                self.args, experience, conditioning, self.references, step=step, clip=self.clip, microbatch=self.microbatch
            )

    def _minibatches(self, experience: Experience) -> list[Minibatch]:
        """`updates` equal parts of the groups; unequal or fewer if rewards were dropped."""
        minibatches, group = [], experience.batch.group[experience.rows]
        for groups in experience.groups.tensor_split(self.args.updates):
            if len(groups):
                rows = experience.rows[torch.isin(group, groups)]
                row_weight = 1 / (len(groups) * experience.rows_per_group)
                minibatches.append(Minibatch(rows, row_weight, batch_size=len(experience.batch.prompts)))
        return minibatches

    def _compute_gradients(self, batch_loss: BatchLoss, minibatch: Minibatch, totals: LossMetrics) -> None:
        """Add the weighted gradients and metrics of a minibatch, chunk by chunk, and the gradients of the other processes.

        Only one loss's graph is in memory at a time.
        """
        chunks = list(self._chunks(minibatch, batch_loss.fixed_positions))
        chunks += self._padding_chunks(len(chunks), minibatch.batch_size)
        with self.policy.meter.timed("forward"):
            batch_loss.before_update(chunks)
            for chunk, weight in chunks:
                kept = totals if weight.any() else LossMetrics()  # a chunk that only pads has no metrics
                for loss in batch_loss.losses(chunk, weight > 0):
                    row_weight = weight.to(loss.value.device, non_blocking=True)
                    self.optimizer.backward((loss.value * row_weight).sum() / batch_loss.count)
                    kept.add(loss, row_weight / batch_loss.count)
        with self.policy.meter.timed("optimizer"):  # the norm is fetched with the losses, by one wait for the GPU
            totals.add_number(GRAD_NORM, self.optimizer.reduce_gradients())
        if not self.mid_step:
            self._check_ratio(totals)

    def _chunks(self, minibatch: Minibatch, fixed_positions: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of a minibatch in chunks of the micro-batch size, and the weights of the rows of each chunk.

        Args:
            fixed_positions: keep each row in the chunk and position that it had in the rollout; the other rows there weigh 0. Otherwise
                the rows are adjacent, and rows of weight 0 fill up the last chunk.
        """
        size, rows = self.microbatch, minibatch.rows
        if fixed_positions:
            weights = torch.zeros(minibatch.batch_size)
            weights[rows] = minibatch.row_weight
            for chunk in torch.arange(minibatch.batch_size).split(size):
                if weights[chunk].any():
                    yield chunk, weights[chunk]
            return
        for chunk in rows.split(size) if len(rows) else ():
            missing = size - len(chunk)
            weight = torch.cat([torch.full((len(chunk),), minibatch.row_weight), torch.zeros(missing)])
            yield torch.cat([chunk, chunk[:1].expand(missing)]), weight

    def _padding_chunks(self, num_chunks: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Chunks of weight 0, so that all processes run backward equally often, where the optimizer needs that."""
        if not self.optimizer.synchronous_backward:
            return []
        chunk = torch.arange(min(self.microbatch, batch_size))
        return [(chunk, torch.zeros(len(chunk)))] * (max(self.processes.all_gather(num_chunks)) - num_chunks)

    def _check_ratio(self, totals: LossMetrics) -> None:
        """Record how far the ratio is from 1 before the first update.

        Raises:
            FlowGRPOError: it is not 1.
        """
        local_deviation = totals.collect().numbers.get(RATIO_DEVIATION)
        if local_deviation is not None:
            totals.numbers["ratio/first_update_max_deviation"] = local_deviation
        deviation = max(self.processes.all_gather(local_deviation or 0.0), key=lambda d: math.inf if math.isnan(d) else d)
        if not math.isfinite(deviation):
            raise FlowGRPOError(
                f"the ratio of new to old probability is {deviation}: the weights or the velocities are no finite numbers any more. Set a "
                "lower optimizer.lr, or dtype=bf16 or fp32 in place of fp16."
            )
        if deviation != 0:
            raise FlowGRPOError(
                f"before the first update the ratio of new to old probability deviates from 1 by {deviation:.1e}: the update "
                "does not compute what the rollout did. Look for dropout or train mode, another dtype or batch shape, or a "
                "compiled model; dtype=fp32 tells rounding from a mistake."
            )

    def _optimizer_step(self, training_step: int, number: int, totals: LossMetrics) -> dict[str, float]:
        """Run the `number`-th optimizer step of this stage, and update what follows the weights. Returns its metrics."""
        norm = totals.collect().numbers.pop(GRAD_NORM)
        was_mid_step, self.mid_step = self.mid_step, True  # also if memory runs out half-way
        try:
            with self.policy.meter.timed("optimizer"):
                self.optimizer.step(self._learning_rate(training_step), norm)
        except FlowGRPOError:
            self.mid_step = was_mid_step
            raise
        finite = math.isfinite(norm)
        if not finite and self.policy.dtype != torch.float16:
            self.mid_step = was_mid_step
            raise FlowGRPOError(
                f"the gradient of step {training_step + 1} is not finite: look at the last lines of metrics.jsonl, and start another "
                "run with a smaller optimizer.lr or dtype=fp32. If a reward was the cause and is fixed, go on with --resume."
            )
        if self.args.ema_decay and finite and number % self.args.ema_every == 0:
            self.policy.ema.update(min(self.args.ema_decay, (1 + training_step) / (10 + training_step)))
        if self.calibrates_clip:
            self.clip.update(self.processes)
        count = sum(parameter.numel() for parameter in self.optimizer.parameters)
        return {GRAD_NORM: norm, "grad_rms": norm / count**0.5} if finite else {"grad_overflow": 1.0}

    def _learning_rate(self, step: int) -> float:
        config, step = self.args.optimizer, step - self.stage_start
        warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        return config.lr * warmup * (1 - (1 - config.final_lr_ratio) * min(1.0, step / max(1, self.args.steps - 1)))

    def _steps_before(self, step: int) -> int:
        """Optimizer steps of this stage before training step `step`, if every update had rows."""
        return (step - self.stage_start) * self.args.updates * self.args.epochs

    def _finish(self, totals: LossMetrics, step: int, num_minibatches: int) -> dict[str, float]:
        """Move the copies of the policy. Returns the step's metrics, of all processes."""
        for name, decay in self.policy_copies.items():
            self.policy.lora.update_copy(name, decay_at(decay, self._steps_before(step + 1)))
        totals = LossMetrics.merge(self.processes.all_gather(totals.collect()))
        self.references.update(step)
        self.mid_step = False
        mean = totals.loss / max(1, num_minibatches)
        return {"loss": mean, **totals.metrics(), **self.clip.metrics(), "lr": self._learning_rate(step)}


def loss_of_batch(
    args: FlowGRPOConfig,
    experience: Experience,
    conditioning: Conditioning,
    references: References,
    *,
    step: int,
    clip: ClipRange,
    microbatch: int,
) -> BatchLoss:
    """The loss of a run with these settings on the images of training step `step`."""
    objective = args.objective
    if isinstance(objective, Stepwise):
        return StepLoss(experience, conditioning, references, objective=objective, clip=clip)
    if isinstance(objective, RewardGradient):
        return RewardGradientLoss(experience, conditioning, references, objective=objective)
    assert isinstance(objective, ForwardProcess)
    return ForwardProcessLoss(
        experience,
        conditioning,
        references,
        objective=objective,
        noise_levels=draw_noise_levels(experience, objective, seed=args.seed, step=step),
        microbatch=microbatch,
        several_updates=args.updates * args.epochs > 1,
    )
