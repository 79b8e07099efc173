"""Find a model or a LoRA by a bundled name, a folder or a hub id, and check its files before they are loaded."""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeGuard

import diffusers
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from flow_grpo.config.loading import read_json
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import check_safetensors, expanded
from flow_grpo.rewards.downloads import NotDownloaded, downloads, hub_file
from flow_grpo.run_folder import layout
from flow_grpo.text import suggest

TINY = Path(__file__).parent.parent / "tiny"
BUNDLED_MODELS = {"tiny": TINY / "pipeline", "tiny_shapes": TINY / "shapes" / "pipeline"}
# the file of a LoRA as diffusers and as peft name it
WEIGHTS, PEFT_WEIGHTS = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"  # beside a LoRA in peft's format: its rank and alpha
INDEX = "model_index.json"
MAX_ERROR_LENGTH = 400  # of another library's error, in characters
SCALED = re.compile(r"(scale_weight|weight_scale|scaled_fp8|weight_scale_2)$")  # of tensors in fp8 files of other programs
SHARD = r"(?:-\d+-of-\d+)?"
WEIGHT_FILE = re.compile(rf"(?:diffusion_pytorch_model|model){SHARD}(?:\.(?P<variant>\w+?))?{SHARD}\.safetensors")


def expert_weights(component: str) -> str:
    """The file of the LoRA of a further expert, by the name of the pipeline's component."""
    return WEIGHTS.replace(".", f"_{component}.")


def expert_lora(source: str, component: str) -> Path | None:
    """The file of the LoRA of a further expert in a folder or under a hub id; None if there is none."""
    name = expert_weights(component)
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    try:
        return Path(hub_file(source, name))
    except EntryNotFoundError:
        return None


def single_file(name: str) -> Path | None:
    """The file of a model that is given as one, whose weights replace the transformer's of its folder; None for any other model."""
    file = expanded(name)
    return file if name not in BUNDLED_MODELS and file.is_file() else None


def resolve_model(name: str) -> str:
    """The folder or hub id of a model; for a single file, its folder. FlowGRPOError if there is none, or the hub has no such model."""
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name])
    folder = expanded(name)
    if folder.is_file():
        if folder.suffix != ".safetensors" or not (folder.parent / INDEX).is_file():
            raise FlowGRPOError(
                f"the model {name} is a single file: put it, as .safetensors, into the folder of its base model in the format of "
                f"diffusers, beside {INDEX}, and give its path there; its transformer takes the place of the folder's."
            )
        folder = folder.parent
    if folder.is_dir():
        if not (folder / INDEX).exists():
            raise FlowGRPOError(f"the folder {name} has no {INDEX}, so it is not a diffusers pipeline.")
        # diffusers would run such a file of a part, whose index may name it
        if code := next(folder.glob("*/*.py"), None):
            raise FlowGRPOError(
                f"the model {folder} contains Python code, {code}, which is not run: read it, load the pipeline in Python, and give "
                "FlowGRPOTrainer a flow_grpo.Policy of it."
            )
        return str(folder)
    if not looks_like_hub_id(name):
        raise FlowGRPOError(
            f"there is no model folder {name}; give a diffusers folder, a hub id such as "
            f"stabilityai/stable-diffusion-3.5-medium, or a bundled model: {', '.join(BUNDLED_MODELS)}."
        )
    if not isinstance(try_to_load_from_cache(name, INDEX), str):
        try:
            with downloads(name):
                HfApi().model_info(name, timeout=5)
        except NotDownloaded as error:
            raise type(error)(f"the model {error}") from error
        except Exception as error:
            raise FlowGRPOError(
                f"the hub has no model {name}, or asks for a login ({type(error).__name__}): accept its licence on its page and run "
                "`hf auth login`."
            ) from error
    return name


def model_name(pipe: Any) -> str:
    """The source of a pipeline: a bundled name, a folder or a hub id; its class if it was built in memory."""
    source = str(pipe.name_or_path or type(pipe).__name__)
    return next((name for name, folder in BUNDLED_MODELS.items() if str(folder) == source), source)


