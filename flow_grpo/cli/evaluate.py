"""The command line of measuring: eval, score."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flow_grpo.cli.image_options import Crop, Padding, Prompt, Prompts, SheetColumns, SheetRows, given, sheet
from flow_grpo.cli.output import prepare_file, prepare_folder
from flow_grpo.cli.rewards import with_options
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.text import counted, escape_formula, visible

if TYPE_CHECKING:
    from flow_grpo.data.image_sets import ImageRecords
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.evaluation.scorecard import Scorecard
    from flow_grpo.evaluation.targets import Target
    from rewards import Reward, WeightedSum

console = Console()
# A path with an equals sign is told from it by a slash before that, ./a=b; only a reward's name may have one too.
SETTING = re.compile(r"[\w.:-]+=|(evaluation\.)?rewards\.[^=]+=")
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Runs, checkpoints, LoRAs, models, configs, sheets or folders of pictures; settings over the configs as "
        "[bold]key.sub=value[/bold].",
        metavar="TARGET...",
        show_default=False,
    ),
]
MOST_SEEDS = 1000  # pictures of a prompt, which are in memory together
PromptSource = Annotated[
    str | None,
    typer.Option(
        help="A set by name (ocr, ocr_test, ocr_paper, geneval, partiprompts, drawbench), a file, a hub data set, or pictures of `sample`, "
        "whose prompts and seeds are drawn again. By default the config's evaluation.prompts.",
        show_default=False,
    ),
]
RewardNames = Annotated[
    list[str] | None,
    typer.Option(
        help="Reward by name, module:function or file.py:function, with options as NAME={key: value}; may be repeated.",
        show_default=False,
    ),
]
Lora = Annotated[
    list[str] | None, typer.Option(help="A LoRA as another target, also by hub id; may be repeated.", show_default=False)
]
Config = Annotated[
    str | None, typer.Option(help="Config of LoRAs and models, which have none of their own.", show_default=False)
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many prompts, from the first on.", show_default=False)]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sampling steps of every model; by default those of the first one's evaluation.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Use all that a config.yaml beside the weights names: its author's code runs, and its servers get the pictures.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for eval.json, .md and .csv; by default that of the first run, or this one.", show_default=False
    ),
]


def evaluate(
    targets: Targets = None,
    lora: Lora = None,
    prompts: PromptSource = None,
    prompt: Prompt = None,
    reward: RewardNames = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="Pictures of each prompt; two or more show how diverse they are.")
    ] = 1,
    limit: Limit = None,
    steps: Steps = None,
    config: Config = None,
    rows: SheetRows = None,
    columns: SheetColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    trust: Trust = False,
    out: Out = None,
) -> None:
    """Measure models or pictures side by side: rewards, detail, diversity, distance from the base model, with intervals and tests.

    [bold]flow-grpo eval runs/tiny_ocr[/bold]  (held-out prompts, with and without the run's LoRA)
    [bold]flow-grpo eval runs/tiny_ocr runs/red --prompts geneval --seeds 4 --reward geneval_exact[/bold]
    [bold]flow-grpo eval samples/grid.png other.png --reward ocr --prompts prompts.txt[/bold]
    """
    from flow_grpo.config import found_config
    from flow_grpo.evaluation import tables
    from flow_grpo.evaluation.targets import Model, Pictures, Reading, find
    from flow_grpo.policy.library_logging import quiet_libraries

    quiet_libraries()
    words = [word for word in targets or [] if not SETTING.match(word)]
    overrides = [word for word in targets or [] if SETTING.match(word)]
    known = _prompts(prompts, prompt)
    how = Reading(config, overrides, prompt or _prompt_set(known), sheet(rows, columns, padding, crop), limit)
    found = find(words if words or lora else ["tiny_ocr"], how, lora)
    for note in [target.gallery.note for target in found if isinstance(target, Pictures) and target.gallery.note]:
        console.print(visible(note), highlight=False, markup=False, soft_wrap=True)
    models = [target for target in found if isinstance(target, Model)]
    for place, model in enumerate(models):  # the first one's config says what is measured, and on what
        if model.found is not None and not trust:
            found_config.check(model.args, model.found, rewards=not (place or reward), prompts=not (place or prompts))
    args = models[0].args if models else FlowGRPOConfig.from_yaml(config, overrides) if config else None
    kit, total = _rewards(reward, args)
    steps = steps or (args.evaluation.steps if args else None)
    folder = out or next((Path(word) for word in words if (Path(word) / "config.yaml").is_file()), Path())
    prepare_folder(folder)
    card = _measured(found, _asked(known, args, seeds, limit) if models and args else None, kit, total, steps)
    tables.show(console, card)
    for warning in dict.fromkeys(kit.drop_messages):
        console.print(f"warning: {visible(warning)}", highlight=False, markup=False, soft_wrap=True)
    settings: dict[str, Any] = {"prompts": prompts or (args and args.evaluation.prompts)}
    if models and args:
        settings |= {"seeds": seeds, "seed": args.evaluation.seed, "steps": steps}
    tables.write(folder, card, settings)
    files = ", ".join(str(folder / name) for name in (tables.JSON, tables.MARKDOWN, tables.CSV))
    console.print(f"numbers: {files}", highlight=False, markup=False, soft_wrap=True)


def score(
    images: Annotated[Path, typer.Argument(help="A grid or picture that `sample` wrote, or a folder of pictures.")],
    reward: RewardNames = None,
    prompts: Prompts = None,
    prompt: Prompt = None,
    rows: SheetRows = None,
    columns: SheetColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    out: Annotated[
        Path | None, typer.Option(help=".json or .csv file for the numbers of each picture.", show_default=False)
    ] = None,
) -> None:
    """Score pictures by any reward, by default ocr: each cell of a grid, or each picture of a folder.

    [bold]flow-grpo score samples/grid.png --reward ocr --reward color[/bold]
    [bold]flow-grpo score sheet.png --prompt 'a red fox' --reward clip[/bold]
    """
    import rewards
    from flow_grpo.data import image_sets
    from flow_grpo.tracking.tracker import print_table

    asked = list(map(with_options, reward or ["ocr"]))
    promptless = not any(rewards.reads_prompts(name, **options) for name, options in asked)
    if out is not None and out.suffix not in WRITERS:
        raise ValueError(f"--out {out} is neither a .json nor a .csv file.")
    shown = image_sets.read(images, given(prompts, prompt), sheet(rows, columns, padding, crop), promptless)
    if shown.note:
        console.print(visible(shown.note), highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        prepare_file(out)
    pictures, metadata = shown.images(), shown.columns()
    values = {
        name: rewards.score(name, one, pictures, shown.prompts, **metadata).tolist()
        for name, one in _loaded(reward or ["ocr"]).items()
    }
    places = list(zip(shown.labels, shown.prompts, strict=True))
    table = {
        name: {
            **{visible(f"{label}  {text}"): v for (label, text), v in zip(places, row, strict=True)},
            "mean": sum(row) / len(row),
        }
        for name, row in values.items()
    }
    print_table(console, f"{counted(len(shown), 'picture')} of {images}", table)
    if out is not None:
        content = [{"picture": n, "prompt": t, **{r: values[r][i] for r in values}} for i, (n, t) in enumerate(places)]
        out.write_text(WRITERS[out.suffix](content), encoding="utf-8", newline="")


def _as_csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(escape_formula, rows[0]))
    writer.writerows([escape_formula(value) for value in row.values()] for row in rows)
    return buffer.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".json": lambda rows: json.dumps(rows, indent=2),
    ".csv": _as_csv,
}


def _prompts(source: str | None, prompt: str | None) -> "PromptSet | ImageRecords | None":
    """A prompt set, or pictures that carry their prompts and seeds."""
    from flow_grpo.data import image_sets
    from flow_grpo.data.prompts import load_prompts

    if source is not None and prompt is None and (image_sets.is_picture(Path(source)) or Path(source).is_dir()):
        return image_sets.read(Path(source))
    found = given(source, prompt)
    return load_prompts([found]) if isinstance(found, str) else found


def _prompt_set(known: "PromptSet | ImageRecords | None") -> "PromptSet | None":
    from flow_grpo.data.prompts import PromptSet

    return None if known is None else PromptSet(known.prompts, known.metadata)


def _measured(
    found: "list[Target]", asked: "ImageRecords | None", kit: "WeightedSum", total: bool, steps: int | None
) -> "Scorecard":
    from flow_grpo.evaluation.measure import measure
    from flow_grpo.evaluation.scorecard import compile_card
    from flow_grpo.evaluation.targets import reference

    measured = []
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {target.name: bar.add_task(escape(visible(target.name)), total=None) for target in found}
        for target in measure(
            found, asked, kit, total, steps, lambda t, done, all: bar.update(tasks[t.name], completed=done, total=all)
        ):
            measured.append(target)
            bar.print(f"{escape(visible(target.name))}: {counted(len(target.rows), 'picture')}", highlight=False)
    return compile_card(measured, {target.name: reference(target, found).name for target in found[1:]})


def _asked(known: "PromptSet | ImageRecords | None", args: FlowGRPOConfig, seeds: int, limit: int | None) -> "ImageRecords":
    """What the models draw."""
    from flow_grpo.data.image_sets import ImageRecords
    from flow_grpo.data.prompts import load_prompts
    from flow_grpo.evaluation import measure as measures

    settings = args.evaluation
    if isinstance(known, ImageRecords):
        if seeds > 1:
            raise ValueError("the pictures of --prompts say which seeds to draw: leave --seeds out.")
        if None in known.seeds:
            raise ValueError("the pictures of --prompts don't say which seeds to draw: give those of flow-grpo sample.")
        return known.head(limit)
    if known is None:
        if settings.prompts is None:
            raise ValueError("there is nothing to draw: name prompts by --prompts, or by evaluation.prompts in the config.")
        known = load_prompts(settings.prompts).head(settings.limit)
    return measures.asked(known, seeds, settings.seed).head(limit)


def _rewards(names: list[str] | None, args: FlowGRPOConfig | None) -> "tuple[WeightedSum, bool]":
    """The rewards, and whether their weighted sum means something: that of a config does."""
    import rewards
    from flow_grpo.training.rewards import build_rewards

    if names:
        loaded = _loaded(names)
        return rewards.WeightedSum(loaded, dict.fromkeys(loaded, 0.0)), False
    if args is None:
        raise ValueError("pictures alone don't say what to measure: give --reward, for example --reward ocr, or --config.")
    return build_rewards(args, monitored=True)[0], True


def _loaded(words: list[str]) -> "dict[str, Reward]":
    """The rewards of --reward by their names in tables."""
    import rewards
    from flow_grpo.training.rewards import RESERVED_NAMES

    options_of = [with_options(word) for word in words]
    if len(dict(options_of)) < len(words):
        raise ValueError("a reward is given twice by --reward: give each once.")
    short = rewards.metric_names(dict(options_of), RESERVED_NAMES)
    return {short[name]: rewards.load(name, **options) for name, options in options_of}
