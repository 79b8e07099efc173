"""`flow-grpo compare`: several configs on one budget."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from flow_grpo.cli.console import console, say
from flow_grpo.cli.options import SETTING, check_folder
from flow_grpo.errors import FlowGRPOError


def compare(
    configs: Annotated[list[str], typer.Argument(help="Configs: files, or names of shipped configs.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per config.")] = 3,
    budget: Annotated[
        str, typer.Option(help="Budget per run: seconds or minutes of training (120s, 20m), or images=N generated images.")
    ] = "120s",
    evaluations: Annotated[
        int,
        typer.Option("--evaluations", "--slices", min=1, help="Evaluations per run. Runs take turns after each evaluation."),
    ] = 6,
    measure: Annotated[str, typer.Option(help="The held-out metric to compare by.")] = "reward",
    target: Annotated[
        float | None, typer.Option(help="Report the seconds until the metric reaches this value.", show_default=False)
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End a run when it reaches --target.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting key.sub=value for all configs. Repeatable.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, compare.png, compare.md and compare.json.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Compare configs on the same budget with several seeds. The runs take turns. If stopped, the same command continues.

    [bold]flow-grpo compare tiny_ocr tiny_grpo --seeds 3 --budget 5m --measure ocr_exact --target 0.92[/bold]
    """
    from flow_grpo import compare as comparison
    from flow_grpo.figures import draw_or_warn
    from flow_grpo.files import new_files
    from flow_grpo.run_folder.opening import locked

    if target is not None and not math.isfinite(target):
        raise FlowGRPOError(f"--target {target} is not a number that a metric reaches: give a finite one.")
    if stop and target is None:
        raise FlowGRPOError("--stop ends a run at its target, and none is given: add --target VALUE.")
    if setting := next((word for word in configs if SETTING.match(word)), None):
        raise FlowGRPOError(f"{setting} is a setting, and there are several configs: write --set {setting}.")
    limits = comparison.parse_budget(budget, evaluations)
    comparison.check_configs(configs, set_ or [], limits)
    check_folder(out)
    with locked(out, say):
        runs = comparison.compare(
            configs, seeds, limits, out, overrides=set_ or [], metric=measure, target=target, stop=stop, log=say
        )
    rows = comparison.summarize(runs, measure, target)
    comparison.print_summary(console, rows, measure, target)
    names = ("compare.png", "compare.md", "compare.json")
    with new_files(out, "compare", names) as folder:
        plot, table, numbers = (folder / name for name in names)
        draw_or_warn(lambda: comparison.save_plot(runs, measure, target, plot), out / plot.name, say)
        table.write_text(comparison.markdown(rows), encoding="utf-8")
        numbers.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    say(f"curves: {out / plot.name}, table: {out / table.name}, numbers: {out / numbers.name}")
