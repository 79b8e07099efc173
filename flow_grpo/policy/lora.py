"""A LoRA on the transformer: adding, loading and saving it, switching it off, and copies of it.

A pipeline with several experts, each a transformer for a part of the schedule, has a LoRA on each of them.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
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
from safetensors.torch import save_file

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import normalize_safetensors
from flow_grpo.policy.hub import PEFT_WEIGHTS, WEIGHTS, expert_lora, expert_weights
from flow_grpo.rewards.downloads import downloads
from flow_grpo.text import gigabytes

TRAINED = "default"  # the trained adapter; others are copies of it
PEFT_PREFIX = "base_model.model."


class Lora:
    """The LoRA on a pipeline's transformer, which need not have one.

    Args:
        dtype: of autocast; the LoRA itself is float32.
        default_targets: the layers that get a LoRA unless others are named, by the end of their name.
        experts: further transformers of the pipeline that get a LoRA, by the names of its components.
    """

    def __init__(
        self, pipe: DiffusionPipeline, dtype: torch.dtype, default_targets: Sequence[str], experts: Sequence[str] = ()
    ) -> None:
        self.pipe, self.dtype, self.default_targets, self.experts = pipe, dtype, default_targets, experts

    @property
    def transformer(self) -> Any:
        """The transformer that holds the LoRA; of several, the first."""
        return self.pipe.transformer

    @property
    def transformers(self) -> dict[str, Any]:
        """All transformers that hold a LoRA, by the beginning of their parameters' names: nothing for the first."""
        return {"": self.transformer, **{f"{name}.": getattr(self.pipe, name) for name in self.experts}}

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the transformer."""
        return list(getattr(self.transformer, "peft_config", {}))

    def lora_layers(self) -> Iterator[BaseTunerLayer]:
        """The layers that have a LoRA."""
        modules = (module for transformer in self.transformers.values() for module in transformer.modules())
        return (module for module in modules if isinstance(module, BaseTunerLayer))

    @property
    def is_enabled(self) -> bool:
        """Whether the transformer computes with an adapter."""
        layer = next(iter(self.lora_layers()), None)
        return layer is not None and not layer.disable_adapters

    def parameters(self, adapter: str = TRAINED) -> dict[str, torch.nn.Parameter]:
        """An adapter's parameters by name."""
        return {name: p for name, p in self._all_parameters() if f".{adapter}." in name}

    def _all_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for prefix, transformer in self.transformers.items():
            yield from ((prefix + name, p) for name, p in transformer.named_parameters() if "lora_" in name)

    # -- adding and removing ------------------------------------------------------------------------------------------

    def add(self, rank: int, alpha: float, targets: Sequence[str] | Literal["all"] | None, seed: int) -> None:
        """Add a float32 LoRA to the linear layers whose names end with one of `targets`. At first it changes no output.

        Args:
            targets: None for the attention layers of the pipeline's family, "all" for all linear layers.
            seed: of the initial weights.

        Raises:
            FlowGRPOError: no layer has such a name, or the LoRA does not fit into this machine's memory.
        """
        layers = self._linear_layers()
        wanted = self.default_targets if targets is None else list(layers) if targets == "all" else targets
        matching = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in layers)]
        if not matching:
            raise FlowGRPOError(
                f"no linear layer of {type(self.transformer).__name__} is named {', '.join(wanted)}: set lora.targets to some of "
                f"{', '.join(_short_names(layers))}."
            )
        endings = tuple(f".{target}" for target in matching)
        adapted = [layer for name, layer in layers.items() if f".{name}".endswith(endings)]
        _check_memory(rank, adapted * len(self.transformers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=matching, init_lora_weights="gaussian")
            self._inject(config, TRAINED)
        self._make_trainable()

    def remove(self) -> None:
        """Remove the trained adapter, if there is one, so that another one can be loaded."""
        if TRAINED in self.adapters:
            for layer in self.lora_layers():
                layer.delete_adapter(TRAINED)
            for transformer in self.transformers.values():
                transformer.peft_config.pop(TRAINED)

    def _linear_layers(self) -> dict[str, torch.nn.Linear]:
        """The transformer's linear layers by name. A layer that had a LoRA before keeps its name."""
        modules = self.transformer.named_modules()
        return {name.removesuffix(".base_layer"): layer for name, layer in modules if isinstance(layer, torch.nn.Linear)}

    def _inject(self, config: LoraConfig, adapter: str) -> None:
        for transformer in self.transformers.values():
            _inject_into(transformer, config, adapter)

    def _make_trainable(self) -> None:
        for layer in self.lora_layers():
            # peft would cast each input to the LoRA's float32, and autocast would cast it back
            layer.cast_input_dtype_enabled = self.dtype == torch.float32
        for parameter in self.parameters().values():
            parameter.data = self._in_float32(parameter)
            parameter.requires_grad_(True)

    def _in_float32(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """An adapter's weights on the transformer's device: peft puts them with the base weights, maybe elsewhere."""
        return parameter.data.to("meta" if parameter.is_meta else self.transformer.device, torch.float32)

    # -- the base model and copies ------------------------------------------------------------------------------------

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Context in which the LoRA is off."""
        was_enabled = self.is_enabled
        self._enable(False)
        try:
            yield
        finally:
            self._enable(was_enabled)

    @property
    def is_zero(self) -> bool:
        """Whether the trained adapter changes no output, as before its first update."""
        return not any(bool(p.any()) for name, p in self.parameters().items() if ".lora_B." in name)

    def _enable(self, on: bool) -> None:
        for layer in self.lora_layers():
            layer.enable_adapters(on)

    def add_adapter_copy(self, adapter: str) -> None:
        """Add a second adapter with the weights of the trained one. It gets no gradients; `update_copy` moves it."""
        if adapter not in self.adapters:  # a policy may be trained twice
            self._inject(self.transformer.peft_config[TRAINED], adapter)
        self._activate(TRAINED)
        for parameter in self.parameters(adapter).values():
            parameter.data = self._in_float32(parameter)
        self.update_copy(adapter, 0.0)

    @torch.no_grad()
    def update_copy(self, adapter: str, decay: float) -> None:
        """Set a copy to decay x itself + (1 - decay) x the trained adapter."""
        copies = self.parameters(adapter)
        for name, parameter in self.parameters().items():
            copies[name.replace(f".{TRAINED}.", f".{adapter}.")].lerp_(parameter, 1 - decay)

    @contextmanager
    def use(self, adapter: str | None) -> Iterator[None]:
        """Context in which that adapter is active instead of the trained one. None changes nothing."""
        if adapter is None:
            yield
            return
        self._activate(adapter)
        try:
            yield
        finally:
            self._activate(TRAINED)

    def _activate(self, adapter: str) -> None:
        for layer in self.lora_layers():
            layer.set_adapter(adapter)
        for name, parameter in self._all_parameters():  # whichever adapter is active, the same one is trained
            parameter.requires_grad_(f".{TRAINED}." in name)

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def has_pipeline_loader(self) -> bool:
        """Whether the pipeline has `load_lora_weights` for its transformer. A few have none, or one for a UNet."""
        save = getattr(self.pipe, "save_lora_weights", None)
        return save is not None and "transformer_lora_layers" in inspect.signature(save).parameters

    def load(self, source: str, file: str | None = None) -> None:
        """Load a saved LoRA from a folder or a hub id.

        Args:
            file: its name there, if it is not the usual one.
        """
        with downloads(source):
            if self.has_pipeline_loader:
                self.pipe.load_lora_weights(source, weight_name=file, adapter_name=TRAINED)
            elif hasattr(self.transformer, "load_lora_adapter"):
                self.transformer.load_lora_adapter(source, weight_name=file or WEIGHTS, adapter_name=TRAINED, prefix=None)
            else:
                self._inject(LoraConfig.from_pretrained(source), TRAINED)
                state = load_peft_weights(source, device="cpu")
                set_peft_model_state_dict(self.transformer, state, adapter_name=TRAINED)
            for name in self.experts:
                self._load_expert(source, name)
        self._make_trainable()

    def _load_expert(self, source: str, name: str) -> None:
        """Load a further expert's LoRA; where its file is missing it gets one that changes nothing."""
        file, into = expert_lora(source, name), {f"load_into_{name}": True}
        if file is not None:
            self.pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=TRAINED, **into)
        else:
            _inject_into(getattr(self.pipe, name), self.transformer.peft_config[TRAINED], TRAINED)

    def check_scales(self, source: str) -> None:
        """Raise FlowGRPOError if the LoRA's alpha is not finite."""
        if not all(math.isfinite(scale) for layer in self.lora_layers() for scale in layer.scaling.values()):
            raise FlowGRPOError(f"{source} has an alpha that is not finite: take an earlier checkpoint of the run.")

    def save(self, folder: Path, write: bool = True) -> Path:
        """Write the LoRA with its rank and alpha, as `pipe.load_lora_weights` reads it, and return the file.

        If the pipeline has no such method it is the transformer's own format (`load_lora_adapter`); if the transformer has no
        methods for adapters either, it is peft's (`PeftModel.from_pretrained`).

        Args:
            write: False on processes that leave the writing to another one.
        """
        if not write:
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        file, config = folder / WEIGHTS, self.transformer.peft_config[TRAINED]
        state = get_peft_model_state_dict(self.transformer, adapter_name=TRAINED)
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)  # a set has another order in each process
        if self.has_pipeline_loader:
            type(self.pipe).save_lora_weights(
                folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
            )
        elif hasattr(self.transformer, "save_lora_adapter"):
            self.transformer.save_lora_adapter(folder, adapter_name=TRAINED, weight_name=WEIGHTS)
        else:
            file = folder / PEFT_WEIGHTS
            save_file({f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}, file)
            config.save_pretrained(str(folder))
        normalize_safetensors(file)
        for name in self.experts:
            self._save_expert(folder, name, config)
        return file

    def _save_expert(self, folder: Path, name: str, config: LoraConfig) -> None:
        """Write a further expert's LoRA as `pipe.load_lora_weights` reads it into that transformer."""
        file = folder / expert_weights(name)
        type(self.pipe).save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(getattr(self.pipe, name), adapter_name=TRAINED),
            transformer_lora_adapter_metadata=config.to_dict(),
            weight_name=file.name,
        )
        normalize_safetensors(file)


def _inject_into(transformer: Any, config: LoraConfig, adapter: str) -> None:
    if hasattr(transformer, "add_adapter"):
        transformer.add_adapter(config, adapter)
    else:  # the transformers of a few families have no methods for adapters
        inject_adapter_in_model(config, transformer, adapter)
        transformer.peft_config = {**getattr(transformer, "peft_config", {}), adapter: config}


def _short_names(layers: Iterable[str]) -> list[str]:
    """The last part of each layer's name, in order; the last two if the last one is a number."""
    return sorted({".".join(name.split(".")[-2:]) if name[-1].isdigit() else name.split(".")[-1] for name in layers})


def _check_memory(rank: int, layers: Iterable[torch.nn.Linear]) -> None:
    """Raise FlowGRPOError if a LoRA of that rank on these layers would alone fill this machine's memory."""
    # not by the shape of the weights: bitsandbytes packs them into a column
    needed = 4 * rank * sum(layer.in_features + layer.out_features for layer in layers)
    available = psutil.virtual_memory().total
    if needed > available:
        raise FlowGRPOError(
            f"lora.rank={rank}: the LoRA alone would take {gigabytes(needed, 0)}, and this machine has {available / 1e9:.0f}: set "
            "a smaller rank, such as 32."
        )
