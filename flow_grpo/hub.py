"""Where a model lies: a shipped name, a folder, or the hub. A folder that is not there is said to be so at once."""

import json
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

SHIPPED = {"tiny": Path(__file__).parent / "tiny" / "pipeline"}


def locate(name: str) -> str:
    """The folder or hub id of a model; a folder that is not there is said to be so without asking the hub."""
    if name in SHIPPED:
        return str(SHIPPED[name])
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "model_index.json").exists():
            raise ValueError(f"the folder {name} has no model_index.json, so it is not a diffusers pipeline.")
        return name
    if not may_be_hub_id(name):
        raise ValueError(
            f"there is no model folder {name}; give a diffusers folder, a hub id such as "
            f"stabilityai/stable-diffusion-3.5-medium, or a shipped model: {', '.join(SHIPPED)}."
        )
    if not isinstance(try_to_load_from_cache(name, "model_index.json"), str):
        try:
            HfApi().model_info(name, timeout=5)
        except Exception as error:
            raise ValueError(
                f"there is no model folder {name}, and the hub has no such model or can't be reached or wants a login "
                f"({type(error).__name__})."
            ) from error
    return name


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


def components(source: str, beginnings: tuple[str, ...]) -> list[str]:
    """Names of a pipeline's components that begin so, from its model_index.json."""
    file = Path(source) / "model_index.json"
    if not file.exists():
        file = Path(hf_hub_download(source, "model_index.json"))
    return [name for name in json.loads(file.read_text()) if name.startswith(beginnings)]


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is no file may be `owner/model`: a misspelt path is not looked up on the hub."""
    owner = name.partition("/")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(owner).is_dir()
