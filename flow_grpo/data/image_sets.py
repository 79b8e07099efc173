"""Images on disk and their prompts: grid images, single images and folders in natural order, written by `sample` or other programs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import Self

from flow_grpo.config.loading import read_text
from flow_grpo.data.grid import (
    FIELD,
    ImageInfo,
    has_prompts,
    open_image,
    prompt_of,
    read_cells,
    rows_and_columns,
    sampling_settings,
    shows_videos,
    to_bytes,
)
from flow_grpo.data.grid_layout import GridLayout, GridOptions, layout_of
from flow_grpo.data.prompt_files import read_table
from flow_grpo.data.prompt_sources import CAPTIONS, FILE_NAME, FOLDER_FILES, folder_file, load_prompts, text_files
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import inside
from flow_grpo.image_prompt import images_of
from flow_grpo.rewards.images import SUFFIXES
from flow_grpo.run_folder import layout
from flow_grpo.text import counted, natural_key

GRID = "grid.png"  # of `sample`, and of GenEval: the images beside it once more
SAMPLES = "samples"  # GenEval's folder of the images of one prompt, which the metadata.jsonl beside it has
OF_SAMPLE = re.compile(r"\d{4,}_seed(-?\d+)\.(png|webp)")  # the name of an image or a video of `sample`, with its seed
WITH_PROMPT = re.compile(r"(.+ .+)_\d{6}")  # the stem of an image of T2I-CompBench: its prompt and a number
MAX_CAPTION = 1 << 20  # bytes
MAX_DEPTH = 3  # of folders in folders
HOW_TO_GIVE_PROMPTS = (
    "give --prompt, --prompts with a row for each, a metadata.jsonl in their folder with the columns file_name and prompt, or a caption "
    "beside each in a .txt file of its name"
)


@dataclass(frozen=True)
class FoundImage:
    """An image of a folder.

    Attributes:
        prompt, seed, metadata: as a table has them, if there is one.
        caption: the text of the file beside it with the same name.
        had_source: whether it was made of a prompt with images.
        settings: by which it was sampled, as far as it states them.
    """

    file: Path
    prompt: str | None = None
    seed: int | None = None
    metadata: dict = field(default_factory=dict)
    caption: str | None = None
    had_source: bool = False
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundImages:
    """The images of a folder, and the files and folders in it that were left out, without hidden ones."""

    images: list[FoundImage]
    left_out: list[Path]


def find_images(folder: Path, depth: int = 0) -> FoundImages:
    """The images that a table of the folder names; else those in it; else, if there are none, those of the folders in it.

    Hidden files, a grid.png and run folders are no images of it.

    Raises:
        FlowGRPOError: a table or a caption can't be read, or names a file that is missing or outside its folder.
    """
    manifest = folder_file(folder)
    if manifest is None:
        return _plain(folder, depth)
    table = load_prompts(manifest)
    if _names_files(table):
        return _of_table(manifest, table)
    if len(table) > 1 or not (folder / SAMPLES).is_dir():
        raise FlowGRPOError(f"{manifest} has no column `file_name` with the image's path in the same folder.")
    found = _plain(folder / SAMPLES, MAX_DEPTH)
    of_prompt = [replace(image, prompt=table.prompts[0], metadata=dict(table.metadata[0])) for image in found.images]
    return replace(found, images=of_prompt)


def caption_of(file: Path) -> tuple[str | None, Path | None]:
    """The text beside an image, in a file of its name that ends in .txt or .caption, and that file."""
    beside = next((path for suffix in CAPTIONS if (path := file.with_suffix(suffix)).is_file()), None)
    if beside is None:
        return None, None
    inside(beside.parent, beside.name, str(beside))
    return read_text(beside, MAX_CAPTION).strip() or None, beside


def _stated_prompt(file: Path, image: Image.Image) -> str | None:
    """The prompt that another program has put into an image, or into its name as T2I-CompBench has it."""
    named = WITH_PROMPT.fullmatch(file.stem)
    return prompt_of(image.info.get(FIELD)) or (named[1] if named else None)


def _plain(folder: Path, depth: int) -> FoundImages:
    """The images in a folder, with their captions; if it has none, those of its folders."""
    shown = sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda path: natural_key(path.name))
    folders = [path for path in shown if path.is_dir()]
    files = [path for path in shown if path not in folders and path.suffix.lower() in SUFFIXES and path.name != GRID]
    captions = [caption_of(file) for file in files]
    used = {*files, *folders, folder / GRID, *(folder / name for name in FOLDER_FILES), *(beside for _, beside in captions)}
    others = [path for path in shown if path not in used]
    if files:
        images = [FoundImage(file, caption=text) for file, (text, _) in zip(files, captions, strict=True)]
        return FoundImages(images, others + folders)
    entered = [path for path in folders if depth < MAX_DEPTH and not path.is_symlink() and not layout.is_run(path)]
    left_out = others + [path for path in folders if path not in entered]
    parts = [find_images(path, depth + 1) for path in entered]
    return FoundImages(
        [image for part in parts for image in part.images],
        left_out + [path for part in parts for path in part.left_out],
    )


def _of_table(manifest: Path, table: PromptSet) -> FoundImages:
    """The images that a table names, in its order. Images of `sample` may have been deleted since."""
    images = []
    for prompt, row in zip(table.prompts, table.metadata, strict=True):
        name = row[FILE_NAME]
        if OF_SAMPLE.fullmatch(str(name)) and not (manifest.parent / name).exists():
            continue
        metadata = {key: value for key, value in row.items() if key not in (FILE_NAME, "seed")}
        images.append(FoundImage(_image_path(manifest, name), prompt, _seed(manifest, row.get("seed")), metadata))
    named = {image.file for image in images}
    present = _plain(manifest.parent, MAX_DEPTH)
    unnamed = [image.file for image in present.images if image.file not in named]
    return FoundImages(images, unnamed + [path for path in present.left_out if not path.is_dir()])


def _image_path(manifest: Path, name: object) -> Path:
    """The path of an image, which must be inside the manifest's folder: the manifest may be untrusted."""
    file = inside(manifest.parent, name, str(manifest))
    if not file.is_file():
        raise FlowGRPOError(f"{manifest} names {name!r}, which does not exist.")
    return file


