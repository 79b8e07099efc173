"""Writes a run's LoRA, or the transformer it is merged into, as other programs read it, with what they show of it in the file's header."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import CHECKSUM, DATA_HASH, UNKNOWN_HASH, seal_safetensors
from flow_grpo.policy import comfyui, hub, lora_file
from flow_grpo.policy.families import lora_header
from flow_grpo.policy.loading import layer_shapes
from flow_grpo.policy.lora import FIRST
from flow_grpo.policy.lora_file import LoraLayer
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import counted, plain

Format = Literal["diffusers", "peft", "comfyui"]
EXAMPLES = 4  # prompts in the header
EXPERTS = {FIRST: "high_noise", "transformer_2": "low_noise"}  # of Wan 2.2, whose files people know by these names


def write_lora(
    source: Path, folder: Path, args: FlowGRPOConfig, run: RunReader, *, title: str, form: Format, dtype: torch.dtype
) -> list[str]:
    """Write the LoRA in `source`, which this package wrote, to `folder`; returns notes for the user.

    The files have the names by which diffusers and peft find them; ComfyUI, which lists files, has one named after the title.

    Args:
        title: of the LoRA, in the header.

    Raises:
        FlowGRPOError: there is no LoRA, its values are not finite, or the format can't hold it.
    """
    files = {FIRST: next((source / name for name in (hub.WEIGHTS, hub.PEFT_WEIGHTS) if (source / name).is_file()), None)}
    files |= {
        file.stem.removeprefix(f"{Path(hub.WEIGHTS).stem}_"): file for file in sorted(source.glob(hub.expert_weights("*")))
    }
    if files[FIRST] is None:
        raise FlowGRPOError(f"{source} holds no LoRA: neither {hub.WEIGHTS} nor {hub.PEFT_WEIGHTS} is in it.")
    if form == "peft" and len(files) > 1:
        raise FlowGRPOError(
            f"peft's format holds the LoRA of one transformer, and this model has {len(files)}: leave out --format."
        )
    header, notes = _header(args, run, title), []
    for component, file in files.items():
        assert file is not None
        found, prefix = lora_file.read_own(file)
        header["modelspec.date"] = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        if form == "comfyui":
            target = folder / comfyui_file(title, component if len(files) > 1 else None)
            layers, left_out = _for_comfyui(found, args.model, component)
            lora_file.write_named(target, layers, {**header, **_sizes(found)}, dtype)
            notes += left_out
            continue
        as_peft = form == "peft"
        target = folder / (hub.PEFT_WEIGHTS if as_peft else file.name)
        prefix = lora_file.PEFT_PREFIX if as_peft else prefix
        lora_file.write(target, found.layers, prefix, header, found.config, dtype=dtype)
    return notes


def comfyui_file(title: str, component: str | None = None) -> str:
    """The name of a LoRA's file for ComfyUI; of several transformers, with that of the component."""
    return f"{title}.safetensors" if component is None else f"{title}_{EXPERTS.get(component, component)}.safetensors"


def write_whole(source: Path, folder: Path, args: FlowGRPOConfig, run: RunReader, title: str) -> None:
    """Write each transformer in `source` as one file, by the names by which ComfyUI recognises the model."""
    components = sorted(path.name for path in source.iterdir())
    header = _header(args, run, title)
    if "modelspec.architecture" in header:
        header["modelspec.architecture"] = header["modelspec.architecture"].removesuffix("/lora")
    for component in components:
        state = {
            name: value
            for file in sorted((source / component).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        named = comfyui.all_weights(state, comfyui_names(args.model, component).whole)
        target = folder / comfyui_file(title, component if len(components) > 1 else None)
        hashes = {DATA_HASH: UNKNOWN_HASH, CHECKSUM: UNKNOWN_HASH}
        save_file({name: value.contiguous() for name, value in named.items()}, target, {"format": "pt", **header, **hashes})
        seal_safetensors(target)


def comfyui_names(model: str, component: str = FIRST) -> comfyui.Names:
    """The names of a model's layers in ComfyUI. FlowGRPOError if they are not known."""
    transformer = hub.component_class(model, component)
    if transformer is None:
        raise FlowGRPOError(
            f"the {hub.INDEX} of {model} is not on this machine, which says what its layers are called in ComfyUI."
        )
    if transformer not in comfyui.FAMILIES:
        raise FlowGRPOError(
            f"--format comfyui: ComfyUI has no model of the kind {transformer}, or its names are not known here: leave out --format."
        )
    return comfyui.FAMILIES[transformer]


def _for_comfyui(found: lora_file.LoraFile, model: str, component: str) -> tuple[dict[str, LoraLayer], list[str]]:
    """The layers by the names that ComfyUI reads, and a note on those that have none."""
    layers, left_out = comfyui.to_comfyui(found.layers, comfyui_names(model, component), _rows(model, component))
    if not layers:
        raise FlowGRPOError(f"--format comfyui: no layer of this LoRA has a name in ComfyUI, {left_out[0]} for one.")
    number = f"{counted(len(left_out), 'layer')} of {len(found.layers)}"
    return layers, [f"left out: {number}, which ComfyUI has no names for; {left_out[0]} is the first."] if left_out else []


def _sizes(found: lora_file.LoraFile) -> dict[str, str]:
    """The rank of the LoRA in a header, whatever that of fused layers is."""
    rank = str(max(layer.rank for layer in found.layers.values()))
    return {"ss_network_dim": rank, "ss_network_alpha": rank}


def _rows(model: str, component: str) -> Callable[[str], int]:
    """The rows of a layer of a model that has no LoRA. The model's config is read when the first is asked for."""
    shapes = cache(lambda: layer_shapes(model, component))
    return lambda name: shapes()[name][0]


def _header(args: FlowGRPOConfig, run: RunReader, title: str) -> dict[str, str]:
    prompts = [plain(prompt) for prompt in (run.evaluations[0]["prompts"][:EXAMPLES] if run.evaluations else [])]
    call = args.evaluation_call_kwargs()
    size = {"modelspec.resolution": f"{call['width']}x{call['height']}"} if {"width", "height"} <= call.keys() else {}
    return {
        **lora_header(hub.pipeline_class(args.model)),
        **size,
        "modelspec.title": title,
        "modelspec.description": f"Prompts: {'; '.join(prompts)}" if prompts else "",
        "ss_output_name": title,
        "ss_sd_model_name": Path(args.model).name if Path(args.model).exists() else args.model,
    }
