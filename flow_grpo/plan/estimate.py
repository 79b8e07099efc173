"""Before a run: the memory and the time of a training step, from the model's config files alone."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.reward_gradient_objectives import Draft, RewardGradient
from flow_grpo.config.stepwise_objectives import Stepwise
from flow_grpo.plan import hardware
from flow_grpo.plan.hardware import GB, Rates
from flow_grpo.plan.meta_pipeline import MetaTextEncoder
from flow_grpo.plan.trace import PASSES, REWARD_GRADIENT, ModelTrace
from flow_grpo.policy.devices import DTYPES, default_dtype
from flow_grpo.policy.memory import repeated_blocks
from flow_grpo.progress import phase

TEXT_ENCODERS, ENCODING = "text encoders", "encoding"  # a part and a phase
CUDA_CONTEXT = 0.6 * GB  # of torch itself, before the first tensor
# by whether it is a GPU: a CPU's allocator keeps freed pieces, and its kernels pack copies
ALLOCATOR_OVERHEAD = {True: 1.0, False: 1.3}
# Of the bytes of a forward and backward pass: compiled blocks keep fewer tensors. SD3.5-M on an H200, blocks compiled for each size and not
# checkpointed: 0.64 and 0.63. Compiled for any size they keep still fewer.
COMPILED_SHARE = 0.64
BLOCK_OPERATIONS = {True: 2e13, False: 2e10}  # of a block's forward pass whose speed is measured, on a GPU and on a CPU
NF4_BITS = 4.5  # per weight, with the scales; the meta pipeline itself has the float8 weights of fp8_layerwise


@dataclass(frozen=True)
class StepEstimate:
    """The memory of a training step on one device.

    Attributes:
        persistent: bytes that stay allocated, by part.
        transient: bytes that are allocated for a while, by phase of the run.
        forward: floating point operations of all devices, in passes without a backward pass.
        update: those in passes with one.
        recomputed: those of `update` that gradient checkpointing computes again.
    """

    microbatch: int
    persistent: dict[str, float]
    transient: dict[str, float]
    forward: float
    update: float
    recomputed: float

    @property
    def operations(self) -> float:
        """Floating-point operations of a step, as the metric `speed/tflop` counts them: without those computed again."""
        return self.forward + self.update - self.recomputed

    def seconds(self, rates: Rates) -> float:
        """Seconds of a step without its rewards, on one device of these rates."""
        return self.forward / rates.forward + self.update / rates.update

    @property
    def peak(self) -> float:
        """The most bytes allocated at once."""
        return sum(self.persistent.values()) + max(self.transient.values())

    @property
    def encoded_peak(self) -> float:
        """The same in a run whose prompts are all in `memory.embedding_cache_dir`, so that it loads no text encoder."""
        return self.peak_without(ENCODING) - self.persistent[TEXT_ENCODERS]

    def peak_without(self, phase_name: str) -> float:
        """The most bytes allocated at once in the other phases."""
        return sum(self.persistent.values()) + max(size for name, size in self.transient.items() if name != phase_name)


class StepEstimator:
    """Estimates what a training step of a config takes, for any micro-batch.

    Args:
        cuda: for a GPU; else for a CPU, where rewards and libraries take part of the same memory.
        count: number of devices, which share weights, gradients or moments as the config says.
        trace: of a config whose model runs the same way; by default this config's model is traced.

    Attributes:
        image_size: height and width of the model's images.

    Raises:
        UntraceableModel: the model's code cannot be traced without its weights.
        FlowGRPOError: the model cannot be trained with these settings, or its configs are damaged or cannot be downloaded.
    """

    def __init__(self, args: FlowGRPOConfig, cuda: bool, count: int = 1, trace: ModelTrace | None = None) -> None:
        self.args, self.cuda, self.count = args, cuda, count
        self.dtype = dtype_of(args, cuda)
        shard, is_full = args.memory.shard if count > 1 else None, args.lora is None
        self.base_shards = count if shard is not None else 1
        self.trained_shards = self.base_shards if is_full else 1  # of what is trained, its gradients and its moments
        self.trace = trace or ModelTrace(args, self.dtype, cuda, release_gradients=self.trained_shards > 1)
        self.image_size = self.trace.image_shape[-2:]
        two, four = (self._transient(rows) for rows in (2, 4))
        self._per_row = {name: (four[name] - two[name]) / 2 for name in two}
        self._fixed = {name: two[name] - 2 * self._per_row[name] for name in two}
        self._graph = self._graph_of_a_step() if self._keeps_graphs else (0.0, 0.0)

    def estimate(self, microbatch: int, base: float = 0.0) -> StepEstimate:
        """Estimate a step with that micro-batch; `base` is the bytes of everything else in memory."""
        transient = self._transient_of(microbatch)
        more = {"libraries and rewards": base} if base else {}
        persistent = {**self._persistent(), **more}
        if self._offloaded_encoders:
            transient[ENCODING] = self._offloaded_encoders
        forward, update, recomputed = self._operations(microbatch)
        return StepEstimate(microbatch, persistent, transient, forward, update, recomputed=recomputed)

    def of_stage(self, stage: FlowGRPOConfig) -> "StepEstimator":
        """The estimator of a stage, whose model runs the same way."""
        if stage == self.args:
            return self
        same = stage.sampling.guidance == self.args.sampling.guidance
        same &= stage.objective.needs.reward_gradient == self.args.objective.needs.reward_gradient
        return StepEstimator(stage, self.cuda, self.count, self.trace if same else None)

    def heaviest_stage(self, base: float = 0.0) -> "StepEstimator":
        """The estimator of the stage whose step takes most memory; this one if the run has no stages."""
        stages = [self.of_stage(stage) for _, stage in self.args.resolved_stages()] if self.args.stages else [self]
        return max(stages, key=lambda one: one.estimate(one.args.microbatch, base).peak)

    def largest_microbatch(self, memory: float, base: float = 0.0) -> int:
        """The largest micro-batch that fits into `memory` bytes; 0 if none does."""
        available = memory - base - sum(self._persistent().values())
        if any(fixed > available for fixed in (*self._fixed.values(), self._offloaded_encoders)):
            return 0
        # a phase of one image at a time, such as sliced decoding, has no slope
        largest = int(min((available - self._fixed[name]) / slope for name, slope in self._per_row.items() if slope > 0))
        while self._keeps_graphs and largest and max(self._transient_of(largest).values()) > available:
            largest -= 1  # the memory of graphs is not linear
        return largest

    def rates(self, microbatch: int) -> Rates:
        """The speed of this machine at the model's own blocks, in the plan's dtype.

        If they are not known or cannot be measured, a fraction of that of a large matrix product.
        """
        device = torch.device("cuda" if self.cuda else "cpu")
        try:
            blocks = self.trace.blocks(2)
            per_row = self.trace.forward_operations / 2 / sum(block.count for block in blocks)
            rows = max(1, min(microbatch, int(BLOCK_OPERATIONS[self.cuda] / per_row)))
            with phase("measuring this machine"):
                meta = self.trace.policy.pipe.transformer.cast
                return hardware.measure_rates(self.trace.blocks(rows), device, self.dtype, meta)
        except Exception:  # a block that cannot be called alone, or none
            return Rates.of_device(device, self.dtype)

    def _transient_of(self, microbatch: int) -> dict[str, float]:
        """Bytes by phase. Where graphs are kept, those of all micro-batches, also its own, are in memory when a backward pass begins."""
        fixed, slope = self._graph
        images = self.args.prompts_per_step * self.args.images_per_prompt / self.count
        graph = fixed + microbatch * slope
        graphs = self.args.objective.num_losses(self.args.sampling.steps) * max(1.0, images / max(1, microbatch))
        bytes_by_phase = {name: self._fixed[name] + microbatch * per_row for name, per_row in self._per_row.items()}
        own = {"update": graph}
        return {name: max(size - own.get(name, 0.0), 0.0) + graphs * graph for name, size in bytes_by_phase.items()}

    def _graph_of_a_step(self) -> tuple[float, float]:
        """Bytes of the graph of a trained step of a micro-batch: those of any, and those of each row."""
        overhead = ALLOCATOR_OVERHEAD[self.cuda] * self._share_of_a_graph
        two, four = (overhead * self.trace.graph_bytes(rows) for rows in (2, 4))
        return two - (four - two), (four - two) / 2

    def _transient(self, rows: int) -> dict[str, float]:
        bytes_by_phase = {name: ALLOCATOR_OVERHEAD[self.cuda] * size for name, size in self.trace.bytes[rows].items()}
        bytes_by_phase["update"] *= self._share_of_a_graph
        if self._reference_passes:
            bytes_by_phase["update"] += bytes_by_phase["rollout"]  # the reference is computed while the graph is in memory
        all_copies, largest = self._offloaded
        bytes_by_phase["rollout"] += largest
        bytes_by_phase["update"] += largest if self.args.memory.gradient_checkpointing else all_copies
        return bytes_by_phase

    def _persistent(self) -> dict[str, float]:
        args, memory, pipe = self.args, self.args.memory, self.trace.policy.pipe
        trained = 4 * sum(p.numel() for p in self.trace.policy.trainable_parameters().values())
        moments = 2 * (8 / 32 if args.optimizer.name == "adamw_8bit" else 1)
        # a teacher's may be of another rank
        adapters = {anchor.adapter for anchor in args.objective.named_anchors if anchor.adapter}
        copies = 1 + bool(args.ema_decay) + len(args.objective.policy_copies) + len(adapters)
        is_full, shards = self.trace.policy.is_full_finetuning, self.trained_shards
        keeps_base = not self.cuda or self._reference_passes  # of full fine-tuning; else the base weights are on the CPU
        denoisers = self.trace.policy.lora.transformers.values()
        base = (
            trained * bool(keeps_base) if is_full else sum(weight_bytes(denoiser, memory.quantize) for denoiser in denoisers)
        )
        base -= self._offloaded[0]
        bytes_by_part = {
            "base weights": base / self.base_shards,
            TEXT_ENCODERS: text_encoder_bytes(pipe) - self._offloaded_encoders,
            "VAE": weight_bytes(pipe.vae, None),
            ("transformer" if is_full else "adapter"): trained * (copies + moments) / shards,
            # gradients that are not sharded are counted as transient
            "gradients": trained / shards if shards > 1 else 0,
            "trajectories": self._trajectories if self.cuda else 0,  # on a CPU the allocator's overhead covers them
            "CUDA": CUDA_CONTEXT if self.cuda else 0,
        }
        optional = ("gradients", "trajectories", "CUDA")
        return {name: size for name, size in bytes_by_part.items() if size or name not in optional}

    @property
    def _keeps_graphs(self) -> bool:
        return isinstance(self.args.objective, Stepwise) and self.args.objective.keep_graphs

    @property
    def _offloaded_encoders(self) -> float:
        """Bytes of the text encoders that are on the device only while prompts are encoded."""
        return text_encoder_bytes(self.trace.policy.pipe) if self.args.memory.offload_text_encoders and self.cuda else 0.0

    @property
    def _trajectories(self) -> float:
        """Bytes of all images' first and last states, and of each trained step's noise and its record of three states."""
        args = self.args
        steps = args.objective.num_losses(args.sampling.steps) if args.objective.stepwise else 0
        states = 2 + steps * (1 if args.memory.offload_trajectories else 4)
        images = args.prompts_per_step * args.images_per_prompt / self.count
        return 4 * images * states * math.prod(self.trace.latent_shape)

    @property
    def _share_of_a_graph(self) -> float:
        """The bytes of a graph over those that the trace counts."""
        memory = self.args.memory
        return COMPILED_SHARE if memory.compile is True and self.cuda and not memory.gradient_checkpointing else 1.0

    @property
    def _offloaded(self) -> tuple[float, float]:
        """Bytes of the weights that are not on the device, and of those of the largest block, which are while it computes."""
        if self.args.memory.offload is None or not self.cuda:
            return 0.0, 0.0
        sizes = [offloaded_bytes(transformer) for transformer in self.trace.policy.lora.transformers.values()]
        return sum(total for total, _ in sizes), max(largest for _, largest in sizes)

    @property
    def _reference_passes(self) -> int:
        """Forward passes without gradients for each one with them. A guided reference counts twice if the run has no guidance."""
        objective = self.args.objective
        guided = {anchor.reference for anchor in objective.named_anchors if anchor.config.guidance is not None}
        more = len(guided) if self.args.guidance <= 1 else 0
        return len(objective.references) + more + self.args.objective.needs.old_policy

    def _operations(self, microbatch: int) -> tuple[float, float, float]:
        """Operations of a step in which every group has reward variance: `forward`, `update` and `recomputed` of `StepEstimate`."""
        args, objective, steps = self.args, self.args.objective, self.args.sampling.steps
        trained = objective.num_losses(steps)
        sampled = 0.0 if args.dataset else float(steps)
        # the steps before the window are computed once for a group
        if isinstance(objective, Stepwise) and objective.shared_initial_noise:
            window = objective.window
            latest = window.last_of(steps) - trained + 1
            before = (window.first_step + latest) / 2 if window.schedule == "random" else window.first_step
            sampled -= before * (1 - 1 / args.images_per_prompt)
        rollout, both, decoding = (self.trace.operations[name] / 2 for name in PASSES)  # of one row
        with_gradient = 0.0
        if isinstance(objective, RewardGradient):
            num_gradients, num_images = objective.decoded_images(steps)
            with_gradient, decoding = num_gradients * self.trace.operations[REWARD_GRADIENT] / 2, num_images * decoding
        forward = self.trace.forward_operations / 2
        images, passes = args.prompts_per_step * args.images_per_prompt, args.epochs * trained
        updated = self._updated_images(microbatch)
        both -= forward * self._keeps_graphs  # the rollout's forward pass is the update's
        more = self._reference_passes
        # the means of split groups are computed before
        if args.objective.needs.group_mean and microbatch % args.images_per_prompt:
            more += 1 + args.objective.needs.old_policy + args.objective.needs.reference
        once = self._rollout_velocities
        if objective.stepwise and args.sampling.guidance not in (None, args.guidance):
            once += trained  # the velocity whose probability is recorded
        if isinstance(objective, Draft):
            once += objective.NOISED_COPIES
        references = updated * passes * more * forward
        sampling_and_references = images * (sampled * rollout + once * forward + decoding) + references
        update = updated * passes * both + images * with_gradient
        return sampling_and_references, update, updated * passes * self.trace.recomputed / 2

    def _updated_images(self, microbatch: int) -> float:
        """Images of a step that pass through an update, also those that fill the micro-batches of a selection."""
        parts, images = self.args.updates * self.count, self.args.updated_images
        if images == self.args.prompts_per_step * self.args.images_per_prompt:
            return images
        return math.ceil(images / parts / microbatch) * microbatch * parts

    @property
    def _rollout_velocities(self) -> int:
        """Velocities of the policy that sampled an image at its noise levels, which ratios need from the second update on."""
        args = self.args
        has_ratio = args.objective.needs.ratio and args.updates * args.epochs > 1
        return args.objective.num_noise_levels if isinstance(args.objective, ForwardProcess) and has_ratio else 0


def dtype_of(args: FlowGRPOConfig, cuda: bool) -> torch.dtype:
    """The dtype that a config's model would have on a GPU or on this CPU."""
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    return torch.bfloat16 if cuda else default_dtype("cpu")


def weight_bytes(network: Any, quantize: str | None) -> float:
    """Bytes of a network's weights without its LoRA; linear layers are quantised."""
    total = 0.0
    for name, parameter in [*network.named_parameters(), *network.named_buffers()]:
        if "lora_" not in name:
            is_linear = parameter.ndim == 2 and name.endswith("weight")
            total += parameter.numel() * (NF4_BITS / 8 if is_linear and quantize == "nf4" else parameter.element_size())
    return total


def offloaded_bytes(network: Any) -> tuple[float, float]:
    """Bytes of the repeated blocks' weights without their LoRA, and those of the largest block: it is recomputed as a whole."""
    sizes = [weight_bytes(block, None) for block in repeated_blocks(network, "memory.offload")]
    return sum(sizes), max(sizes)


def text_encoder_bytes(pipe: Any) -> float:
    """Bytes of the text encoders of a meta pipeline."""
    return sum(part.bytes for part in pipe.components.values() if isinstance(part, MetaTextEncoder))
