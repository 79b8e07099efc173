"""The command line before and after a run: init, schema, plan, report, export."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.validation import check_unused_settings

console = Console()


def init(
    file: Annotated[Path, typer.Argument(help="YAML file to write.", metavar="FILE")] = Path("config.yaml"),
    model: Annotated[str, typer.Option(help="Diffusers folder, hub id or bundled model to train.")] = "tiny",
    reward: Annotated[
        list[str] | None, typer.Option(help="Reward to train on; may be given several times.", show_default="ocr")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented config for a model and a reward.

    [bold]flow-grpo init my.yaml --model stabilityai/stable-diffusion-3.5-medium --reward my_reward.py:redness[/bold]
    """
    import rewards
    from flow_grpo.config.template import template

    if file.exists() and not force:
        raise ValueError(f"{file} exists: give another FILE, or --force to overwrite it.")
    for name in reward or ():
        rewards.check_options(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(template(model, reward or ["ocr"]), encoding="utf-8")
    FlowGRPOConfig.from_yaml(file)
    console.print(f"config: {file}; train it by: flow-grpo train {file}", highlight=False, markup=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of a config file, with the documentation of every setting, for editors.

    [bold]flow-grpo schema > flow-grpo.schema.json[/bold]
    """
    from flow_grpo.config.template import json_schema

    print(json.dumps(json_schema(), indent=2))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are compared on one page.", metavar="RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file; by default report.html in the run's folder, of several here.", show_default=False),
    ] = None,
) -> None:
    """Write what a run was and what came of it as one HTML file, which needs no network. Training writes it too, at every evaluation.

    [bold]flow-grpo report runs/tiny_ocr[/bold]
    [bold]flow-grpo report runs/tiny_ocr runs/red --out compared.html[/bold]
    """
    from flow_grpo.report import page
    from flow_grpo.run_folder import layout

    file = out or (runs[0] / layout.REPORT if len(runs) == 1 else Path(layout.REPORT))
    console.print(f"report: {page.write(runs, file)}", highlight=False, markup=False, soft_wrap=True)


def plan(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped config.", metavar="CONFIG")
    ] = "tiny_ocr",
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings over the config.", show_default=False)] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU by name, such as 'RTX 4090' or H100; by default what is here.", show_default=False),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, max=1e6, help="Override the GPU's memory, in GB.", show_default=False)
    ] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, help="Override its peak in dense bf16 TFLOP/s; with --gpu.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
) -> None:
    """What a run will need: memory by part, seconds a step, the largest micro-batch, sizes that divide. Loads no weights.

    [bold]flow-grpo plan sd35_medium_ocr --gpu 'RTX 4090'[/bold]
    [bold]flow-grpo plan flux_dev_ocr memory.quantize=nf4 --gpu H100 --gpus 8[/bold]
    """
    from flow_grpo.plan import estimate as planning
    from flow_grpo.policy.library_logging import quiet_libraries
    from flow_grpo.policy.policy import usable_device

    quiet_libraries()
    args = FlowGRPOConfig.from_yaml(config, overrides)
    check_unused_settings(args)
    if any(math.isnan(number) for number in (gpu_memory, gpu_tflops) if number is not None):
        raise ValueError("--gpu-memory and --gpu-tflops should be numbers.")
    if gpu_tflops is not None and gpu is None:
        raise ValueError("--gpu-tflops is for --gpu NAME; the speed of this machine is measured.")
    if gpu is not None:
        machine = planning.Hardware.from_name(gpu, gpu_memory, gpus, gpu_tflops)
    else:
        machine = planning.Hardware.of_this_machine(usable_device(args.device), gpu_memory, gpus)
    base = 0.0 if machine.cuda else planning.baseline_memory(args)
    if not planning.print_plan(console, args, machine, base):
        raise typer.Exit(1)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for it; by default export/ in the run's folder.", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The LoRA of the best evaluation in place of the last one.")] = False,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="The LoRA of this step's checkpoint.", show_default=False)
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="The whole model with the LoRA in its weights.")] = False,
    push: Annotated[
        str | None, typer.Option(help="Upload it to the hub as user/name.", metavar="USER/NAME", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Nobody else sees it there.")] = False,
) -> None:
    """Write what a run has trained as others use it: the LoRA for diffusers, or the whole model, with a model card; and share it.

    [bold]flow-grpo export runs/tiny_ocr --out signs[/bold]
    [bold]flow-grpo export runs/tiny_ocr --merge --out signs-model[/bold]
    [bold]flow-grpo export runs/tiny_ocr --best --out signs --push me/signs --private[/bold]
    """
    from flow_grpo.export import export as sharing

    if private and push is None:
        raise ValueError("--private is of what is pushed to the hub: give --push user/name as well.")
    if push is not None:
        sharing.check_push(push)
    for line in sharing.export(run, out or run / "export", best, checkpoint, merge, push):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if push is not None:
        address = sharing.push(out or run / "export", push, private)
        console.print(f"pushed: {address}", highlight=False, markup=False, soft_wrap=True)
