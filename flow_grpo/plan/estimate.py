"""Before a run: what it will need of memory and time, from the model's configs alone.

The pipeline's own code is followed without numbers (see `flow_grpo.policy.meta_pipeline`), so the forecast knows any family, with its
guidance, its checkpointing and its adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import load_prompts
from flow_grpo.distributed.processes import BUCKET_NUMEL
from flow_grpo.plan import block_speed
from flow_grpo.plan.counters import FlopCounter, LiveBytesCounter
from flow_grpo.plan.hardware import GB, Rates, matmul_speed
from flow_grpo.plan.weights_memory import LoadingMemory, weight_bytes
from flow_grpo.policy import hub
from flow_grpo.policy.devices import DTYPES, default_dtype
from flow_grpo.policy.memory import apply_memory_settings
from flow_grpo.policy.meta_pipeline import BlockCall, MetaTextEncoder, load_meta_pipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.trainable import add_trainable_weights
from flow_grpo.progress import phase
from flow_grpo.text import first_line
from flow_grpo.training.zero import STAGES

CUDA_CONTEXT = 0.6 * GB  # of torch's own, before the first tensor
# times what passes: a CPU's allocator keeps pieces of it, and its kernels pack copies of their own
ALLOCATOR_OVERHEAD = {True: 1.0, False: 1.3}
BLOCK_OPERATIONS = {True: 2e13, False: 2e10}  # of a forward pass of a block whose speed is measured, on a GPU and on a CPU


@dataclass(frozen=True)
class StepEstimate:
    """Of a training step on one device: bytes that stay, by part, and bytes that come and go, by what is done then.

    Attributes:
        forward: floating point operations of all devices, of passes without a backward pass.
        update: those of passes with one.
    """

    microbatch: int
    persistent: dict[str, float]
    transient: dict[str, float]
    forward: float
    update: float

    @property
    def operations(self) -> float:
        return self.forward + self.update

    def seconds(self, rates: Rates) -> float:
        """Of a step, the rewards' left out, on one device of these rates."""
        return self.forward / rates.forward + self.update / rates.update

    @property
    def peak(self) -> float:
        return sum(self.persistent.values()) + max(self.transient.values())


class UntraceableModel(ValueError):
    """A model whose code needs its numbers."""


