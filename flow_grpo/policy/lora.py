"""A LoRA on the transformer: adding, loading and saving it, switching it off, and copies of it.

A pipeline with several experts, each a transformer for a part of the schedule, has a LoRA on each of them.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy import comfyui, lora_file
from flow_grpo.policy.devices import machine_memory
from flow_grpo.policy.families import lora_header
from flow_grpo.policy.hub import PEFT_WEIGHTS, WEIGHTS, expert_lora, expert_weights
from flow_grpo.policy.library_logging import quietly
from flow_grpo.policy.lora_file import LoraFile, LoraLayer
from flow_grpo.progress import tell
from flow_grpo.text import gigabytes

TRANSFORMER = "transformer"  # the component that holds the LoRA; of several, the first
TRAINED = "default"  # the trained adapter; others are copies of it
REPLACED = "the policy has trained weights already: remove them by policy.reset_to_base()."


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

    @property
    def targets(self) -> list[str]:
        """The layers with the trained adapter, as `add` takes them: by the end of their name, or by the whole name if it was loaded."""
        targets = self.transformer.peft_config[TRAINED].target_modules
        return sorted(_layers(self.transformer) if isinstance(targets, str) else targets)

    def lora_layers(self) -> Iterator[BaseTunerLayer]:
        """The layers that have a LoRA."""
        return (
            module
            for transformer in self.transformers.values()
            for module in transformer.modules()
            if isinstance(module, BaseTunerLayer)
        )

    @property
    def is_enabled(self) -> bool:
        """Whether the transformer computes with an adapter."""
        layer = next(iter(self.lora_layers()), None)
        return layer is not None and not layer.disable_adapters

    def parameters(self, adapter: str = TRAINED) -> dict[str, torch.nn.Parameter]:
        """An adapter's parameters by name."""
        return {name: p for name, p in self._all_parameters().items() if f".{adapter}." in name}

    def _all_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            prefix + name: p
            for prefix, transformer in self.transformers.items()
            for name, p in transformer.named_parameters()
            if "lora_" in name
        }

    # -- adding and removing ------------------------------------------------------------------------------------------

    def add(self, rank: int, alpha: float, targets: Sequence[str] | Literal["all"] | None, seed: int) -> None:
        """Add a float32 LoRA to the linear layers whose names end with one of `targets`. At first it changes no output.

        Args:
            targets: None for the attention layers of the pipeline's family, "all" for all linear layers.
            seed: of the initial weights.

        Raises:
            FlowGRPOError: no layer has such a name, there is a LoRA already, or it does not fit into this machine's memory.
        """
        if TRAINED in self.adapters:
            raise FlowGRPOError(REPLACED)
        layers = linear_layers(self.transformer)
        wanted = self.default_targets if targets is None else list(layers) if targets == "all" else targets
        matching = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in layers)]
        if not matching:
            raise FlowGRPOError(
                f"no linear layer of the transformer is named {', '.join(wanted)}: set lora.targets to some of "
                f"{', '.join(_short_names(layers))}."
            )
        endings = tuple(f".{target}" for target in matching)
        adapted = [layer for name, layer in layers.items() if f".{name}".endswith(endings)]
        _check_memory(rank, adapted * len(self.transformers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=matching, init_lora_weights="gaussian")
            for transformer in self.transformers.values():
                _inject_into(transformer, config, TRAINED)
        self._make_trainable()

    def remove(self, adapter: str | None = None) -> None:
        """Remove an adapter, if there is one of that name, or all of them, so that another one can be loaded."""
        # the active one last: peft would warn that it activates another
        names = [name for name in reversed(self.adapters) if adapter in (None, name)]
        for name in names:
            for layer in self.lora_layers():
                layer.delete_adapter(name)
            for transformer in self.transformers.values():
                transformer.peft_config.pop(name)
        if names and not self.adapters:  # else the base layers would keep other names than the model's
            for transformer in self.transformers.values():
                recurse_remove_peft_layers(transformer)

    def _make_trainable(self) -> None:
        for layer in self.lora_layers():
            # peft would cast each input to the LoRA's float32, and autocast would cast it back
            layer.cast_input_dtype_enabled = self.dtype == torch.float32
        self._move_in_float32(TRAINED)
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)

    def _move_in_float32(self, adapter: str) -> None:
        """Move an adapter's weights to the transformer's device: peft puts them with the base weights, maybe elsewhere."""
        device = self.transformer.device  # looks through all modules, so not for each weight
        for parameter in self.parameters(adapter).values():
            parameter.data = parameter.data.to("meta" if parameter.is_meta else device, torch.float32)

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
        self.remove(adapter)  # a policy may be trained twice
        for transformer in self.transformers.values():  # each expert's may have its own ranks
            _inject_into(transformer, transformer.peft_config[TRAINED], adapter)
        self._activate(TRAINED)
        self._move_in_float32(adapter)
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
        for name, parameter in self._all_parameters().items():  # whichever adapter is active, the same one is trained
            parameter.requires_grad_(f".{TRAINED}." in name)

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def has_pipeline_loader(self) -> bool:
        """Whether the pipeline has `load_lora_weights` for its transformer. A few have none, or one for a UNet."""
        save = getattr(self.pipe, "save_lora_weights", None)
        return save is not None and "transformer_lora_layers" in inspect.signature(save).parameters

    def load(self, source: str, file: str | None = None, name: str | None = None, adapter: str = TRAINED) -> None:
        """Load a saved LoRA, written by any program. Only the transformer's layers are loaded; a message names the others.

        Args:
            source: a folder or a hub id.
            file: its name there, if it is not the usual one.
            name: what the user calls it.
            adapter: what it becomes: the trained one, or one beside it, which replaces another of that name and is not trained.

        Raises:
            FlowGRPOError: it is damaged, of another kind or model, some of its layers have no place in the transformer, or there is a LoRA
                already.
        """
        title = name or source
        # not on the meta device of `plan`; diffusers logs each name that it does not convert
        with torch.device("cpu"), quietly():
            files = self._files(source, file)
            read = {component: lora_file.read(path, title if len(files) == 1 else None) for component, path in files.items()}
            layers = {component: self._place(found, component) for component, found in read.items()}
        if adapter == TRAINED and TRAINED in self.adapters:
            raise FlowGRPOError(REPLACED)
        self.remove(adapter)  # a policy may be trained twice
        with quietly():  # peft warns of an adapter that was taken off
            unchanged = {name: _zero(layer) for name, layer in next(iter(layers.values())).items()}
            for component in (TRANSFORMER, *self.experts):
                self._attach(component, layers.get(component, unchanged), adapter)
        self._make_trainable()
        if adapter != TRAINED:
            self._activate(TRAINED)
        for message in dict.fromkeys(found.left_out for found in read.values() if found.left_out):
            tell(message)
        if missing := [component for component in (TRANSFORMER, *self.experts) if component not in layers]:
            tell(f"the LoRA {title} has no file for {' and '.join(missing)}, which stays as it is.")

    def _files(self, source: str, file: str | None) -> dict[str, Path]:
        """The file of each transformer's LoRA, but for those that have none. Of two files for high and low noise, either names both."""
        first = lora_file.find_file(source, file, in_pairs=bool(self.experts))
        high, low = lora_file.pair_of(first)
        if self.experts and high != low:
            found = dict(zip((TRANSFORMER, *self.experts), (high, low), strict=False))
            return {component: path for component, path in found.items() if path.is_file()}
        others = {expert: expert_lora(source, expert) for expert in self.experts}
        return {TRANSFORMER: first, **{expert: path for expert, path in others.items() if path}}

    def _place(self, found: LoraFile, component: str) -> dict[str, LoraLayer]:
        transformer = getattr(self.pipe, component)
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in linear_layers(transformer).items()}
        return lora_file.place(found, type(self.pipe).__name__, shapes, self._converted(found, transformer, shapes))

    def _converted(
        self, found: LoraFile, transformer: Any, shapes: dict[str, tuple[int, int]]
    ) -> Iterator[dict[str, LoraLayer]]:
        if names := comfyui.FAMILIES.get(type(transformer).__name__):
            yield comfyui.from_comfyui(found.layers, names, shapes)
            # by the names of the model's authors
            yield comfyui.from_comfyui(found.layers, comfyui.Names(names.whole), shapes)
        if self.has_pipeline_loader:
            yield from lora_file.by_diffusers(found, type(self.pipe).lora_state_dict)

    def _attach(self, component: str, layers: dict[str, LoraLayer], adapter: str) -> None:
        """Add a LoRA with these weights, and with the alpha of each layer."""
        transformer = getattr(self.pipe, component)
        exactly = {name: f"^{re.escape(name)}" for name in layers}  # peft takes patterns of the end of a name
        first = next(iter(layers.values()))
        config = LoraConfig(
            r=first.rank,
            lora_alpha=first.alpha,
            rank_pattern={exactly[name]: layer.rank for name, layer in layers.items() if layer.rank != first.rank},
            alpha_pattern={exactly[name]: layer.alpha for name, layer in layers.items() if layer.alpha != first.alpha},
            target_modules="|".join(map(re.escape, layers)),
        )
        _inject_into(transformer, config, adapter)
        modules = dict(transformer.named_modules())
        for name, layer in layers.items():
            for matrix, value in ((modules[name].lora_A, layer.down), (modules[name].lora_B, layer.up)):
                parameter = matrix[adapter].weight
                parameter.data = value.to(parameter.device, torch.float32)

    @property
    def prefix_in_files(self) -> str:
        """The prefix of the names of layers in a written file: the pipeline's, the transformer's or peft's."""
        if self.has_pipeline_loader:
            return lora_file.PIPELINE_PREFIX
        return "" if hasattr(self.transformer, "load_lora_adapter") else lora_file.PEFT_PREFIX

    def save(self, folder: Path, write: bool = True) -> Path:
        """Write the LoRA with alpha = rank, as `pipe.load_lora_weights` reads it, and return the file.

        If the pipeline has no such method it is the transformer's own format (`load_lora_adapter`); if the transformer has no
        methods for adapters either, it is peft's (`PeftModel.from_pretrained`).

        Args:
            write: False on processes that leave the writing to another one.
        """
        file = folder / (PEFT_WEIGHTS if self.prefix_in_files == lora_file.PEFT_PREFIX else WEIGHTS)
        if not write:
            return file
        folder.mkdir(parents=True, exist_ok=True)
        header = lora_header(type(self.pipe).__name__)
        for component in (TRANSFORMER, *self.experts):
            of_component = file if component == TRANSFORMER else folder / expert_weights(component)
            transformer = getattr(self.pipe, component)
            targets = transformer.peft_config[TRAINED].target_modules
            lora_file.write(of_component, _layers(transformer), self.prefix_in_files, header, targets)
        return file


def linear_layers(transformer: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """A transformer's linear layers by name. A layer that has or had a LoRA keeps its name; the LoRA's own are left out."""
    modules = transformer.named_modules()
    return {
        name.removesuffix(".base_layer"): layer
        for name, layer in modules
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in name
    }


def _layers(transformer: torch.nn.Module) -> dict[str, LoraLayer]:
    """The trained adapter of a transformer by layer."""
    return {
        name: LoraLayer(
            layer.lora_A[TRAINED].weight.detach(),
            layer.lora_B[TRAINED].weight.detach(),
            layer.scaling[TRAINED] * layer.r[TRAINED],
        )
        for name, layer in transformer.named_modules()
        if isinstance(layer, BaseTunerLayer) and TRAINED in layer.lora_A
    }


def _zero(layer: LoraLayer) -> LoraLayer:
    return replace(layer, up=torch.zeros_like(layer.up))


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
    available = machine_memory()
    if needed > available:
        raise FlowGRPOError(
            f"lora.rank={rank}: the LoRA alone would take {gigabytes(needed, 0)}, and this machine has {available / 1e9:.0f}: set "
            "a smaller rank, such as 32."
        )
