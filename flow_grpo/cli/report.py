"""`flow-grpo report`: runs as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from flow_grpo.cli.console import say


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are compared on one page.", metavar="RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file; by default report.html in the run's folder, or in this folder for several runs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run's settings and results as one HTML file, which needs no network. Training writes it at every evaluation.

    [bold]flow-grpo report runs/tiny_ocr[/bold]
    [bold]flow-grpo report runs/tiny_ocr runs/bold --out compared.html[/bold]
    """
    from flow_grpo.report import page
    from flow_grpo.run_folder import layout

    file = out or (runs[0] / layout.REPORT if len(runs) == 1 else Path(layout.REPORT))
    say(f"report: {page.write(runs, file)}")
