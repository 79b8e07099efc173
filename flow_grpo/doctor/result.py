"""The result of one check; the table, the JSON file and the sentence of all results."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo.files import write_atomic
from flow_grpo.text import escape_markup, visible

Status = Literal["ok", "warning", "error"]
OK: Status = "ok"
WARNING: Status = "warning"
ERROR: Status = "error"
STYLES = {OK: None, WARNING: "yellow", ERROR: "bold red"}
MAX_WIDTH = 110  # columns of the terminal
NAME_WIDTH, VALUE_WIDTH, MESSAGE_WIDTH = 37, 24, 39  # of a hundred


@dataclass(frozen=True)
class CheckResult:
    """One line of the doctor's table.

    Attributes:
        name: what was checked.
        value: what was measured.
        message: what it means and, unless the status is ok, what to do.
    """

    name: str
    value: str
    status: Status
    message: str = ""


CheckSection = tuple[str, list[CheckResult]]  # title, results


def failed(name: str, error: Exception) -> CheckResult:
    """A check that ended with an error: out of memory, or one with a sentence of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return CheckResult(name, "out of memory", ERROR, "set a smaller microbatch, or memory.gradient_checkpointing.")
    return CheckResult(name, "fails", ERROR, str(error))


def conclusion(results: Iterable[CheckResult], passed: str = "the run can be started") -> str:
    """One sentence about all results.

    Args:
        passed: what follows if no check failed.
    """
    statuses = [result.status for result in results]
    errors, warnings = statuses.count(ERROR), statuses.count(WARNING)
    also = f"{warnings} warning" + "s" * (warnings != 1)
    if errors:
        return f"{errors} of the checks failed, {also}: fix this before you train."
    return f"No check failed, {also}: {passed}."


def show(console: Console, title: str, sections: Iterable[CheckSection], passed: str, file: Path | None = None) -> bool:
    """Print each section as soon as it is complete, and a sentence at the end. Returns whether no check failed.

    Args:
        passed: what is possible if no check failed.
        file: is written with the results as JSON, also when the checks end with an error.
    """
    console.print(visible(title), style="bold", highlight=False, markup=False)
    rows: list[dict[str, str]] = []
    results: list[CheckResult] = []
    sentence = "The checks were not completed."
    try:
        for section, section_results in sections:
            console.print(section_table(console, section, section_results))
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


def section_table(console: Console, section: str, results: list[CheckResult]) -> Table:
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
