"""Where prompts come from: files, folders, addresses and data sets by name, and objects of a Python program.

And what prompts are warned of: training prompts that are tested on, and syntax of other programs.
"""

import functools
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flow_grpo.config.loading import bundled_file, read_text
from flow_grpo.config.sections import FROM_PYTHON, PromptSetConfig
from flow_grpo.data.prompt_files import (
    COLUMNS,
    DERIVED,
    IMAGE_COLUMN,
    SUFFIXES,
    Table,
    prompt_columns,
    read_images,
    read_table,
    table_of_rows,
    table_of_texts,
)
from flow_grpo.data.prompts import SET_COLUMN, PromptMixture, Prompts, PromptSet, join_sets
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import check_regular, expanded, write_atomic
from flow_grpo.image_prompt import SourceImage, images_of, prompt_key, with_images
from flow_grpo.rewards.downloads import HubUnreachable, NotDownloaded, downloads
from flow_grpo.rewards.scoring import REWARDS_COLUMN
from flow_grpo.text import has_password, natural_key, visible, without_passwords

HTTPS = "https://"
# a hub id of a data set, which has no -- and no ..
DATA_SET = re.compile(r"(?!.*(?:--|\.\.))(?:[\w.-]+/[\w.-]+|[\w-]+)")
MAX_PROMPT_BYTES = 1 << 20  # of a file that is one prompt
CAPTIONS = (".txt", ".caption")  # kohya's scripts have the second for the text of an image
FOLDER_FILES, FILE_NAME = ("metadata.jsonl", "metadata.csv"), "file_name"  # of a folder of images, as `datasets` has them
RESERVED_COLUMNS = ("images", "prompts")  # arguments of rewards that are not metadata
ARTICLES = {"a", "an", "the"}
# kohya's `# comment` and `--w 512`, A1111's `--steps 20`, `<lora:name:0.8>` and `(word:1.2)`, Midjourney's `--ar 16:9`
SYNTAX = re.compile(r"^#\s|(?<!\S)--[A-Za-z][\w-]*(?=\s|=|$)|<(?:lora|lyco|hypernet):[^<>]+>|\([^()]*[^():\s\d]:\d*\.\d+\)")
PACKAGED = "prompts/"  # the folder of bundled files
PROMPT_SETS = {  # by name, in lower case: a bundled file, an address or a hub data set
    "ocr": "prompts/signs_eval.txt",  # 256 signs for the embedded model; ours, Apache-2.0
    "shapes": "prompts/shapes_eval.jsonl",  # scenes in GenEval's six tasks, for the embedded model of shapes; ours, Apache-2.0
    "shape_edits": "prompts/shape_edits_eval.jsonl",  # 72 edits of such scenes; ours, Apache-2.0
    "ocr_test": "prompts/ocr_test.txt",  # 512 scenes with a text in quotes; ours, Apache-2.0
    # the OCR test prompts of Flow-GRPO (arXiv 2505.05470), MIT
    "ocr_paper": "https://raw.githubusercontent.com/yifan123/flow_grpo/main/dataset/ocr/test.txt",
    # 553 prompts in six tasks (arXiv 2310.11513); github.com/djghosh13/geneval, MIT
    "geneval": "prompts/geneval.jsonl",
    # 1632 prompts by category and challenge (arXiv 2206.10789); github.com/google-research/parti, Apache-2.0
    "partiprompts": "nateraw/parti-prompts",
    # 200 prompts in eleven categories (arXiv 2205.11487); without a licence, so that the package does not contain it
    "drawbench": "sayakpaul/drawbench",
}


