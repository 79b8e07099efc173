"""LoRA files: read whichever program wrote them, with every tensor accounted for, and written so that every program applies them alike.

What a layer adds is `alpha / rank x up @ down`. Programs disagree on where alpha stands: as a tensor beside the two (kohya, ComfyUI), in
the header (diffusers from 0.34 on) or in adapter_config.json (peft); where it is missing, all of them take the rank. So a file is written
with the scale in `up` and alpha = rank.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import CHECKSUM, DATA_HASH, UNKNOWN_HASH, atomic_file, check_safetensors, seal_safetensors
from flow_grpo.policy.hub import ADAPTER_CONFIG, PEFT_WEIGHTS, WEIGHTS
from flow_grpo.policy.weights import check_weights
from flow_grpo.rewards.downloads import downloads, hub_file
from flow_grpo.text import counted

HEADER_CONFIG = "lora_adapter_metadata"  # the entry of a file's header in which diffusers writes peft's config
PEFT_PREFIX, PIPELINE_PREFIX = "base_model.model.", "transformer."
# before the name of a layer, and before one whose dots are underscores
PREFIXES = (PEFT_PREFIX, "model.diffusion_model.", "diffusion_model.", PIPELINE_PREFIX, "module.")
FLAT_PREFIXES = ("lora_transformer_", "lora_unet_", "lycoris_", "transformer_")
HIGH, LOW = "high_noise", "low_noise"  # in the names of the two files of a LoRA for Wan 2.2
TEXT_ENCODER = re.compile(r"(text_encoder(?:_\d)?|text_encoders\.\w+|lora_te\d?|clip_[lgh]|t5(?:xxl)?)[._]")
DOWN = r"lora_A(?:\.\w+)?\.weight|lora_down\.weight|lora\.down\.weight|lora_linear_layer\.down\.weight"
UP = r"lora_B(?:\.\w+)?\.weight|lora_up\.weight|lora\.up\.weight|lora_linear_layer\.up\.weight"
TENSOR = re.compile(rf"(?P<layer>.+)\.(?:(?P<down>{DOWN})|(?P<up>{UP})|(?P<alpha>alpha))")
# parts of the names of other adapters' tensors, between dots
OTHER_KINDS = {
    "lokr_": "a LoKr",
    "hada_": "a LoHa",
    "oft_": "an OFT",
    "dora_scale": "a DoRA",
    "lora_magnitude_vector": "a DoRA",
    "lora_mid": "a LoCon with a third factor",
    "glora": "a GLoRA",
    ".diff.": "a LyCORIS file of whole differences",
    ".diff_b.": "a LyCORIS file of whole differences",
}


@dataclass(frozen=True)
class LoraLayer:
    """The LoRA of a linear layer: it adds alpha / rank x up @ down to the weight (out, in)."""

    down: Tensor  # (rank, in)
    up: Tensor  # (out, rank)
    alpha: float

    @property
    def rank(self) -> int:
        """The inner dimension of the product."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the layer."""
        return self.up.shape[0], self.down.shape[1]

    def folded(self) -> "LoraLayer":
        """The same difference in float32 with alpha = rank: the scale is in `up`."""
        return LoraLayer(self.down.float(), self.up.float() * (self.alpha / self.rank), self.rank)

    def padded(self, rank: int) -> "LoraLayer":
        """The same difference with alpha = `rank`, of a folded layer: rows and columns of 0 are added."""
        zeros = rank - self.rank
        down, up = torch.nn.functional.pad(self.down, (0, 0, 0, zeros)), torch.nn.functional.pad(self.up, (0, zeros))
        return LoraLayer(down, up, rank)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as a file has it.

    Attributes:
        source: what the user calls it.
        layers: by the names that the file has for them.
        config: peft's, from its header or the file beside it; {} if it has none.
        text_encoders: how many layers of each text encoder were left out.
    """

    source: str
    layers: dict[str, LoraLayer]
    config: dict[str, Any] = field(default_factory=dict)
    text_encoders: dict[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> str | None:
        """A sentence on the text encoders' part, None if there is none."""
        if not self.text_encoders:
            return None
        parts = " and ".join(f"{counted(count, 'layer')} of {name}" for name, count in self.text_encoders.items())
        return f"the LoRA {self.source} also has {parts}: left out, only the transformer's part is loaded."


