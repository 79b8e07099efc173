"""The command line of measuring: eval, score."""

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.harmless import visible
from flow_grpo.reward_cli import with_options

if TYPE_CHECKING:
    from flow_grpo.gallery import Rows, Sheet
    from flow_grpo.prompts import PromptSet
    from flow_grpo.scorecard import Scorecard
    from flow_grpo.targets import Target
    from rewards import WeightedSum

console = Console()
SETTING = re.compile(r"[\w.:-]+=")  # a path with an equals sign is told from it by a slash before that: ./a=b
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Runs, checkpoints, LoRAs, models, configs, sheets or folders of pictures; settings over the configs as "
        "[bold]key.sub=value[/bold].",
        metavar="TARGET...",
        show_default=False,
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="A set by name (ocr, ocr_paper, geneval, partiprompts, drawbench), a file, a hub data set, or pictures of `sample`, "
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
SheetRows = Annotated[int | None, typer.Option(min=1, help="Of a sheet that `sample` did not write.", show_default=False)]
SheetColumns = Annotated[int | None, typer.Option(min=1, help="Of such a sheet.", show_default=False)]
Padding = Annotated[int, typer.Option(min=0, help="Pixels around each picture of such a sheet; torchvision leaves 2.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for eval.json, .md and .csv; by default that of the first run, or this one.", show_default=False
    ),
]


def evaluate(
    targets: Targets = None,
    lora: Lora = None,
    prompts: Prompts = None,
    reward: RewardNames = None,
    seeds: Annotated[int, typer.Option(min=1, help="Pictures of each prompt; two or more show how diverse they are.")] = 1,
    limit: Limit = None,
    steps: Steps = None,
    config: Config = None,
    rows: SheetRows = None,
    columns: SheetColumns = None,
    padding: Padding = 0,
    out: Out = None,
) -> None:
    """Measure models or pictures side by side: rewards, detail, diversity, distance from the base model, with intervals and tests.

    [bold]flow-grpo eval runs/tiny_ocr[/bold]  (held-out prompts, with and without the run's LoRA)
    [bold]flow-grpo eval runs/tiny_ocr runs/red --prompts geneval --seeds 4 --reward geneval_exact[/bold]
    [bold]flow-grpo eval samples/grid.png other.png --reward ocr --rows 2 --columns 4 --prompts prompts.txt[/bold]
    """
    from flow_grpo import tables
    from flow_grpo.quiet import quiet_libraries
    from flow_grpo.targets import Model, Reading, find

    quiet_libraries()
    words = [word for word in targets or [] if not SETTING.match(word)]
    overrides = [word for word in targets or [] if SETTING.match(word)]
    known = _prompts(prompts)
    how = Reading(config, overrides, _prompt_set(known), _sheet(rows, columns, padding), limit)
    found = find(words if words or lora else ["tiny_ocr"], how, lora)
    models = [target for target in found if isinstance(target, Model)]
    args = models[0].args if models else FlowGRPOConfig.read(config, overrides) if config else None
    kit, total = _rewards(reward, args)
    steps = steps or (args.evaluation.steps if args else None)
    folder = out or next((Path(word) for word in words if (Path(word) / "config.yaml").is_file()), Path())
    _make(folder)
    card = _measured(found, _asked(known, args, seeds, limit) if models and args else None, kit, total, steps)
    tables.show(console, card)
    for warning in dict.fromkeys(kit.dropped):
        console.print(f"warning: {visible(warning)}", highlight=False, markup=False, soft_wrap=True)
    settings: dict[str, Any] = {"prompts": prompts or (args and args.evaluation.prompts)}
    if models and args:
        settings |= {"seeds": seeds, "first_seed": args.evaluation.seed, "steps": steps}
    tables.write(folder, card, settings)
    files = ", ".join(str(folder / name) for name in (tables.JSON, tables.MARKDOWN, tables.CSV))
    console.print(f"numbers: {files}", highlight=False, markup=False, soft_wrap=True)


