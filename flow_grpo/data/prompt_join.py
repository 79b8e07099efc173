"""Which of the given prompts belongs to which image on disk: by file name, by position, or by the prompt that the image contains."""

from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of
from flow_grpo.text import counted

FILE_COLUMNS = ("file_name", "file")
HOW_TO_GIVE_PROMPTS = (
    "give --prompt, --prompts with a row for each, a metadata.jsonl in their folder with the columns file_name and prompt, or a caption "
    "beside each in a .txt file of its name"
)


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