# -- finding --------------------------------------------------------------------------------------------------------------


def find_file(source: str, name: str | None = None, in_pairs: bool = False) -> Path:
    """The file of a LoRA in a folder or under a hub id, downloaded if need be.

    Args:
        name: of the file; by default that of diffusers or peft, or the only one there.
        in_pairs: whether two files may be one LoRA, for high and for low noise. The result is then the first.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder, name = _on_hub(source, name, in_pairs)
    if name is None:
        name = _choose([file.name for file in folder.iterdir() if file.is_file()], source, in_pairs)
    return folder / name


def pair_of(file: Path) -> tuple[Path, Path]:
    """The files for high and for low noise, of which `file` is one by its name; the file itself twice if it is not one of two."""
    return file.with_name(file.name.replace(LOW, HIGH)), file.with_name(file.name.replace(HIGH, LOW))


def _on_hub(repo: str, name: str | None, in_pairs: bool) -> tuple[Path, str | None]:
    """The local folder and the name of a LoRA's file on the hub. Without a connection, only the cache is searched."""
    with downloads(repo):
        if name is None:
            try:
                names = HfApi().list_repo_files(repo)
            except (OfflineModeIsEnabled, ConnectionError):
                return Path(snapshot_download(repo, local_files_only=True)), None
            name = _choose([name for name in names if "/" not in name], repo, in_pairs)
    file = Path(hub_file(repo, name))
    if in_pairs and HIGH in name:
        with suppress(EntryNotFoundError):
            hub_file(repo, name.replace(HIGH, LOW))
    if name.startswith("adapter_model."):
        hub_file(repo, ADAPTER_CONFIG)
    return file.parent, name


def _choose(names: Collection[str], source: str, in_pairs: bool) -> str:
    for usual in (WEIGHTS, PEFT_WEIGHTS, Path(WEIGHTS).stem + ".bin", Path(PEFT_WEIGHTS).stem + ".bin"):
        if usual in names:
            return usual
    experts = re.compile(re.escape(WEIGHTS).replace(r"\.", r"_\w+\.", 1))
    files = sorted(name for name in names if name.endswith(".safetensors") and not experts.fullmatch(name))
    if not files:
        raise FlowGRPOError(f"{source} holds no LoRA: no .safetensors file is in it.")
    is_pair = in_pairs and len(files) == 2 and files[0].replace(HIGH, LOW) == files[1]
    if len(files) > 1 and not is_pair:
        raise FlowGRPOError(f"{source} holds {len(files)} files, {', '.join(files[:5])}: give the one that is meant.")
    return files[0]


# -- reading --------------------------------------------------------------------------------------------------------------


def read(file: Path, source: str | None = None) -> LoraFile:
    """Read a LoRA file.

    Args:
        source: what the user calls it, for the sentences.

    Raises:
        FlowGRPOError: it is damaged, of another kind (LoKr, DoRA, ...), or has tensors that no layer's LoRA has.
    """
    source = str(file) if source is None else source
    tensors, header = _tensors(file, source)
    text, own = _split(tensors)
    if kind := next((kind for word, kind in OTHER_KINDS.items() if any(word in f"{name}." for name in own)), None):
        raise _other_kind(source, kind)
    if unknown := [name for name in own if not TENSOR.fullmatch(name)]:
        raise FlowGRPOError(
            f"the LoRA {source} holds {counted(len(unknown), 'tensor')} of {len(own)} that are no part of a LoRA; the first "
            f"is {unknown[0]}."
        )
    parts = _by_layer(own, source)
    settings = _settings(file, header, source, [*parts])
    layers = {name: _layer(source, name, tensors, settings) for name, tensors in parts.items()}
    return LoraFile(source, layers, settings, _count_layers(text))