def _seed(manifest: Path, value: object) -> int | None:
    if value is None or value != value:  # a table's empty number is NaN
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise FlowGRPOError(f"{manifest} has the seed {value!r}, which is not a whole number.")
    return int(value)


def left_out_note(folder: Path, left_out: Iterable[Path]) -> str:
    """A sentence on what is not among the images of a folder; "" if nothing is left out."""
    names = [f"{path.relative_to(folder)}{'/' * path.is_dir()}" for path in left_out]
    return f"{folder}: left out {counted(len(names), 'other file')}: {_first(names)}" if names else ""


def _first(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def join_prompts(
    labels: list[str],
    texts: Sequence[str | None],
    prompts: PromptSet | str | None,
    path: Path,
    captions: Sequence[str | None] | None = None,
) -> tuple[list[str], list[dict]]:
    """The prompt and metadata of each image: matched by file name, by position, or by prompt where that is unambiguous.

    Args:
        labels: the file of each image, in the folder.
        texts: the prompts that the images contain. A prompt that is given for an image must be the same.
        captions: the prompts of images that contain none, where none is given.
    """
    known = [text or caption for text, caption in zip(texts, captions or texts, strict=True)]
    if prompts is None:
        return [text or "" for text in known], [{} for _ in known]
    if isinstance(prompts, str):
        prompts = PromptSet([prompts] * len(labels), [{}] * len(labels))
    if path.is_dir() and "file" in prompts.metadata[0] and not _names_files(prompts):
        raise FlowGRPOError("the prompts have a column `file`: rename it to `file_name` to match images by their names.")
    if _names_files(prompts) and path.is_dir():
        rows = _rows_by_name(labels, prompts, path)
    elif len(prompts) == len(labels):
        rows = list(range(len(labels)))
    else:
        return _join_by_prompt(labels, known, prompts, path)
    for label, text, row in zip(labels, texts, rows, strict=True):
        if text is not None and text != str(prompts.prompts[row]):
            raise FlowGRPOError(
                f"{label} in {path} shows {text!r}, but the prompt given for it, row {row + 1}, is {prompts.prompts[row]!r}: "
                "give the rows in the order of the images."
            )
    metadata = [{key: value for key, value in prompts.metadata[i].items() if key != FILE_NAME} for i in rows]
    return [prompts.prompts[i] for i in rows], metadata


def _names_files(prompts: PromptSet) -> bool:
    """Whether the prompts have a column with the names of files."""
    return FILE_NAME in prompts.metadata[0]


def rows_without_image(labels: list[str], prompts: PromptSet | str | None, folder: Path) -> str:
    """A warning of the rows of the prompts that name no image of the folder; "" if there are none."""
    if not isinstance(prompts, PromptSet) or not _names_files(prompts):
        return ""
    names, shown = _comparable(prompts, labels)
    missing = [str(row[FILE_NAME]) for row, name in zip(prompts.metadata, names, strict=True) if name not in shown]
    if not missing:
        return ""
    return f"warning: {counted(len(missing), 'row')} of the prompts without an image in {folder}: {_first(missing)}"


def _rows_by_name(labels: list[str], prompts: PromptSet, folder: Path) -> list[int]:
    """The row of each image, by the column of file names."""
    names, wanted = _comparable(prompts, labels)
    row_of: dict[str, int] = {}
    for row, name in enumerate(names):
        if row_of.setdefault(name, row) != row:
            raise FlowGRPOError(
                f"the rows {row_of[name] + 1} and {row + 1} of the prompts are both for {name}: keep one of them."
            )
    missing = next((label for label, name in zip(labels, wanted, strict=True) if name not in row_of), None)
    if missing is not None:
        raise FlowGRPOError(f"the prompts have no row whose file name is {missing}, which is in {folder}.")
    return [row_of[name] for name in wanted]


def _comparable(prompts: PromptSet, labels: list[str]) -> tuple[list[str], list[str]]:
    """File names of prompts and of images, without endings if the prompts are texts: 7.txt is of 7.png, as in DPG-Bench."""
    names = [str(row[FILE_NAME]) for row in prompts.metadata]
    if not all(name.lower().endswith(CAPTIONS) for name in names):
        return names, labels
    return [str(Path(name).with_suffix("")) for name in names], [str(Path(label).with_suffix("")) for label in labels]


def _join_by_prompt(
    labels: list[str], shown: Sequence[str | None], prompts: PromptSet, path: Path
) -> tuple[list[str], list[dict]]:
    """The prompt of each image; its source images and metadata where the prompt is among the given ones."""
    counts = f"there are {len(prompts)} prompts for {len(labels)} images in {path}"
    texts = [text for text in shown if text is not None]
    if len(texts) < len(labels):
        raise FlowGRPOError(f"{counts}: {HOW_TO_GIVE_PROMPTS}.")
    known: dict[str, tuple[str, dict]] = {}
    for prompt, row in zip(prompts.prompts, prompts.metadata, strict=True):
        text = str(prompt)
        if text in texts and known.setdefault(text, (prompt, row)) != (prompt, row):
            raise FlowGRPOError(
                f"{counts}, and several with the text {text!r} but different metadata or images: give a row for each image, in their order."
            )
    if not known and (any(prompts.metadata) or any(map(images_of, prompts.prompts))):
        raise FlowGRPOError(f"{counts}, and no image has one of these prompts: give a row for each image, in their order.")
    joined = [known.get(text, (text, {})) for text in texts]
    return [prompt for prompt, _ in joined], [row for _, row in joined]


@dataclass(frozen=True)
class ImageRecords:
    """The facts about B images, whether they are generated yet or not. A seed is None where the image's noise is unknown.

    Attributes:
        lacks_sources: whether images were made of prompts with images, which are not known.
    """

    labels: list[str]
    prompts: list[str]
    seeds: list[int | None]
    metadata: list[dict]
    lacks_sources: bool = field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.labels)

    def columns(self, rows: Sequence[int] | None = None) -> dict[str, list]:
        """The metadata of these rows, by default of all, as reward keyword arguments: a list by name."""
        return PromptSet(self.prompts, self.metadata).take(range(len(self)) if rows is None else rows, 1).columns()

    def take(self, rows: list[int]) -> Self:
        """Some of the records, in the order of `rows`."""
        labels, prompts = [self.labels[i] for i in rows], [self.prompts[i] for i in rows]
        seeds, metadata = [self.seeds[i] for i in rows], [self.metadata[i] for i in rows]
        return replace(self, labels=labels, prompts=prompts, seeds=seeds, metadata=metadata)

    def head(self, count: int | None) -> Self:
        """All images of the first `count` different prompts, by default of all prompts."""
        first = set(list(dict.fromkeys(self.prompts))[:count])
        return self.take([i for i, prompt in enumerate(self.prompts) if prompt in first])


