"""The policy: a flow pipeline whose transformer is trained, by a LoRA or in full, and averaged."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded, write_errors
from flow_grpo.image_prompt import with_images
from flow_grpo.policy.families import denoisers
from flow_grpo.policy.hub import resolve_lora
from flow_grpo.policy.lora import REPLACED, TRAINED, Lora
from flow_grpo.policy.memory import compile_blocks, repeated_blocks
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.step_meter import StepMeter
from flow_grpo.policy.weights import (
    FullWeights,
    check_shapes,
    check_weights,
    copy_into,
    damaged_file,
    fully_shard_blocks,
    gather_to_cpu,
    shard_like,
)
from flow_grpo.text import first_line


class Policy(FlowPipeline):
    """A flow pipeline with trainable weights. Its arguments are those of `FlowPipeline`.

    Attributes:
        lora: the LoRA on the transformer, if it has one, and copies of it.
        trained: what is trained: the LoRA, or all weights of the transformer.
        ema: the moving average of what is trained, once it was started.
        compiled: whether a forward pass with gradients may use other kernels than one without.
        meter: measures the training steps.
        uses_fsdp: whether the transformer's weights are sharded, all but a LoRA's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # On Hopper, cuDNN's attention returns NaN or wrong gradients for some lengths (pytorch/pytorch#196678, NVIDIA/cudnn-frontend#160;
        # tests/test_cuda.py), and torch would choose it. DIFFUSERS_ATTN_BACKEND=_native_cudnn still sets it.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.lora = Lora(self.pipe, self.dtype, self.family.lora_targets, experts=denoisers(self.pipe)[1:])
        if self.lora.adapters:
            raise FlowGRPOError(
                f"the pipeline has a LoRA, {', '.join(self.lora.adapters)}: load it anew, or merge the LoRA by pipe.fuse_lora() and "
                "pipe.unload_lora_weights(). To train the LoRA on, set lora.init_from to its file, or give the trainer's `policy` of "
                "an earlier run in place of its pipeline."
            )
        for name, part in self.pipe.components.items():
            if "transformer" in name and isinstance(part, torch.nn.Module):  # one family has a second denoiser
                part.requires_grad_(False).eval()
        self.trained: Lora | FullWeights = self.lora
        self.meter = StepMeter(self.lora, self.device)
        self.ema = MovingAverage(self.trainable_parameters)
        self.compiled = self.uses_fsdp = False
        self._guided: dict[float, FlowPipeline] = {}

    # -- what is trained ----------------------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, targets: list[str] | Literal["all"] | None, seed: int) -> None:
        """Add a LoRA, as `Lora.add` does. FlowGRPOError also for a value that the settings of `lora` do not take."""
        FlowGRPOConfig(lora={"rank": rank, "alpha": alpha, "targets": targets}, seed=seed)
        self.lora.add(rank, alpha, targets, seed)

    @property
    def has_lora(self) -> bool:
        """Whether a LoRA is trained, not all weights."""
        return bool(self.lora.adapters)

    def enable_full_finetuning(self) -> None:
        """Train all weights of the transformer from now on. They become float32; autocast lowers what is computed.

        FlowGRPOError if the pipeline has several experts.
        """
        if self.lora.experts:
            raise FlowGRPOError(
                f"{type(self.pipe).__name__} has {1 + len(self.lora.experts)} transformers, which get a LoRA each: set lora."
            )
        full = self.trained if isinstance(self.trained, FullWeights) else FullWeights(self.pipe.transformer)
        full.train()
        self.trained = full

    @property
    def is_full_finetuning(self) -> bool:
        """Whether full transformer weights, not a LoRA, are trained or loaded."""
        return isinstance(self.trained, FullWeights)

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a shard of what is trained, so that all must help to gather it."""
        return self.uses_fsdp and self.is_full_finetuning

    def trainable_parameters(self, adapter: str = TRAINED) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, or those of a copy of the LoRA."""
        return self.trained.parameters() if adapter == TRAINED else self.lora.parameters(adapter)

    def base_model(self) -> AbstractContextManager[None]:
        """A context in which this is the base model: the LoRA is off, or the base weights are back."""
        return self.trained.base_model()

    def with_guidance(self, guidance: float | None) -> FlowPipeline:
        """The same weights, called with that guidance scale; within `base_model`, those of the base model. None is this policy.

        Prompts are encoded again, since guidance needs the negative ones.
        """
        if guidance is None or guidance == self.guidance:
            return self
        if guidance not in self._guided:
            offload = self.encoder.offload
            self._guided[guidance] = FlowPipeline(self.pipe, self.dtype, guidance, offload=offload, **self.own_call)
            self._guided[guidance].synced_call_count = self.synced_call_count
        return self._guided[guidance]

    def without_zero_lora(self) -> AbstractContextManager[None]:
        """Turn a LoRA with zero weights off, for speed. Not when compiled: that would recompile."""
        off = self.has_lora and not self.compiled and self.lora.is_zero
        return self.lora.base_model() if off else nullcontext()

    def store_base_weights(self, device: torch.device | str) -> None:
        """Store the base model's weights on a device for `base_model`, if all weights are trained: a LoRA leaves them unchanged."""
        if isinstance(self.trained, FullWeights):
            self.trained.store_base_weights(device)

    def reset_to_base(self) -> None:
        """Remove what was loaded or trained, so that the base model is left and something else can be loaded."""
        self.trained.remove()
        self.trained = self.lora

    # -- files and checkpoints ----------------------------------------------------------------------------------------

    def load_lora(self, path: str | Path) -> None:
        """Load a saved LoRA, of this or another program, or the transformer of full fine-tuning in place of the base model's.

        Args:
            path: a folder, a .safetensors file, a hub id, or the folder of a finished run.

        Raises:
            FlowGRPOError: it cannot be loaded, is of another model, holds values that are not finite, or is not the first to be loaded.
        """
        source, file = resolve_lora(path)
        is_full = FullWeights.is_saved_in(Path(source))
        if self.is_full_finetuning or (is_full and TRAINED in self.lora.adapters):
            raise FlowGRPOError(REPLACED)
        with _explain_loading(path, source, file):
            if is_full:
                full = FullWeights(self.pipe.transformer)
                full.load(Path(source))
                self.trained = full
            else:
                self.lora.load(source, file, str(path))
        try:
            check_weights(self.trainable_parameters(), f"the {'transformer' if is_full else 'LoRA'} {path}")
        except ValueError:
            self.reset_to_base()
            raise

    def add_teacher(self, adapter: str, path: str | Path) -> None:
        """Add a saved LoRA beside the trained one, as an adapter of that name, never trained. Arguments and errors as in `load_lora`.

        Raises:
            FlowGRPOError: also if it is a whole transformer, or all weights are trained.
        """
        source, file = resolve_lora(path)
        if not self.has_lora:
            raise FlowGRPOError(
                f"the teacher {path} is a LoRA beside the trained one, and lora=null trains all weights: set lora."
            )
        if FullWeights.is_saved_in(Path(source)):
            raise FlowGRPOError(f"the teacher {path} is a whole transformer: give a LoRA.")
        with _explain_loading(path, source, file):
            self.lora.load(source, file, str(path), adapter)
        check_weights(self.lora.parameters(adapter), f"the LoRA {path}")

    def save(self, folder: str | Path, write: bool = True) -> Path:
        """Write what is trained, a LoRA or the transformer, as `load_lora` and diffusers read it. Returns the file or folder.

        Args:
            write: False on processes that only help to gather the weights.

        Raises:
            FlowGRPOError: nothing is trained, or the folder can't be written.
        """
        if not (self.has_lora or self.is_full_finetuning):
            raise FlowGRPOError("the policy has no trained weights to save: add a LoRA by policy.add_lora(...).")
        folder = expanded(folder)
        with write_errors(folder):
            return self.trained.save(folder, write)

    def adapter_state(self, adapter: str = TRAINED, keep_on_this_rank: bool = True) -> dict[str, Tensor]:
        """The full (unsharded) trained parameters on the CPU.

        If they are sharded, every process must call this; pass keep_on_this_rank=False on processes that discard the result.
        """
        return gather_to_cpu(self.trainable_parameters(adapter), keep_on_this_rank)

    def load_adapter_state(self, state: dict[str, Tensor], adapter: str = TRAINED) -> None:
        """Restore what `adapter_state` returned. FlowGRPOError if it is of other parameters."""
        parameters = self.trainable_parameters(adapter)
        check_shapes(state, parameters)
        copy_into(parameters, state)

    # -- how it is computed -------------------------------------------------------------------------------------------

    def compile(self, falls_back: bool = False) -> None:
        """Compile the transformer's repeated blocks, with the LoRA in them: for each size, unless prompts differ in length.

        Args:
            falls_back: code that torch fails to compile runs as it is, in place of an error. It then does so in the whole process.
        """
        if falls_back:
            torch._dynamo.config.suppress_errors = True
        self.encode(self.probe_prompts[:1])  # finds out whether they do
        for transformer in self.lora.transformers.values():
            compile_blocks(transformer, for_each_size=self.encoder.pads_to_one_length)
        self.compiled = True

    def free_memory(self) -> None:
        """Free the memory of a GPU that torch keeps for later tensors."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shard(self, processes: Processes, within_machines: bool = False) -> None:
        """Shard the weights over the processes. From now on all of them call the transformer equally often.

        Args:
            within_machines: over those of each machine, each of which then holds all weights.

        Raises:
            FlowGRPOError: the pipeline has several experts, of which processes could call different ones at a time; or machines have
                different numbers of processes.
        """
        if self.lora.experts:
            raise FlowGRPOError(
                f"memory.shard is for one transformer, and {type(self.pipe).__name__} has several: leave it out."
            )
        mesh = processes.mesh_by_machine(self.device.type) if within_machines else None
        conditioning, (schedule, shape) = self.encode(self.probe_prompts[:1] * 2), self.schedule(2)
        x, rows = torch.zeros(2, *shape), torch.arange(2)
        self.accepts_per_sample_timesteps(x, schedule.timesteps, conditioning, rows)  # while all processes compute alike
        if self.takes_images:
            self._probe_images(x, schedule.timesteps)
        transformer = self.pipe.transformer
        replicated = {parameter for name, parameter in transformer.named_parameters() if "lora_" in name}
        fully_shard_blocks(transformer, repeated_blocks(transformer, "memory.shard"), replicated, mesh)
        self.uses_fsdp, self.meter.counts_flops = True, False  # an extra call would have to run on every process
        for model in (self, *self._guided.values()):
            model.synced_call_count = lambda calls: max(processes.all_gather(calls))

    def _probe_images(self, x: Tensor, timesteps: Tensor) -> None:
        """Find out whether rows with different images can share a call; prompts with images may come later, to some processes first."""
        try:
            self.accepts_images_per_row(x, timesteps[0], with_images("a", self.probe_images(1)))
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TypeError):  # a model that is trained on texts
            self.supports_images_per_row = False


@contextmanager
def _explain_loading(path: str | Path, source: str, file: str | None) -> Iterator[None]:
    """Raise FlowGRPOError that says what is wrong if the LoRA at that path, resolved to source and file, can't be loaded."""
    try:
        yield
    except (FlowGRPOError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        damaged = damaged_file(Path(source), file)
        reason = f"{damaged} is damaged or no .safetensors file: copy it again." if damaged else first_line(error)
        raise FlowGRPOError(f"the LoRA {path} could not be loaded: {reason}") from error


class MovingAverage:
    """The exponential moving average of parameters.

    Args:
        parameters: returns the parameters by name.

    Attributes:
        average: the averaged parameters by name; empty unless `start` was called.
    """

    def __init__(self, parameters: Callable[[], dict[str, torch.nn.Parameter]]) -> None:
        self.parameters = parameters
        self.average: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin the average with the current parameters."""
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters().items()}

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set the average to decay x itself + (1 - decay) x the parameters."""
        for name, parameter in self.parameters().items():
            self.average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the parameters have the values of the average, if there is one."""
        parameters = self.parameters()
        current = {name: p.detach().clone() for name, p in parameters.items() if name in self.average}
        copy_into(parameters, self.average)
        try:
            yield
        finally:
            copy_into(parameters, current)

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Tensor]:
        """The full (unsharded) average on the CPU, empty if there is none.

        If the parameters are sharded, every process must call this; pass keep_on_this_rank=False on processes that discard the result.
        """
        return gather_to_cpu(self.average, keep_on_this_rank)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore an average. FlowGRPOError if it is of other parameters, or there should be none."""
        parameters = self.parameters()
        check_shapes(state, parameters if self.average else {})
        self.average = {
            name: shard_like(value.to(parameters[name].device), parameters[name].detach()) for name, value in state.items()
        }
