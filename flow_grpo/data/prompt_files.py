"""Files of prompts as tables, whatever their format, and the images of their prompts, each read and checked once."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.config.loading import read_text
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import check_regular, inside
from flow_grpo.image_prompt import SourceImage
from flow_grpo.progress import phase

COLUMNS = ("prompt", "prompts")  # names of the prompt column, upper or lower case
OTHER_COLUMNS = (  # names that it has in published sets, one of which is taken if a table has no `prompt`
    *("caption", "captions", "text", "texts", "description"),
    *("prompt_en", "prompt_cn", "prompt_zh", "en_prompt", "prompt_text", "text_prompt"),
)
ID = "id"  # the column of the keys of a JSON object by id
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
MAX_BYTES = 1 << 30  # of a file of text
MAX_PARQUET_BYTES = 2 << 30  # of a file, and an eighth of what it may need in memory
MAX_ROWS = 10_000_000
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,100}")  # also of 19 digits and more, as seeds and ids have
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
LEADING_ZERO = re.compile(r"[+-]?0\d.*")  # 007 is a text
BOOLEANS = {"true": True, "false": False}
IMAGE_COLUMN = "image"
DERIVED = ("source", "sources")  # arguments of rewards that are made of the images
MAX_IMAGES = 16  # of one prompt


@dataclass(frozen=True)
class Table:
    """The rows of a file or data set, each with a value for every column.

    Attributes:
        locations: of each row, such as `line 3`, for errors.
        folder: to which paths of images are relative; None if there is none, as for a file at an address.
        stay_inside: whether paths of images must stay within that folder, since the table may be a stranger's.
        image_column: the column with the paths of images, where it has not its usual name.
        notes: sentences for the user on what was left out.
    """

    columns: list[str]
    rows: list[dict[str, Any]]
    locations: list[str]
    folder: Path | None = None
    stay_inside: bool = True
    image_column: str | None = None
    notes: tuple[str, ...] = ()


def prompt_columns(columns: list[str]) -> list[str]:
    """Those of the columns that may hold the prompts: one of `COLUMNS`, or else all of `OTHER_COLUMNS` that there are."""
    exact = [column for wanted in COLUMNS for column in columns if column.lower() == wanted]
    return exact[:1] or [column for column in columns if column.lower() in OTHER_COLUMNS]


def table_of_texts(texts: list[str], locations: list[str]) -> Table:
    """A table with the column `prompt` alone."""
    return Table([COLUMNS[0]], [{COLUMNS[0]: text} for text in texts], locations)


def table_of_rows(rows: list[dict[str, Any]], locations: list[str]) -> Table:
    """A table of rows that may lack columns, which are None there."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table(columns, [{key: row.get(key) for key in columns} for row in rows], locations)


def read_table(file: Path, name: str, suffix: str) -> Table:
    """Read all rows of a file. Blank lines are skipped; a .txt file has one column, `prompt`.

    Args:
        name: of the file in errors.
        suffix: one of `SUFFIXES`, which decides the format.

    Raises:
        FlowGRPOError: the file can't be read, is no regular file or too large, or one of its lines is invalid; names the line.
    """
    if suffix not in SUFFIXES:
        raise FlowGRPOError(f"{name} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")
    check_regular(file, name, MAX_PARQUET_BYTES if suffix == ".parquet" else MAX_BYTES)
    if suffix == ".parquet":
        return _parquet_table(file, name)
    text = read_text(file, MAX_BYTES)
    if suffix == ".txt":
        numbered = list(_lines(text))
        return table_of_texts([line for _, line in numbered], [f"line {number}" for number, _ in numbered])
    if suffix in (".csv", ".tsv"):
        return _csv_table(text, name, tabs=suffix == ".tsv")
    return _json_table(text, name, suffix)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    r"""The lines that are not blank, and their numbers. \n, \r\n and \r end a line, Unicode's other line breaks don't."""
    for number, line in enumerate(re.split(r"\r\n?|\n", text), 1):
        if line.strip():
            yield number, line.strip()


def _json_table(text: str, name: str, suffix: str) -> Table:
    """The texts or objects of JSON lines, of a JSON list, or of a JSON object by id."""
    entries = _json_entries(text, name, suffix)
    locations = [location for location, _ in entries]
    if entries and all(isinstance(entry, str) for _, entry in entries):
        return table_of_texts([entry for _, entry in entries], locations)
    wrong = next(((location, entry) for location, entry in entries if not isinstance(entry, dict)), None)
    if wrong is not None:
        raise FlowGRPOError(
            f'{name}, {wrong[0]}: give an object such as {{"prompt": "a red fox"}}, not {_short(wrong[1])}; or all texts.'
        )
    return table_of_rows([entry for _, entry in entries], locations)


