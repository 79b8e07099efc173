"""`flow-grpo plan`: memory and time before a run."""

import math
from typing import Annotated

import typer

from flow_grpo.cli.console import console, without_library_messages
from flow_grpo.cli.options import DEFAULT_CONFIG, ConfigName, Overrides, config_and_overrides
from flow_grpo.errors import USER_ERROR, FlowGRPOError


@without_library_messages
def plan(
    config: ConfigName = DEFAULT_CONFIG,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU by name, such as 'RTX 4090' or H100, or by its memory, such as 24GB; by default this machine's.",
            show_default=False,
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, max=1e6, help="Override the GPU's memory, in GB.", show_default=False)
    ] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, help="Override the GPU's peak dense bf16 TFLOP/s; needs --gpu.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
) -> None:
    """Estimate what a run needs: memory by part, seconds per step, the largest micro-batch, sizes that divide. Loads no weights.

    [bold]flow-grpo plan sd35_medium_ocr --gpu 'RTX 4090'[/bold]
    [bold]flow-grpo plan flux_dev_ocr memory.quantize=nf4 --gpu H100 --gpus 8[/bold]
    """
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.plan.fit import baseline_memory, print_plan
    from flow_grpo.plan.hardware import Hardware
    from flow_grpo.policy.devices import usable_device

    file, settings = config_and_overrides(config, overrides)
    args = FlowGRPOConfig.from_yaml(file, settings)
    if any(math.isnan(number) for number in (gpu_memory, gpu_tflops) if number is not None):
        raise FlowGRPOError("--gpu-memory and --gpu-tflops should be numbers.")
    if gpu_tflops is not None and gpu is None:
        raise FlowGRPOError("--gpu-tflops is for --gpu NAME; the speed of this machine is measured.")
    if gpu is not None:
        machine = Hardware.from_name(gpu, gpu_memory, gpus, gpu_tflops)
    else:
        machine = Hardware.of_this_machine(usable_device(args.device), gpu_memory, gpus)
    base = 0.0 if machine.cuda else baseline_memory(args)
    if not print_plan(console, args, machine, base):
        raise typer.Exit(USER_ERROR)