class StepEstimator:
    """Forecasts for a config.

    Args:
        cuda: for a GPU; else for a CPU, where rewards and libraries lie in the same memory.
        count: devices, which share weights, gradients or moments where the config says so.

    Attributes:
        image_size: height and width of what the model draws.

    Raises:
        UntraceableModel: the model's code can't be followed without its numbers.
        ValueError: the model can't be trained so, or its configs are damaged or can't be had.
    """

    def __init__(self, args: FlowGRPOConfig, cuda: bool, count: int = 1) -> None:
        self.args, self.cuda, shard = args, cuda, args.memory.shard if count > 1 else None
        self.dtype = dtype_of(args, cuda)
        pipe = load_meta_pipeline(hub.resolve_model(args.model), self.dtype, cuda)
        apply_memory_settings(
            pipe, args.memory.model_copy(update={"attention": None})
        )  # a kernel that only the GPU's machine has
        self.loading = (
            LoadingMemory.of(pipe, self.dtype, bool(args.memory.embedding_cache_dir))
            if not cuda
            else LoadingMemory(0.0, 0.0)
        )
        self.policy = Policy(pipe, self.dtype, **args.pipeline_call_kwargs())
        with torch.device("meta"):
            add_trainable_weights(self.policy, args)
        whole = self.policy.is_full_finetuning
        self.shares = {  # in which there lie, of what is meant by each
            "base": count if shard == "fsdp2" else 1,
            "trained": count if shard == "fsdp2" and whole else 1,
            "gradients": count if shard == "zero2" or (shard == "fsdp2" and whole) else 1,
            "moments": count if shard in STAGES or (shard == "fsdp2" and whole) else 1,
        }
        self.copied = shard in STAGES  # DeepSpeed moves a copy of each process's share of what is trained
        self.sums = 2 if shard == "zero2" else 1  # it adds the newest gradients to the sum of those before
        prompts = load_prompts(args.training_prompts).prompts
        self.prompt = max(prompts, key=len)
        try:
            with phase(f"following the code of {args.model}"):
                self.schedule, self.state_shape = self.policy.schedule(args.sampling.steps)
                self.image_size = self._decoded(2)
                two, four = (
                    {name: ALLOCATOR_OVERHEAD[cuda] * v for name, v in self._passing(rows, LiveBytesCounter).items()}
                    for rows in (2, 4)
                )
                self.operations = self._passing(2, FlopCounter)
        except Exception as error:  # of the pipeline's own code
            if self._follows_without_settings():
                sentence = f"{type(pipe).__name__} can't be trained with these settings: {type(error).__name__}: {first_line(error)}"
                raise ValueError(str(error) if isinstance(error, ValueError) else sentence) from error
            raise UntraceableModel(
                f"{type(pipe).__name__} can't be followed without its weights: {first_line(error)}"
            ) from error
        if self._references:
            for one in (two, four):
                one["update"] += one["rollout"]  # the reference is computed while the graph is there
        self._slope = {name: (four[name] - two[name]) / 2 for name in two}
        self._start = {name: two[name] - 2 * self._slope[name] for name in two}

    def estimate(self, microbatch: int, base: float = 0.0) -> StepEstimate:
        """Of a step with that micro-batch, in which bytes are linear; `base` is what else lies in the memory."""
        passing = {name: self._start[name] + microbatch * slope for name, slope in self._slope.items()}
        more = {"libraries and rewards": base} if base else {}
        staying = {**self._staying(), **more}
        passing["loading"] = max(0.0, base + self.loading.peak - sum(staying.values()))
        return StepEstimate(microbatch, staying, passing, *self._operations())

    def largest_microbatch(self, memory: float, base: float = 0.0) -> int:
        """The largest micro-batch that fits, 0 if none does."""
        left = memory - base - sum(self._staying().values())
        if base + self.loading.peak > memory:
            return 0
        return max(0, int(min((left - self._start[name]) / slope for name, slope in self._slope.items())))

    def _passing(self, rows: int, counter: Callable[[], Any]) -> dict[str, float]:
        """What a counter finds of so many rows: in a forward pass without gradients, in one with its backward pass, in decoding."""
        return {
            "rollout": self._velocity(rows, counter(), False),
            "update": self._velocity(rows, counter(), True),
            "decoding": self._decoding(rows, counter()),
        }

    def _velocity(self, rows: int, counter: Any, training: bool) -> float:
        policy = self.policy
        conditioning = policy.encode([self.prompt] * rows)
        x, index = torch.zeros(rows, *self.state_shape), torch.arange(rows)
        with policy.pipe.transformer.counting(counter, training, self.shares["gradients"] > 1):
            policy.velocity(x, self.schedule.timesteps[0], conditioning, index)
        return _count(counter)

    def _decoding(self, rows: int, counter: Any) -> float:
        with self.policy.pipe.vae.counting(counter, False):
            self._decoded(rows)
        return _count(counter)

    def _decoded(self, rows: int) -> torch.Size:
        return self.policy.decode(torch.zeros(rows, *self.state_shape), rows).shape[-2:]

    def _follows_without_settings(self) -> bool:
        """Whether the model's code can be followed as the pipeline calls it by itself: then its settings are to blame."""
        try:
            self.policy = Policy(self.policy.pipe, self.dtype)
            self.schedule, self.state_shape = self.policy.schedule(2)
            self._velocity(2, FlopCounter(), False)
        except Exception:
            return False
        return True

    def rates(self, microbatch: int, dtype: torch.dtype | None = None) -> Rates:
        """The speed of this machine at the model's own blocks, in the plan's dtype or another one.

        Where they are not known or can't be measured, a share of that of a large matrix product.
        """
        device, dtype = torch.device("cuda" if self.cuda else "cpu"), dtype or self.dtype
        try:
            blocks = self._blocks(2)
            share = self.operations["rollout"] / 2 / sum(block.count for block in blocks)  # of a row in a block
            rows = max(1, min(microbatch, int(BLOCK_OPERATIONS[self.cuda] / share)))
            with phase("measuring this machine"):
                return block_speed.measure_rates(self._blocks(rows), device, dtype, self.policy.pipe.transformer.cast)
        except Exception:  # a block that can't be called alone, or none
            return Rates.of_peak(matmul_speed(device, dtype))

    def _blocks(self, rows: int) -> list[BlockCall]:
        with self.policy.pipe.transformer.block_calls() as found:
            self._velocity(rows, FlopCounter(), True)
        return found

    def _staying(self) -> dict[str, float]:
        args, memory, transformer = self.args, self.args.memory, self.policy.pipe.transformer
        trained = 4 * sum(p.numel() for p in self.policy.trainable_parameters().values())
        moments = 2 * (8 / 32 if args.optimizer.name == "adamw_8bit" else 1) + self.copied
        copies = 1 + bool(args.ema_decay) + args.method.old_policy
        whole, shares = self.policy.is_full_finetuning, self.shares
        kept = whole and (not self.cuda or self._references)  # the base model's, which is else on the CPU
        encoders = 0 if memory.offload_text_encoders or memory.embedding_cache_dir else self._encoders()
        return {
            "base weights": (trained * kept if whole else weight_bytes(transformer, memory.quantize)) / shares["base"],
            "text encoders": encoders,
            "VAE": weight_bytes(self.policy.pipe.vae, None),
            **({"files in another dtype": self.loading.stays} if self.loading.stays else {}),
            ("transformer" if whole else "adapter"): trained * (copies / shares["trained"] + moments / shares["moments"]),
            **({"gradients": trained * self.sums / shares["gradients"]} if shares["gradients"] > 1 else {}),  # else passing
            **({"messages": min(trained, 4 * BUCKET_NUMEL)} if self.copied else {}),
            **({"CUDA": CUDA_CONTEXT} if self.cuda else {}),
        }

    def _encoders(self) -> float:
        return sum(part.bytes for part in self.policy.pipe.components.values() if isinstance(part, MetaTextEncoder))

    @property
    def _references(self) -> int:
        """Forward passes without a gradient beside each one with it."""
        method = self.args.method
        return bool(self.args.objective.kl_weight or method.reference) + method.old_policy

    def _operations(self) -> tuple[float, float]:
        """Of a step in which every group has signal: in passes without a backward pass, and in those with one."""
        args = self.args
        s, o = args.sampling, args.objective
        w, last = s.window, s.steps - 2 if s.window.last_step is None else s.window.last_step
        steps = last - w.first_step + 1 if w.schedule == "all" else w.size
        trained = steps if args.method.stepwise else o.num_noise_levels
        drawn = 0 if args.dataset else (2 * s.steps - 1 if s.solver == "heun" else s.steps)
        forward, both, decoding = (count / 2 for count in self.operations.values())  # of a row
        images, passes = args.prompts_per_step * args.images_per_prompt, args.epochs * trained
        return images * (drawn * forward + decoding + passes * self._references * forward), images * passes * both


def _count(counter: Any) -> float:
    return counter.peak if isinstance(counter, LiveBytesCounter) else counter.total


def dtype_of(args: FlowGRPOConfig, cuda: bool) -> torch.dtype:
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    return torch.bfloat16 if cuda else default_dtype("cpu")
