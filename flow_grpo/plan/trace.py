"""A config's model, traced on the meta device: what its passes take in bytes and in floating point operations.

The pipeline's own code runs without weights (see `flow_grpo.plan.meta_pipeline`), so any family can be traced, with its guidance,
its gradient checkpointing and its LoRA.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import EvaluationConfig, LoraConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of
from flow_grpo.plan.meta_pipeline import BlockCall, load_for_plan
from flow_grpo.policy.hub import resolve_lora
from flow_grpo.policy.loading import add_trainable_weights
from flow_grpo.policy.memory import apply_memory_settings, frozen_decoder
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.step_meter import ModelFlopCounter
from flow_grpo.progress import phase
from flow_grpo.text import first_line

PASSES = ("rollout", "update", "decoding")  # a forward pass without gradients, one with its backward pass, the VAE's
REWARD_GRADIENT = "reward gradient"  # the VAE's with its backward pass, of objectives by reward gradients
# How many times the bytes of its input and output cuDNN takes for a convolution in 16 bits: it copies both to the order channels-last.
# Measured on an H200 for the VAE of SD3 and FLUX, at three sizes.
CUDNN_WORKSPACE = 1.25


class UntraceableModel(FlowGRPOError):
    """A model whose code needs its weights."""


class ModelTrace:
    """The model of a config without its weights, traced with its longest prompt of those with most images.

    Args:
        cuda: trace what CUDA's autocast does.
        release_gradients: each gradient is given up as soon as it is computed, as where gradients are sharded.

    Attributes:
        policy: the policy on the meta device.
        notes: sentences on what the trace could not look up: the model's config files, the shapes of the LoRA of `lora.init_from`.
        image_shape: (3, H, W) of the model's images, (F, 3, H, W) of videos.
        bytes: the most bytes alive at once in each of `PASSES`, and in `REWARD_GRADIENT` if there is one, with 2 and with 4 rows.
        operations: floating point operations of each of them, with 2 rows.
        forward_operations: those of the trained velocity without gradients, with 2 rows; a rollout's may have guidance.
        recomputed: those of `update` that gradient checkpointing computes again.

    Raises:
        UntraceableModel: the model's code cannot be traced without its weights.
        FlowGRPOError: the model cannot be trained with these settings, or its configs are damaged or cannot be downloaded.
    """

    def __init__(self, args: FlowGRPOConfig, dtype: torch.dtype, cuda: bool, release_gradients: bool) -> None:
        self.args, self.dtype, self.cuda, self.release_gradients = args, dtype, cuda, release_gradients
        pipe, note = load_for_plan(args.model, dtype, cuda)
        self.notes = [note] if note else []
        # an attention backend may need a kernel that only the run's machine has
        apply_memory_settings(pipe, args.memory)
        self.policy = Policy(pipe, dtype, **args.pipeline_call_kwargs())
        with torch.device("meta"):
            self._add_lora_to_continue(args.lora)
            add_trainable_weights(self.policy, args.lora, args.seed)
        prompts = load_run_prompts(args.training_prompts).prompts
        self.policy.check_images(prompts)
        self.prompt = max(prompts, key=lambda prompt: (len(images_of(prompt)), len(prompt)))
        try:
            with phase(f"tracing the code of {args.model}"):
                self.schedule, self.latent_shape = self.policy.schedule(args.sampling.steps)
                self.image_shape = self.decoded_shape(2)
                memory = {rows: self._count(rows, partial(LiveBytesCounter, cuda)) for rows in (2, 4)}
                self.bytes = {rows: {name: one.peak for name, one in counters.items()} for rows, counters in memory.items()}
                counters = self._count(2, FlopCounter)
                self.operations = {name: counter.total for name, counter in counters.items()}
                self.recomputed = counters["update"].recomputed
                self.forward_operations = self._forward_operations()
        except Exception as error:  # of the pipeline's own code
            name = type(pipe).__name__
            if not self._works_without_settings():
                raise UntraceableModel(f"{name} can't be traced without its weights: {first_line(error)}") from error
            if isinstance(error, ValueError):
                raise FlowGRPOError(str(error)) from error
            raise FlowGRPOError(
                f"{name} can't be trained with these settings: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _add_lora_to_continue(self, lora: LoraConfig | None) -> None:
        """Add the saved LoRA of `init_from`, which keeps its own rank and layers, if it is on this machine."""
        if lora is None or lora.init_from is None:
            return
        source, file = resolve_lora(lora.init_from)
        if Path(source).is_dir():
            self.policy.lora.load(source, file, lora.init_from)
        else:
            self.notes.append(
                f"The rank and targets of the LoRA {lora.init_from} are not known from a file here: the estimate has those of the config."
            )

    def blocks(self, rows: int) -> list[BlockCall]:
        """One call of a block of each kind that repeats. FlowGRPOError if diffusers does not say which blocks repeat."""
        with self.policy.pipe.transformer.block_calls() as calls:
            self._count_velocity(rows, FlopCounter(), training=True)
        return calls

    def graph_bytes(self, rows: int) -> float:
        """Bytes that stay in memory from a forward pass with gradients until its backward pass."""
        conditioning, counter = self.policy.encode([self.prompt] * rows), LiveBytesCounter(self.cuda)
        x, index = torch.zeros(rows, *self.latent_shape), torch.arange(rows)
        with self.policy.pipe.transformer.counting(counter, True, self.release_gradients):
            self.policy.velocity(x, self.schedule.timesteps[0], conditioning, index)
            return counter.now

    def operations_per_image(self, evaluation: EvaluationConfig) -> float:
        """Floating point operations of a held-out image."""
        model = self.policy.with_guidance(evaluation.guidance)
        if model is self.policy:
            return (evaluation.steps * self.forward_operations + self.operations["decoding"]) / 2
        schedule, shape = model.schedule(evaluation.steps)
        x, conditioning = torch.zeros(1, *shape), model.encode([self.prompt])
        forward, decoding = FlopCounter(), FlopCounter()
        with self.policy.pipe.transformer.counting(forward, False):
            model.velocity(x, schedule.timesteps[0], conditioning, torch.arange(1))
        with self.policy.pipe.vae.counting(decoding, False):
            model.decode(x, 1)
        return evaluation.steps * forward.total + decoding.total

    def decoded_shape(self, rows: int) -> torch.Size:
        """The shape of a decoded image."""
        return self.policy.decode(torch.zeros(rows, *self.latent_shape), rows).shape[1:]

    def _count(self, rows: int, counter: Callable[[], Any]) -> dict[str, Any]:
        """A counter of that kind for each of `PASSES`, after its pass."""
        counters = {name: counter() for name in PASSES}
        self._count_velocity(rows, counters["rollout"], training=False, guidance=self.args.sampling.guidance)
        self._count_velocity(rows, counters["update"], training=True)
        with self.policy.pipe.vae.counting(counters["decoding"], False):
            self.decoded_shape(rows)
        if self.args.objective.needs.reward_gradient:
            counters[REWARD_GRADIENT] = counter()
            self._count_decoder_gradient(rows, counters[REWARD_GRADIENT])
        return counters

    def _count_decoder_gradient(self, rows: int, counter: Any) -> None:
        """One backward pass through the decoder for each slice of `rows`, as in `decode_vjp`."""
        pipe, size = self.policy.pipe, 1 if self.args.memory.vae_slicing else rows
        for _ in range(rows // size):
            with frozen_decoder(pipe), pipe.vae.counting(counter, True):
                self.policy.decode_with_grad(torch.zeros(size, *self.latent_shape))

    def _count_velocity(self, rows: int, counter: Any, training: bool, guidance: float | None = None) -> None:
        model = self.policy.with_guidance(guidance)
        conditioning = model.encode([self.prompt] * rows)
        x, index = torch.zeros(rows, *self.latent_shape), torch.arange(rows)
        with self.policy.pipe.transformer.counting(counter, training, self.release_gradients):
            model.velocity(x, self.schedule.timesteps[0], conditioning, index)

    def _forward_operations(self) -> float:
        if self.policy.with_guidance(self.args.sampling.guidance) is self.policy:
            return self.operations["rollout"]
        forward = FlopCounter()
        self._count_velocity(2, forward, training=False)
        return forward.total

    def _works_without_settings(self) -> bool:
        """Whether the code can be traced as the pipeline calls it by default: then the config's settings are to blame."""
        try:
            self.policy.lora.remove()
            self.policy = Policy(self.policy.pipe, self.dtype)
            self.schedule, self.latent_shape = self.policy.schedule(2)
            self._count_velocity(2, FlopCounter(), training=False)
        except Exception:
            return False
        return True


