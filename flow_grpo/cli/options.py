"""Options that several commands share: their types, and the checks of their values."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flow_grpo.errors import FlowGRPOError

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.evaluation.targets import ModelTarget
    from flow_grpo.rewards import Reward, WeightedSum

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
    """Apply `found_config.check` to configs found next to weights. Rewards and prompts are those of the first model's."""
    from flow_grpo.config import found_config

    for i, model in enumerate(models):
        if model.config_file is not None:
            first = i == 0
            found_config.check(model.args, model.config_file, rewards=first and uses_rewards, prompts=first and uses_prompts)


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
    """The rewards of --reward, else of the config and all models; and whether the config's weighted sum is a metric.

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
    return build_rewards(_with_rewards_of(models[1:], args), monitored=True)[0], True


def _with_rewards_of(models: "list[ModelTarget]", args: "FlowGRPOConfig") -> "FlowGRPOConfig":
    """The config, with the rewards of other models as metrics. One that can't score these prompts is dropped, with a warning."""
    known = args.rewards.keys() | args.evaluation.rewards.keys()
    found = {
        name: setting for model in models for name, setting in (model.args.evaluation.rewards | model.args.rewards).items()
    }
    added = {name: setting.model_copy(update={"on_error": "drop"}) for name, setting in found.items() if name not in known}
    evaluation = args.evaluation.model_copy(update={"rewards": args.evaluation.rewards | added})
    return args.model_copy(update={"evaluation": evaluation})


def prepare_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder and check, before the work, that files can be written to it. ValueError, which names the option, if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FlowGRPOError(f"nothing can be written to {folder} ({reason}): give another path by {option}.") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create the folder as `prepare_folder` does; if the work in this context fails, a new and empty one is removed again."""
    is_new = not os.path.exists(folder)  # which answers for a name that is too long, too
    prepare_folder(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()
        raise


def check_suffix(file: Path, suffixes: Iterable[str], option: str = "--out") -> None:
    """Check, before the work, that a file has one of these suffixes. ValueError, which names the option, if not."""
    if file.suffix.lower() not in suffixes:
        raise FlowGRPOError(f"{option} {file} does not end in {' or '.join(suffixes)}: give a file that does.")


def prepare_file(file: Path, option: str = "--out") -> None:
    """Create the file's folder and check, before the work, that the file can be written. ValueError, which names the option, if not."""
    prepare_folder(file.parent, option)
    if file.is_dir():
        raise FlowGRPOError(f"{file} is a folder: give a file by {option}.")
    if file.exists() and not os.access(file, os.W_OK):
        raise FlowGRPOError(f"{file} can't be written: give another file by {option}.")
