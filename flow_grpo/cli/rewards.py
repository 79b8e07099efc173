"""The command line of rewards: serve, and `rewards list | info | test | fit`."""

import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding as Indented
from rich.table import Table

from flow_grpo.cli.image_options import Crop, Padding, Prompt, Prompts, SheetColumns, SheetRows, given, sheet
from flow_grpo.cli.output import prepare_file, prepare_folder
from flow_grpo.config.loading import parse_yaml
from flow_grpo.text import counted, visible

app = typer.Typer(help="What rewards there are, and what they like.", no_args_is_help=True, rich_markup_mode="rich")
console = Console()


def serve(
    reward: Annotated[
        list[str],
        typer.Argument(help="Rewards by name, module:function or file.py:function, each with options as NAME={key: value}."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's own need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            help="What a client must send; in the environment nobody sees it.", envvar="REWARD_TOKEN", show_default=False
        ),
    ] = None,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = 256,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Most pixels of a request's pictures together.")] = 100,
) -> None:
    """Put rewards behind HTTP, in an environment or on a machine of their own.

    [bold]flow-grpo serve ocr 'clip={model: ViT-L-14, pretrained: openai}'[/bold]
    [bold]flow-grpo train tiny_ocr 'rewards={ocr: {remote: http://127.0.0.1:8000}}'[/bold]
    """
    import rewards
    from rewards.serving import server

    asked = dict(with_options(text) for text in reward)
    loaded = {name: rewards.load(name, **options) for name, options in asked.items()}
    limits = server.Limits(max_megabytes * 1_000_000, max_megapixels * 1_000_000)

    def ready(url: str) -> None:
        console.print(f"{', '.join(loaded)} at {url}", highlight=False, markup=False, soft_wrap=True)

    server.serve(loaded, host, port, token=token, limits=limits, ready=ready)


@app.command("list")
def list_() -> None:
    """All rewards by name, each with a line of what it measures."""
    import rewards

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in rewards.REGISTRY:
        table.add_row(f"[bold]{name}[/bold]", escape(_first_sentence(rewards.docstring(name))))
    console.print(table)


@app.command()
def info(name: Annotated[str, typer.Argument(help="A reward by name, module:function or file.py:function.")]) -> None:
    """What a reward measures, its range, weights, licence and memory, how it is gamed, and its options."""
    import rewards

    target = rewards.locate("reward", name, rewards.REGISTRY)
    if not callable(target):
        kind = type(target).__name__
        raise ValueError(f"reward {name} is not callable but {kind}: it must be `reward(images, prompts, **metadata)`.")
    console.print(f"[bold]{escape(name)}[/bold]  {escape(rewards.REGISTRY.get(name, ''))}", highlight=False)
    console.print()
    for line in _flowing(inspect.getdoc(target) or "It has no docstring."):
        indent = len(line) - len(line.lstrip())
        console.print(Indented(escape(line.strip()), (0, 0, 0, 2 + indent)), highlight=False)
    console.print()
    given = ("images", "prompts")
    try:
        taken = inspect.signature(target).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(f"reward {name} does not say what it takes: wrap it in a function(images, prompts).") from error
    parameters = [p for p in taken if p.name not in given and p.kind != p.VAR_KEYWORD]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for p in parameters:
        default = "to be given" if p.default is p.empty else repr(p.default)
        kind = "" if p.annotation is p.empty else inspect.formatannotation(p.annotation)
        table.add_row(f"[bold]{p.name}[/bold]", escape(default), f"[dim]{escape(kind.replace('typing.', ''))}[/dim]")
    console.print("options" if parameters else "no options")
    console.print(table)