@dataclass(frozen=True)
class ImageSet(ImageRecords):
    """B images of one size.

    Attributes:
        note: for the user: how a grid image that `sample` did not write was cut, or which rows of the prompts have no image.
        settings: those by which all images were sampled, as far as they state them.
    """

    pixels: Tensor  # (B, 3, H, W) uint8
    note: str = ""
    settings: dict[str, str] = field(default_factory=dict)

    def images(self, rows: Sequence[int] | None = None) -> Tensor:
        """These rows, by default all: (n, 3, H, W) in [0, 1]."""
        return (self.pixels if rows is None else self.pixels[list(rows)]).float() / 255

    def take(self, rows: list[int]) -> Self:
        return replace(super().take(rows), pixels=self.pixels[rows])


def read(
    source: Path, prompts: PromptSet | str | None = None, grid: GridOptions | None = None, promptless: bool = False
) -> ImageSet:
    """Read a grid image, a single image, or a folder of images.

    Images that `sample` wrote contain their prompts. A folder may have a manifest: metadata.jsonl or .csv as for the ImageFolder of
    `datasets`, with the columns file_name and prompt, optionally seed; other columns are metadata. Or a caption beside each image, or
    GenEval's folders of samples. A folder without images has those of its folders. Other grid images are cut at their gutters, or as
    `grid` specifies; those in a folder only as `grid` specifies.

    Args:
        prompts: a row for each image, in natural order of file names or of a grid's cells row by row; or rows with the column
            file_name; or, for images that contain their prompts, metadata by prompt. For a grid also one prompt for all images or for
            each row, and for a folder of grids one for each file. A text is the prompt of all images.
        promptless: whether images without a prompt are accepted; their prompt is "".

    Raises:
        FlowGRPOError: something is missing, unreadable, ambiguous, outside its folder, or differs in size from the rest.
    """
    if source.is_dir():
        return _from_folder(source, prompts, grid or GridOptions(), promptless)
    if not source.exists():
        raise FlowGRPOError(f"there is no image or folder {source}.")
    return _from_grid(source, prompts, grid or GridOptions(), promptless)


