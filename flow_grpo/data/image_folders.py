"""The images of a folder in natural order, and what the folder says of each: in a table, in captions beside them, or as GenEval does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_grpo.config.loading import read_text
from flow_grpo.data.prompts import PromptSet, load_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import inside
from flow_grpo.image_prompt import images_of
from flow_grpo.rewards.image_files import SUFFIXES
from flow_grpo.run_folder import layout
from flow_grpo.text import counted, natural_key

MANIFESTS = ("metadata.jsonl", "metadata.csv", "manifest.jsonl", "manifest.csv")
GRID = "grid.png"  # of `sample`, and of GenEval: the images beside it once more
SAMPLES = "samples"  # GenEval's folder of the images of one prompt, which the metadata.jsonl beside it has
OWN_COLUMNS = {"file_name", "seed", "model"}  # of the table that `sample` writes, beside the prompts
CAPTIONS = (".txt", ".caption")
MAX_CAPTION = 1 << 20  # bytes
MAX_DEPTH = 3  # of folders in folders
FILE_COLUMNS = ("file_name", "file")
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
    """

    file: Path
    prompt: str | None = None
    seed: int | None = None
    metadata: dict = field(default_factory=dict)
    caption: str | None = None


@dataclass(frozen=True)
class FoundImages:
    """The images of a folder; the files and folders in it that were left out, without hidden ones; and notes on its tables."""

    images: list[FoundImage]
    left_out: list[Path] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def find_images(folder: Path, depth: int = 0) -> FoundImages:
    """The images that a table of the folder names; else those in it; else, if there are none, those of the folders in it.

    Hidden files, a grid.png and run folders are no images of it.

    Raises:
        FlowGRPOError: a table or a caption can't be read, or names a file that is missing or outside its folder.
    """
    manifest = next((folder / name for name in MANIFESTS if (folder / name).is_file()), None)
    if manifest is None:
        return _plain(folder, depth)
    table = load_prompts(manifest)
    if file_column(table) is not None:
        is_own = all(row.keys() == OWN_COLUMNS for row in table.metadata)
        return _of_sample(folder, table) if is_own else _of_table(manifest, table)
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
    if beside.stat().st_size > MAX_CAPTION:
        raise FlowGRPOError(f"{beside} has more than {MAX_CAPTION >> 20} MB, which is no caption of an image.")
    return read_text(beside).strip() or None, beside


def _plain(folder: Path, depth: int) -> FoundImages:
    """The images in a folder, with their captions; if it has none, those of its folders."""
    shown = sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda path: natural_key(path.name))
    folders = [path for path in shown if path.is_dir()]
    files = [path for path in shown if path not in folders and path.suffix.lower() in SUFFIXES and path.name != GRID]
    captions = [caption_of(file) for file in files]
    used = {*files, *folders, folder / GRID, *(folder / name for name in MANIFESTS), *(beside for _, beside in captions)}
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
        tuple(note for part in parts for note in part.notes),
    )


def _of_table(manifest: Path, table: PromptSet) -> FoundImages:
    """The images that a table names, in its order."""
    column = file_column(table)
    images = []
    for prompt, row in zip(table.prompts, table.metadata, strict=True):
        metadata = {key: value for key, value in row.items() if key not in (column, "seed")}
        images.append(FoundImage(_image_path(manifest, row[column]), prompt, _seed(manifest, row.get("seed")), metadata))
    named = {image.file for image in images}
    present = _plain(manifest.parent, MAX_DEPTH)
    unnamed = [image.file for image in present.images if image.file not in named]
    return FoundImages(images, unnamed + [path for path in present.left_out if not path.is_dir()])


def _of_sample(folder: Path, table: PromptSet) -> FoundImages:
    """The images in a folder of `sample`, some of which may have been deleted or added since."""
    found = _plain(folder, MAX_DEPTH)
    row_of = {row["file_name"]: i for i, row in enumerate(table.metadata)}
    rows = [row_of.get(image.file.name) for image in found.images]
    known = [
        image if i is None else replace(image, prompt=table.prompts[i], seed=_seed(folder, table.metadata[i]["seed"]))
        for image, i in zip(found.images, rows, strict=True)
    ]
    return replace(found, images=known)


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
    if not names:
        return ""
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{folder}: left out {counted(len(names), 'other file')}: {named}"


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
    column = file_column(prompts)
    if column is not None and path.is_dir():
        rows = _rows_by_name(labels, [row[column] for row in prompts.metadata], path)
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
    metadata = [{key: value for key, value in prompts.metadata[i].items() if key != column} for i in rows]
    return [prompts.prompts[i] for i in rows], metadata


def file_column(prompts: PromptSet) -> str | None:
    """The metadata column with file names, if there is one."""
    return next((name for name in FILE_COLUMNS if name in prompts.metadata[0]), None)


def rows_without_image(labels: list[str], prompts: PromptSet | str | None, folder: Path) -> str:
    """A warning of the rows of the prompts that name no image of the folder; "" if there are none."""
    if not isinstance(prompts, PromptSet) or (column := file_column(prompts)) is None:
        return ""
    missing = [str(row[column]) for row in prompts.metadata if row[column] not in labels]
    named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"warning: {counted(len(missing), 'row')} of the prompts without an image in {folder}: {named}" if missing else ""


def _rows_by_name(labels: list[str], names: list[object], folder: Path) -> list[int]:
    """The row of each image, by the column of file names."""
    row_of: dict[object, int] = {}
    for row, name in enumerate(names):
        if row_of.setdefault(name, row) != row:
            raise FlowGRPOError(
                f"the rows {row_of[name] + 1} and {row + 1} of the prompts are both for {name}: keep one of them."
            )
    missing = next((label for label in labels if label not in row_of), None)
    if missing is not None:
        raise FlowGRPOError(f"the prompts have no row whose file name is {missing}, which is in {folder}.")
    return [row_of[label] for label in labels]


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