def load_prompts(source: Prompts, image_column: str = IMAGE_COLUMN) -> PromptSet:
    """Load prompts from a file, a folder, an address, a hub data set or a known name, or from texts or dicts in memory.

    A name is one of flow_grpo/data/prompt_sources.py, a .txt file (one prompt per line), a .json, .jsonl, .csv, .tsv or .parquet file, the
    https address of such a file, a folder, or a hub data set. Objects are a `PromptSet` (returned as it is), and a list, generator,
    `datasets.Dataset` or another iterable of texts, or of dicts by column.

    Tables have a column `prompt`, Prompt or prompts, or a single one of `prompt_files.OTHER_COLUMNS`; other columns become metadata. No
    row is skipped. The column `image` has the images of a prompt: a path or several, relative to the file. A folder has a
    metadata.jsonl or .csv, whose column file_name has the images, or .txt files with a prompt each. A text of another column than
    `prompt` describes its image: that is not an image to be edited, and is left out.

    Args:
        image_column: the column of the prompts' images; `image` has another meaning in tables of given images.

    Raises:
        FlowGRPOError: there is no such file or data set, or it has no prompts, no column for them, or a value that is no prompt or image.
    """
    if isinstance(source, PromptSet):
        reserved = {*RESERVED_COLUMNS, *(DERIVED if any(map(images_of, source.prompts)) else ())}
        _check_columns(itertools.chain.from_iterable(source.metadata), reserved, "the PromptSet")
        _check_prompts(source.prompts, [f"item {number}" for number in range(1, len(source) + 1)], "the PromptSet")
        return source
    if isinstance(source, str | Path):
        return _prompts_of(read_source(str(source)), str(source), image_column)
    return _prompts_of(read_items(source), "the given data set", image_column)


def _prompts_of(table: Table, name: str, image_column: str) -> PromptSet:
    """The prompts of a table, with their images and metadata."""
    column, image_column = _prompt_column(table, name), table.image_column or image_column
    is_caption = column.lower() not in COLUMNS  # of the image beside it
    has_images = image_column in table.columns and not is_caption
    reserved = {*RESERVED_COLUMNS, *(DERIVED if has_images else ())} - {column, image_column}
    _check_columns(table.columns, reserved, name)
    images: list[tuple[SourceImage, ...]] = [()] * len(table.rows)
    if has_images:
        images = read_images([row[image_column] for row in table.rows], table, name, image_column)
    texts = [row[column] for row in table.rows]
    _check_prompts(texts, table.locations, name)
    dropped = {column, image_column} - ({FILE_NAME} if is_caption else set())
    metadata = [{key: value for key, value in row.items() if key not in dropped} for row in table.rows]
    notes = []
    if is_caption:
        without = ", without the images that it describes" if image_column in table.columns else ""
        notes.append(f"{name}: the column `{visible(column)}` is taken as the prompt{without}.")
    prompts = [with_images(text, sources) for text, sources in zip(texts, images, strict=True)]
    return PromptSet(prompts, metadata, tuple(notes))


def _check_prompts(texts: Sequence[Any], locations: Sequence[str], name: str) -> None:
    """FlowGRPOError if there are no prompts, or one of them is no text or empty."""
    if len(texts) == 0:
        raise FlowGRPOError(f"{name} holds no prompts.")
    invalid = next((i for i, text in enumerate(texts) if not _is_prompt(text)), None)
    if invalid is not None:
        raise FlowGRPOError(
            f"{name}, {locations[invalid]}: {repr(texts[invalid])[:80]} is not a prompt: every prompt must be a text that is not empty."
        )


def _check_columns(columns: Iterable[str], reserved: Collection[str], name: str) -> None:
    """FlowGRPOError if one of the columns has a reserved name."""
    clash = next((column for column in columns if column in reserved), None)
    if clash is not None:
        raise FlowGRPOError(
            f"{name} has a column `{clash}`, a name that is reserved in calls of rewards: give it another name."
        )


