"""The names of all files and folders in a run folder. No other module spells them.

    RUN/
      config.yaml                     the settings
      metrics.jsonl                   a row of numbers for each training step and evaluation (metrics_file.py)
      metrics.torn.jsonl              lines that were no rows, moved away when the run was resumed
      machine.json                    device, cores, processes, versions
      inputs.json                     digests of the prompts, weights and code that the settings name
      trackers.json                   the run's id in each tracking service
      checkpoints/step_000100/        state.pt, and checkpoint.json with its checksum (checkpoint.py)
      lora/ or transformer/           the trained weights of a finished run
      best/                           the weights of the best evaluation
      pictures/step_000100/           images and numbers of an evaluation or training step (samples.py writes, reader.py reads)
        evaluation.json               the held-out prompts with all their scores
        prompt_0003.webp              the image of held-out prompt 3
        groups.json                   some groups of the training step, with rewards and advantages
        group_1_02.webp               image 2 of group 1
      before.png, after.png           grids of the first held-out prompts before and after training
      before_after.png                the two of them as pairs
      reward.png                      the curves
      report.html                     the report
      profile/                        a trace and a summary, with train --profile (tracking/profiler.py)
      export/                         what `export` without --out writes, and what `push_to_hub` uploads
      eval.json, eval.md, eval.csv    what `eval` without --out writes (evaluation/scorecard.py)
      .lock, .owner.json              which process trains here (opening.py)

An export has the run's config.yaml too, and flow_grpo.json with the list of its files.
"""

from pathlib import Path

CONFIG = "config.yaml"
METRICS, TORN = "metrics.jsonl", "metrics.torn.jsonl"
MACHINE, INPUTS, TRACKERS = "machine.json", "inputs.json", "trackers.json"
CHECKPOINTS, STATE, MANIFEST = "checkpoints", "state.pt", "checkpoint.json"
LORA, TRANSFORMER, BEST = "lora", "transformer", "best"
PICTURES, EVALUATION, GROUPS = "pictures", "evaluation.json", "groups.json"
BEFORE, AFTER, BEFORE_AFTER = "before.png", "after.png", "before_after.png"
CURVES, REPORT = "reward.png", "report.html"
PROFILE, TRACE, PROFILE_PAGE = "profile", "trace.json.gz", "summary.md"
LOCK, OWNER = ".lock", ".owner.json"
EXPORT, EXPORT_MANIFEST = "export", "flow_grpo.json"

_STEP = "step_"


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step in RUN/checkpoints or RUN/pictures."""
    return folder / f"{_STEP}{step:06d}"


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """The steps that have a folder there, in order, each with its folder."""
    numbers = [path.name.removeprefix(_STEP) for path in folder.glob(f"{_STEP}*") if path.is_dir()]
    steps = {int(number) for number in numbers if number.isascii() and number.isdecimal()}
    return [(step, step_folder(folder, step)) for step in sorted(steps) if step_folder(folder, step).is_dir()]


def step_of(folder: Path) -> int | None:
    """The step that a folder of a checkpoint is named after; None for another name."""
    number = folder.name.removeprefix(_STEP)
    return int(number) if number != folder.name and number.isascii() and number.isdecimal() else None


def prompt_image(index: int) -> str:
    """The image of the held-out prompt with that index."""
    return f"prompt_{index:04d}.webp"


def strip_of(image: str) -> str:
    """Name of the frame strip stored next to an animation."""
    return image.replace(".webp", "_strip.webp")


def still_image(folder: Path, image: str) -> Path:
    """The file of a kept image that does not move: of a video, its strip."""
    strip = folder / strip_of(image)
    return strip if strip.is_file() else folder / image


def group_image(group: int, image: int) -> str:
    """An image of a group of a training step."""
    return f"group_{group}_{image:02d}.webp"


def source_image(digest: str) -> str:
    """In RUN/pictures, the first image of a prompt, by the digest of its content."""
    return f"sources/{digest}.webp"


def is_run(folder: Path) -> bool:
    """Whether a run has written metrics there."""
    return (folder / METRICS).is_file()


def trained_weights(folder: Path) -> Path | None:
    """The LoRA or transformer that a finished run has left; None if it is not finished."""
    return next((folder / name for name in (LORA, TRANSFORMER) if (folder / name).is_dir()), None)


def config_near(name: str | None) -> Path | None:
    """The config.yaml of the run or export that a file or folder belongs to; None outside of them, and for other names."""
    if name is None or not Path(name).exists():
        return None
    path = Path(name)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / CONFIG).is_file() and any((folder / mark).is_file() for mark in (METRICS, EXPORT_MANIFEST)):
            return folder / CONFIG
    return None
