"""`flow-grpo rewards list | info | test | fit`: what rewards there are, and how one behaves on images."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.padding import Padding as Indented
from rich.table import Table

from flow_grpo.cli.console import console, say
from flow_grpo.cli.options import (
    IMAGES_HELP,
    Crop,
    GridColumns,
    GridRows,
    ImagesCommand,
    Padding,
    Prompt,
    Prompts,
    check_file,
    check_folder,
    check_suffix,
    grid_layout,
    parse_reward,
    read_images,
)
from flow_grpo.errors import USER_ERROR, FlowGRPOError
from flow_grpo.text import counted

app = typer.Typer(help="List, describe, test and train rewards.", no_args_is_help=True, rich_markup_mode="rich")


@app.command("list")
def list_() -> None:
    """List all rewards by name, with one sentence each."""
    from flow_grpo import rewards

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in rewards.REGISTRY:
        table.add_row(f"[bold]{name}[/bold]", escape(_first_sentence(rewards.docstring(name))))
    console.print(table)


@app.command()
def info(name: Annotated[str, typer.Argument(help="A reward by name, module:function or file.py:function.")]) -> None:
    """Describe a reward: what it measures, its range, weights, licence and memory, how it can be hacked, and its options."""
    from flow_grpo import rewards

    target = rewards.locate("reward", name, rewards.REGISTRY)
    if not callable(target):
        kind = type(target).__name__
        raise FlowGRPOError(f"reward {name} is not callable but {kind}: it must be `reward(images, prompts, **metadata)`.")
    console.print(f"[bold]{escape(name)}[/bold]  {escape(rewards.REGISTRY.get(name, ''))}", highlight=False)
    console.print()
    for line in _unwrapped(inspect.getdoc(target) or "It has no docstring."):
        indent = len(line) - len(line.lstrip())
        console.print(Indented(escape(line.strip()), (0, 0, 0, 2 + indent)), highlight=False)
    console.print()
    parameters = _options(name, target)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for p in parameters:
        default = "required" if p.default is p.empty else repr(p.default)
        kind = "" if p.annotation is p.empty else inspect.formatannotation(p.annotation)
        table.add_row(f"[bold]{p.name}[/bold]", escape(default), f"[dim]{escape(kind.replace('typing.', ''))}[/dim]")
    console.print("options" if parameters else "no options")
    console.print(table)


@app.command("test", cls=ImagesCommand)
def probe(
    name: Annotated[str, typer.Argument(help="A reward, with options as NAME={key: value}.")],
    images: Annotated[Path, typer.Option(help=IMAGES_HELP)],
    prompts: Prompts = None,
    prompt: Prompt = None,
    rows: GridRows = None,
    columns: GridColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    out: Annotated[
        Path | None,
        typer.Option(help="PNG of the images, best first; by default reward_NAME.png.", show_default=False),
    ] = None,
) -> None:
    """Test a reward on images: original, blurred, noisy and with wrong prompts; latency, determinism.

    [bold]flow-grpo rewards test ocr --images samples/grid.png[/bold]
    """
    from flow_grpo import rewards
    from flow_grpo.doctor import reward_probe
    from flow_grpo.doctor.result import ERROR
    from flow_grpo.progress import phase
    from flow_grpo.rewards.calls import RewardInputs

    reward, options = parse_reward(name)
    promptless = not rewards.reads_prompts(reward, **options)
    image_set = read_images(images, prompts, prompt, grid_layout(rows, columns, padding, crop), promptless)
    file = out or Path(f"reward_{re.sub(r'[^A-Za-z0-9]+', '_', reward)}.png")
    check_suffix(file, [".png"])
    check_file(file)
    inputs = RewardInputs(image_set.images(), image_set.prompts, image_set.columns())
    with phase(f"loading reward {reward}"):
        loaded = rewards.load(reward, **options)
    count = counted(len(image_set), "image")
    with phase(f"scoring {count} by {reward}, original and perturbed"):
        stats = reward_probe.measure(reward, loaded, inputs, reward_probe.perturbed(inputs))
    results = reward_probe.show(console, f"{reward} on {count} of {images}", reward, stats)
    reward_probe.save_ranked(file, reward, inputs, image_set.labels, stats.original)
    if not promptless and reward_probe.WRONG_PROMPT not in stats.values:
        say("all images are of one prompt: wrong prompts were not tried")
    if stats.std_within_prompts is None:
        say("no prompt has two images, so that what a run could learn from the reward was not tested")
    say(f"best to worst: {file}")
    if not stats.finite or any(result.status == ERROR for result in results):
        raise typer.Exit(USER_ERROR)


@app.command()
def fit(
    votes: Annotated[
        str,
        typer.Argument(
            help="A table of votes, .jsonl, .csv or .parquet: prompt, better and worse; or as Pick-a-Pic or ImageRewardDB have them. "
            "Paths are relative to the file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the head.")] = Path("preference_head"),
    model: Annotated[
        str | None,
        typer.Option(help="open_clip model for the features; by default the embedded tiny one.", show_default=False),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option(help="The model's pretrained tag or checkpoint.", show_default=False)
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="L2 penalty.")] = 1e-3,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the prompts held out to measure accuracy.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed for the held-out split.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
) -> None:
    """Train a preference head on people's votes, for the reward preference_head.

    [bold]flow-grpo rewards fit votes/votes.jsonl --model ViT-L-14 --pretrained openai[/bold]
    """
    from flow_grpo.data.votes import load_votes
    from flow_grpo.files import new_files
    from flow_grpo.rewards import preference_head

    found = load_votes(votes, stay_inside=True)
    check_folder(out)
    with new_files(out, "head", preference_head.FILES) as folder:
        fitted = preference_head.fit(
            found,
            folder,
            preference_head.TINY if model is None else model,
            pretrained,
            weight_decay=weight_decay,
            held_out=held_out,
            seed=seed,
            device=device,
        )
    accuracy = fitted.held_out_accuracy
    unseen = "" if accuracy is None else f", {accuracy:.3f} of {fitted.held_out_votes} held out"
    say(f"agrees with {fitted.accuracy:.3f} of {counted(fitted.votes - fitted.held_out_votes, 'vote')}{unseen}: {out}")
    say(f"as a reward: 'rewards={{preference_head: {{options: {{weights: {out}}}}}}}'")


def _options(name: str, reward: Callable[..., object]) -> list[inspect.Parameter]:
    """The reward's parameters other than what every reward is given."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (ValueError, TypeError) as error:
        raise FlowGRPOError(f"reward {name} does not say what it takes: wrap it in a function(images, prompts).") from error
    return [p for p in parameters if p.name not in ("images", "prompts") and p.kind != p.VAR_KEYWORD]


def _unwrapped(text: str) -> list[str]:
    """A docstring with each paragraph, list item and argument on one line, so that the terminal can wrap it."""
    lines: list[str] = []
    for line in text.split("\n"):
        starts = not line.strip() or not lines or not lines[-1].strip() or re.match(r"\s*(- |\w+: |\w+:$)", line)
        if starts:
            lines.append(line)
        else:
            lines[-1] += " " + line.strip()
    return lines


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[^A-Z\d\s][.?]) ", " ".join(text.split("\n\n")[0].split()))[0]
