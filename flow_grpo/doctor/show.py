"""The doctor's tables and JSON file."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor import model, run
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult, CheckSection, conclusion
from flow_grpo.files import write_atomic
from flow_grpo.policy.policy import Policy
from flow_grpo.text import escape_markup, visible

STYLES = {OK: None, WARNING: "yellow", ERROR: "bold red"}
MAX_WIDTH = 110  # columns of the terminal
NAME_WIDTH, VALUE_WIDTH, MESSAGE_WIDTH = 37, 24, 39  # of a hundred


def show_run_checks(console: Console, args: FlowGRPOConfig, file: Path | None = None) -> bool:
    """Check a run and print a table for each section. Returns whether no check failed.

    Args:
        file: is written with the results as JSON, also when the checks end with an error.
    """
    return _show(console, f"{args.model}, {args.objective.name}", run.run_checks(args), "the run can be started", file)


def show_model_checks(console: Console, policy: Policy, file: Path | None = None) -> bool:
    """Check whether a model can be trained, and print the results."""
    sections = (("", [result]) for result in model.check_model(policy))
    return _show(console, type(policy.pipe).__name__, sections, "the pipeline can be trained", file)


def _show(console: Console, title: str, sections: Iterator[CheckSection], passed: str, file: Path | None) -> bool:
    """Print each section as soon as it is complete, and a sentence at the end; `passed` says what is possible if no check failed."""
    console.print(visible(title), style="bold", highlight=False, markup=False)
    rows: list[dict[str, str]] = []
    results: list[CheckResult] = []
    sentence = "The checks were not completed."
    try:
        for section, section_results in sections:
            console.print(_table(console, section, section_results))
            if section:
                console.print()
            rows += [{"section": section, **dataclasses.asdict(result)} for result in section_results]
            results += section_results
        sentence = conclusion(results, passed)
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    finally:  # the results so far are kept, whatever ended the checks
        if file is not None:
            write_atomic(file, json.dumps({"title": title, "conclusion": sentence, "checks": rows}, indent=2))
    if file is not None:
        console.print(f"results: {file}", highlight=False, markup=False, soft_wrap=True)
    return all(result.status != ERROR for result in results)


def _table(console: Console, section: str, results: list[CheckResult]) -> Table:
    """One section. Its columns are as wide as those of the others, so that they line up."""
    width = min(console.width, MAX_WIDTH)
    table = Table(box=None, pad_edge=False, show_header=bool(section), header_style="bold", width=width)
    table.add_column(escape_markup(section), ratio=NAME_WIDTH)
    table.add_column("", ratio=VALUE_WIDTH, overflow="fold")
    table.add_column("", ratio=MESSAGE_WIDTH, overflow="fold")
    for result in results:
        status = result.status.upper() if result.status == ERROR else result.status
        message = f"{status}: {result.message}" if result.message else status
        table.add_row(
            escape_markup(result.name), escape_markup(result.value), escape_markup(message), style=STYLES[result.status]
        )
    return table
