"""Where a model or a LoRA lies: a shipped name, a folder, or the hub. A folder that is not there is said to be so at once."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache

from flow_grpo.run_folder.metrics_file import METRICS
from rewards.downloads import HubUnreachable, downloads, hub_file

BUNDLED_MODELS = {"tiny": Path(__file__).parent.parent / "tiny" / "pipeline"}
WEIGHTS, PEFT_WEIGHTS = (
    "pytorch_lora_weights.safetensors",
    "adapter_model.safetensors",
)  # a LoRA's file, diffusers' and peft's
INDEX, CONFIG = "model_index.json", "config.yaml"
EXPORT = "flow_grpo.json"  # what `flow-grpo export` wrote holds it


def resolve_model(name: str) -> str:
    """The folder or hub id of a model; a folder that is not there is said to be so without asking the hub."""
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name])
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "model_index.json").exists():
            raise ValueError(f"the folder {name} has no model_index.json, so it is not a diffusers pipeline.")
        _check_no_code(folder)
        return name
    if not looks_like_hub_id(name):
        raise ValueError(
            f"there is no model folder {name}; give a diffusers folder, a hub id such as "
            f"stabilityai/stable-diffusion-3.5-medium, or a shipped model: {', '.join(BUNDLED_MODELS)}."
        )
    if not isinstance(try_to_load_from_cache(name, "model_index.json"), str):
        try:
            with downloads(name):
                HfApi().model_info(name, timeout=5)
        except HubUnreachable as error:
            raise HubUnreachable(f"there is no model folder {error}") from error
        except Exception as error:
            raise ValueError(
                f"there is no model folder {name}, and the hub has no such model or wants a login ({type(error).__name__})."
            ) from error
    return name


def model_name(pipe: Any) -> str:
    """What a pipeline was loaded from: a shipped name, a folder or a hub id; its class if it was built in memory."""
    source = pipe.name_or_path
    return next((name for name, folder in BUNDLED_MODELS.items() if str(folder) == source), source or type(pipe).__name__)


def _check_no_code(folder: Path) -> None:
    """ValueError if diffusers would run Python files of the folder: weights may come from anybody, and so would their code."""
    try:
        index = dict(json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # loading it says what is wrong
        return
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry}
    files = [folder / ("" if name == "_class_name" else name) / f"{entry[0]}.py" for name, entry in entries.items()]
    code = next((file for file in files if file.is_file()), None)
    if code is not None:
        raise ValueError(
            f"the model {folder} brings code of its own, {code}, which is not run: read it, load the pipeline in Python, and give "
            "FlowGRPOTrainer a flow_grpo.Policy of it."
        )


def fingerprint(source: str) -> list:
    """What tells a model from another one, or from itself after a change: the hub's commit, or a folder's files."""
    folder = Path(source)
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return [
            str(folder.resolve()),
            *((str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files),
        ]
    cached = try_to_load_from_cache(source, "model_index.json")
    return [source, Path(cached).parent.name if isinstance(cached, str) else None]


def component_names(source: str, beginnings: tuple[str, ...]) -> list[str]:
    """Names of a pipeline's components that begin so, from its model_index.json."""
    file = Path(source) / "model_index.json"
    if not file.exists():
        file = Path(hub_file(source, "model_index.json"))
    return [name for name in json.loads(file.read_text()) if name.startswith(beginnings)]


def pipeline_class(name: str) -> str:
    """What diffusers calls a model's pipeline, by the files at hand; without them DiffusionPipeline, which finds out by itself."""
    cached = try_to_load_from_cache(name, INDEX) if looks_like_hub_id(name) else None
    file = Path(cached) if isinstance(cached, str) else BUNDLED_MODELS.get(name, Path(name)) / INDEX
    try:
        return str(json.loads(file.read_text())["_class_name"])
    except (OSError, ValueError, KeyError):
        return "DiffusionPipeline"


def resolve_lora(name: str | Path) -> Path:
    """Where the LoRA lies: of a run folder it is lora/, or transformer/, else what was given. ValueError for what holds none."""
    folder = Path(name)
    if (folder / INDEX).is_file():
        raise ValueError(f"{folder} is a whole model, not a LoRA: give it as --model.")
    if not (folder / METRICS).is_file():
        return folder
    for trained in ("lora", "transformer"):
        if (folder / trained).is_dir():
            return folder / trained
    raise ValueError(f"the run {folder} is not finished, so it has no lora/: give {folder}/best or one of its checkpoints/.")


def find_run_config(name: str | None) -> Path | None:
    """The config of the run that a LoRA or model comes from, where a run folder or an export holds it."""
    if name is None or not Path(name).exists():
        return None
    place = Path(name)
    for folder in (place, place.parent, place.parent.parent):
        if (folder / CONFIG).is_file() and any((folder / mark).is_file() for mark in (METRICS, EXPORT)):
            return folder / CONFIG
    return None


def looks_like_hub_id(name: str) -> bool:
    """Whether a name that is no file may be `owner/model`: a misspelt path is not looked up on the hub."""
    owner = name.partition("/")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(owner).is_dir()
