"""Files that are installed with the package: run configs and prompts."""

from pathlib import Path

from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

SUFFIXES = (".yaml", ".yml")
# the prompts that each bundled model was made for
TRAINING_PROMPTS = {"tiny": "prompts/signs_train.txt", "tiny_shapes": "prompts/shapes_train.jsonl"}


def bundled_file(name: str) -> Path:
    """A file of `configs/`, which is next to the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parent.parent
    installed, checkout = package / "configs" / name, package.parent / "configs" / name
    return installed if installed.exists() else checkout


def find_config(path: str | Path) -> Path:
    """A config file, by its path or by the name of a bundled one.

    Raises:
        FlowGRPOError: there is none.
    """
    for candidate in (Path(path), bundled_file(f"{path}.yaml"), bundled_file(str(path))):
        if candidate.is_file():
            return candidate
    names = sorted(p.stem for p in bundled_file("").glob("*.yaml"))
    if Path(path).is_dir() and (inside := sorted(Path(path).glob("*.yaml"))):
        raise FlowGRPOError(f"{path} is a folder and no config: give a config in it, {inside[0]}.")
    if Path(path).suffix in SUFFIXES:
        hint = suggest(Path(path).stem, names) or suggest(str(path), [str(p) for p in Path(path).parent.glob("*.yaml")])
        raise FlowGRPOError(f"there is no file {path}.{hint} `flow-grpo init {path}` writes a new config.")
    raise FlowGRPOError(f"there is no config {path}.{suggest(str(path), names)} Bundled ones: {', '.join(names)}.")
