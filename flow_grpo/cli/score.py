"""`flow-grpo score`: the rewards of images on disk."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flow_grpo.cli.console import console
from flow_grpo.cli.image_options import (
    IMAGES_HELP,
    Crop,
    GridColumns,
    GridRows,
    Padding,
    Prompt,
    Prompts,
    grid_layout,
    read_images,
)
from flow_grpo.cli.options import RewardNames, check_suffix, load_rewards, parse_reward, prepare_file
from flow_grpo.files import write_atomic
from flow_grpo.text import counted, escape_formula, visible


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
        Path | None, typer.Option(help=".json or .csv file for the values of each image.", show_default=False)
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
        prepare_file(out)
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
        records = [
            {"picture": label, "prompt": text} | {name: values[name][i] for name in values}
            for i, (label, text) in enumerate(zip(image_set.labels, image_set.prompts, strict=True))
        ]
        write_atomic(out, WRITERS[out.suffix.lower()](records))


def _to_csv(records: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(escape_formula, records[0]))
    writer.writerows([escape_formula(value) for value in record.values()] for record in records)
    return buffer.getvalue()


def _to_json(records: list[dict[str, Any]]) -> str:
    return json.dumps(records, indent=2)


WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {".json": _to_json, ".csv": _to_csv}