def score(
    images: Annotated[Path, typer.Argument(help="A grid or picture that `sample` wrote, or a folder of pictures.")],
    reward: RewardNames = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts of the pictures in the order of their names or cells, if they don't carry them.",
            show_default=False,
        ),
    ] = None,
    rows: SheetRows = None,
    columns: SheetColumns = None,
    padding: Padding = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers of each picture.", show_default=False)] = None,
) -> None:
    """Score pictures by any reward, by default ocr: each cell of a grid, or each picture of a folder.

    [bold]flow-grpo score samples/grid.png --reward ocr --reward color[/bold]
    """
    import rewards
    from flow_grpo import gallery
    from flow_grpo.prompts import load_prompts
    from flow_grpo.tracking import print_table

    shown = gallery.read(images, load_prompts(prompts) if prompts else None, _sheet(rows, columns, padding))
    if out is not None:
        _make(out.parent)
    pictures, metadata = shown.images(), shown.columns()
    values = {
        name: rewards.score(name, rewards.load(name, **options), pictures, shown.prompts, **metadata).tolist()
        for name, options in map(with_options, reward or ["ocr"])
    }
    places = list(zip(shown.labels, shown.prompts, strict=True))
    table = {
        name: {
            **{visible(f"{label}  {text}"): v for (label, text), v in zip(places, row, strict=True)},
            "mean": sum(row) / len(row),
        }
        for name, row in values.items()
    }
    print_table(console, f"{len(shown)} pictures of {images}", table)
    if out is not None:
        content = [{"picture": n, "prompt": t, **{r: values[r][i] for r in values}} for i, (n, t) in enumerate(places)]
        out.write_text(json.dumps(content, indent=2))


def _make(folder: Path) -> None:
    """The folder of the numbers is there and can be written to, or a ValueError says so before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written to {folder} ({error.strerror}): give another place by --out.") from error


def _sheet(rows: int | None, columns: int | None, padding: int) -> "Sheet | None":
    from flow_grpo.gallery import Sheet

    return Sheet(rows or 1, columns or 1, padding) if rows or columns or padding else None


def _prompts(source: str | None) -> "PromptSet | Rows | None":
    """A prompt set, or pictures that carry their prompts and seeds."""
    from flow_grpo import gallery
    from flow_grpo.prompts import load_prompts

    if source is None:
        return None
    path = Path(source)
    return gallery.read(path) if gallery.is_picture(path) or path.is_dir() else load_prompts(source)


def _prompt_set(known: "PromptSet | Rows | None") -> "PromptSet | None":
    from flow_grpo.prompts import PromptSet

    return None if known is None else PromptSet(known.prompts, known.metadata)


def _measured(
    found: "list[Target]", asked: "Rows | None", kit: "WeightedSum", total: bool, steps: int | None
) -> "Scorecard":
    from flow_grpo.measures import measure
    from flow_grpo.scorecard import compile_card
    from flow_grpo.targets import reference

    measured = []
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {target.name: bar.add_task(escape(visible(target.name)), total=None) for target in found}
        for target in measure(
            found, asked, kit, total, steps, lambda t, done, all: bar.update(tasks[t.name], completed=done, total=all)
        ):
            measured.append(target)
            bar.print(f"{escape(visible(target.name))}: {len(target.rows)} pictures", highlight=False)
    return compile_card(measured, {target.name: reference(target, found).name for target in found[1:]})


def _asked(known: "PromptSet | Rows | None", args: FlowGRPOConfig, seeds: int, limit: int | None) -> "Rows":
    """What the models draw."""
    from flow_grpo import measures
    from flow_grpo.gallery import Rows
    from flow_grpo.prompts import load_prompts

    settings = args.evaluation
    if isinstance(known, Rows):
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
    from flow_grpo.evaluate import build_rewards

    if names:
        options_of = [with_options(name) for name in names]
        if len(dict(options_of)) < len(names):
            raise ValueError("a reward is given twice by --reward: give each once.")
        loaded: dict[str, Any] = {name: rewards.load(name, **options) for name, options in options_of}
        return rewards.WeightedSum(loaded, dict.fromkeys(loaded, 0.0)), False
    if args is None:
        raise ValueError("pictures alone don't say what to measure: give --reward, for example --reward ocr, or --config.")
    return build_rewards(args, held_out=True)[0], True
