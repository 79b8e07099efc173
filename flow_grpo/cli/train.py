"""`flow-grpo train`: fine-tune a model by a config."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flow_grpo.cli.console import say, without_collection, without_library_messages
from flow_grpo.cli.options import DEFAULT_CONFIG, ConfigName, Overrides, config_and_overrides
from flow_grpo.errors import INTERRUPTED, FlowGRPOError, RetryableError

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig

NEWEST = "newest"  # `--resume` without a word
PROCESSES_PER_CORE = 4  # more would only wait for each other


def train(
    config: ConfigName = DEFAULT_CONFIG,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[auto]",
            help="Continue from the newest checkpoint in the run folder; with `auto`, start if there is none.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check settings, prompts, rewards, model files and sizes, and estimate the cost of a step. Trains nothing.",
        ),
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved config and exit; with --dry-run, also run the checks.")
    ] = False,
    num_processes: Annotated[
        int, typer.Option("--num-processes", min=1, help="Processes on this machine, one for each GPU.")
    ] = 1,
    profile: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            help="Number of training steps to profile: a trace and a summary in RUN/profile.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fine-tune a model. Without arguments, the embedded model learns to spell in minutes on a CPU.

    [bold]flow-grpo train[/bold]
    [bold]flow-grpo train tiny_ocr steps=20 rewards.color=0.5[/bold]
    [bold]flow-grpo train my.yaml --resume[/bold]
    """
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.distributed.launchers import AUTO, adopt, end_with_launcher

    adopt()
    if resume not in (None, NEWEST, AUTO):
        raise FlowGRPOError(f"--resume={resume}: write --resume, or --resume auto, which starts if there is no checkpoint.")
    file, settings = config_and_overrides(config, overrides)
    with nullcontext() if dry_run or show_config else _together():
        args = FlowGRPOConfig.from_yaml(file, settings)
    if show_config:
        print(args.to_yaml())
        if not dry_run:
            return
    if profile is not None and args.steps < 2:
        raise FlowGRPOError("--profile leaves out the first step, which also loads libraries: set steps=2 or more.")
    if num_processes > 1 and "RANK" not in os.environ and not dry_run:
        options = [*([f"--resume={resume}"] if resume else []), *(["--profile", str(profile)] if profile else [])]
        raise typer.Exit(_launch(num_processes, file or DEFAULT_CONFIG, settings, options, Path(args.output_dir)))
    end_with_launcher()
    how = True if resume == NEWEST else resume
    if dry_run:
        _check(args, num_processes, how)
    else:
        _train(args, how, profile)


@contextmanager
def _together() -> Iterator[None]:
    """End all processes of a run, if a launcher has started several, by an error of this one within the block."""
    if "RANK" not in os.environ:
        yield
        return
    from flow_grpo.distributed.processes import Processes

    with Processes.meet().together():
        yield


@without_library_messages
def _check(args: "FlowGRPOConfig", num_processes: int, resume: bool | str | None) -> None:
    from flow_grpo.doctor.dry_run import dry_run
    from flow_grpo.training.start_checks import check_output

    for line in dry_run(args, num_processes):
        say(line)
    # last: a run of the same settings is often there, and would hide every other error
    check_output(Path(args.output_dir), resume)


@without_library_messages
def _train(args: "FlowGRPOConfig", resume: bool | str | None, profile: int | None) -> None:
    """Train in this process. If the user stops it, say how to continue and exit with the status of an interrupt."""
    with without_collection():
        from flow_grpo.distributed.launchers import go_on
        from flow_grpo.distributed.processes import Processes
        from flow_grpo.tracking.profiler import TrainingProfiler
        from flow_grpo.trainer import FlowGRPOTrainer, Interrupted
        from flow_grpo.training.start_checks import check_output

        processes = Processes.from_environment(args.device)
        with processes.together():
            processes.on_main(lambda: check_output(Path(args.output_dir), resume))
        profilers = [TrainingProfiler(profile)] if profile else []
        trainer = FlowGRPOTrainer(args=args, callbacks=profilers)
    try:
        trainer.train(resume)
    except Interrupted:
        if trainer.processes.is_main:
            say("")
            say(f"Stopped; the run is saved. Go on with: {go_on('--resume')}")
        raise typer.Exit(INTERRUPTED) from None
    for profiler in profilers:
        if profiler.written:
            say(f"profile: {profiler.written}")


def _launch(num_processes: int, config: str, overrides: list[str], options: list[str], folder: Path) -> int:
    """Train in several processes and return their exit status. FlowGRPOError with the command to continue if one dies."""
    from flow_grpo.distributed.launchers import RankDied, go_on, launch
    from flow_grpo.run_folder import checkpoint, layout

    if num_processes > (max_processes := PROCESSES_PER_CORE * (os.cpu_count() or 1)):
        raise FlowGRPOError(
            f"--num-processes={num_processes} is too many for the cores of this machine: give at most {max_processes}."
        )
    try:
        return launch(num_processes, ["train", config, *overrides, *options])
    except RankDied as error:
        saved = checkpoint.steps(folder / layout.CHECKPOINTS)
        advice = (
            f"The checkpoint of step {saved[0]} is saved. Go on with" if saved else "Nothing was saved. Start again with"
        )
        kind = RetryableError if error.status < 0 else FlowGRPOError  # killed, such as for memory or by a scheduler
        raise kind(f"{error} {advice}: {go_on('--resume' if saved else '')}") from None
