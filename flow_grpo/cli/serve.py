"""`flow-grpo serve`: rewards behind HTTP."""

from typing import Annotated

import typer

from flow_grpo.cli.console import say
from flow_grpo.cli.options import parse_rewards


def serve(
    reward: Annotated[
        list[str],
        typer.Argument(help="Rewards by name, module:function or file.py:function, each with options as NAME={key: value}."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token that clients must send.", envvar="REWARD_TOKEN", show_default=False),
    ] = None,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request's body.")] = 256,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Maximum number of pixels of all images of a request.")] = 100,
) -> None:
    """Serve rewards over HTTP, from another environment or another machine.

    [bold]flow-grpo serve ocr 'clip={model: ViT-L-14, pretrained: openai}'[/bold]
    [bold]flow-grpo train tiny_ocr 'rewards={ocr: {remote: http://127.0.0.1:8000}}'[/bold]
    """
    from flow_grpo import rewards
    from flow_grpo.rewards.serving import server

    loaded = {name: rewards.load(name, **options) for name, options in parse_rewards(reward).items()}
    limits = server.Limits(max_megabytes * 1_000_000, max_megapixels * 1_000_000)

    def ready(url: str) -> None:
        say(f"{', '.join(loaded)} at {url}")

    server.serve(loaded, host, port, token=token, limits=limits, ready=ready)
