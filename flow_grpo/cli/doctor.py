"""`flow-grpo doctor`: checks before a run."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flow_grpo.cli.console import console, say, without_library_messages
from flow_grpo.cli.options import Overrides, check_file, check_suffix, config_and_overrides
from flow_grpo.errors import INTERRUPTED, USER_ERROR, FlowGRPOError

if TYPE_CHECKING:
    from flow_grpo.policy.policy import Policy

Config = Annotated[
    str | None,
    typer.Argument(
        help="A YAML file, or the name of a shipped config; by default tiny_ocr, with --step-variance tiny_grpo.",
        metavar="CONFIG",
        show_default=False,
    ),
]


@without_library_messages
def doctor(
    config: Config = None,
    overrides: Overrides = None,
    step_variance: Annotated[
        bool, typer.Option("--step-variance", help="Measure the reward variance caused by the noise of each sampling step.")
    ] = False,
    transitions: Annotated[str, typer.Option(help="Transitions for --step-variance, comma-separated.")] = "cps,flow_sde",
    noise_levels: Annotated[str, typer.Option(help="Noise levels for --step-variance, comma-separated.")] = "0.4,0.7,1.0",
    out: Annotated[
        Path | None,
        typer.Option(help="PNG file for --step-variance; by default step_variance.png.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a pipeline: check whether it can be trained.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.", show_default=False)
    ] = None,
) -> None:
    """Check a run before it starts: machine, prompts, rewards, groups, two updates, costs. Or check a model, or measure step variance.

    Each check is ok, a warning or an error, with advice. After an error the exit status is 2.

    [bold]flow-grpo doctor tiny_ocr[/bold]
    [bold]flow-grpo doctor --model ./my-model height=512 width=512[/bold]
    [bold]flow-grpo doctor tiny_grpo --step-variance --transitions cps --noise-levels 0.6,0.8[/bold]
    """
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.doctor.model import check_model
    from flow_grpo.doctor.result import show
    from flow_grpo.doctor.run import run_checks
    from flow_grpo.doctor.step_variance import check_step_variance

    if step_variance and (model is not None or json_file is not None):
        raise FlowGRPOError(
            "--step-variance makes a plot of a config's run: leave out --model and --json, which are for checks."
        )
    if out is not None and not step_variance:
        raise FlowGRPOError("--out is the PNG file of --step-variance: give both, or --json for the results of checks.")
    out = out or Path("step_variance.png")
    if json_file is not None:
        check_file(json_file, "--json")
    if step_variance:
        check_suffix(out, [".png"])
        check_file(out)
    config, overrides = config_and_overrides(config, overrides)
    passed = True
    try:
        if model is not None:
            policy = _load(model, overrides)
            sections = (("", [result]) for result in check_model(policy))
            passed = show(console, type(policy.pipe).__name__, sections, "the pipeline can be trained", json_file)
            if config is not None:
                say(f"The config was not checked, as --model checks a pipeline alone: run flow-grpo doctor {config}.")
        elif step_variance:
            names = [name.strip() for name in transitions.split(",")]
            levels = [_noise_level(level) for level in noise_levels.split(",")]
            check_step_variance(console, FlowGRPOConfig.from_yaml(config or "tiny_grpo", overrides), names, levels, out)
        else:
            args = FlowGRPOConfig.from_yaml(config, overrides)
            title = f"{args.model}, {args.objective.name}"
            passed = show(console, title, run_checks(args), "the run can be started", json_file)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not passed:
        raise typer.Exit(USER_ERROR)


def _load(model: str, settings: list[str]) -> "Policy":
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.policy.loading import load_policy

    args = FlowGRPOConfig.for_model(model, settings)
    return load_policy(model, args.device, args.dtype, memory=args.memory, **args.pipeline_call_kwargs())


def _noise_level(text: str) -> float:
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not math.isfinite(level):
        raise FlowGRPOError(f"{text!r} is not a noise level: give numbers with commas between, such as 0.4,0.7.")
    return level
