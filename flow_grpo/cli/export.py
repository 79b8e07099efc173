"""`flow-grpo export`: trained weights for others, with a model card."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flow_grpo.cli.console import say
from flow_grpo.errors import FlowGRPOError


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option(help="Output folder; by default export/ in the run's folder.", show_default=False)
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the weights of the best evaluation instead of the last ones.")
    ] = False,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="Export the weights of this step's checkpoint.", show_default=False)
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Export the whole model with the LoRA merged into it.")] = False,
    form: Annotated[
        Literal["diffusers", "peft", "comfyui"],
        typer.Option(
            "--format",
            help="The program that the weights are for: its names of layers and files. With --merge: diffusers or comfyui.",
        ),
    ] = "diffusers",
    dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(
            help="Numbers of the weights; by default fp32 for a LoRA, the run's for a whole model.",
            show_default=False,
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Upload to the hub as user/name.", metavar="USER/NAME", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Write trained weights for use elsewhere: the LoRA, or the whole model, with a model card. Optionally upload them.

    [bold]flow-grpo export runs/tiny_ocr --out signs[/bold]
    [bold]flow-grpo export runs/tiny_ocr --format comfyui --dtype bf16 --out signs[/bold]
    [bold]flow-grpo export runs/tiny_ocr --merge --out signs-model[/bold]
    [bold]flow-grpo export runs/tiny_ocr --merge --format comfyui --out signs-comfyui[/bold]
    [bold]flow-grpo export runs/tiny_ocr --best --out signs --push me/signs --private[/bold]
    """
    from flow_grpo.export.export import check_push, push_export
    from flow_grpo.export.export import export as export_run
    from flow_grpo.run_folder import layout

    if private and push is None:
        raise FlowGRPOError("--private is for a repository on the hub: give --push user/name as well.")
    if push is not None:
        check_push(push)
    folder = out or run / layout.EXPORT
    for line in export_run(run, folder, best, checkpoint, merge, repo=push, form=form, dtype=dtype):
        say(line)
    if push is not None:
        say(f"pushed: {push_export(folder, push, private)}")
