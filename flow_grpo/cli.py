"""The command line: train, sample, compare, doctor; eval and score in eval_cli, plan, report and export in around_cli, serve and rewards in
reward_cli."""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flow_grpo import around_cli, eval_cli, reward_cli
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.harmless import visible
from flow_grpo.quiet import before_imports

app = typer.Typer(
    help="Fine-tune a text-to-image flow model with a reward: any diffusers flow pipeline, any Python function as reward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)
for verb in (eval_cli.score, around_cli.plan, around_cli.report, around_cli.export, reward_cli.serve):
    app.command()(verb)
app.command("eval")(eval_cli.evaluate)
app.add_typer(reward_cli.app, name="rewards")

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
INTERRUPTED = 130


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
    args = FlowGRPOConfig.read(config, overrides)
    if show_config:
        console.print(args.dump(), highlight=False, markup=False)
        if not dry_run:
            return
    if num_processes > 1 and "RANK" not in os.environ and not dry_run:
        from flow_grpo.launch import launch

        raise typer.Exit(launch(num_processes, ["train", config, *(overrides or []), *(["--resume"] if resume else [])]))
    from flow_grpo.quiet import quiet_libraries

    quiet_libraries()
    if dry_run:
        from flow_grpo.dry_run import dry_run as check

        for line in check(args, num_processes, resume):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    from flow_grpo.train import FlowGRPOTrainer, Interrupted
    from flow_grpo.training.early_checks import check_output

    check_output(Path(args.output), resume)
    trainer = FlowGRPOTrainer(args=args)
    try:
        trainer.train(resume)
    except Interrupted:
        if trainer.processes.first:
            processes = [] if trainer.processes.count == 1 else ["--num-processes", str(trainer.processes.count)]
            again = shlex.join(["flow-grpo", "train", config, *(overrides or []), "--resume", *processes])
            console.print(f"\nStopped; the run is saved. Go on with: {again}", highlight=False, markup=False)
        trainer.processes.leave()
        raise typer.Exit(INTERRUPTED) from None
    trainer.processes.leave()


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
    seeds: Annotated[int, typer.Option(min=1, help="Pictures of each prompt, from this many seeds.")] = 4,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Sampling steps; by default those of evaluation.", show_default=False)
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; 1 is off.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for grid.png and the single pictures.")] = Path("samples"),
) -> None:
    """Draw pictures: prompts x seeds as a grid PNG that remembers what is in each cell, and as single PNGs.

    [bold]flow-grpo sample 'red text "CAT" on a blue background' --seeds 4[/bold]
    """
    from flow_grpo import hub
    from flow_grpo.evaluate import draw
    from flow_grpo.grid import Cell, save_grid, save_image
    from flow_grpo.prompts import load_prompts

    texts = [
        t
        for p in prompts
        for t in (load_prompts(p).prompts if Path(p).suffix in (".txt", ".jsonl", ".csv", ".parquet") else [p])
    ]
    if not all(text.strip() for text in texts):
        raise ValueError("an empty prompt was given.")
    source = config or hub.config_of(lora) or hub.config_of(model)
    args = FlowGRPOConfig(model=model) if model and not source else FlowGRPOConfig.read(source)
    model = model or args.model
    policy = _policy(args, model, lora, guidance)
    rows = [text for text in texts for _ in range(seeds)]
    numbers = [first_seed + n for _ in texts for n in range(seeds)]
    images = draw(policy, rows, numbers, steps or args.evaluation.steps, args.microbatch)
    name = model if lora is None else f"{model} + {lora}"
    cells = [Cell(prompt, seed, name) for prompt, seed in zip(rows, numbers, strict=True)]
    save_grid(out / "grid.png", images, cells, columns=seeds if len(texts) > 1 else min(seeds, 8))
    for i, (image, cell) in enumerate(zip(images, cells, strict=True)):
        save_image(out / f"{i:04d}_seed{cell.seed}.png", image, cell)
    console.print(f"{len(images)} pictures: {out / 'grid.png'}", highlight=False, markup=False)


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
    from flow_grpo import compare as comparison

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    limits = comparison.parse_budget(budget, slices)
    runs = comparison.compare(configs, seeds, limits, out, set_ or [], measure, target, stop, say)
    rows = comparison.summary(runs, measure, target)
    comparison.print_summary(console, rows, measure, target)
    comparison.plot(runs, measure, target, out / "compare.png")
    (out / "compare.md").write_text(comparison.markdown(rows))
    (out / "compare.json").write_text(json.dumps(rows, indent=2))
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
    from flow_grpo import doctor as checks
    from flow_grpo.quiet import quiet_libraries

    quiet_libraries()
    try:
        if model is not None:
            settings = FlowGRPOConfig.of(model, [*([config] if "=" in config else []), *(overrides or [])])
            well = checks.model(console, _policy(settings, model, None, None), json_file)
        elif explore:
            names = [name.strip() for name in transitions.split(",")]
            levels = [_number(level) for level in noise_levels.split(",")]
            checks.explore(console, FlowGRPOConfig.read(config, overrides), names, levels, out)
            well = True
        else:
            well = checks.examine(console, FlowGRPOConfig.read(config, overrides), json_file)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not well:
        raise typer.Exit(1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a noise level: give numbers with commas between, such as 0.4,0.7.") from None


def _policy(args: FlowGRPOConfig, model: str, lora: str | None, guidance: float | None) -> Any:
    from flow_grpo.policy import load_policy
    from flow_grpo.quiet import quiet_libraries
    from flow_grpo.trainable import load_trained

    quiet_libraries()
    call = args.call()
    if guidance is not None:
        call["guidance"] = guidance
    policy = load_policy(model, args.device, args.dtype, memory=args.memory, **call)
    if lora is not None:
        load_trained(policy, lora)
    return policy


def run() -> None:
    """The entry point: errors of the user's are one sentence, and other libraries keep quiet."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    before_imports()
    try:
        app(standalone_mode=True)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except RuntimeError as error:
        if os.environ.get("WORLD_SIZE", "1") != "1" and any(word in str(error) for word in ("gloo", "NCCL", "onnection")):
            time.sleep(5)  # another process has failed, and says why: by then the launcher knows, and ends this one
            sys.exit(1)
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
