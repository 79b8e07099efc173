"""Where a model lies: a shipped name, a folder, or the hub. A folder that is not there is said to be so at once."""

from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache

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


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is no file may be `owner/model`: a misspelt path is not looked up on the hub."""
    owner = name.partition("/")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(owner).is_dir()