def _from_grid(file: Path, prompts: PromptSet | str | None, grid: GridOptions, promptless: bool) -> ImageSet:
    image = open_image(file)
    settings = sampling_settings(image.info.get(FIELD))
    if has_prompts(image):
        _check_no_videos(image, file)
        stored, cells = read_cells(image, file)
        pixels = torch.from_numpy(to_bytes(stored)).permute(0, 3, 1, 2)
        labels = _labels(file.name, len(cells))
        texts, metadata = join_prompts(labels, [cell.prompt for cell in cells], prompts, file)
        lacks_sources = _lacks_sources(texts, [cell.had_source for cell in cells])
        return ImageSet(
            labels,
            texts,
            [cell.seed for cell in cells],
            metadata,
            pixels,
            lacks_sources=lacks_sources,
            settings=settings,
        )
    if prompts is None:
        prompts = caption_of(file)[0] or _stated_prompt(file, image)
    if prompts is None and not promptless:
        raise FlowGRPOError(
            f"{file} has no prompts in it: it was not written by flow-grpo sample. Give --prompt, or --prompts with a row for "
            "each of its images."
        )
    stated = rows_and_columns(image.info.get(FIELD), image.width, image.height) if grid.is_empty else None
    if stated is not None:
        grid = GridOptions(rows=stated[0], columns=stated[1], padding=(0, 0))
    prompt_set = PromptSet([prompts or ""], [{}]) if prompts is None or isinstance(prompts, str) else prompts
    array = np.asarray(image)
    layout = layout_of(array, grid, str(file), allow_single=len(prompt_set) == 1)
    images = layout.crop_cells(array)
    indices = _prompt_indices(layout, len(prompt_set), file)
    pixels = torch.from_numpy(images[: len(indices)]).permute(0, 3, 1, 2)
    texts, metadata = [prompt_set.prompts[i] for i in indices], [prompt_set.metadata[i] for i in indices]
    is_single = layout.rows == layout.columns == 1
    note = f"one image of {layout.width} x {layout.height} pixels" if is_single else str(layout)
    if empty := max(0, len(indices) - layout.filled):
        verb = "has" if empty == 1 else "have"
        note += f"; the last {counted(empty, 'image')} of the {len(indices)} {verb} the colour of the gutters alone"
    labels = _labels(file.name, len(indices))
    return ImageSet(labels, texts, [None] * len(indices), metadata, pixels, note=f"{file.name}: {note}", settings=settings)


