"""Finding a model or a LoRA: a bundled name, a folder or a hub id. A missing folder is an error, without asking the hub."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from flow_grpo.config.loading import read_json
from flow_grpo.errors import FlowGRPOError
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


def resolve_model(name: str) -> str:
    """The folder or hub id of a model. FlowGRPOError if there is no such folder, or the hub has no such model."""
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name])
    folder = Path(name).expanduser()
    if folder.is_file():
        raise FlowGRPOError(
            f"the model {name} is a single file, and a folder in the format of diffusers is needed: in Python, the class of its "
            "pipeline has from_single_file, and save_pretrained writes such a folder."
        )
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
    """What a pipeline was loaded from: a bundled name, a folder or a hub id; its class if it was built in memory."""
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
    """Identifies a model and its version: by the hub's commit, or the sizes and times of a folder's files."""
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
    cached = try_to_load_from_cache(name, INDEX) if looks_like_hub_id(name) else None
    file = Path(cached) if isinstance(cached, str) else BUNDLED_MODELS.get(name, Path(name)) / INDEX
    try:
        return str(read_json(file)["_class_name"])
    except (ValueError, KeyError, TypeError):
        return "DiffusionPipeline"


def resolve_lora(path: str | Path) -> tuple[str, str | None]:
    """The folder or hub id of a saved LoRA, and the file's name if a file was given.

    The folder of a finished run has it in lora/, or has a transformer/. FlowGRPOError if there is none.
    """
    folder = Path(path).expanduser()
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
