"""The command line: train, sample, compare, doctor; eval and score in eval_cli, plan, report and export in around_cli, serve and rewards in
reward_cli."""

import json
import math
import os
import shlex
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flow_grpo import __version__
from flow_grpo.cli import evaluate
from flow_grpo.cli import export as around_cli
from flow_grpo.cli import rewards as reward_cli
from flow_grpo.cli.output import prepare_file, prepare_folder
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.parent import end_with_launcher
from flow_grpo.files import write_whole
from flow_grpo.policy.library_logging import before_imports
from flow_grpo.progress import reported
from flow_grpo.text import counted, visible
from flow_grpo.training import interrupt

app = typer.Typer(
    help="Fine-tune a text-to-image flow model with a reward: any diffusers flow pipeline, any Python function as reward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings over the config, [bold]key.sub=value[/bold], such as optimizer.lr=1e-4.", show_default=False
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        help="LoRA: a folder, a .safetensors file, a hub id, a run folder, its best/, a checkpoint, an export.",
        show_default=False,
    ),
]
PROCESSES_PER_CORE = 4  # more would only wait for each other
TRACEBACK = "FLOW_GRPO_TRACEBACK"  # environment variable, which other processes of a run inherit


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flow-grpo {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", help=f"Show whole tracebacks of errors, as {TRACEBACK}=1 in the environment does."),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands; `run` has read them by now, wherever they stood."""


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped config.", metavar="CONFIG")
    ] = "tiny_ocr",
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check settings, prompts, rewards, model files and sizes; say what a step takes; train nothing.",
        ),
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved config; alone, train nothing.")
    ] = False,
    num_processes: Annotated[
        int, typer.Option("--num-processes", min=1, help="Processes on this machine, one for each of its GPUs.")
    ] = 1,
) -> None:
    """Fine-tune a model: without arguments the embedded one learns to spell, in minutes on a CPU.

    [bold]flow-grpo train[/bold]
    [bold]flow-grpo train tiny_ocr steps=20 rewards.color=0.5[/bold]
    [bold]flow-grpo train my.yaml --resume[/bold]
    """
    if "=" in config:  # settings alone go over the default config
        config, overrides = "tiny_ocr", [config, *(overrides or [])]
    args = FlowGRPOConfig.from_yaml(config, overrides)
    if show_config:
        console.print(args.to_yaml(), highlight=False, markup=False)
        if not dry_run:
            return
    if num_processes > 1 and "RANK" not in os.environ and not dry_run:
        raise typer.Exit(_launch(num_processes, config, overrides or [], resume, Path(args.output)))
    end_with_launcher()
    from flow_grpo.policy.library_logging import quiet_libraries

    quiet_libraries()
    if dry_run:
        from flow_grpo.doctor.dry_run import dry_run as check

        for line in check(args, num_processes, resume):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    from flow_grpo.trainer import FlowGRPOTrainer, Interrupted
    from flow_grpo.training.early_checks import check_output

    check_output(Path(args.output), resume)
    trainer = FlowGRPOTrainer(args=args)
    try:
        trainer.train(resume)
    except Interrupted:
        if trainer.processes.is_main:
            again = _command(config, overrides or [], True, trainer.processes.world_size)
            console.print(f"\nStopped; the run is saved. Go on with: {again}", highlight=False, markup=False)
        trainer.processes.destroy()
        raise typer.Exit(interrupt.INTERRUPTED) from None
    trainer.processes.destroy()


def _launch(count: int, config: str, overrides: list[str], resume: bool, folder: Path) -> int:
    """Trains in several processes; ValueError, with how to go on, if one of them dies."""
    from flow_grpo.distributed.launch import RankDied, launch
    from flow_grpo.run_folder import checkpoint, layout

    if count > (most := PROCESSES_PER_CORE * (os.cpu_count() or 1)):
        raise ValueError(f"--num-processes={count} is too many for the cores of this machine: give at most {most}.")
    try:
        return launch(count, ["train", config, *overrides, *(["--resume"] if resume else [])])
    except RankDied as error:
        saved = checkpoint.steps(folder / layout.CHECKPOINTS)
        kept = f"The checkpoint of step {saved[0]} is saved. Go on with" if saved else "Nothing was saved. Start again with"
        raise ValueError(f"{error} {kept}: {_command(config, overrides, bool(saved), count)}") from None


def _command(config: str, overrides: list[str], resume: bool, processes: int) -> str:
    """The command line that starts or resumes a run."""
    several = [] if processes == 1 else ["--num-processes", str(processes)]
    return shlex.join(["flow-grpo", "train", config, *overrides, *(["--resume"] if resume else []), *several])