def _json_entries(text: str, name: str, suffix: str) -> list[tuple[str, Any]]:
    """Each entry with its location."""
    start = text.lstrip()[:1]
    if start == "[":
        return [(f"entry {number}", entry) for number, entry in enumerate(_parse_json(text, name), 1)]
    if start == "{" and suffix == ".json" and (whole := _single_object(text, name)) is not None:
        return _entries_by_id(whole, name)
    return [(f"line {number}", _parse_json(line, f"{name}, line {number}")) for number, line in _lines(text)]


def _single_object(text: str, name: str) -> dict[str, Any] | None:
    """The object that a .json file is; None if it has objects line by line."""
    numbered = list(_lines(text))
    try:
        _parse_json(numbered[0][1], name)
    except FlowGRPOError:
        return _parse_json(text, name)  # an object over several lines
    return _parse_json(text, name) if len(numbered) == 1 else None


def _entries_by_id(whole: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    """The entries of an object by id, each with its id as metadata; the object itself if it is a single row."""
    if any(isinstance(whole[column], str) for column in prompt_columns(list(whole))):
        return [("line 1", whole)]
    values = list(whole.values())
    if values and all(isinstance(value, str) for value in values):
        return [(f"entry {key!r}", {ID: key, COLUMNS[0]: value}) for key, value in whole.items()]
    if not all(isinstance(value, dict) for value in values):
        keys = ", ".join(map(str, whole))
        raise FlowGRPOError(
            f"{name} is one object with the keys {keys[:120]}: give a list of prompts, or an object of prompts by id."
        )
    return [(f"entry {key!r}", {ID: key, **value}) for key, value in whole.items()]


def _parse_json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise FlowGRPOError(f"the key {_short(next(k for k in keys if keys.count(k) > 1))} occurs twice in an object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FlowGRPOError(f"{where} is not valid JSON: {problem}.") from error


def _csv_table(text: str, name: str, tabs: bool) -> Table:
    """The rows of a CSV file whose first line has the column names; with `tabs` it is separated by tabs and has no quotes."""
    delimiter = "\t" if tabs else _delimiter(text)
    numbered = list(_csv_rows(text, name, delimiter, quotes=not tabs))
    if not numbered:
        return Table([], [], [])
    (_, header), *body = numbered
    columns = [cell.strip() for cell in header]
    _check_unique(columns, name)
    for number, cells in body:
        if any(cells[len(columns) :]):
            separator = {"\t": "tabs", ";": "semicolons"}.get(delimiter, "commas")
            raise FlowGRPOError(
                f"{name}, line {number}: it has {len(cells)} cells under {len(columns)} column names; put a text with "
                f"{separator} in double quotes{', in a .csv file' if tabs else ''}."
            )
    texts, values = prompt_columns(columns), {}
    for i, column in enumerate(columns):
        if column:  # the column of an index has no name
            cells = [row[i] if i < len(row) else "" for _, row in body]
            values[column] = cells if column in texts else _convert_column(cells)
    rows = [{column: cells[i] for column, cells in values.items()} for i in range(len(body))]
    return Table(list(values), rows, [f"line {number}" for number, _ in body])


def _delimiter(text: str) -> str:
    """The separator of a .csv file: of comma, semicolon and tab the first that separates a prompt column in its first line."""
    header = next((line for _, line in _lines(text)), "")
    names = {mark: [cell.strip(' "') for cell in header.split(mark)] for mark in ",;\t"}
    return next((mark for mark, cells in names.items() if prompt_columns(cells)), ",")


def _csv_rows(text: str, name: str, delimiter: str, quotes: bool) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with the number of its first line."""
    dialect: dict[str, Any] = {"strict": True} if quotes else {"quoting": csv.QUOTE_NONE}
    former = csv.field_size_limit(len(text) + 1)
    try:
        reader, first = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **dialect), 1
        for row in reader:
            if row:
                yield first, row
            first = reader.line_num + 1
    except csv.Error as error:
        raise FlowGRPOError(f"{name}, line {reader.line_num}: not valid CSV, {error}.") from error
    finally:
        csv.field_size_limit(former)


def _convert_column(cells: list[str]) -> list[Any]:
    """The cells of a column as numbers or booleans if all of them are, else as text; None for empty cells."""
    filled = [cell for cell in cells if cell]
    if all(cell.lower() in BOOLEANS for cell in filled):
        return [BOOLEANS[cell.lower()] if cell else None for cell in cells]
    convert: type = str
    if not any(LEADING_ZERO.fullmatch(cell) for cell in filled):
        if all(WHOLE_NUMBER.fullmatch(cell) for cell in filled):
            convert = int
        elif all(NUMBER.fullmatch(cell) for cell in filled):
            convert = float
    return [convert(cell) if cell else None for cell in cells]


def _parquet_table(file: Path, name: str) -> Table:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        parquet = ParquetFile(file)
        _check_parquet_size(parquet.metadata, name)
        table = parquet.read()
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        raise FlowGRPOError(f"{name} could not be read as Parquet: {' '.join(str(error).split())}") from error
    _check_unique(table.column_names, name)
    return Table(table.column_names, rows, [f"row {n}" for n in range(1, len(rows) + 1)])


def _check_parquet_size(metadata: Any, name: str) -> None:
    """FlowGRPOError if a file that may be small on disk is too large in memory."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if metadata.num_rows > MAX_ROWS or size > 8 * MAX_PARQUET_BYTES:
        raise FlowGRPOError(
            f"{name} has {metadata.num_rows:,} rows with {size >> 20:,} MB; at most {MAX_ROWS:,} rows and "
            f"{8 * MAX_PARQUET_BYTES >> 20:,} MB are read: leave out rows or columns."
        )


def _check_unique(columns: list[str], name: str) -> None:
    duplicate = next((column for column in columns if column and columns.count(column) > 1), None)
    if duplicate is not None:
        raise FlowGRPOError(f"{name} has two columns `{duplicate}`: rename one of them.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_images(
    cells: Sequence[Any],
    locations: Sequence[str],
    folder: Path | None,
    column: str = IMAGE_COLUMN,
    stay_inside: bool = False,
) -> list[tuple[SourceImage, ...]]:
    """Read the images of each prompt, from the cells of a column.

    Args:
        cells: each a path, a list of paths, a mapping with `bytes` or `path` as hub data sets have, a PIL image, or None.
        locations: of the cells, such as `prompts.csv, line 3`, for errors.
        folder: which paths are relative to; None if there is none, as for a file at an address.
        column: its name, for errors.
        stay_inside: refuse paths that lead out of the folder, since the table may be a stranger's.

    Raises:
        FlowGRPOError: an image does not exist, is damaged, too large or no image, or is outside the folder; names the location.
    """
    readers = [
        [_reader(image, location, folder, column, stay_inside) for image in _cell_images(cell, location, column)]
        for cell, location in zip(cells, locations, strict=True)
    ]
    flat = [reader for of_prompt in readers for reader in of_prompt]
    with ThreadPoolExecutor() as threads, phase("reading the prompts' images", total=len(flat)) as done:
        read = []
        for image in threads.map(lambda reader: reader(), flat):
            read.append(image)
            done.advance(1)
    images = iter(read)
    return [tuple(next(images) for _ in of_prompt) for of_prompt in readers]


def _cell_images(cell: Any, location: str, column: str) -> list[Any]:
    """The images of a cell, each still a path, content or mapping."""
    if isinstance(cell, str) and cell.strip().startswith("["):  # of a .csv file
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise FlowGRPOError(
                f"{location}: the column `{column}` holds {cell[:80]!r}, which is not a list of paths."
            ) from error
    if cell is None or cell == "":
        return []
    images = list(cell) if isinstance(cell, list | tuple) else [cell]
    if len(images) > MAX_IMAGES:
        raise FlowGRPOError(f"{location}: a prompt has {len(images)} images; at most {MAX_IMAGES} are allowed.")
    return images


def _reader(image: Any, location: str, folder: Path | None, column: str, stay_inside: bool) -> Callable[[], SourceImage]:
    """A function that reads one image."""
    if isinstance(image, Image.Image):
        return partial(SourceImage.from_pil, image, f"of {location}")
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return partial(SourceImage.read, image, f"of {location}")
    if not isinstance(image, str | Path) or not str(image).strip() or "\0" in str(image):
        raise FlowGRPOError(f"{location}: the column `{column}` holds {repr(image)[:80]}; give a path, or a list of paths.")
    if folder is None and (stay_inside or not Path(image).is_absolute()):
        raise FlowGRPOError(
            f"{location}: the image {str(image)[:200]} has no folder to be found in: download the file and its images."
        )
    path = (folder or Path()) / image
    if folder is not None and stay_inside:
        path = inside(folder, str(path.relative_to(folder) if path.is_relative_to(folder) else image), location)
    return partial(SourceImage.read, path, f"{str(image)[:200]} ({location})")