def _prompt_indices(layout: GridLayout, prompts: int, file: Path) -> list[int]:
    """The index of each image's prompt. The last row of a grid may end early, so that there are fewer images than cells."""
    if layout.filled <= prompts <= layout.rows * layout.columns:
        return list(range(prompts))
    if prompts == 1:
        return [0] * layout.filled
    if prompts == layout.rows:
        return [cell // layout.columns for cell in range(layout.filled)]
    raise FlowGRPOError(
        f"there are {prompts} prompts for the {layout.filled} images in {layout.rows} rows of {file}: give one for each image, "
        "one for each row, or one for all."
    )


def _from_folder(folder: Path, prompts: PromptSet | str | None, grid: GridOptions, promptless: bool) -> ImageSet:
    found = find_images(folder)
    left_out = left_out_note(folder, found.left_out)
    if not found.images:
        raise FlowGRPOError(f"the folder {folder} contains no images{f' ({left_out})' if left_out else ''}.")
    pixels, by_file, layouts = zip(*(_read_found(image, grid) for image in found.images), strict=True)
    images = [image for of_file in by_file for image in of_file]
    without = next((image.file for image in images if not image.prompt and not image.caption), None)
    if without is not None and prompts is None and not promptless:
        raise FlowGRPOError(
            f"{without} has no prompt in it: it was not written by flow-grpo sample. For such images {HOW_TO_GIVE_PROMPTS}."
        )
    owner = [i for i, of_file in enumerate(by_file) for _ in of_file]
    if isinstance(prompts, PromptSet) and len(prompts) == len(by_file) < len(images) and not _names_files(prompts):
        prompts = PromptSet([prompts.prompts[i] for i in owner], [prompts.metadata[i] for i in owner])
    names = [str(image.file.relative_to(folder)) for image in images]
    own, captions = [image.prompt for image in images], [image.caption for image in images]
    plain = [None if prompt is None else str(prompt) for prompt in own]  # equal to prompts without its images
    given, joined = join_prompts(names, plain, prompts, folder, captions)
    cut = [layout for layout in layouts if layout is not None]
    folders = len({image.file.parent for image in images})
    notes = [
        f"{folder}: {counted(len(by_file), 'image')} in {counted(folders, 'folder')}" if folders > 1 else "",
        f"{folder}: {counted(len(cut), 'file')} cut into {counted(len(images), 'image')}; the first: {cut[0]}"
        if cut
        else "",
        left_out,
        rows_without_image(names, prompts, folder),
    ]
    texts = [text if text is not None and images_of(text) else other for text, other in zip(own, given, strict=True)]
    return ImageSet(
        [label for of_file in by_file for label in _labels(str(of_file[0].file.relative_to(folder)), len(of_file))],
        texts,
        [image.seed for image in images],
        [row | image.metadata for row, image in zip(joined, images, strict=True)],
        _stack([image.file for image in found.images], pixels),
        note="\n".join(note for note in notes if note),
        settings={
            name: value
            for name, value in images[0].settings.items()
            if all(image.settings.get(name) == value for image in images)
        },
        lacks_sources=_lacks_sources(texts, [image.had_source for image in images]),
    )


def _lacks_sources(prompts: Sequence[str], had_source: Sequence[bool]) -> bool:
    """Whether an image was made of a prompt with images that are not among these prompts."""
    return any(had and not images_of(prompt) for prompt, had in zip(prompts, had_source, strict=True))


def _read_found(found: FoundImage, grid: GridOptions) -> tuple[np.ndarray, list[FoundImage], GridLayout | None]:
    """The images (n, H, W, 3) of a file, of which a grid has several, what is known of each, and how another program's grid was cut."""
    image = open_image(found.file)
    caption = found.caption or _stated_prompt(found.file, image)
    found = replace(found, caption=caption, settings=sampling_settings(image.info.get(FIELD)))
    if has_prompts(image):
        _check_no_videos(image, found.file)
        cells, stored = read_cells(image, found.file)
        return to_bytes(cells), [_with_stored(found, cell) for cell in stored], None
    array = np.asarray(image)
    if grid.is_empty:
        return array[None], [found], None
    layout = layout_of(array, grid, str(found.file), allow_single=False)
    return layout.crop_cells(array)[: layout.filled], [found] * layout.filled, layout


def _with_stored(found: FoundImage, cell: ImageInfo) -> FoundImage:
    """What is known of an image that `sample` wrote: by its table, else as stored. A stored seed is that of the stored prompt."""
    prompt = cell.prompt if found.prompt is None else found.prompt
    seed = cell.seed if found.seed is None and prompt == cell.prompt else found.seed
    return replace(found, prompt=prompt, seed=seed, had_source=cell.had_source)


def _check_no_videos(image: Image.Image, file: Path) -> None:
    """Raise FlowGRPOError for a grid of videos: a strip of frames is no image that a reward knows."""
    if shows_videos(image):
        raise FlowGRPOError(f"{file} shows strips of videos, which can't be scored: measure the model by flow-grpo eval.")


def _stack(files: list[Path], arrays: Sequence[np.ndarray]) -> Tensor:
    """The images (n, H, W, 3) of each file as (B, 3, H, W)."""
    size = arrays[0].shape[1:]
    other_size = next((file for file, array in zip(files, arrays, strict=True) if array.shape[1:] != size), None)
    if other_size is not None:
        raise FlowGRPOError(f"{other_size} has another size than {files[0]}: score images of one size at a time.")
    return torch.from_numpy(np.concatenate(arrays)).permute(0, 3, 1, 2)


def _labels(name: str, count: int) -> list[str]:
    """The labels of the images of a file."""
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]


def is_prompt_folder(path: Path) -> bool:
    """Whether a folder has prompts, and not results: a metadata.jsonl or .csv without the column `seed`, or texts and no images."""
    manifest = folder_file(path)
    if manifest is None:
        return bool(text_files(path)) and not any(file.suffix.lower() in SUFFIXES for file in path.iterdir())
    columns = read_table(manifest, str(manifest), manifest.suffix.lower()).columns
    return FILE_NAME in columns and "seed" not in columns


def is_image_file(path: Path) -> bool:
    """Whether the path is a file with an image's suffix."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def has_images(folder: Path) -> bool:
    """Whether a folder has images, in itself or in its folders, as `read` finds them."""
    return bool(find_images(folder).images)
