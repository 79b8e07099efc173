"""Find a model or a LoRA by a bundled name, a folder or a hub id, and check its files before they are loaded."""

import math
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from flow_grpo.config.loading import read_json
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import check_safetensors, expanded
from flow_grpo.rewards.downloads import HubUnreachable, downloads, hub_file
from flow_grpo.run_folder import layout
from flow_grpo.text import suggest

TINY = Path(__file__).parent.parent / "tiny"
BUNDLED_MODELS = {"tiny": TINY / "pipeline", "tiny_shapes": TINY / "shapes" / "pipeline"}
# the file of a LoRA as diffusers and as peft name it
WEIGHTS, PEFT_WEIGHTS = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"  # beside a LoRA in peft's format: its rank and alpha
INDEX = "model_index.json"
HUB_ID = re.compile(r"[A-Za-z0-9_-][\w.-]*/[\w.-]+", re.ASCII)
MAX_ERROR_LENGTH = 250  # of another library's error, in characters
SCALED = re.compile(r"(scale_weight|weight_scale|scaled_fp8|weight_scale_2)$")  # of tensors in fp8 files of other programs
NETWORKS = ("transformer", "vae", "text_encoder")  # prefixes of the parts that are networks in every pipeline
SHARD = r"(?:-\d+-of-\d+)?"
WEIGHT_FILE = re.compile(rf"(?:diffusion_pytorch_model|model){SHARD}(?:\.(?P<variant>\w+?))?{SHARD}\.safetensors")
# by safetensors' names
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    """The folder or hub id of a model, of a single file its folder. FlowGRPOError if there is none, or the hub has no such model."""
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name])
    folder = expanded(name)
    if folder.suffix == ".gguf" and folder.is_file():
        raise FlowGRPOError(
            f"the model {name} is a GGUF file, which holds a quantised transformer alone: give the folder or hub id of the whole model, "
            "with memory.quantize=nf4 where memory is short."
        )
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
        _check_no_code(folder)
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
        except HubUnreachable as error:
            raise HubUnreachable(f"the model {error}") from error
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


def _check_no_code(folder: Path) -> None:
    """Raise FlowGRPOError if diffusers would run Python files of the folder, which may come from anybody."""
    try:
        index = dict(read_json(folder / INDEX))
    except (ValueError, TypeError):  # loading it raises a better error
        return
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry}
    files = [folder / ("" if name == "_class_name" else name) / f"{entry[0]}.py" for name, entry in entries.items()]
    code = next((file for file in files if file.is_file()), None)
    if code is not None:
        raise FlowGRPOError(
            f"the model {folder} contains Python code, {code}, which is not run: read it, load the pipeline in Python, and give "
            "FlowGRPOTrainer a flow_grpo.Policy of it."
        )


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


def component_names(source: str, prefixes: tuple[str, ...]) -> list[str]:
    """Names of a pipeline's components that begin with one of the prefixes, from its model_index.json."""
    file = Path(source) / INDEX
    if not file.exists():
        file = Path(hub_file(source, INDEX))
    return [name for name in read_json(file) if name.startswith(prefixes)]


def pipeline_class(name: str) -> str:
    """The class of a model's pipeline, from local files; without them DiffusionPipeline, which finds the class itself."""
    return str(_local_index(name).get("_class_name", "DiffusionPipeline"))


def component_class(name: str, component: str) -> str | None:
    """The class of a part of a model's pipeline, from local files; None without them."""
    entry = _local_index(name).get(component)
    return entry[1] if isinstance(entry, list) and _names_class(entry) else None


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
        siblings = {
            sibling.name: str(sibling)
            for sibling in folder.parent.glob("*")
            if sibling.is_dir() or sibling.suffix == ".safetensors"
        }
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
    owner = name.partition("/")[0]
    return HUB_ID.fullmatch(name) is not None and not Path(owner).is_dir()


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
    """Read the index of a folder. FlowGRPOError if a part is missing or has no readable config."""
    folder = Path(folder)
    with load_errors(folder):
        content = _read_json_object(folder / INDEX)
        name = content.get("_class_name")
        pipeline_class = getattr(diffusers, name, None) if isinstance(name, str) else None
        if not isinstance(pipeline_class, type) or not issubclass(pipeline_class, DiffusionPipeline):
            raise FlowGRPOError(
                f"{INDEX} has _class_name {name!r}, which is no pipeline of diffusers {diffusers.__version__}"
            )
        arguments = {
            name: p for name, p in signature(pipeline_class).parameters.items() if p.kind is not Parameter.VAR_KEYWORD
        }
        entries = {name: content[name] for name in arguments if name in content}
        optional = getattr(pipeline_class, "_optional_components", ())
        settings = {name for name, argument in arguments.items() if argument.default is not Parameter.empty} - {*optional}
        parts = {
            name: _class(name, entry)
            for name, entry in entries.items()
            if isinstance(entry, list) and (name not in settings or _names_class(entry))
        }
        needed = (name for name in arguments if name not in settings and name not in optional)
        if (absent := next((name for name in needed if parts.get(name) is None), None)) and absent in parts:
            raise FlowGRPOError(
                f"{INDEX} leaves out {absent} ([null, null]), and {pipeline_class.__name__} can't be loaded without it: copy its "
                "folder from the published model, and its entry"
            )
        if absent:
            raise FlowGRPOError(
                f"{INDEX} names no {absent} with its library and class, and {pipeline_class.__name__} needs one"
            )
        for name, part in parts.items():
            if part is not None:
                _check_configs(folder / name, part)
    return Index(pipeline_class, parts, {name: entry for name, entry in entries.items() if name not in parts})


