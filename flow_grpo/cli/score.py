"""`flow-grpo score`: the rewards of images on disk."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flow_grpo.cli.console import console, say
from flow_grpo.cli.options import (
    IMAGES_HELP,
    Crop,
    GridColumns,
    GridRows,
    Padding,
    Prompt,
    Prompts,
    RewardNames,
    check_file,
    check_suffix,
    grid_layout,
    load_rewards,
    parse_reward,
    read_images,
)
from flow_grpo.files import write_atomic
from flow_grpo.text import counted, escape_formula, visible

GENEVAL = "geneval_exact"  # the reward that is GenEval's own score


def score(
    images: Annotated[Path, typer.Argument(help=IMAGES_HELP)],
    reward: RewardNames = None,
    prompts: Prompts = None,
    prompt: Prompt = None,
    rows: GridRows = None,
    columns: GridColumns = None,
    padding: Padding = None,
    crop: Crop = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=".json, .csv or .jsonl file for the values of each image and the other columns of its prompt; .jsonl with "
            "--reward geneval_exact is read by GenEval's summary_scores.py.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Score images with rewards (default: ocr): each cell of a grid, or each image of a folder.

    [bold]flow-grpo score samples/grid.png --reward ocr --reward color[/bold]
    [bold]flow-grpo score sheet.png --prompt 'a red fox' --reward clip[/bold]
    """
    from flow_grpo import rewards
    from flow_grpo.progress import phase
    from flow_grpo.tracking.tracker import print_table

    names = reward or ["ocr"]
    if out is not None:
        check_suffix(out, WRITERS)
    reads_prompts = any(rewards.reads_prompts(name, **options) for name, options in map(parse_reward, names))
    layout = grid_layout(rows, columns, padding, crop)
    image_set = read_images(images, prompts, prompt, layout, promptless=not reads_prompts)
    if out is not None:
        check_file(out)
    pixels, metadata = image_set.images(), image_set.columns()
    values = {}
    for name, function in load_rewards(names).items():
        with phase(f"scoring {counted(len(image_set), 'image')} by {name}"):
            values[name] = rewards.score(name, function, pixels, image_set.prompts, **metadata).tolist()
    rows_shown = [visible(f"{label}  {text}") for label, text in zip(image_set.labels, image_set.prompts, strict=True)]
    table = {
        name: dict(zip(rows_shown, column, strict=True)) | {"mean": sum(column) / len(column)}
        for name, column in values.items()
    }
    print_table(console, f"{counted(len(image_set), 'image')} of {images}", table)
    if out is not None:
        own = {"picture": image_set.labels, "prompt": [*map(str, image_set.prompts)], **values}
        others = {name: column for name, column in metadata.items() if name not in (*own, "sources")}
        records = [{name: column[i] for name, column in (own | others).items()} for i in range(len(image_set))]
        write_atomic(out, WRITERS[out.suffix.lower()](records))
        say(f"scores: {out}")


def _to_csv(records: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(escape_formula, records[0]))
    writer.writerows([escape_formula(_cell(value)) for value in record.values()] for record in records)
    return buffer.getvalue()


def _cell(value: object) -> object:
    """A value for CSV: lists and objects of metadata as JSON."""
    return value if isinstance(value, str | int | float) or value is None else _to_json(value, indent=None)


def _to_json(content: object, indent: int | None = 2) -> str:
    from flow_grpo.data.prompts import json_value

    return json.dumps(content, indent=indent, default=json_value)


def _to_lines(records: list[dict[str, Any]]) -> str:
    return "".join(f"{_to_json(_as_genevals(record), indent=None)}\n" for record in records)


def _as_genevals(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the names that GenEval's evaluation gives its results, if it has their values."""
    if GENEVAL not in record:
        return record
    task = {name: record[name] for name in ("tag", "include", "exclude", "prompt") if record.get(name) is not None}
    return {
        "filename": record["picture"],
        **record,
        "correct": record[GENEVAL] == 1,
        "metadata": _to_json(task, indent=None),
    }


WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {".json": _to_json, ".csv": _to_csv, ".jsonl": _to_lines}
