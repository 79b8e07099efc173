"""The command line of rewards: serve, and `rewards list | info | test`."""

from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

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
    from rewards import server

    asked = dict(_with_options(text) for text in reward)
    loaded = {name: rewards.load(name, **options) for name, options in asked.items()}
    limits = server.Limits(max_megabytes * 1_000_000, max_megapixels * 1_000_000)

    def ready(url: str) -> None:
        console.print(f"{', '.join(loaded)} at {url}", highlight=False, markup=False, soft_wrap=True)

    server.serve(loaded, host, port, token, limits, ready)


def _with_options(text: str) -> tuple[str, dict[str, Any]]:
    """`clip={model: ViT-L-14}` is the reward clip with the option model."""
    name, equals, rest = text.partition("={")
    try:
        options = yaml.safe_load("{" + rest) if equals else {}
    except yaml.YAMLError as error:
        raise ValueError(f"the options of {text!r} are not valid YAML: write NAME={{key: value, ...}}.") from error
    return name, options