def check_weight_files(folder: str | Path, left_out: Collection[str] = (), file: Path | None = None) -> None:
    """Load all networks as a run does, but on the meta device.

    Args:
        left_out: parts that will not be loaded.
        file: whose weights replace the transformer's.

    Raises:
        FlowGRPOError: one of them could not be loaded, or its files lack tensors, which would then be random.
    """
    folder = Path(folder)
    variant = weights_variant(folder)
    if file is not None:
        left_out = [*left_out, "transformer"]
        _check_single_file(file)
    for name, part in networks(read_index(folder)).items():
        quantised = "quantization_config" in _read_json_object(folder / name / "config.json")
        if name in left_out or quantised:  # the library that quantised it may need a GPU
            continue
        with load_errors(folder):
            _check_files(folder / name)
        with load_errors(folder, name):
            own = {"variant": variant} if variant and variant == _weight_files(folder / name)[0] else {}
            _, report = part.from_pretrained(folder / name, device_map="meta", output_loading_info=True, **own)
            if missing := sorted(report["missing_keys"]):
                more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
                raise FlowGRPOError(f"its weights lack {missing[0]}{more}; copy or download them again")


def _check_single_file(file: Path) -> None:
    _check_readable(file)
    check_safetensors(file)
    with safe_open(file, "pt") as tensors:
        scaled = next((name for name in tensors.keys() if SCALED.search(name)), None)  # noqa: SIM118
    if scaled is not None:
        raise FlowGRPOError(
            f"the weights in {file} are scaled ({scaled}), and diffusers would read them without their scales: give a file in bf16 or fp16."
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


def networks(index: Index) -> dict[str, Any]:
    """The classes of the parts that have weights."""
    return {name: part for name, part in index.parts.items() if part and issubclass(part, torch.nn.Module)}


def stored_bytes(folder: Path, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes in each weights file of a network: of the tensors that loading converts to `dtype`, and of all others."""
    sizes = []
    for file in _weight_files(folder)[1]:
        converted, unchanged = 0, 0
        _check_readable(file)
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_slice(name)
                tensor_dtype = STORED_DTYPES.get(tensor.get_dtype())
                size = math.prod(tensor.get_shape()) * (tensor_dtype.itemsize if tensor_dtype else 1)
                is_converted = tensor_dtype not in (None, dtype)
                converted += size * is_converted
                unchanged += size * (not is_converted)
        sizes.append((converted, unchanged))
    return sizes


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


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except FlowGRPOError as error:  # also of 100,000 brackets
        raise FlowGRPOError(f"{_short_path(file)} is not valid JSON") from error
    if not isinstance(content, dict):
        raise FlowGRPOError(f"{_short_path(file)} holds no JSON object")
    return content


def _names_class(entry: list[Any]) -> bool:
    return len(entry) == 2 and all(isinstance(word, str) for word in entry)


def _class(name: str, entry: list[Any]) -> Any:
    if entry == [None, None]:
        return None
    if not _names_class(entry):
        raise FlowGRPOError(f"{INDEX} names {entry} as {name}, which should be a library and a class")
    library, class_name = entry
    module = getattr(diffusers.pipelines, library, sys.modules.get(library))  # as diffusers looks for it
    part_class = getattr(module, class_name, None)
    if not isinstance(part_class, type):
        raise FlowGRPOError(f"{INDEX} names {library}.{class_name} as {name}, and there is no such class")
    if name.startswith(NETWORKS) and not issubclass(part_class, torch.nn.Module):
        raise FlowGRPOError(f"{INDEX} names {library}.{class_name} as {name}, and that is no network")
    return part_class


def _check_configs(folder: Path, part: Any) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        raise FlowGRPOError(f"{INDEX} names {folder.name}, and its folder is missing or empty")
    if issubclass(part, torch.nn.Module) and not (folder / "config.json").is_file():
        raise FlowGRPOError(f"there is no {folder.name}/config.json")
    for file in folder.glob("*config.json"):
        _read_json_object(file)


def _check_files(folder: Path) -> None:
    """Raise FlowGRPOError if a network's weights are missing or cut off, or some of their shards are missing."""
    for index in folder.glob("*.index.json"):
        shards = _read_json_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise FlowGRPOError(f"{_short_path(index)} has no weight_map")
        if missing := next((shard for shard in shards.values() if not (folder / str(shard)).is_file()), None):
            raise FlowGRPOError(f"there is no {folder.name}/{missing}, which {index.name} names; copy or download it again")
    files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    if not files:
        raise FlowGRPOError(f"there are no weights in the folder {folder.name}; copy or download them again")
    for file in files:
        if file.suffix == ".safetensors":
            _check_readable(file)
            check_safetensors(file)


def _check_readable(file: Path) -> None:
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise FlowGRPOError(f"{_short_path(file)} is damaged ({error}); copy or download it again") from error


def _short_path(file: Path) -> str:
    return file.name if file.name == INDEX else f"{file.parent.name}/{file.name}"