@app.command()
def sample(
    prompts: Annotated[list[str], typer.Argument(help="Prompts, or files of prompts (.txt, .jsonl, .csv, .parquet).")],
    model: Annotated[
        str | None,
        typer.Option(help="Diffusers folder, hub id or shipped model; by default the config's.", show_default=False),
    ] = None,
    lora: Lora = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Config that says how to call the model; by default that of the LoRA's or model's run, where it is at hand, the "
            "pipeline's own size with --model, or tiny_ocr.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Pictures of each prompt, from this many seeds.")] = 4,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Sampling steps; by default those of evaluation.", show_default=False),
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; 1 is off.", show_default=False)] = None,
    trust: evaluate.Trust = False,
    out: Annotated[Path, typer.Option(help="Folder for grid.png and the single pictures.")] = Path("samples"),
) -> None:
    """Draw pictures: prompts x seeds as a grid PNG that remembers what is in each cell, and as single PNGs.

    [bold]flow-grpo sample 'red text "CAT" on a blue background' --seeds 4[/bold]
    """
    import torch

    from flow_grpo.config import found_config
    from flow_grpo.data.grid import ImageInfo, fits, save_grid, save_image
    from flow_grpo.evaluation.generate import generate_images
    from flow_grpo.policy import hub

    texts = _texts(prompts)
    found = None if config else hub.find_run_config(lora) or hub.find_run_config(model)
    source = config or found
    args = FlowGRPOConfig(model=model) if model and not source else FlowGRPOConfig.from_yaml(source)
    if found is not None and not trust:
        found_config.check(args, found, rewards=False, prompts=False)
    model = model or args.model
    prepare_folder(out)
    policy = _policy(args, model, lora, guidance)
    name = model if lora is None else f"{model} + {lora}"
    cells = [ImageInfo(prompt, first_seed + n, name) for prompt in texts for n in range(seeds)]
    kept: list[Any] = []
    for begin in range(0, len(cells), args.microbatch):
        some = cells[begin : begin + args.microbatch]
        images = generate_images(
            policy, [c.prompt for c in some], [c.seed for c in some], steps or args.evaluation.steps, len(some)
        )
        for i, (image, cell) in enumerate(zip(images, some, strict=True), begin):
            save_image(out / f"{i:04d}_seed{cell.seed}.png", image, cell)
        if fits(len(cells), *images.shape[-2:]):
            kept.append(images)
    if kept:
        save_grid(out / "grid.png", torch.cat(kept), cells, columns=seeds if len(texts) > 1 else min(seeds, 8))
    where = out / "grid.png" if kept else f"{out}, without a grid.png, which would be too large"
    console.print(f"{counted(len(cells), 'picture')}: {where}", highlight=False, markup=False)


