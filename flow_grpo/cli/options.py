"""Options that several commands share, also those of images on disk and their prompts: their types, and the checks of their values."""

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from flow_grpo.cli.console import say
from flow_grpo.errors import FlowGRPOError

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.data.grid_layout import GridOptions
    from flow_grpo.data.image_sets import ImageRecords, ImageSet
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.evaluation.targets import ModelTarget
    from flow_grpo.rewards import Reward, WeightedSum

# Of settings, only a reward's name may have a slash: `runs/lr=1e-4/config.yaml` and `./a=b` are paths.
SETTING = re.compile(r"[\w.:-]+=|(evaluation\.)?rewards\.[^=]+=")
DEFAULT_CONFIG = "tiny_ocr"
ConfigName = Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped config.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that override the config, [bold]key.sub=value[/bold], such as optimizer.lr=1e-4.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Trust a config.yaml found next to the weights: run the code that it names, and send images to its servers.",
    ),
]
RewardNames = Annotated[
    list[str] | None,
    typer.Option(
        help="Reward by name, module:function or file.py:function, with options as NAME={key: value}. Repeatable.",
        show_default=False,
    ),
]
IMAGES_HELP = (
    "A grid or image written by `sample`, a folder of images, or another program's grid (with --prompt or --prompts)."
)
Prompt = Annotated[str | None, typer.Option(help="One prompt for all images.", show_default=False)]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="File with the images' prompts: a row for each image, in the order of their names or cells, or with a column "
        "file_name. Other columns are metadata for rewards.",
        show_default=False,
    ),
]
GridRows = Annotated[
    int | None,
    typer.Option(min=1, help="Rows of a grid image not written by `sample`; found by default.", show_default=False),
]
GridColumns = Annotated[
    int | None,
    typer.Option(min=1, help="Columns of a grid image not written by `sample`; found by default.", show_default=False),
]
Padding = Annotated[
    str | None,
    typer.Option(
        help="Pixels between the images of such a grid, and around it unless --crop is given: N, or N,M between columns and "
        "between rows. torchvision uses 2.",
        show_default=False,
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(help="Pixels to remove at the edges of such a grid: N, or LEFT,TOP,RIGHT,BOTTOM.", show_default=False),
]


class ImagesCommand(TyperCommand):
    """A typer command on the images of one file or folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. FlowGRPOError for several files, such as a shell makes of *.png."""
        ctx.allow_extra_args = True
        if others := super().parse_args(ctx, args):
            raise FlowGRPOError(
                f"one image or folder can be given, and {others[0]} is another one: put the images into a folder and give that, or "
                "compare them by flow-grpo eval."
            )
        return others


def config_and_overrides(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """The config, None where the first word is a setting already, and all settings."""
    if config is not None and SETTING.match(config):
        return None, [config, *(overrides or [])]
    return config, overrides or []


def config_for_weights(config: str | None, model: str | None, lora: str | None, trust: bool) -> "FlowGRPOConfig":
    """The config of --config, else the one found next to the LoRA or model, else the model's defaults."""
    from flow_grpo.config import FlowGRPOConfig, found_config
    from flow_grpo.run_folder import layout

    own_config = None if config else layout.config_near(lora) or layout.config_near(model)
    source = config or own_config
    args = FlowGRPOConfig(model=model) if model and not source else FlowGRPOConfig.from_yaml(source)
    if own_config is not None and not trust:
        found_config.check(args, own_config, rewards=False, prompts=False)
    return args


def check_found_configs(models: "list[ModelTarget]", uses_rewards: bool, uses_prompts: bool) -> None:
    """Apply `found_config.check` to configs found next to weights. Rewards are those of all models, prompts those of the first."""
    from flow_grpo.config import found_config

    for i, model in enumerate(models):
        if model.config_file is not None:
            found_config.check(model.args, model.config_file, rewards=uses_rewards, prompts=uses_prompts and i == 0)


def parse_reward(text: str) -> tuple[str, dict[str, Any]]:
    """Split `clip={model: ViT-L-14}` into the reward's name and its options."""
    from flow_grpo.config.loading import parse_yaml

    name, equals, option_text = text.partition("={")
    options = parse_yaml("{" + option_text, repr(text)) if equals else {}
    invalid = next((key for key in options if not isinstance(key, str)), None)
    if invalid is not None:
        raise FlowGRPOError(f"{text!r} has the option {invalid!r}, which is not a name: write NAME={{key: value, ...}}.")
    return name, options


def parse_rewards(words: list[str]) -> dict[str, dict[str, Any]]:
    """The options of each reward by its name. FlowGRPOError if one is given twice."""
    options_of = [parse_reward(word) for word in words]
    names = [name for name, _ in options_of]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FlowGRPOError(f"the reward {twice} is given twice: give each once.")
    return dict(options_of)


def load_rewards(words: list[str]) -> "dict[str, Reward]":
    """The rewards of --reward, by their names in tables."""
    from flow_grpo import rewards
    from flow_grpo.progress import phase
    from flow_grpo.training.setup import RESERVED_NAMES

    options_of = parse_rewards(words)
    short_names = rewards.metric_names(options_of, RESERVED_NAMES)
    loaded = {}
    for name, options in options_of.items():
        with phase(f"loading reward {name}"):
            loaded[short_names[name]] = rewards.load(name, **options)
    return loaded


def rewards_to_measure(
    words: list[str] | None, args: "FlowGRPOConfig | None", models: "list[ModelTarget]"
) -> "tuple[WeightedSum, bool]":
    """The rewards of --reward, else of the config and all models; and whether the config's weighted sum, of several, is a metric.

    FlowGRPOError if a run was trained on rewards that its config can't name.
    """
    from flow_grpo import rewards
    from flow_grpo.evaluation.targets import check_rewards_are_named
    from flow_grpo.training.setup import build_rewards

    if words:
        loaded = load_rewards(words)
        return rewards.WeightedSum(loaded, dict.fromkeys(loaded, 0.0)), False
    if args is None:
        raise FlowGRPOError("images alone don't say what to measure: give --reward, for example --reward ocr, or --config.")
    for model in models:
        check_rewards_are_named(model)
    found, trained = build_rewards(_with_rewards_of(models[1:], args), monitored=True)
    return found, len(trained) > 1  # of a single reward the sum is that reward


def _with_rewards_of(models: "list[ModelTarget]", args: "FlowGRPOConfig") -> "FlowGRPOConfig":
    """The config, with the rewards of other models as metrics. One that can't score these prompts is dropped, with a warning."""
    known = args.rewards.keys() | args.evaluation.rewards.keys()
    found = {
        name: setting for model in models for name, setting in (model.args.evaluation.rewards | model.args.rewards).items()
    }
    added = {name: setting.model_copy(update={"on_error": "drop"}) for name, setting in found.items() if name not in known}
    evaluation = args.evaluation.model_copy(update={"rewards": args.evaluation.rewards | added})
    return args.model_copy(update={"evaluation": evaluation})


def check_folder(folder: Path, option: str = "--out") -> None:
    """Check, before the work, that files can be written to a folder, or where it would be created.

    FlowGRPOError, which names the option, if not.
    """
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise FlowGRPOError(
            f"nothing can be written to {folder} ({error.strerror}): give another path by {option}."
        ) from error


def check_suffix(file: Path, suffixes: Iterable[str], option: str = "--out") -> None:
    """Check, before the work, that a file has one of these suffixes. FlowGRPOError, which names the option, if not."""
    if file.suffix.lower() not in suffixes:
        raise FlowGRPOError(f"{option} {file} does not end in {' or '.join(suffixes)}: give a file that does.")


def check_file(file: Path, option: str = "--out") -> None:
    """Check, before the work, that a file can be written. FlowGRPOError, which names the option, if not."""
    check_folder(file.parent, option)
    if file.is_dir():
        raise FlowGRPOError(f"{file} is a folder: give a file by {option}.")
    if file.exists() and not os.access(file, os.W_OK):
        raise FlowGRPOError(f"{file} can't be written: give another file by {option}.")


def grid_layout(rows: int | None, columns: int | None, padding: str | None, crop: str | None) -> "GridOptions":
    """The layout that the options describe. FlowGRPOError if --padding or --crop are not numbers of pixels."""
    from flow_grpo.data.grid_layout import GridOptions

    return GridOptions(rows, columns, _pixels("--padding", padding, 2), _pixels("--crop", crop, 4))


def read_images(
    images: Path, prompts: str | None, prompt: str | None, layout: "GridOptions", promptless: bool
) -> "ImageSet":
    """The images of a file or folder with their prompts. Prints how a grid image was cut."""
    from flow_grpo.data import image_sets

    image_set = image_sets.read(images, read_prompts(prompts, prompt), layout, promptless)
    for line in image_set.note.splitlines():
        say(line)
    return image_set


def read_prompts(prompts: str | None, prompt: str | None) -> "PromptSet | str | None":
    """The prompts of --prompts, a row for each image, or the text of --prompt, one for all images."""
    from flow_grpo.data.prompt_sources import load_prompts

    if prompt is not None and prompts is not None:
        raise FlowGRPOError("--prompt is one prompt for all images and --prompts has a row for each: give one of the two.")
    if prompt is not None and not prompt.strip():
        raise FlowGRPOError("--prompt is empty: describe what the images show.")
    if prompts is None:
        return prompt
    try:
        loaded = load_prompts(prompts)
        say_notes(loaded)
        return loaded
    except ValueError as error:
        if "/" in prompts or Path(prompts).suffix:
            raise
        raise FlowGRPOError(f"{str(error).rstrip('.')}. If these are words of a prompt, give them by --prompt.") from error


def read_prompt_source(source: str | None, prompt: str | None) -> "PromptSet | ImageRecords | None":
    """The prompts of --prompts or --prompt; if --prompts names images of `sample`, their prompts and seeds."""
    from flow_grpo.data import image_sets
    from flow_grpo.data.prompt_sources import load_prompts

    if source is not None and prompt is None:
        path = Path(source)
        if image_sets.is_image_file(path) or (path.is_dir() and not image_sets.is_prompt_folder(path)):
            return image_sets.read(path)
    prompt_source = read_prompts(source, prompt)
    return load_prompts([prompt_source]) if isinstance(prompt_source, str) else prompt_source


def say_notes(prompts: "PromptSet") -> None:
    """Print how prompts were read, and what in them may not be meant as it is read."""
    from flow_grpo.data.prompt_sources import syntax_warnings

    for line in (*prompts.notes, *(f"warning: {sentence}" for sentence in syntax_warnings(prompts.prompts))):
        say(line)


def prompt_set_of(prompt_source: "PromptSet | ImageRecords | None") -> "PromptSet | None":
    """The prompts alone, without the seeds and images that they may come with."""
    from flow_grpo.data.prompts import PromptSet

    return None if prompt_source is None else PromptSet(prompt_source.prompts, prompt_source.metadata)


def _pixels(option: str, text: str | None, count: int) -> tuple[int, ...] | None:
    """Parse `count` numbers; a single number is repeated."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, count) or not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise FlowGRPOError(f"{option} {text} is not a number of pixels, nor {count} of them separated by commas.")
    return tuple(int(part) for part in parts) * (count // len(parts))
