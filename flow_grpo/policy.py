"""A flow pipeline whose transformer carries a trainable LoRA: the adapter, its copies, its files, and how a model is loaded."""

import inspect
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import (
    LoraConfig,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo import checkpoint, hub
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.embeddings import Embeddings
from flow_grpo.hub import PEFT_WEIGHTS, WEIGHTS
from flow_grpo.memory import arrange, compile_blocks, quantization, shard
from flow_grpo.parallel import Processes
from flow_grpo.pipeline import ENCODERS, PROBES, FlowPipeline
from flow_grpo.probe import first_line
from flow_grpo.sections import MemoryConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEFT_PREFIX = "base_model.model."


class Policy(FlowPipeline):
    """A flow pipeline with a trainable LoRA on its transformer.

    Attributes:
        ema: the averaged adapter by parameter name, once `start_ema` was called.
        compiled: whether a forward pass with gradients may be another kernel than one without.
        sharded: whether each process holds a share of the base weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ema: dict[str, Tensor] = {}
        self.compiled = self.sharded = False

    # -- the adapter ------------------------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, targets: list[str] | None, seed: int) -> None:
        """Puts a float32 LoRA on the modules whose names end with one of `targets`. Seeded, and starting as the base.

        Without targets it is the attention of the family. ValueError if there is no such module.
        """
        transformer = self.pipe.transformer
        modules = transformer.named_modules()
        linear = [name.removesuffix(".base_layer") for name, module in modules if isinstance(module, torch.nn.Linear)]
        wanted = self.family.targets if targets is None else targets
        found = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in linear)]
        if not found:
            there = sorted(
                {".".join(name.split(".")[-2:]) if name[-1].isdigit() else name.split(".")[-1] for name in linear}
            )
            raise ValueError(
                f"no linear layer of {type(transformer).__name__} is named {', '.join(wanted)}: set lora.targets to some of "
                f"{', '.join(there)}."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._inject(LoraConfig(r=rank, lora_alpha=alpha, target_modules=found, init_lora_weights="gaussian"), "default")
        self._finish_adapter()

    def _inject(self, config: LoraConfig, adapter: str) -> None:
        transformer = self.pipe.transformer
        if hasattr(transformer, "add_adapter"):
            transformer.add_adapter(config, adapter)
        else:  # transformers of a few families know nothing of adapters
            inject_adapter_in_model(config, transformer, adapter)
            transformer.peft_config = {**getattr(transformer, "peft_config", {}), adapter: config}

    def load_lora(self, path: str | Path) -> None:
        """Puts a saved LoRA on the transformer as diffusers does: a folder, a .safetensors file, a hub id, a run or its checkpoint."""
        path, name = hub.lora_of(path), None
        folder = Path(path)
        if (folder / checkpoint.SEAL).is_file():
            self._load_checkpoint(folder)
            return
        if folder.is_file():
            folder, name = folder.parent, folder.name
        elif not folder.exists() and not hub.may_be_hub_id(str(path)):
            raise ValueError(f"there is no LoRA at {path}: give a folder with {WEIGHTS}, or that file.")
        source = str(folder if folder.exists() else path)
        try:
            if self.loads_loras:
                self.pipe.load_lora_weights(source, weight_name=name, adapter_name="default")
            elif hasattr(self.pipe.transformer, "load_lora_adapter"):
                self.pipe.transformer.load_lora_adapter(
                    source, weight_name=name or WEIGHTS, adapter_name="default", prefix=None
                )
            else:
                self._load_with_peft(source)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"the LoRA {path} could not be loaded: {first_line(error)}") from error
        self._finish_adapter()

    def _load_checkpoint(self, folder: Path) -> None:
        """The adapter of a run's checkpoint: its moving average, where it has one, as that is what a run evaluates and saves."""
        state = checkpoint.read(folder.parent, int(folder.name.removeprefix("step_")))
        lora = FlowGRPOConfig.read(folder.parent.parent / hub.CONFIG).lora
        if lora.start is None:
            self.add_lora(lora.rank, lora.alpha, lora.targets, seed=0)
        else:
            self.load_lora(lora.start)
        self.load_adapter_state(state["ema"] or state["adapter"])

    def drop_lora(self) -> None:
        """Takes the adapter off, so that another one can be loaded."""
        for layer in self._layers():
            layer.delete_adapter("default")
        self.pipe.transformer.peft_config.pop("default")

    @property
    def loads_loras(self) -> bool:
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
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    @property
    def has_lora(self) -> bool:
        return bool(self.adapters)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the transformer."""
        return list(getattr(self.pipe.transformer, "peft_config", {}))

    def parameters(self, adapter: str = "default") -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name."""
        mark = f".{adapter}."
        return {n: p for n, p in self.pipe.transformer.named_parameters() if "lora_" in n and mark in n}

    def _layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.pipe.transformer.modules() if isinstance(module, BaseTunerLayer))

    def compile(self) -> None:
        """Compiles the transformer's repeated blocks, the LoRA within them."""
        compile_blocks(self.pipe.transformer)
        self.compiled = True

    def shard(self, processes: Processes) -> None:
        """Spreads the base weights over the processes; from here on all of them call the transformer equally often."""
        conditioning, (schedule, shape) = self.encode(list(PROBES[:1] * 2)), self.schedule(2)
        self._takes_timesteps(
            torch.zeros(2, *shape), schedule.timesteps, conditioning, torch.arange(2)
        )  # while all are alike
        shard(self.pipe.transformer, {p for name, p in self.pipe.transformer.named_parameters() if "lora_" in name})
        self.sharded, self._calls = True, lambda calls: max(processes.everyone(calls))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it, the adapter is off: the base model, which is the reference of the KL."""
        for layer in self._layers():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers():
                layer.enable_adapters(True)

    def start_ema(self) -> None:
        self.ema = {name: p.detach().clone() for name, p in self.parameters().items()}

    @torch.no_grad()
    def update_ema(self, decay: float) -> None:
        for name, parameter in self.parameters().items():
            self.ema[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the adapter holds its moving average, if there is one: what is evaluated and saved."""
        current = {name: p.detach().clone() for name, p in self.parameters().items() if name in self.ema}
        self._assign(self.ema)
        try:
            yield
        finally:
            self._assign(current)

    def add_copy(self, adapter: str) -> None:
        """A second adapter with the values of the first, not trained: `follow` moves it, `using` switches to it."""
        self._inject(self.pipe.transformer.peft_config["default"], adapter)
        self._use("default")
        for parameter in self.parameters(adapter).values():
            parameter.data = parameter.data.float()
        self.follow(adapter, 0.0)

    @torch.no_grad()
    def follow(self, adapter: str, decay: float) -> None:
        """Moves the copy towards the trained adapter: decay times itself plus the rest of the trained one."""
        own = self.parameters(adapter)
        for name, parameter in self.parameters().items():
            own[name.replace(".default.", f".{adapter}.")].lerp_(parameter, 1 - decay)

    @contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Within it, that adapter is active instead of the trained one."""
        self._use(adapter)
        try:
            yield
        finally:
            self._use("default")

    def _use(self, adapter: str) -> None:
        for layer in self._layers():
            layer.set_adapter(adapter)
        for name, parameter in self.pipe.transformer.named_parameters():
            if "lora_" in name:  # the trained one is always `default`, whichever is active
                parameter.requires_grad_(".default." in name)

    def save_lora(self, folder: Path) -> Path:
        """Writes the adapter, rank and alpha inside, as `pipe.load_lora_weights` takes it, and returns the file.

        For a pipeline without that method it is the transformer's own format (`load_lora_adapter`) or, where the transformer knows
        nothing of adapters either, peft's (`PeftModel.from_pretrained`).
        """
        folder.mkdir(parents=True, exist_ok=True)
        transformer = self.pipe.transformer
        state, config = get_peft_model_state_dict(transformer, adapter_name="default"), transformer.peft_config["default"]
        if self.loads_loras:
            type(self.pipe).save_lora_weights(
                folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
            )
        elif hasattr(transformer, "save_lora_adapter"):
            transformer.save_lora_adapter(folder, adapter_name="default", weight_name=WEIGHTS)
        else:
            save_file({f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}, folder / PEFT_WEIGHTS)
            config.save_pretrained(str(folder))
            return folder / PEFT_WEIGHTS
        return folder / WEIGHTS

    def merge(self, folder: Path, base: str) -> None:
        """Adds the LoRA to the base weights, one rounding to their dtype, and writes the pipeline as `from_pretrained` takes it.

        The adapter is gone afterwards. The other parts are copied from `base`, which the pipeline was loaded from: what diffusers
        saves of a part is not always what it loads. ValueError if the base weights are quantised.
        """
        transformer = self.pipe.transformer
        if transformer.config.get("quantization_config") is not None:
            raise ValueError(
                "the base weights are quantised, and a LoRA can't be added to them: export the LoRA without merging."
            )
        for layer in self._layers():
            linear = layer.get_base_layer()
            dtype = linear.weight.dtype
            linear.float()
            layer.merge(safe_merge=True)
            linear.to(dtype)
        recurse_remove_peft_layers(transformer)
        del transformer.peft_config
        transformer._hf_peft_config_loaded = False  # else diffusers would save an adapter
        transformer.save_pretrained(folder / "transformer")
        source = hub.locate(base)
        place = Path(source if Path(source).is_dir() else DiffusionPipeline.download(source))
        shutil.copy(place / hub.INDEX, folder)
        for part in hub.components(str(place), ("",)):
            if part != "transformer" and (place / part).is_dir():
                shutil.copytree(place / part, folder / part)

    def adapter_state(self, adapter: str = "default") -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.parameters(adapter).items()}

    def load_adapter_state(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        own = self.parameters(adapter)
        if own.keys() != state.keys():
            raise ValueError("the checkpoint's adapter has other modules or another rank than the config asks for.")
        self._assign(state, adapter)

    @torch.no_grad()
    def _assign(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        own = self.parameters(adapter)
        for name, value in state.items():
            own[name].copy_(value)


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
    source = hub.locate(path_or_name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device} can't be used here: {first_line(error)}") from error
    weights = fast_dtype(device) if dtype == "auto" else DTYPES[dtype]
    embeddings = Embeddings(memory.embeddings, [hub.fingerprint(source), str(weights), guidance > 1, sorted(call.items())])
    more: dict[str, Any] = {}
    if prompts is not None and embeddings.complete([*PROBES[:1], *prompts]):
        more |= dict.fromkeys(hub.components(source, ENCODERS))
    if memory.quantize is not None:
        more["quantization_config"] = quantization(memory.quantize, weights)
    try:
        pipe = DiffusionPipeline.from_pretrained(source, torch_dtype=weights, **more)
    except (OSError, ValueError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise ValueError(f"the model {path_or_name} could not be loaded: {first_line(error)}") from error
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and not (memory.offload_encoders and name.startswith(ENCODERS)):
            part.to(device)
    arrange(pipe, memory)
    policy = Policy(pipe, weights, guidance, embeddings, memory.offload_encoders, **call)
    if lora is not None:
        policy.load_lora(lora)
    return policy


def fast_dtype(device: str) -> torch.dtype:
    """bf16 where the device has instructions for it, else fp32: a CPU without them is a hundred times slower in bf16."""
    kind = torch.device(device).type
    if kind == "cpu":
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    else:
        native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
