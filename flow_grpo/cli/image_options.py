"""Options of the commands that read images on disk (score, eval, rewards test): their prompts, and the layout of grid images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flow_grpo.cli.console import say
from flow_grpo.errors import FlowGRPOError

if TYPE_CHECKING:
    from flow_grpo.data.grid_layout import GridOptions
    from flow_grpo.data.image_sets import ImageRecords, ImageSet
    from flow_grpo.data.prompts import PromptSet

IMAGES_HELP = (
    "A grid or image written by `sample`, a folder of images, or another program's grid (with --prompt or --prompts)."
)
Prompt = Annotated[str | None, typer.Option(help="One prompt for all images.", show_default=False)]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="File with the images' prompts: a row for each image, in the order of their names or cells, or with a column "
        "file_name. Other columns are metadata for rewards.",
        show_default=False,
    ),
]
GridRows = Annotated[
    int | None,
    typer.Option(min=1, help="Rows of a grid image not written by `sample`; found by default.", show_default=False),
]
GridColumns = Annotated[
    int | None,
    typer.Option(min=1, help="Columns of a grid image not written by `sample`; found by default.", show_default=False),
]
Padding = Annotated[
    str | None,
    typer.Option(
        help="Pixels between the images of such a grid, and around it unless --crop is given: N, or N,M between columns and "
        "between rows. torchvision uses 2.",
        show_default=False,
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(help="Pixels to remove at the edges of such a grid: N, or LEFT,TOP,RIGHT,BOTTOM.", show_default=False),
]


def grid_layout(rows: int | None, columns: int | None, padding: str | None, crop: str | None) -> "GridOptions":
    """The layout that the options describe. FlowGRPOError if --padding or --crop are not numbers of pixels."""
    from flow_grpo.data.grid_layout import GridOptions

    return GridOptions(rows, columns, _pixels("--padding", padding, 2), _pixels("--crop", crop, 4))


def read_images(
    images: Path, prompts: str | None, prompt: str | None, layout: "GridOptions", promptless: bool
) -> "ImageSet":
    """The images of a file or folder with their prompts. Prints how a grid image was cut."""
    from flow_grpo.data import image_sets

    image_set = image_sets.read(images, read_prompts(prompts, prompt), layout, promptless)
    for line in image_set.note.splitlines():
        say(line)
    return image_set


def read_prompts(prompts: str | None, prompt: str | None) -> "PromptSet | str | None":
    """The prompts of --prompts, a row for each image, or the text of --prompt, one for all images."""
    from flow_grpo.data.prompts import load_prompts

    if prompt is not None and prompts is not None:
        raise FlowGRPOError("--prompt is one prompt for all images and --prompts has a row for each: give one of the two.")
    if prompt is not None and not prompt.strip():
        raise FlowGRPOError("--prompt is empty: describe what the images show.")
    if prompts is None:
        return prompt
    try:
        loaded = load_prompts(prompts)
        say_notes(loaded)
        return loaded
    except ValueError as error:
        if "/" in prompts or Path(prompts).suffix:
            raise
        raise FlowGRPOError(f"{str(error).rstrip('.')}. If these are words of a prompt, give them by --prompt.") from error


def read_prompt_source(source: str | None, prompt: str | None) -> "PromptSet | ImageRecords | None":
    """The prompts of --prompts or --prompt; if --prompts names images of `sample`, their prompts and seeds."""
    from flow_grpo.data import image_sets
    from flow_grpo.data.prompts import load_prompts

    if source is not None and prompt is None:
        path = Path(source)
        if image_sets.is_image_file(path) or (path.is_dir() and not image_sets.is_prompt_folder(path)):
            return image_sets.read(path)
    prompt_source = read_prompts(source, prompt)
    return load_prompts([prompt_source]) if isinstance(prompt_source, str) else prompt_source


def say_notes(prompts: "PromptSet") -> None:
    """Print how prompts were read, and what in them may not be meant as it is read."""
    from flow_grpo.data.prompt_warnings import syntax_warnings

    for line in (*prompts.notes, *(f"warning: {sentence}" for sentence in syntax_warnings(prompts.prompts))):
        say(line)


def prompt_set_of(prompt_source: "PromptSet | ImageRecords | None") -> "PromptSet | None":
    """The prompts alone, without the seeds and images that they may come with."""
    from flow_grpo.data.prompts import PromptSet

    return None if prompt_source is None else PromptSet(prompt_source.prompts, prompt_source.metadata)


def _pixels(option: str, text: str | None, count: int) -> tuple[int, ...] | None:
    """Parse `count` numbers; a single number is repeated."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, count) or not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise FlowGRPOError(f"{option} {text} is not a number of pixels, nor {count} of them separated by commas.")
    return tuple(int(part) for part in parts) * (count // len(parts))