def _tensors(file: Path, source: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the header of a file. A pickle is read as tensors only."""
    if file.suffix != ".safetensors":
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for files that it has not written
            raise FlowGRPOError(f"the LoRA {source} could not be loaded: {file} can't be read as tensors.") from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise FlowGRPOError(f"the LoRA {source} could not be loaded: {file} holds no tensors by name.")
        return content, {}
    check_safetensors(file)
    try:
        with safe_open(file, "pt") as opened:
            header = dict(opened.metadata() or {})
        return load_file(file), header
    except (SafetensorError, ValueError) as error:
        raise FlowGRPOError(
            f"the LoRA {source} could not be loaded: {file} is damaged or no .safetensors file: copy it again."
        ) from error


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of text encoders, and all others."""
    text = {name: value for name, value in tensors.items() if TEXT_ENCODER.match(name)}
    return text, {name: value for name, value in tensors.items() if name not in text}


def _count_layers(text: Collection[str]) -> dict[str, int]:
    """The number of layers of each text encoder."""
    layers: dict[str, set[str]] = {}
    for name in text:
        encoder, known = TEXT_ENCODER.match(name), TENSOR.fullmatch(name)
        assert encoder is not None
        layers.setdefault(encoder[1], set()).add(known["layer"] if known else name.rpartition(".")[0])
    return {encoder: len(names) for encoder, names in sorted(layers.items())}


def _other_kind(source: str, kind: str) -> FlowGRPOError:
    return FlowGRPOError(
        f"the LoRA {source} is {kind}, which is not supported: of such files, only plain LoRAs, two matrices for each layer, are."
    )


def _settings(file: Path, header: Mapping[str, str], source: str, names: Collection[str]) -> dict[str, Any]:
    """The peft config of a LoRA, from its header or the file beside it; {} if there is none."""
    config = file.parent / ADAPTER_CONFIG
    try:
        if HEADER_CONFIG in header:
            packed = dict(json.loads(header[HEADER_CONFIG]))
            settings = {name.removeprefix(PIPELINE_PREFIX): value for name, value in packed.items()}
        elif config.is_file() and any(name.startswith(PEFT_PREFIX) for name in names):
            settings = dict(json.loads(config.read_text(encoding="utf-8")))
        else:
            settings = {}
    except (ValueError, TypeError, RecursionError) as error:
        raise FlowGRPOError(f"the LoRA {source} could not be loaded: its settings for peft are not readable.") from error
    if not settings and file.stem == Path(PEFT_WEIGHTS).stem:
        raise FlowGRPOError(f"the LoRA {source} could not be loaded: {ADAPTER_CONFIG} with its alpha is not beside it.")
    if settings.get("use_dora"):
        raise _other_kind(source, OTHER_KINDS["dora_scale"])
    init = str(settings.get("init_lora_weights")).lower()
    if init.startswith(("pissa", "corda", "olora", "loftq")):
        raise _other_kind(source, f"for base weights that peft changes ({init})")
    return settings


def _layer(source: str, name: str, tensors: dict[str, Tensor], settings: dict[str, Any]) -> LoraLayer:
    if missing := [part for part in ("down", "up") if part not in tensors]:
        raise FlowGRPOError(f"the LoRA {source} is incomplete: {name} has no {missing[0]} matrix.")
    down, up = tensors["down"], tensors["up"]
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not (down.numel() and up.numel()):
        raise FlowGRPOError(
            f"the LoRA {source} has matrices {tuple(down.shape)} and {tuple(up.shape)} at {name}, which are no LoRA of a linear layer."
        )
    alpha = _alpha(source, tensors.get("alpha"), settings, strip_prefixes(name), down.shape[0])
    return LoraLayer(down, up, alpha)


def _alpha(source: str, tensor: Tensor | None, settings: dict[str, Any], name: str, rank: int) -> float:
    try:
        if tensor is not None:
            alpha = float(tensor)
        elif "lora_alpha" not in settings:
            alpha = rank
        else:
            patterns = dict(settings.get("alpha_pattern") or {})  # by the end of a layer's name, as peft matches them
            own = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
            alpha = float(next(own, settings["lora_alpha"]))
            alpha *= math.sqrt(rank) if settings.get("use_rslora") else 1
    except (ValueError, TypeError, AttributeError, RuntimeError, re.error) as error:
        raise FlowGRPOError(f"the LoRA {source} has no number as the alpha of {name}.") from error
    if not math.isfinite(alpha):
        raise FlowGRPOError(f"the LoRA {source} has an alpha that is not finite: take an earlier checkpoint of the run.")
    return alpha


def strip_prefixes(name: str) -> str:
    """A layer's name without what programs write before it."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def flattened(name: str) -> str:
    """A layer's name without what programs write before it, and with underscores in place of dots."""
    stripped = strip_prefixes(name)
    if "." in stripped:
        return stripped.replace(".", "_")
    return next((stripped.removeprefix(prefix) for prefix in FLAT_PREFIXES if stripped.startswith(prefix)), stripped)


# -- a file's layers and the model's ------------------------------------------------------------------------------------------


def place(
    lora: LoraFile, model: str, shapes: Mapping[str, tuple[int, int]], converted: Iterable[dict[str, LoraLayer]] = ()
) -> dict[str, LoraLayer]:
    """The LoRA's layers by the names of the model's.

    Args:
        model: its class, for the sentences.
        shapes: (out, in) of the model's linear layers by name.
        converted: the same layers by other names, which are tried if some have no place by those of the file.

    Raises:
        FlowGRPOError: a layer has no place in the model, or another shape there.
    """
    if not lora.layers:
        only = lora.text_encoders and f": it has only layers of {' and '.join(lora.text_encoders)}"
        raise FlowGRPOError(f"the LoRA {lora.source} holds no weights for the transformer of this model{only or ''}.")
    placed, unmatched = _by_name(lora.layers, shapes)
    for layers in converted:
        if not unmatched:
            break
        again = _by_name(layers, shapes)
        if len(again[1]) < len(unmatched) and _weights(layers) == _weights(lora.layers):
            placed, unmatched = again
    if unmatched:
        raise FlowGRPOError(
            f"the LoRA {lora.source} has {counted(len(placed) + len(unmatched), 'layer')}, of which {len(placed)} have a place in "
            f"{model}: {unmatched[0]} is the first that has none. It is of another model, or has names of another program that "
            "diffusers does not convert for this model."
        )
    for name, layer in placed.items():
        if layer.shape != tuple(shapes[name]):
            raise FlowGRPOError(
                f"the LoRA {lora.source} is of another model: {name} is {layer.shape[0]} x {layer.shape[1]} there, and "
                f"{shapes[name][0]} x {shapes[name][1]} in {model}."
            )
    return placed


def _by_name(layers: Mapping[str, LoraLayer], names: Collection[str]) -> tuple[dict[str, LoraLayer], list[str]]:
    """The layers by the model's names, and the names of those that have no place."""
    flat: dict[str, list[str]] = {}
    for name in names:
        flat.setdefault(name.replace(".", "_"), []).append(name)
    placed: dict[str, LoraLayer] = {}
    unmatched = []
    for name, layer in layers.items():
        found = next((one for one in (name, strip_prefixes(name)) if one in names), None)
        candidates = flat.get(flattened(name), [])
        match = found or (candidates[0] if len(candidates) == 1 else None)
        if match is None or match in placed:
            unmatched.append(name)
        else:
            placed[match] = layer
    return placed, unmatched


def by_diffusers(lora: LoraFile, converter: Callable) -> Iterator[dict[str, LoraLayer]]:
    """The layers by diffusers' names, if its converter takes those of the file. Converters look at the matrices' names too.

    Args:
        converter: from the tensors of other programs to those of diffusers.
    """
    for down, up in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
        tensors: dict[str, Tensor] = {}
        for name, layer in lora.layers.items():
            folded = layer.folded()
            tensors |= {f"{name}.{down}.weight": folded.down, f"{name}.{up}.weight": folded.up}
            tensors |= {f"{name}.alpha": torch.tensor(float(layer.rank))} if down == "lora_down" else {}
        try:
            converted = converter(tensors)
        except Exception:
            continue
        if all(TENSOR.fullmatch(name) for name in converted):
            yield {name: _layer(lora.source, name, parts, {}) for name, parts in _by_layer(converted, lora.source).items()}


def _by_layer(tensors: Mapping[str, Tensor], source: str) -> dict[str, dict[str, Tensor]]:
    """`down`, `up` and `alpha` of each layer. FlowGRPOError if one of them has two names, as in a file of several adapters."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        match = TENSOR.fullmatch(name)
        assert match is not None
        assert match.lastgroup is not None
        parts = layers.setdefault(match["layer"], {})
        if match.lastgroup in parts:
            raise FlowGRPOError(f"the LoRA {source} has {match['layer']} twice, with {name}: give a file of one adapter.")
        parts[match.lastgroup] = value
    return layers


def _weights(layers: Mapping[str, LoraLayer]) -> int:
    """How many weights the layers change. A conversion that splits or renames layers keeps it."""
    return sum(math.prod(layer.shape) for layer in layers.values())


# -- writing --------------------------------------------------------------------------------------------------------------


def write(
    file: Path,
    layers: Mapping[str, LoraLayer],
    prefix: str,
    header: Mapping[str, str],
    targets: Collection[str] | str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a LoRA with alpha = rank, and the checksum that `read` compares.

    Layers of a smaller rank than others get zeros: older versions of diffusers take one alpha for all. The config of peft has only what
    a LoRA needs: diffusers passes all of it on, and an older peft refuses a field that it does not know.

    Args:
        layers: by the model's names.
        prefix: of the names in the file: `PIPELINE_PREFIX`, `PEFT_PREFIX` or nothing.
        header: further entries of its header.
        targets: the layers, as peft's `target_modules` has them.
    """
    rank = max(layer.rank for layer in layers.values())
    padded = {f"{prefix}{name}": layer.folded().padded(rank) for name, layer in layers.items()}
    targets = targets if isinstance(targets, str) else sorted(targets)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    packed = {f"{prefix}{name}": value for name, value in config.items()} if prefix == PIPELINE_PREFIX else config
    write_named(file, padded, {**header, HEADER_CONFIG: json.dumps(packed, sort_keys=True)}, dtype)
    if prefix == PEFT_PREFIX:
        (file.parent / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def write_named(file: Path, layers: Mapping[str, LoraLayer], header: Mapping[str, str], dtype: torch.dtype) -> None:
    """Write a LoRA by names that are complete, with alpha = rank of each layer.

    Args:
        header: further entries of its header; also the rank that it gives, which is otherwise the largest.
    """
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        folded = layer.folded()
        for part, value in (("lora_A", folded.down), ("lora_B", folded.up)):
            tensors[f"{name}.{part}.weight"] = value.to("cpu", dtype).contiguous()
    rank = str(max(layer.rank for layer in layers.values()))
    sizes = {"ss_network_dim": rank, "ss_network_alpha": rank}
    with atomic_file(file) as partial:
        save_file(tensors, partial, {"format": "pt", **sizes, **header, DATA_HASH: UNKNOWN_HASH, CHECKSUM: UNKNOWN_HASH})
        seal_safetensors(partial)


def read_own(file: Path) -> tuple[LoraFile, str]:
    """A LoRA that this package wrote, its layers by the model's names, and what stands before them in the file.

    FlowGRPOError as in `read`, or if values are not finite.
    """
    found = read(file)
    values = {f"{name}.{part}": getattr(layer, part) for name, layer in found.layers.items() for part in ("down", "up")}
    check_weights(values, str(file))
    prefix = next((one for one in (PEFT_PREFIX, PIPELINE_PREFIX) if next(iter(found.layers)).startswith(one)), "")
    return replace(found, layers={name.removeprefix(prefix): layer for name, layer in found.layers.items()}), prefix
