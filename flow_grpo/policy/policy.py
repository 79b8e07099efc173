"""A flow pipeline whose transformer is trained, by a LoRA or all of it: its copies, its files, and how a model is loaded."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from diffusers import DiffusionPipeline
from peft import (
    LoraConfig,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.distributed.sharding import fully_shard_blocks, gather_to_cpu, shard_like
from flow_grpo.files import normalize_safetensors
from flow_grpo.policy import hub
from flow_grpo.policy.embedding_cache import EmbeddingCache
from flow_grpo.policy.full_weights import FullWeights
from flow_grpo.policy.hub import PEFT_WEIGHTS, WEIGHTS
from flow_grpo.policy.library_logging import quietly
from flow_grpo.policy.memory import apply_memory_settings, compile_blocks, quantization, repeated_blocks
from flow_grpo.policy.model_files import check_weights as check_files
from flow_grpo.policy.model_files import telling
from flow_grpo.policy.pipeline import ENCODER_PREFIXES, PROBE_PROMPTS, FlowPipeline
from flow_grpo.policy.weight_checks import check_weights
from flow_grpo.progress import phase
from flow_grpo.text import first_line
from rewards.downloads import downloads

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEFT_PREFIX = "base_model.model."


class Policy(FlowPipeline):
    """A flow pipeline with a trainable LoRA on its transformer, or with a transformer that is trained as a whole.

    Attributes:
        ema: the averaged parameters by name, once `start_ema` was called.
        whole: the transformer, where all its weights are trained, or were, in place of a LoRA on it.
        compiled: whether a forward pass with gradients may be another kernel than one without.
        sharded: whether each process holds a share of the weights, but for the LoRA's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ema: dict[str, Tensor] = {}
        self.whole: FullWeights | None = None
        self.compiled = self.uses_fsdp = False

    # -- the whole transformer ----------------------------------------------------------------------------------------

    def enable_full_finetuning(self) -> None:
        """From here on all weights of the transformer are trained. They are float32; autocast lowers what is computed."""
        self.whole = self.whole or FullWeights(self.pipe.transformer)
        self.whole.train()

    @property
    def is_full_finetuning(self) -> bool:
        """Whether all weights of the transformer are trained, or were, in place of a LoRA on it."""
        return self.whole is not None

    def store_base_weights(self, device: torch.device | str) -> None:
        """Keeps the base model's weights there; those of now, unless others were loaded in their place."""
        assert self.whole
        self.whole.store_base_weights(device)

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a share of what is trained, so that all must help to gather it."""
        return self.uses_fsdp and self.is_full_finetuning

    # -- the adapter ------------------------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, targets: list[str] | Literal["all"] | None, seed: int) -> None:
        """Puts a float32 LoRA on the modules whose names end with one of `targets`. Seeded, and starting as the base.

        Without targets it is the attention of the family; `all` are all linear layers. ValueError if there is no such module.
        """
        transformer = self.pipe.transformer
        modules = transformer.named_modules()
        linear = [name.removesuffix(".base_layer") for name, module in modules if isinstance(module, torch.nn.Linear)]
        wanted = self.family.lora_targets if targets is None else linear if targets == "all" else targets
        found = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in linear)]
        if not found:
            there = sorted(
                {".".join(name.split(".")[-2:]) if name[-1].isdigit() else name.split(".")[-1] for name in linear}
            )
            raise ValueError(
                f"no linear layer of {type(transformer).__name__} is named {', '.join(wanted)}: set lora.targets to some of "
                f"{', '.join(there)}."
            )
        self._check_memory(rank, found)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._inject(LoraConfig(r=rank, lora_alpha=alpha, target_modules=found, init_lora_weights="gaussian"), "default")
        self._finish_adapter()

    def _check_memory(self, rank: int, targets: Sequence[str]) -> None:
        """ValueError if a LoRA of that rank on modules with these endings would alone fill this machine's memory."""
        layers = [
            module
            for name, module in self.pipe.transformer.named_modules()
            if isinstance(module, torch.nn.Linear)
            and f".{name.removesuffix('.base_layer')}".endswith(tuple(f".{t}" for t in targets))
        ]
        needed, there = 4 * rank * sum(sum(layer.weight.shape) for layer in layers), psutil.virtual_memory().total
        if needed > there:
            raise ValueError(
                f"lora.rank={rank}: the LoRA alone would take {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:.0f}: set a "
                "smaller rank, such as 32."
            )

    def _inject(self, config: LoraConfig, adapter: str) -> None:
        transformer = self.pipe.transformer
        if hasattr(transformer, "add_adapter"):
            transformer.add_adapter(config, adapter)
        else:  # transformers of a few families know nothing of adapters
            inject_adapter_in_model(config, transformer, adapter)
            transformer.peft_config = {**getattr(transformer, "peft_config", {}), adapter: config}

    def load_lora(self, path: str | Path) -> None:
        """Puts a saved LoRA on the transformer as diffusers does: a folder, a .safetensors file, a hub id or a finished run.

        Or, from a folder with a whole transformer's weights, those in place of the base model's.
        """
        path, name = hub.resolve_lora(path), None
        folder = Path(path)
        if folder.is_file():
            folder, name = folder.parent, folder.name
        elif not folder.exists() and not hub.looks_like_hub_id(str(path)):
            raise ValueError(f"there is no LoRA at {path}: give a folder with {WEIGHTS}, or that file.")
        source = str(folder if folder.exists() else path)
        try:
            if FullWeights.lies_in(folder):
                whole = FullWeights(self.pipe.transformer)
                whole.load(folder)
                self.whole = whole
                self._check_loaded(f"the transformer {path}")
                return
            with downloads(source):
                self._load_adapter(source, name)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"the LoRA {path} could not be loaded: {first_line(error)}") from error
        self._finish_adapter()
        self._check_loaded(f"the LoRA {path}")

    def _check_loaded(self, source: str) -> None:
        """Takes off again what holds nothing, or values that are not finite, and raises ValueError."""
        scales = [scale for layer in self.lora_layers() for scale in layer.scaling.values()]
        try:
            check_weights(self.trainable_parameters(), source)
            if not all(map(math.isfinite, scales)):
                raise ValueError(f"{source} has an alpha that is not finite: take an earlier checkpoint of the run.")
        except ValueError:
            self.reset_to_base()
            raise

    def _load_adapter(self, source: str, name: str | None) -> None:
        if self.has_lora_loader:
            self.pipe.load_lora_weights(source, weight_name=name, adapter_name="default")
        elif hasattr(self.pipe.transformer, "load_lora_adapter"):
            self.pipe.transformer.load_lora_adapter(source, weight_name=name or WEIGHTS, adapter_name="default", prefix=None)
        else:
            self._load_with_peft(source)

    def reset_to_base(self) -> None:
        """Takes off what was loaded or trained, if anything was: the base model is left, and something else can be loaded."""
        if self.whole:
            self.whole.leave()
            self.whole = None
        if self.has_lora:
            self.remove_lora()

    def remove_lora(self) -> None:
        """Takes the adapter off, so that another one can be loaded."""
        for layer in self.lora_layers():
            layer.delete_adapter("default")
        self.pipe.transformer.peft_config.pop("default")

    @property
    def has_lora_loader(self) -> bool:
        """Whether the pipeline has `load_lora_weights` for its transformer; a few have none, or one for a UNet."""
        save = getattr(self.pipe, "save_lora_weights", None)
        return save is not None and "transformer_lora_layers" in inspect.signature(save).parameters

    def _load_with_peft(self, source: str) -> None:
        self._inject(LoraConfig.from_pretrained(source), "default")
        set_peft_model_state_dict(self.pipe.transformer, load_peft_weights(source, device="cpu"), adapter_name="default")

    def _finish_adapter(self) -> None:
        for module in self.pipe.transformer.modules():
            if isinstance(module, BaseTunerLayer):
                # peft would cast each input to the LoRA's float32, only for autocast to cast it back
                module.cast_input_dtype_enabled = self.dtype == torch.float32
        for parameter in self.trainable_parameters().values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    @property
    def has_lora(self) -> bool:
        return bool(self.adapters)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the transformer."""
        return list(getattr(self.pipe.transformer, "peft_config", {}))

    def trainable_parameters(self, adapter: str = "default") -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name; all of the transformer's, where they are trained."""
        if self.whole:
            return self.whole.parameters()
        mark = f".{adapter}."
        return {n: p for n, p in self.pipe.transformer.named_parameters() if "lora_" in n and mark in n}

    def lora_layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.pipe.transformer.modules() if isinstance(module, BaseTunerLayer))

    def compile(self) -> None:
        """Compiles the transformer's repeated blocks, the LoRA within them."""
        compile_blocks(self.pipe.transformer)
        self.compiled = True

    def shard(self, processes: Processes) -> None:
        """Spreads the weights over the processes; from here on all of them call the transformer equally often."""
        conditioning, (schedule, shape) = self.encode(list(PROBE_PROMPTS[:1] * 2)), self.schedule(2)
        self._has_per_sample_timesteps(
            torch.zeros(2, *shape), schedule.timesteps, conditioning, torch.arange(2)
        )  # while all are alike
        transformer = self.pipe.transformer
        replicated = {p for name, p in transformer.named_parameters() if "lora_" in name}
        fully_shard_blocks(transformer, repeated_blocks(transformer, "memory.shard"), replicated)
        self.uses_fsdp, self._calls = True, lambda calls: max(processes.all_gather(calls))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it, the adapter is off, or the base weights are back: the base model, which is the reference of the KL."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        if self.whole:
            self.whole.swap()
        for layer in self.lora_layers():
            layer.enable_adapters(on)

    def start_ema(self) -> None:
        self.ema = {name: p.detach().clone() for name, p in self.trainable_parameters().items()}

    @torch.no_grad()
    def update_ema(self, decay: float) -> None:
        for name, parameter in self.trainable_parameters().items():
            self.ema[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Within it, the adapter holds its moving average, if there is one: what is evaluated and saved."""
        current = {name: p.detach().clone() for name, p in self.trainable_parameters().items() if name in self.ema}
        self._assign(self.ema)
        try:
            yield
        finally:
            self._assign(current)

    def add_adapter_copy(self, adapter: str) -> None:
        """A second adapter with the values of the first, not trained: `update_adapter_copy` moves it, `use_adapter` switches to it."""
        self._inject(self.pipe.transformer.peft_config["default"], adapter)
        self._use("default")
        for parameter in self.trainable_parameters(adapter).values():
            parameter.data = parameter.data.float()
        self.update_adapter_copy(adapter, 0.0)

    @torch.no_grad()
    def update_adapter_copy(self, adapter: str, decay: float) -> None:
        """Moves the copy towards the trained adapter: decay times itself plus the rest of the trained one."""
        own = self.trainable_parameters(adapter)
        for name, parameter in self.trainable_parameters().items():
            own[name.replace(".default.", f".{adapter}.")].lerp_(parameter, 1 - decay)

    @contextmanager
    def use_adapter(self, adapter: str) -> Iterator[None]:
        """Within it, that adapter is active instead of the trained one."""
        self._use(adapter)
        try:
            yield
        finally:
            self._use("default")

    def _use(self, adapter: str) -> None:
        for layer in self.lora_layers():
            layer.set_adapter(adapter)
        for name, parameter in self.pipe.transformer.named_parameters():
            if "lora_" in name:  # the trained one is always `default`, whichever is active
                parameter.requires_grad_(".default." in name)

    def save(self, folder: Path, write: bool = True) -> Path:
        """Writes what is trained, a LoRA or the transformer, for `load_lora` and diffusers, and returns the file or folder.

        Args:
            write: False in the processes that only help to gather it.
        """
        if self.whole:
            return self.whole.save(folder, write)
        return self.save_lora(folder) if write else folder

    def save_lora(self, folder: Path) -> Path:
        """Writes the adapter, rank and alpha inside, as `pipe.load_lora_weights` takes it, and returns the file.

        For a pipeline without that method it is the transformer's own format (`load_lora_adapter`) or, where the transformer knows
        nothing of adapters either, peft's (`PeftModel.from_pretrained`).
        """
        folder.mkdir(parents=True, exist_ok=True)
        transformer, file = self.pipe.transformer, folder / WEIGHTS
        state, config = get_peft_model_state_dict(transformer, adapter_name="default"), transformer.peft_config["default"]
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)  # else they are written in an order of the process
        if self.has_lora_loader:
            type(self.pipe).save_lora_weights(
                folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
            )
        elif hasattr(transformer, "save_lora_adapter"):
            transformer.save_lora_adapter(folder, adapter_name="default", weight_name=WEIGHTS)
        else:
            file = folder / PEFT_WEIGHTS
            save_file({f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}, file)
            config.save_pretrained(str(folder))
        normalize_safetensors(file)
        return file

    def adapter_state(self, adapter: str = "default", keep: bool = True) -> dict[str, Tensor]:
        """The trained parameters, whole, on the CPU. Where they are spread, all processes must ask, and need not `keep` them."""
        return gather_to_cpu(dict(self.trainable_parameters(adapter)), keep)

    def ema_state(self, keep: bool = True) -> dict[str, Tensor]:
        """Their moving average, likewise."""
        return gather_to_cpu(self.ema, keep)

    def load_ema_state(self, state: dict[str, Tensor]) -> None:
        own = self.trainable_parameters()
        _check_fit(state, own if self.ema else {})
        self.ema = {name: shard_like(value.to(self.device), own[name].detach()) for name, value in state.items()}

    def load_adapter_state(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        _check_fit(state, self.trainable_parameters(adapter))
        self._assign(state, adapter)

    @torch.no_grad()
    def _assign(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        own = self.trainable_parameters(adapter)
        for name, value in state.items():
            own[name].copy_(shard_like(value, own[name]))


@quietly()
def load_policy(
    path_or_name: str,
    device: str | None = None,
    dtype: str = "auto",
    lora: str | Path | None = None,
    guidance: float = 1.0,
    memory: MemoryConfig | None = None,
    prompts: list[str] | None = None,
    **call: Any,
) -> Policy:
    """A policy from a diffusers folder, a hub id or the name of a shipped model (`tiny`).

    Args:
        device: torch device; the accelerator if there is one, else the CPU.
        dtype: of the base weights and of autocast: fp32, bf16, fp16, or auto, which is bf16 where the device computes in
            it and fp32 elsewhere. A LoRA is float32 in any case.
        lora: a saved LoRA to put on, as `Policy.load_lora` takes it.
        guidance: guidance scale, whatever the pipeline's argument for it is called; 1 is off.
        memory: what is where, and in how many bits.
        prompts: all that will be asked for. If their embeddings are all kept on disk, the text encoders are not loaded.
        call: arguments of every pipeline call (height, width, max_sequence_length ...).

    Raises:
        ValueError: there is no such model, or it is not a flow.
    """
    memory = memory or MemoryConfig()
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}; choose one of auto, {', '.join(DTYPES)}.")
    if not math.isfinite(guidance):
        raise ValueError(f"guidance={guidance} is not a finite number: set one, or 1 for none.")
    source = hub.resolve_model(path_or_name)
    device = usable_device(device)
    weights = default_dtype(device) if dtype == "auto" else DTYPES[dtype]
    embeddings = EmbeddingCache(
        memory.embeddings, [hub.fingerprint(source), str(weights), guidance > 1, sorted(call.items())]
    )
    more: dict[str, Any] = {}
    if prompts is not None and embeddings.complete([*PROBE_PROMPTS[:1], *prompts]):
        more |= dict.fromkeys(hub.component_names(source, ENCODER_PREFIXES))
    if memory.quantize is not None:
        more["quantization_config"] = quantization(memory.quantize, weights)
    if Path(source).is_dir():
        check_files(source, [name for name, part in more.items() if part is None])
    with phase(f"loading {path_or_name}"), telling(path_or_name), downloads(source):
        pipe = DiffusionPipeline.from_pretrained(source, torch_dtype=weights, **more)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and not (memory.offload_encoders and name.startswith(ENCODER_PREFIXES)):
            part.to(device)
    apply_memory_settings(pipe, memory)
    policy = Policy(pipe, weights, guidance, embeddings, memory.offload_encoders, **call)
    if lora is not None:
        policy.load_lora(lora)
    return policy


def _check_fit(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """ValueError if a checkpoint holds other tensors than these."""
    if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in own.items()}:
        raise ValueError("the checkpoint's adapter has other modules or another rank than the config asks for.")


def usable_device(device: str | None) -> str:
    """The device, by default the accelerator if there is one, else the CPU. ValueError if torch can't use it here."""
    device = device or default_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device} can't be used here: {first_line(error)}") from error
    return device


def default_device() -> str:
    """cuda, else mps (untested: no such machine was at hand), else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """bf16 where the device has instructions for it, else fp32: a CPU without them is a hundred times slower in bf16."""
    kind = torch.device(device).type
    if kind == "cpu":
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    else:
        native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