def _prompt_column(table: Table, name: str) -> str:
    """The column of the prompts. FlowGRPOError if there are no rows, or if there is no such column, or more than one."""
    columns = prompt_columns(table.columns)
    if not table.columns or (columns and not table.rows):
        raise FlowGRPOError(f"{name} holds no prompts.")
    if not columns:
        raise FlowGRPOError(f"{name} has no column `prompt`; it has {visible(', '.join(table.columns))[:200]}.")
    if len(columns) > 1:
        several = " and ".join(f"`{column}`" for column in columns[:4])
        raise FlowGRPOError(f"{name} has no column `prompt`, but {several}: rename the one with the prompts to `prompt`.")
    return columns[0]


def _is_prompt(value: object) -> bool:
    """Whether it is a text that isn't blank and can be encoded: it has no half of a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def load_run_prompts(source: Any) -> PromptSet:
    """Load prompts as `load_prompts` does, or the mixture of a list of `PromptSetConfig`.

    Raises:
        FlowGRPOError: as `load_prompts`, or the prompts have a column `prompt_set` or `rewards`.
    """
    if isinstance(source, PromptMixture):
        return source
    if not (isinstance(source, list) and source and all(isinstance(entry, PromptSetConfig) for entry in source)):
        return _without_reserved(load_prompts(source), "the PromptSet" if isinstance(source, PromptSet) else str(source))
    labels, weights = [config.label for config in source], [config.weight for config in source]
    return join_sets(labels, [_load_set(config) for config in source], weights)


def _load_set(config: PromptSetConfig) -> PromptSet:
    """The prompts of a set, each with the set's name and rewards."""
    loaded = _without_reserved(load_prompts(config.file), config.file)
    rewards = dict.fromkeys(config.rewards) if isinstance(config.rewards, list) else config.rewards
    metadata = [{**row, SET_COLUMN: config.label, REWARDS_COLUMN: rewards} for row in loaded.metadata]
    return PromptSet(loaded.prompts, metadata, loaded.notes)


def _without_reserved(loaded: PromptSet, name: str) -> PromptSet:
    """The prompts themselves. FlowGRPOError if they have a column that only a list of sets may give them."""
    _check_columns(itertools.chain.from_iterable(loaded.metadata), {SET_COLUMN}, name)
    if any(REWARDS_COLUMN in row for row in loaded.metadata):  # by which 0.4 chose the rewards of each prompt
        raise FlowGRPOError(
            f"{name} has a column `{REWARDS_COLUMN}`, by which prompts no longer choose their rewards: give prompts with other "
            "rewards as a set, prompts=[{file: FILE, rewards: [NAME]}], or give the column another name."
        )
    return loaded


def source_of(name: str) -> str:
    """The source of the set of that name, in upper or lower case; other names are returned unchanged."""
    return PROMPT_SETS.get(name.lower(), name)


def is_prompt_file(name: str) -> bool:
    """Whether a name ends as those of prompt files do."""
    return Path(name).suffix.lower() in SUFFIXES


def names_a_path(word: str) -> bool:
    """Whether a word of a command line is a file or folder, there or missing, and not words to draw."""
    try:
        return is_prompt_file(word) or word.endswith("/") or Path(word).exists()
    except (OSError, ValueError):  # longer than any file's name, or a zero byte
        return False


def read_source(name: str) -> Table:
    """The rows of a file, a folder, the file at an address, or a hub data set.

    A folder has a metadata.jsonl or .csv, or .txt or .caption files with a prompt each.

    Raises:
        FlowGRPOError: there is none of that name, or it can't be read.
    """
    if name == FROM_PYTHON:
        raise FlowGRPOError(
            "the prompts of this run were given from Python and are in no file: give a file of prompts, by prompts=... or --prompts."
        )
    if has_password(name):
        raise FlowGRPOError(
            f"the address {without_passwords(name)} has a user or password, which would be written with the results: give a file."
        )
    source = source_of(name)
    if source.startswith(HTTPS):
        # the hub's links end in ?download=true
        return read_table(_downloaded(source), name, Path(urlsplit(source).path).suffix.lower())
    file = _local(source)
    if file is not None and file.is_dir():
        return _folder_table(file)
    if file is not None:
        table = read_table(file, name, file.suffix.lower())
        # a table of its folder's images may be a stranger's as the folder is; another file may name images anywhere
        return replace(table, folder=file.parent, stay_inside=file.name in FOLDER_FILES)
    if is_prompt_file(source):
        raise FlowGRPOError(f"there is no file {name}.")
    if not DATA_SET.fullmatch(source):
        raise FlowGRPOError(
            f"{name[:200]!r} is not a prompt file, an address or a data set: write prompts into a file, one per line."
        )
    return _data_set(source)