def fingerprint(source: str) -> list:
    """Identify a model and its version: by the hub's commit, or the sizes and times of a folder's files."""
    folder = Path(source)
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return [
            str(folder.resolve()),
            *((str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files),
        ]
    cached = try_to_load_from_cache(source, INDEX)
    return [source, Path(cached).parent.name if isinstance(cached, str) else None]


def component_names(name: str, prefixes: tuple[str, ...] = ("",)) -> list[str]:
    """Names of a pipeline's components that begin with one of the prefixes, from local files."""
    return [part for part in _local_index(name) if part.startswith(prefixes)]


def pipeline_class(name: str) -> str:
    """The class of a model's pipeline, from local files; without them DiffusionPipeline, which finds the class itself."""
    return str(_local_index(name).get("_class_name", "DiffusionPipeline"))


def component_class(name: str, component: str) -> str | None:
    """The class of a part of a model's pipeline, from local files; None without them."""
    entry = _local_index(name).get(component)
    return entry[1] if _is_part(entry) else None


def _local_index(name: str) -> dict[str, Any]:
    """The model_index.json of a model on this machine; {} if there is none or it is not readable."""
    cached = try_to_load_from_cache(name, INDEX) if looks_like_hub_id(name) else None
    file = single_file(name)
    folder = file.parent if file else BUNDLED_MODELS.get(name, Path(name))
    file = Path(cached) if isinstance(cached, str) else folder / INDEX
    try:
        return dict(read_json(file))
    except (ValueError, TypeError):
        return {}


def resolve_lora(path: str | Path) -> tuple[str, str | None]:
    """The folder or hub id of a saved LoRA, and the file's name if a file was given.

    The folder of a finished run has it in lora/, or has a transformer/. FlowGRPOError if there is none.
    """
    folder = expanded(path)
    if folder.is_file():
        return str(folder.parent), folder.name
    if not folder.exists() and looks_like_hub_id(str(path)):
        return str(path), None
    if not folder.exists():
        siblings = {sibling.name: str(sibling) for sibling in folder.parent.glob("*")}
        raise FlowGRPOError(
            f"there is no LoRA at {path}.{suggest(folder.name, siblings)} Give a folder with {WEIGHTS}, or that file."
        )
    if (folder / INDEX).is_file():
        raise FlowGRPOError(f"{folder} is a whole model, not a LoRA: give it as --model.")
    for candidate in (folder, folder / layout.LORA, folder / layout.TRANSFORMER):
        if any(file.suffix in (".safetensors", ".bin") for file in candidate.glob("*")):
            return str(candidate), None
    raise FlowGRPOError(
        f"{folder} holds no LoRA: give a folder with {WEIGHTS}, or that file; of a run that is not finished, its best/ or one of "
        "its checkpoints/."
    )


def looks_like_hub_id(name: str) -> bool:
    """Whether a name that is no file may be `owner/model`, and not a misspelt path."""
    return is_hub_id(name) and not Path(name.partition("/")[0]).is_dir()


def is_hub_id(name: str) -> bool:
    """Whether a name is `owner/model` as the hub allows it: without -- and .., and not ending in .git."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


@dataclass(frozen=True)
class Index:
    """The content of a model_index.json.

    Attributes:
        pipeline_class: the class of the pipeline.
        parts: the class of each part; None for one that is left out.
        settings: other arguments of the pipeline.
    """

    pipeline_class: type[DiffusionPipeline]
    parts: dict[str, Any]
    settings: dict[str, Any]


def read_index(folder: str | Path) -> Index:
    """Read the index of a folder. FlowGRPOError if it is damaged, or a part that the pipeline needs is missing."""
    folder = Path(folder)
    with load_errors(folder):
        content = dict(read_json(folder / INDEX))
        name = content.get("_class_name")
        pipeline_class = getattr(diffusers, name, None) if isinstance(name, str) else None
        if not isinstance(pipeline_class, type) or not issubclass(pipeline_class, DiffusionPipeline):
            raise FlowGRPOError(
                f"{INDEX} has _class_name {name!r}, which is no pipeline of diffusers {diffusers.__version__}"
            )
        arguments = signature(pipeline_class).parameters
        entries = {name: entry for name, entry in content.items() if name in arguments}
        parts = {name: _class(name, entry) for name, entry in entries.items() if _is_part(entry)}
        optional = getattr(pipeline_class, "_optional_components", ())
        needed = [
            name for name, argument in arguments.items() if argument.default is Parameter.empty and name not in optional
        ]
        if absent := next((name for name in needed if parts.get(name) is None), None):
            raise FlowGRPOError(
                f"{INDEX} names no {absent} with its library and class, and {name} can't be loaded without it: copy its folder "
                "from the published model, and its entry"
            )
        empty = (name for name, part in parts.items() if part and not any((folder / name).glob("*")))
        if missing := next(empty, None):
            raise FlowGRPOError(f"{INDEX} names {missing}, and its folder is missing or empty")
    return Index(pipeline_class, parts, {name: entry for name, entry in entries.items() if name not in parts})


def _is_part(entry: Any) -> TypeGuard[list[str | None]]:
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str | None) for word in entry)


def _class(name: str, entry: list[str | None]) -> type | None:
    library, class_name = entry
    if library is None or class_name is None:  # left out
        return None
    module = getattr(diffusers.pipelines, library, sys.modules.get(library))  # as diffusers looks for it
    part_class = getattr(module, class_name, None)
    if not isinstance(part_class, type):
        raise FlowGRPOError(f"{INDEX} names {library}.{class_name} as {name}, and there is no such class")
    return part_class


def check_weight_files(folder: str | Path, left_out: Collection[str] = (), file: Path | None = None) -> None:
    """Load all networks as a run does, but on the meta device.

    Args:
        left_out: parts that will not be loaded.
        file: a single file, whose weights replace the transformer's.

    Raises:
        FlowGRPOError: one of them could not be loaded, or its files lack tensors, which would then be random.
    """
    folder = Path(folder)
    variant = weights_variant(folder)
    if file is not None:
        left_out = [*left_out, "transformer"]
        _check_single_file(file)
    for name, part in read_index(folder).parts.items():
        if name not in left_out and part and issubclass(part, torch.nn.Module):
            with load_errors(folder, name):
                _check_network(folder / name, part, variant)


def _check_network(folder: Path, part: Any, variant: str | None) -> None:
    if "quantization_config" in dict(read_json(folder / "config.json")):  # the library that quantised it may need a GPU
        return
    own_variant, files = _weight_files(folder)
    for file in files:
        check_safetensors(file)
    options = {"variant": variant} if variant and variant == own_variant else {}
    _, report = part.from_pretrained(folder, device_map="meta", output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise FlowGRPOError(f"its weights lack {missing[0]}{more}; copy or download them again")


def _check_single_file(file: Path) -> None:
    with load_errors(file):
        check_safetensors(file)
        with safe_open(file, "pt") as tensors:
            scaled = next((name for name in tensors.keys() if SCALED.search(name)), None)  # noqa: SIM118
        if scaled is not None:
            raise FlowGRPOError(
                f"its weights are scaled ({scaled}), and diffusers would read them without their scales: give a file in bf16 or fp16"
            )


def weights_variant(folder: str | Path) -> str | None:
    """The variant by which `from_pretrained` finds the weights of a folder, such as fp16; None if all parts have plain files."""
    parts = (part for part in sorted(Path(folder).iterdir()) if part.is_dir())
    return next((variant for part in parts if (variant := _weight_files(part)[0])), None)


def _weight_files(part: Path) -> tuple[str | None, list[Path]]:
    """The weights of a network, plain ones before a variant, and which variant they are."""
    by_variant: dict[str, list[Path]] = {}
    for file in sorted(part.glob("*.safetensors")):
        if match := WEIGHT_FILE.fullmatch(file.name):
            by_variant.setdefault(match["variant"] or "", []).append(file)
    variant = min(by_variant, default="")
    return variant or None, by_variant.get(variant, [])


@contextmanager
def load_errors(folder: str | Path, part: str = "") -> Iterator[None]:
    """Context in which any error of a library about the model becomes a FlowGRPOError of one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        prefix = "" if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: "
        reason = shorten(f"{prefix}{error}", MAX_ERROR_LENGTH).rstrip(".")
        raise FlowGRPOError(f"the model {folder} could not be loaded: {part and f'{part}: '}{reason}.") from error
