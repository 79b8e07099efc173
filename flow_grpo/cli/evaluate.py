"""`flow-grpo eval`: models and images measured side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flow_grpo.cli.console import console, say, without_library_messages
from flow_grpo.cli.options import (
    DEFAULT_CONFIG,
    SETTING,
    Crop,
    GridColumns,
    GridRows,
    Padding,
    Prompt,
    RewardNames,
    Trust,
    check_folder,
    check_found_configs,
    grid_layout,
    prompt_set_of,
    read_prompt_source,
    rewards_to_measure,
)
from flow_grpo.text import counted

if TYPE_CHECKING:
    from torch import Tensor

    from flow_grpo.evaluation.scorecard import Scorecard
    from flow_grpo.rewards import WeightedSum

MAX_SEEDS = 1000  # the images of a prompt are in memory together
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Runs, checkpoints, LoRAs, models, configs, grid images or folders of images; settings that override the configs "
        "as [bold]key.sub=value[/bold].",
        metavar="TARGET...",
        show_default=False,
    ),
]
PromptSource = Annotated[
    str | None,
    typer.Option(
        help="A prompt set by name (ocr, shapes, shape_edits, ocr_test, ocr_paper, geneval, partiprompts, drawbench), a file, a hub "
        "data set, a folder of prompts with images, or images of `sample`, whose prompts and seeds are used again. By default the "
        "config's evaluation.prompts.",
        show_default=False,
    ),
]
Lora = Annotated[list[str] | None, typer.Option(help="LoRA to compare: path or hub id. Repeatable.", show_default=False)]
Config = Annotated[
    str | None, typer.Option(help="Config for LoRAs and models that have none of their own.", show_default=False)
]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.", show_default=False)]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sampling steps of every model; by default those of the first one's evaluation.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for eval.json, .md and .csv; by default that of the first run, or the current one.", show_default=False
    ),
]

Seeds = Annotated[
    int,
    typer.Option(
        min=1, max=MAX_SEEDS, help="Images per prompt. With 1, 16 prompts get a second image to measure diversity."
    ),
]


@without_library_messages
def evaluate(
    targets: Targets = None,
    lora: Lora = None,
    prompts: PromptSource = None,
    prompt: Prompt = None,
    reward: RewardNames = None,
    seeds: Seeds = 1,
    limit: Limit = None,
    steps: Steps = None,
    config: Config = None,
    rows: GridRows = None,
    columns: GridColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    trust: Trust = False,
    out: Out = None,
) -> None:
    """Measure models or images side by side: rewards, detail, diversity, distance from the base model, with intervals and tests.

    [bold]flow-grpo eval runs/tiny_ocr[/bold]  (held-out prompts, with and without the run's LoRA)
    [bold]flow-grpo eval runs/tiny_ocr runs/bold --prompts geneval --seeds 4 --reward geneval_exact[/bold]
    [bold]flow-grpo eval samples/grid.png other.png --reward ocr --prompts prompts.txt[/bold]
    """
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.evaluation.generate import SEED
    from flow_grpo.evaluation.measure import measure, rows_to_generate
    from flow_grpo.evaluation.scorecard import build_scorecard
    from flow_grpo.evaluation.targets import ImageTarget, ModelTarget, TargetOptions, reference, resolve_targets

    words = [word for word in targets or [] if not SETTING.match(word)]
    overrides = [word for word in targets or [] if SETTING.match(word)]
    prompt_source = read_prompt_source(prompts, prompt)
    options = TargetOptions(
        config, overrides, prompt or prompt_set_of(prompt_source), grid_layout(rows, columns, padding, crop), limit
    )
    if not words and not lora:
        say(f"no target is given: this is the base model of {DEFAULT_CONFIG}")
    resolved = resolve_targets(words if words or lora else [DEFAULT_CONFIG], options, lora)
    for target in resolved:
        for line in target.image_set.note.splitlines() if isinstance(target, ImageTarget) else ():
            say(line)
    _say_different_settings({t.name: t.image_set.settings for t in resolved if isinstance(t, ImageTarget)})
    models = [target for target in resolved if isinstance(target, ModelTarget)]
    if not trust:
        check_found_configs(models, uses_rewards=not reward, uses_prompts=not prompts)
    args = models[0].args if models else FlowGRPOConfig.from_yaml(config, overrides) if config else None
    reward_sum, sum_is_metric = rewards_to_measure(reward, args, models)
    steps = steps or (args.evaluation.steps if args else None)
    folder = out or _default_folder(words)
    check_folder(folder)
    settings: dict[str, Any] = {
        "prompt_set": prompts or (models[0].args.evaluation.prompt_files if models and not prompt else None)
    }
    to_generate = None
    if models and args:
        settings |= {"seeds": seeds, "seed": SEED, "steps": steps}
        to_generate = rows_to_generate(prompt_source, args.evaluation, seeds, limit)
    measured, kept = list[Any](), dict[int, Any]()
    for result in measure(resolved, to_generate, reward_sum, sum_is_metric, steps, kept=kept):
        measured.append(result)
        say(f"{result.name}: {counted(len(result.rows), 'image')}")
    scorecard = build_scorecard(measured, {target.name: reference(target, resolved).name for target in resolved[1:]})
    _write(scorecard, folder, settings, _warnings(reward_sum, to_generate, kept))


def _say_different_settings(settings: dict[str, dict[str, str]]) -> None:
    """Print which settings of sampling, by target, are not the same in images that are compared."""
    values: dict[str, set[str]] = {}
    for name, value in (pair for stated in settings.values() for pair in stated.items()):
        values.setdefault(name, set()).add(value)
    different = {
        target: ", ".join(f"{name} {value}" for name, value in stated.items() if len(values[name]) > 1)
        for target, stated in settings.items()
    }
    if parts := [f"{target} has {words}" for target, words in different.items() if words]:
        say(f"warning: the images were sampled by different settings: {'; '.join(parts)}.")


def _default_folder(words: list[str]) -> Path:
    """The first run folder among the targets, else the current folder."""
    from flow_grpo.run_folder import layout

    return next((Path(word) for word in words if (Path(word) / layout.CONFIG).is_file()), Path())


def _warnings(reward_sum: "WeightedSum", rows: Any, images: "dict[int, Tensor]") -> list[str]:
    """Sentences on values that mean less than they seem to; `images` are some of the rows'."""
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.evaluation.group_dependence import group_dependence_warnings

    if not (rows and images):
        return reward_sum.drop_messages
    prompts = PromptSet(rows.prompts, rows.metadata)
    return [*reward_sum.drop_messages, *group_dependence_warnings(reward_sum.rewards, prompts, images)]


def _write(scorecard: "Scorecard", folder: Path, settings: dict[str, Any], warnings: list[str]) -> None:
    """Print the tables and write them to files."""
    from flow_grpo.evaluation.scorecard import CSV, JSON, MARKDOWN, show, write

    show(console, scorecard)
    for warning in dict.fromkeys(warnings):
        say(f"warning: {warning}")
    replaced = " (in place of earlier ones)" if (folder / JSON).exists() else ""
    write(folder, scorecard, settings)
    say(f"numbers: {', '.join(str(folder / name) for name in (JSON, MARKDOWN, CSV))}{replaced}")
