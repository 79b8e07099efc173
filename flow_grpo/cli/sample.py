"""`flow-grpo sample`: images of prompts, as single files and as a grid."""

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flow_grpo.cli.console import say, without_library_messages
from flow_grpo.cli.options import Trust, check_folder, config_for_weights, say_notes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import finish_files, new_files, write_atomic
from flow_grpo.progress import phase
from flow_grpo.text import counted

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.data.grid import ImageInfo
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.image_prompt import SourceImage
    from flow_grpo.policy.policy import Policy

GRID, TABLE, FILE_NAME, RESULT = "grid.png", "metadata.jsonl", "file_name", "sample"
OWN_NAME = re.compile(r"(\d{4,}_seed-?\d+|\d{5,}/samples/\d{4,})\.(png|webp)")  # of an image, in both layouts
Layout = Literal["flat", "geneval"]
Sources = Annotated[
    list[Path] | None,
    typer.Option(
        help="An image that the prompts edit or refer to; several if the pipeline takes several.", show_default=False
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        min=1, help="Height in pixels; by default the config's, else the pipeline's or that of --image.", show_default=False
    ),
]
Guidance = Annotated[
    float | None, typer.Option(help="Guidance scale, 1 or less is off; by default that of evaluation.", show_default=False)
]
Width = Annotated[int | None, typer.Option(min=1, help="Width in pixels; same default as --height.", show_default=False)]


def sample(
    prompts: Annotated[
        list[str], typer.Argument(help="Prompts, or files and folders of prompts (.txt, .json, .jsonl, .csv, .parquet).")
    ],
    image: Sources = None,
    model: Annotated[
        str | None,
        typer.Option(help="Diffusers folder, hub id or bundled model; by default the config's.", show_default=False),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            help="LoRA: a folder, a .safetensors file, a hub id, a run folder, its best/, a checkpoint, an export.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Config with the model's call settings. By default the config.yaml found next to the LoRA or model; without one, "
            "the pipeline's defaults (with --model) or tiny_ocr.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Images per prompt, each from its own seed.")] = 4,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Sampling steps; by default those of evaluation.", show_default=False),
    ] = None,
    guidance: Guidance = None,
    height: Height = None,
    width: Width = None,
    trust: Trust = False,
    layout: Annotated[
        Layout,
        typer.Option(
            help="Names of the files: flat is 0000_seed0.png, geneval is 00000/samples/0000.png and 00000/metadata.jsonl for each "
            "prompt. Both have a metadata.jsonl of all images.",
        ),
    ] = "flat",
    out: Annotated[Path, typer.Option(help="Folder for grid.png and the single images or videos.")] = Path("samples"),
) -> None:
    """Generate images: prompts x seeds as single PNGs and as a grid PNG, with prompt and seed stored in each file and in a table.

    Images of an earlier command in the folder are replaced when the new ones are complete, so that it holds those of one command.

    Videos are WebP animations, and strips of frames in the grid.

    [bold]flow-grpo sample 'red text "CAT" on a blue background' --seeds 4[/bold]
    [bold]flow-grpo sample prompts/geneval.jsonl --lora LORA --layout geneval[/bold]
    """
    from flow_grpo.data.grid import ImageInfo
    from flow_grpo.image_prompt import images_of

    if not -(2**63) <= first_seed <= 2**63 - seeds:  # the range of torch's generators
        raise FlowGRPOError(f"--first-seed {first_seed} is out of range: give one from -2^63 to 2^63 - {seeds}.")
    prompt_set = _read_prompts(prompts, image or [])
    texts = prompt_set.prompts
    args = config_for_weights(config, model, lora, trust)
    model = model or args.model
    settings = {"guidance": args.held_out.guidance if guidance is None else guidance, "height": height, "width": width}
    name = model if lora is None else f"{model} + {lora}"
    cells = [ImageInfo(prompt, first_seed + n, name) for prompt in texts for n in range(seeds)]
    columns = seeds if len(texts) > 1 else min(seeds, 8)
    check_folder(out)
    finish_files(out, RESULT)
    earlier = _earlier_files(out)
    policy = _load_policy(args, model, lora, settings, next(iter(images_of(texts[0])), None))
    suffix = ".webp" if policy.makes_videos else ".png"
    names = [f"{_stem(layout, i, cell.seed, seeds)}{suffix}" for i, cell in enumerate(cells)]
    # without earlier ones, those of a command that is stopped are kept
    with new_files(out, RESULT, earlier) if earlier else nullcontext(out) as folder:
        files = [folder / name for name in names]
        has_grid = _generate(
            policy,
            cells,
            files,
            grid=folder / GRID,
            steps=steps or args.evaluation.steps,
            microbatch=args.microbatch,
            columns=columns,
        )
        for file, rows in _tables(layout, prompt_set, cells, names).items():
            write_atomic(folder / file, "".join(f"{row}\n" for row in rows))
    gone = [name for name in earlier if not name.endswith((GRID, TABLE)) and not (out / name).exists()]
    if gone:
        say(f"removed from {out}: {counted(len(gone), 'image')} of an earlier command")
    output = out / GRID if has_grid else f"{out}, without a {GRID}, which would be too large"
    say(f"{counted(len(cells), 'video' if policy.makes_videos else 'image')}: {output}")