def folder_file(folder: Path) -> Path | None:
    """The table of a folder's images, if it has one."""
    return next((folder / name for name in FOLDER_FILES if (folder / name).is_file()), None)


def text_files(folder: Path) -> list[Path]:
    """The .txt files of a folder, or else its .caption files, in natural order, without hidden ones."""
    shown = sorted(
        (file for file in folder.iterdir() if not file.name.startswith(".")), key=lambda file: natural_key(file.name)
    )
    return next((found for end in CAPTIONS if (found := [file for file in shown if file.suffix.lower() == end])), [])


def _folder_table(folder: Path) -> Table:
    """The table of a folder's images, in which `file_name` is relative to the folder; else its .txt files, a prompt each."""
    manifest = folder_file(folder)
    if manifest is not None:
        table = read_table(manifest, str(manifest), manifest.suffix.lower())
        if FILE_NAME not in table.columns:
            raise FlowGRPOError(f"{manifest} has no column `{FILE_NAME}` with the names of the images in its folder.")
        return replace(table, folder=folder, image_column=FILE_NAME)
    files = text_files(folder)
    if not files:
        raise FlowGRPOError(
            f"{folder} is a folder without prompts: it has no metadata.jsonl or .csv and no .txt or .caption files. "
            "Give a prompt file in it."
        )
    for file in files:
        check_regular(file, str(file), MAX_PROMPT_BYTES)
    rows = [{"prompt": read_text(file).strip(), FILE_NAME: file.name} for file in files]
    return replace(table_of_rows(rows, [file.name for file in files]), folder=folder)


def _local(source: str) -> Path | None:
    """The file or folder of that name, or the bundled file; None if there is none, as for a data set."""
    try:
        path, bundled = expanded(source), bundled_file(source)
        if source and path.exists():
            return path
        return bundled if bundled.is_file() else None
    except (OSError, ValueError):  # longer than any file's name
        return None


def _downloaded(address: str) -> Path:
    """The file at an address: downloaded now or, without a network, the copy of the last download."""
    import httpx

    copy = expanded("~/.cache/flow-grpo/prompts") / hashlib.sha256(address.encode()).hexdigest()
    try:
        response = httpx.get(address, follow_redirects=True, timeout=30)
        response.raise_for_status()
    except httpx.TransportError as error:
        if copy.is_file():
            return copy
        raise HubUnreachable(_unreachable(address, error)) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the last of an impossible host name
        raise FlowGRPOError(_unreachable(address, error)) from error
    write_atomic(copy, response.content)
    return copy


def _data_set(source: str) -> Table:
    import datasets

    datasets.disable_progress_bars()
    try:
        with downloads(source):
            data_set = datasets.load_dataset(source, split="train")
        rows = data_set.to_list()
    except NotDownloaded as error:
        raise type(error)(
            f"the prompts {error} Give a local file of them; the sets known by name are {', '.join(PROMPT_SETS)}."
        ) from error
    except Exception as error:
        raise FlowGRPOError(_unreachable(source, error)) from error
    locations = [f"row {n}" for n in range(1, len(rows) + 1)]
    # images that were downloaded with the data set are in the hub's cache
    return Table(data_set.column_names, rows, locations, folder=expanded(datasets.config.HF_CACHE_HOME))