class LiveBytesCounter(TorchDispatchMode):
    """Counts the bytes of live tensors, each storage once, and their peak.

    Args:
        cuda: whether convolutions take what cuDNN takes.
    """

    def __init__(self, cuda: bool = False) -> None:
        super().__init__()
        self.now, self.peak = 0, 0.0
        self.cuda = cuda
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = _storages((args, *(kwargs or {}).values()))  # a view allocates nothing
        for key, storage in _storages(output).items():
            if key not in inputs:
                self._count(key, storage)
        if self.cuda and func is torch.ops.aten.convolution.default and output.element_size() == 2:
            self.peak = max(self.peak, self.now + CUDNN_WORKSPACE * (args[0].nbytes + output.nbytes))
        return output

    def _count(self, key: int, storage: Any) -> None:
        size = storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storages(values: Any) -> dict[int, Any]:
    storages = (tensor.untyped_storage() for tensor in _tensors(values))
    return {storage._cdata: storage for storage in storages}


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors of an operator's arguments or outputs; pytree's functions take a third of a trace's time."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class FlopCounter:
    """Counts floating point operations. Do not combine it with `LiveBytesCounter`: torch's counter holds on to tensors.

    Attributes:
        total: all operations.
        recomputed: those among them that gradient checkpointing computes again.
    """

    def __init__(self) -> None:
        self.total, self.recomputed = 0, 0

    def __enter__(self) -> None:
        self._counter = ModelFlopCounter()  # a new one, since entering clears it
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        self.recomputed += self._counter.recomputed
        self.total += self._counter.get_total_flops() + self._counter.recomputed
