"""The options of the verbs that look at images on disk, score, eval and rewards test: what they show, and how sheets are cut."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flow_grpo.data.grid_options import GridOptions
    from flow_grpo.data.prompts import PromptSet

Prompt = Annotated[str | None, typer.Option(help="One prompt for all images, in words.", show_default=False)]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="Prompts of the images: a row for each, in the order of their names or cells, or with a column file_name; "
        "the other columns are metadata for rewards.",
        show_default=False,
    ),
]
SheetRows = Annotated[
    int | None,
    typer.Option(min=1, help="Rows of a sheet that `sample` did not write; found by default.", show_default=False),
]
SheetColumns = Annotated[int | None, typer.Option(min=1, help="Columns of such a sheet.", show_default=False)]
Padding = Annotated[
    str | None,
    typer.Option(
        help="Pixels between the images of such a sheet, and around them unless --crop is given: N, or N,M between columns and "
        "between rows. torchvision leaves 2.",
        show_default=False,
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(help="Pixels to leave out at the edges of such a sheet: N, or LEFT,TOP,RIGHT,BOTTOM.", show_default=False),
]


def sheet(rows: int | None, columns: int | None, padding: str | None, crop: str | None) -> "GridOptions":
    """What the options say of a sheet. ValueError if they are no numbers of pixels."""
    from flow_grpo.data.grid_options import GridOptions

    return GridOptions(rows, columns, _pixels("--padding", padding, 2), _pixels("--crop", crop, 4))


def given(prompts: str | None, prompt: str | None) -> "PromptSet | str | None":
    """The prompts that --prompts or --prompt give: rows, or one text for all images."""
    from flow_grpo.data.prompts import load_prompts

    if prompt is not None and prompts is not None:
        raise ValueError("--prompt is one prompt for all images and --prompts has a row for each: give one of the two.")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty: say what the images show.")
    if prompts is None:
        return prompt
    try:
        return load_prompts(prompts)
    except ValueError as error:
        if "/" in prompts or Path(prompts).suffix:
            raise
        raise ValueError(f"{str(error).rstrip('.')}. If these are words of a prompt, give them by --prompt.") from error


def _pixels(option: str, text: str | None, count: int) -> tuple[int, ...] | None:
    """`count` numbers, or one that stands for all."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, count) or not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise ValueError(f"{option} {text} is not a number of pixels, nor {count} of them with commas between.")
    return tuple(int(part) for part in parts) * (count // len(parts))