@app.command("test")
def examine_command(
    name: Annotated[str, typer.Argument(help="A reward, with options as NAME={key: value}.")],
    images: Annotated[Path, typer.Option(help="A grid or picture that `sample` wrote, or a folder of pictures.")],
    prompts: Prompts = None,
    prompt: Prompt = None,
    rows: SheetRows = None,
    columns: SheetColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    out: Annotated[
        Path | None, typer.Option(help="Contact sheet, best first; by default reward_NAME.png.", show_default=False)
    ] = None,
) -> None:
    """Try a reward on pictures as they are, blurred, noisy and with wrong prompts: what it likes, how fast, how steadily.

    [bold]flow-grpo rewards test ocr --images samples/grid.png[/bold]
    """
    import rewards
    from flow_grpo.data import image_sets
    from flow_grpo.doctor import reward_probe
    from flow_grpo.evaluation.group_dependence import RewardInputs

    reward, options = with_options(name)
    promptless = not rewards.reads_prompts(reward, **options)
    shown = image_sets.read(images, given(prompts, prompt), sheet(rows, columns, padding, crop), promptless)
    if shown.note:
        console.print(visible(shown.note), highlight=False, markup=False, soft_wrap=True)
    file = out or Path(f"reward_{re.sub(r'[^A-Za-z0-9]+', '_', reward)}.png")
    prepare_file(file)
    pictures = RewardInputs(shown.images(), shown.prompts, shown.columns())
    found = reward_probe.examine(reward, lambda: rewards.load(reward, **options), pictures)
    reward_probe.show(console, f"{reward} on {counted(len(shown), 'picture')} of {images}", found)
    reward_probe.sheet(file, reward, pictures, shown.labels, found.values[reward_probe.PLAIN])
    console.print(f"best to worst: {file}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def fit(
    votes: Annotated[
        Path, typer.Argument(help="A .jsonl of votes, a line each: prompt, better, worse, paths beside the file.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the head.")] = Path("preference_head"),
    model: Annotated[
        str | None,
        typer.Option(help="open_clip model whose features it reads; by default the tiny one.", show_default=False),
    ] = None,
    pretrained: Annotated[str | None, typer.Option(help="Its pretrained tag or checkpoint.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(help="Pull of the head towards 0.")] = 1e-3,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the prompts that only measure it.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Draws those prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
) -> None:
    """Train a preference head on people's votes, to be used as the reward preference_head.

    [bold]flow-grpo rewards fit votes/votes.jsonl --model ViT-L-14 --pretrained openai[/bold]
    """
    from rewards import preference_head

    prepare_folder(out)
    name = preference_head.TINY if model is None else model
    found = preference_head.fit(votes, out, name, pretrained, weight_decay, held_out, seed, device)
    unseen = "" if found.held_out_accuracy is None else f", {found.held_out_accuracy:.3f} of {found.held_out_votes} held out"
    for line in (
        f"agrees with {found.accuracy:.3f} of {counted(found.votes - found.held_out_votes, 'vote')}{unseen}: {out}",
        f"as a reward: 'rewards={{preference_head: {{options: {{weights: {out}}}}}}}'",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _flowing(text: str) -> list[str]:
    """A docstring with each paragraph, point and argument on one line, for a terminal of any width."""
    lines: list[str] = []
    for line in text.split("\n"):
        begins = not line.strip() or not lines or not lines[-1].strip() or re.match(r"\s*(- |\w+: |\w+:$)", line)
        if begins:
            lines.append(line)
        else:
            lines[-1] += " " + line.strip()
    return lines


def _first_sentence(text: str) -> str:
    """Of a docstring."""
    return re.split(r"(?<=[^A-Z\d][.?]) ", " ".join(text.split("\n\n")[0].split()))[0]


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """`clip={model: ViT-L-14}` is the reward clip with the option model."""
    name, equals, rest = text.partition("={")
    options = parse_yaml("{" + rest, repr(text)) if equals else {}
    odd = next((key for key in options if not isinstance(key, str)), None)
    if odd is not None:
        raise ValueError(f"{text!r} has the option {odd!r}, which is no name: write NAME={{key: value, ...}}.")
    return name, options