@app.command()
def compare(
    configs: Annotated[list[str], typer.Argument(help="Configs, by file or by the name of a shipped one.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each config.")] = 3,
    budget: Annotated[
        str, typer.Option(help="Of each run: seconds or minutes of training (120s, 20m) or images=N drawn.")
    ] = "120s",
    slices: Annotated[int, typer.Option(min=1, help="Evaluations of each run; runs take turns after each.")] = 6,
    measure: Annotated[str, typer.Option(help="The held-out measure to compare by.")] = "reward",
    target: Annotated[
        float | None, typer.Option(help="Report the seconds until the measure reaches this.", show_default=False)
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End a run once it has reached the target.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value over every config.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, compare.png, compare.md and compare.json.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Compare configs on the same budget with several seeds, taking turns on the machine. Stopped, it goes on where it was.

    [bold]flow-grpo compare tiny_ocr tiny_grpo --seeds 3 --budget 5m --measure ocr_exact --target 0.92[/bold]
    """
    from flow_grpo.compare import runs as comparison
    from flow_grpo.run_folder.lock import locked

    if target is not None and not math.isfinite(target):
        raise ValueError(f"--target {target} is not a number that a measure reaches: give a finite one.")

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    limits = comparison.parse_budget(budget, slices)
    prepare_folder(out)
    with locked(out, say):
        runs = comparison.compare(configs, seeds, limits, out, set_ or [], measure, target, stop, say)
    rows = comparison.summary(runs, measure, target)
    comparison.print_summary(console, rows, measure, target)
    comparison.plot(runs, measure, target, out / "compare.png")
    write_whole(out / "compare.md", comparison.markdown(rows))
    write_whole(out / "compare.json", json.dumps(rows, indent=2))
    say(f"curves: {out / 'compare.png'}, table: {out / 'compare.md'}, numbers: {out / 'compare.json'}")


@app.command()
def doctor(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped config.", metavar="CONFIG")
    ] = "tiny_grpo",
    overrides: Overrides = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Measure how much reward variance the noise of each sampling step owns.")
    ] = False,
    transitions: Annotated[str, typer.Option(help="Transitions to explore, with commas between.")] = "cps,flow_sde",
    noise_levels: Annotated[str, typer.Option(help="Noise levels to explore, with commas between.")] = "0.4,0.7,1.0",
    out: Annotated[Path, typer.Option(help="Picture of the exploration.")] = Path("explore.png"),
    model: Annotated[
        str | None,
        typer.Option(help="A folder or hub id: can this pipeline be trained, check by check?", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the verdicts to this file.", show_default=False)
    ] = None,
) -> None:
    """Look at a run before it starts: machine, prompts, rewards, groups, two updates, costs; or what explores; or a model.

    Each check has a verdict: fine, warning or wrong, and then what to do. If anything is wrong the exit status is 1.

    [bold]flow-grpo doctor tiny_grpo[/bold]
    [bold]flow-grpo doctor --model ./my-model height=512 width=512[/bold]
    [bold]flow-grpo doctor tiny_grpo --explore --transitions cps --noise-levels 0.6,0.8[/bold]
    """
    from flow_grpo.doctor import show as checks
    from flow_grpo.policy.library_logging import quiet_libraries

    quiet_libraries()
    if json_file is not None:
        prepare_file(json_file, "--json")
    if explore and model is None:
        prepare_file(out)
    try:
        if model is not None:
            settings = FlowGRPOConfig.for_model(model, [*([config] if "=" in config else []), *(overrides or [])])
            well = checks.model(console, _policy(settings, model, None, None), json_file)
        elif explore:
            names = [name.strip() for name in transitions.split(",")]
            levels = [_number(level) for level in noise_levels.split(",")]
            checks.explore(console, FlowGRPOConfig.from_yaml(config, overrides), names, levels, out)
            well = True
        else:
            well = checks.examine(console, FlowGRPOConfig.from_yaml(config, overrides), json_file)
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.INTERRUPTED) from None
    if not well:
        raise typer.Exit(1)


def _texts(words: list[str]) -> list[str]:
    """The prompts that words stand for, each a prompt or a file of prompts."""
    from flow_grpo.data.prompt_files import SUFFIXES
    from flow_grpo.data.prompts import load_prompts

    files = [word for word in words if Path(word).suffix.lower() in SUFFIXES]
    if not all(word.strip() for word in words):
        raise ValueError("an empty prompt was given.")
    if sum(word not in files and len(word.split()) == 1 for word in words) > 1:
        raise ValueError(
            f"{len(words)} prompts were given, some of one word: put quotes around a prompt of several words, as in "
            f"{shlex.quote(' '.join(words))}, and prompts of one word into a file, one a line."
        )
    return [text for word in words for text in (load_prompts(word).prompts if word in files else [word])]


def _number(text: str) -> float:
    try:
        level = float(text)
        if not math.isfinite(level):
            raise ValueError
        return level
    except ValueError:
        raise ValueError(f"{text!r} is not a noise level: give numbers with commas between, such as 0.4,0.7.") from None


def _policy(args: FlowGRPOConfig, model: str, lora: str | None, guidance: float | None) -> Any:
    from flow_grpo.policy.library_logging import quiet_libraries
    from flow_grpo.policy.policy import load_policy
    from flow_grpo.training.setup import load_trained

    quiet_libraries()
    call = args.pipeline_call_kwargs()
    if guidance is not None:
        call["guidance"] = guidance
    policy = load_policy(model, args.device, args.dtype, memory=args.memory, **call)
    if lora is not None:
        load_trained(policy, lora)
    return policy


app.command("eval")(evaluate.evaluate)
for verb in (
    evaluate.score,
    around_cli.report,
    around_cli.export,
    around_cli.plan,
    around_cli.init,
    around_cli.schema,
    reward_cli.serve,
):
    app.command()(verb)
app.add_typer(reward_cli.app, name="rewards")


def run() -> None:
    """The entry point: errors of the user's are one sentence, other libraries keep quiet, and nothing that hangs keeps it from ending."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    before_imports()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        interrupt.guard()
        interrupt.second_ends(_interrupted)
    try:
        _run()
    except SystemExit as end:
        interrupt.leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _interrupted() -> None:
    raise KeyboardInterrupt


def _run() -> None:
    words = [word for word in sys.argv[1:] if word != "--traceback"]
    if len(words) < len(sys.argv[1:]):
        os.environ[TRACEBACK] = "1"
    try:
        with reported(errors) if os.environ.get("RANK", "0") == "0" else nullcontext():
            app(words, standalone_mode=True)
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK) and type(error).__name__ != "UserCodeError":  # whose traceback stands above
            traceback.print_exception(error)
        _fail(str(error))
    except RuntimeError as error:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from flow_grpo.distributed.processes import PEER_LOST, is_peer_lost

            if is_peer_lost(error):
                time.sleep(1)  # by then the launcher knows which one it was
                sys.stdout.flush()
                os._exit(PEER_LOST)  # the interpreter's own end would wait for the other process
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail("the device ran out of memory: set a smaller microbatch, or smaller pictures by height and width.")


def _fail(message: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # an error of all processes is said once: by then the launcher has ended this one
    errors.print(
        f"[bold red]error[/bold red]: {escape(visible(' '.join(message.split())))}", highlight=False, soft_wrap=True
    )
    sys.exit(2)