def _read_prompts(words: list[str], images: Sequence[Path] = ()) -> "PromptSet":
    """The prompts with their metadata. Of the words each word is one with these images, or a file or folder of several."""
    from flow_grpo.data.prompt_sources import load_prompts, names_a_path
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.image_prompt import SourceImage, with_images

    files = [word for word in words if names_a_path(word)]
    if files and images:
        raise FlowGRPOError(f"--image belongs to prompts that are given as text: {files[0]} may have a column `image`.")
    sources = [SourceImage.read(file, str(file)) for file in images]
    if not all(word.strip() for word in words):
        raise FlowGRPOError("an empty prompt was given.")
    if sum(word not in files and len(word.split()) == 1 for word in words) > 1:
        raise FlowGRPOError(
            f"{len(words)} prompts were given, some of one word: put quotes around a prompt of several words, as in "
            f"{shlex.quote(' '.join(words))}, and prompts of one word into a file, one a line."
        )
    found = PromptSet([], [])
    for word in words:
        if word not in files:
            loaded = PromptSet([with_images(word, sources)], [{}])
        else:
            loaded = load_prompts(word)
            say_notes(loaded)
        found = PromptSet(found.prompts + loaded.prompts, found.metadata + loaded.metadata)
    return found


@without_library_messages
def _load_policy(
    args: "FlowGRPOConfig", model: str, lora: str | None, settings: dict[str, Any], source: "SourceImage | None"
) -> "Policy":
    """The model, with those of the settings that are given. Without a size, images have that of the source of the first prompt."""
    from flow_grpo.policy.loading import load_policy
    from flow_grpo.run_folder.weights import load_trained_weights

    call = args.pipeline_call_kwargs()
    call |= {name: value for name, value in settings.items() if value is not None}
    if source is not None and not {"height", "width"} & call.keys():
        call["width"], call["height"] = result_size(source.size)
    policy = load_policy(model, args.device, args.dtype, memory=args.memory, **call)
    if lora is not None:
        load_trained_weights(policy, lora)
    return policy


def result_size(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height of the results for a source: at most a million pixels, in multiples of 32."""
    scale = min(1.0, (1024 * 1024 / (size[0] * size[1])) ** 0.5)
    width, height = (max(32, round(side * scale / 32) * 32) for side in size)
    return width, height


def _generate(
    policy: "Policy", cells: "list[ImageInfo]", files: list[Path], grid: Path, steps: int, microbatch: int, columns: int
) -> bool:
    """Generate and save the images, a micro-batch at a time, then the grid. Returns whether a grid was written."""
    import torch

    from flow_grpo.data.grid import fits, save_grid, save_image
    from flow_grpo.evaluation.generate import generate_images
    from flow_grpo.image_prompt import images_of

    small_images: list[torch.Tensor] = []
    settings = {"Steps": steps, "CFG scale": f"{policy.guidance:g}"}
    with phase("generating", total=len(cells), unit="images") as saved:
        for start in range(0, len(cells), microbatch):
            batch = cells[start : start + microbatch]
            images = generate_images(
                policy, [cell.prompt for cell in batch], [cell.seed for cell in batch], steps, len(batch)
            )
            for image, cell, file in zip(images, batch, files[start:], strict=False):
                save_image(file, image, cell, settings)
            if fits(len(cells) * (2 if any(images_of(cell.prompt) for cell in cells) else 1), images):
                small_images.append(images)
            saved.advance(len(batch))
    if small_images:
        save_grid(grid, torch.cat(small_images), cells, columns=columns)
    return bool(small_images)


def _stem(layout: Layout, index: int, seed: int, seeds: int) -> str:
    """The path of an image in the folder, without its suffix."""
    if layout == "geneval":
        return f"{index // seeds:05d}/samples/{index % seeds:04d}"
    return f"{index:04d}_seed{seed}"


def _tables(layout: Layout, prompts: "PromptSet", cells: "list[ImageInfo]", names: list[str]) -> dict[str, list[str]]:
    """The lines of each table, by its path: of all images, as `datasets` reads it, and in GenEval's layout also of each prompt."""
    from flow_grpo.data.prompts import json_value

    rows = [
        {"prompt": str(prompt)} | {key: value for key, value in row.items() if value is not None and key != FILE_NAME}
        for prompt, row in zip(prompts.prompts, prompts.metadata, strict=True)
    ]
    seeds = len(cells) // len(rows)
    of_images = [
        {FILE_NAME: name, **rows[i // seeds], "seed": cell.seed}
        for i, (name, cell) in enumerate(zip(names, cells, strict=True))
    ]
    tables = {TABLE: of_images}
    if layout == "geneval":
        tables |= {f"{i:05d}/{TABLE}": [row] for i, row in enumerate(rows)}
    return {file: [json.dumps(row, default=json_value) for row in content] for file, content in tables.items()}


def _earlier_files(folder: Path) -> list[str]:
    """The images, tables and grid of an earlier `sample`, by its table. FlowGRPOError if the folder has a table of other images."""
    from flow_grpo.data.prompt_sources import load_prompts

    table = folder / TABLE
    if not table.exists():
        return []
    images = [str(row.get(FILE_NAME)) for row in load_prompts(str(table)).metadata]
    if not all(OWN_NAME.fullmatch(name) for name in images):
        raise FlowGRPOError(f"{table} is a table of other images: give another folder by --out.")
    tables = {f"{name.partition('/')[0]}/{TABLE}" for name in images if "/" in name}
    return [name for name in (*images, *sorted(tables), TABLE, GRID) if (folder / name).exists()]