def _unreachable(source: str, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return (
        f"the prompts {source} could not be read: {reason}. Without a network give a local file of them; the sets known by name "
        f"are {', '.join(PROMPT_SETS)}."
    )


def read_items(items: Iterable[Any]) -> Table:
    """The rows of texts or of mappings by column, in a list, generator, `datasets.Dataset` or another iterable that ends.

    Raises:
        FlowGRPOError: it is no iterable, or has items of another kind.
    """
    if isinstance(items, Mapping) or not (isinstance(items, Iterable) or hasattr(items, "__getitem__")):
        raise FlowGRPOError(
            f"the prompts were given as {type(items).__name__}: give a file, a list of texts or dicts, a PromptSet, a "
            "datasets.Dataset or one split of a DatasetDict."
        )
    if hasattr(items, "itertuples") and hasattr(items, "to_dict"):  # a pandas table, which iterates over its column names
        items = items.to_dict("records")
    listed = list(items)
    locations = [f"item {number}" for number in range(1, len(listed) + 1)]
    kind = str if listed and isinstance(listed[0], str) else Mapping
    if kind is Mapping and any(not isinstance(key, str) for item in listed if isinstance(item, Mapping) for key in item):
        raise FlowGRPOError("the given prompts have columns that are no text: name the columns, one of them `prompt`.")
    wrong = next((i for i, item in enumerate(listed) if not isinstance(item, kind)), None)
    if wrong is not None:
        raise FlowGRPOError(
            f"the given prompts, {locations[wrong]}: {repr(listed[wrong])[:80]}: give all as texts, or all as dicts by column."
        )
    if kind is str:
        return table_of_texts(listed, locations)
    return replace(table_of_rows([dict(item) for item in listed], locations), folder=Path(), stay_inside=False)


def normal_form(prompt: str) -> str:
    """The same text for equivalent prompts."""
    return prompt_key(with_images(_normal_text(str(prompt)), images_of(prompt)))


@functools.lru_cache(maxsize=1 << 16)  # each prompt is compared with several sets
def _normal_text(text: str) -> str:
    words = [word for word in text.casefold().rstrip(". \n").split() if word not in ARTICLES]
    before, of, things = " ".join(words).rpartition(" of ")
    return before + of + " and ".join(sorted(things.split(" and ")))


def held_out_overlap(trained: list[str], held_out: list[str]) -> int:
    """The number of held-out prompts that are among the training prompts."""
    known = {normal_form(prompt) for prompt in trained}
    return sum(normal_form(prompt) in known for prompt in held_out)


def benchmark_overlap(trained: list[str], held_out: list[str], source: str | None = None) -> dict[str, int]:
    """For each named prompt set: how many of its prompts are trained on, not counting those that are held out too.

    Sets that are not part of the package are recognised by their name or address only.

    Args:
        source: of the training prompts, as in the config.
    """
    known = {normal_form(prompt) for prompt in trained} - {normal_form(prompt) for prompt in held_out}
    counts = {}
    for name, origin in PROMPT_SETS.items():
        if origin.startswith(PACKAGED):
            rows = read_table(bundled_file(origin), origin, Path(origin).suffix).rows  # not a user's file of that name
            counts[name] = sum(normal_form(row["prompt"]) in known for row in rows)
        elif source and source_of(source) == origin:
            counts[name] = len(trained)
    return {name: count for name, count in counts.items() if count}


def syntax_warnings(prompts: Sequence[str]) -> list[str]:
    """A sentence on prompts with marks of another program's syntax; [] if there are none."""
    found = {prompt: marks for prompt in dict.fromkeys(prompts) if (marks := SYNTAX.findall(prompt))}
    if not found:
        return []
    prompt, marks = next(iter(found.items()))
    return [
        f"{len(found)} of {len(set(prompts))} prompts have marks of another program's syntax, such as `{marks[0].strip()}` in "
        f"{str(prompt)[:60]!r}: comments, options and weights are words here, which the model reads like the rest. Remove them from "
        "the prompts if they are not meant so."
    ]
