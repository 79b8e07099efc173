"""Files of prompts as tables, whatever their format, and the images of their prompts, each read and checked once."""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
MAX_BYTES = 1 << 30  # of a file
IMAGE_COLUMN = "image"
DERIVED = ("source", "sources")  # arguments of rewards that are made of the images
WHITESPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Table:
    """The rows of a file or data set, each with a value for every column.

    Attributes:
        locations: of each row, such as `line 3`, for errors.
        folder: to which paths of images are relative; None if there is none, as for a file at an address.
        stay_inside: whether paths of images must stay within that folder, since the table may be a stranger's.
        image_column: the column with the paths of images, where it has not its usual name.
    """

    columns: list[str]
    rows: list[dict[str, Any]]
    locations: list[str]
    folder: Path | None = None
    stay_inside: bool = True
    image_column: str | None = None


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
    check_regular(file, name, MAX_BYTES)
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
    entries = list(_json_values(text, name))
    if len(entries) == 1 and isinstance(entries[0][1], list):
        entries = [(f"entry {number}", entry) for number, entry in enumerate(entries[0][1], 1)]
    elif len(entries) == 1 and suffix == ".json" and isinstance(entries[0][1], dict):
        entries = _entries_by_id(entries[0][1]) or entries
    locations = [location for location, _ in entries]
    if entries and all(isinstance(entry, str) for _, entry in entries):
        return table_of_texts([entry for _, entry in entries], locations)
    wrong = next(((location, entry) for location, entry in entries if not isinstance(entry, dict)), None)
    if wrong is not None:
        raise FlowGRPOError(
            f'{name}, {wrong[0]}: give an object such as {{"prompt": "a red fox"}}, not {repr(wrong[1])[:80]}; or all texts.'
        )
    return table_of_rows([entry for _, entry in entries], locations)


def _json_values(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The JSON values of a file, one after another, each with its line."""
    decoder, position, line = json.JSONDecoder(object_pairs_hook=_unique), 0, 1
    while (start := WHITESPACE.match(text, position).end()) < len(text):  # type: ignore[union-attr]
        line += text.count("\n", position, start)
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise FlowGRPOError(f"{name}, line {line} is not valid JSON: {problem}.") from error
        yield f"line {line}", value
        line += text.count("\n", start, position)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in an object")
    return dict(pairs)


def _entries_by_id(whole: dict[str, Any]) -> list[tuple[str, Any]]:
    """The texts or objects of an object by id, each with its id as metadata; none if the object is a row itself."""
    values = list(whole.values())
    if any(isinstance(whole[column], str) for column in prompt_columns(list(whole))):
        return []
    if all(isinstance(value, str) for value in values):
        return [(f"entry {key!r}", {ID: key, COLUMNS[0]: value}) for key, value in whole.items()]
    if all(isinstance(value, dict) for value in values):
        return [(f"entry {key!r}", {ID: key, **value}) for key, value in whole.items()]
    return []


def _csv_table(text: str, name: str, tabs: bool) -> Table:
    """The rows of a CSV file whose first line has the column names; with `tabs` it is separated by tabs and has no quotes."""
    csv.field_size_limit(MAX_BYTES)  # a prompt may be longer than the 131,072 letters that are allowed otherwise
    delimiter = "\t" if tabs else _delimiter(text)
    reader = csv.DictReader(
        io.StringIO(text.lstrip("\r\n"), newline=""),
        restval="",
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
        strict=True,
    )
    rows, locations = [], []
    try:
        reader.fieldnames = columns = [column.strip() for column in reader.fieldnames or ()]
        for row in reader:
            rows.append(row)
            locations.append(f"line {reader.line_num}")
            if any(row.get(None, ())):  # the cells without a column
                raise FlowGRPOError(
                    f"{name}, line {reader.line_num}: it has more cells than the {len(columns)} column names; put a text with "
                    f"{delimiter!r} in double quotes{', in a .csv file' if tabs else ''}."
                )
    except csv.Error as error:
        raise FlowGRPOError(f"{name}, line {reader.line_num}: not valid CSV, {error}.") from error
    named = [column for column in columns if column]  # the column of an index has no name
    if len({*named}) < len(named):
        raise FlowGRPOError(f"{name} has two columns of one name among {', '.join(named)}: rename one of them.")
    texts = prompt_columns(named)
    cells = {column: [row[column] for row in rows] for column in named}
    values = {column: of_rows if column in texts else _convert_column(of_rows) for column, of_rows in cells.items()}
    return Table(named, [{column: values[column][i] for column in named} for i in range(len(rows))], locations)


def _delimiter(text: str) -> str:
    """The separator of a .csv file: of comma, semicolon and tab the first that separates a prompt column in its first line."""
    header = next((line for _, line in _lines(text)), "")
    names = {mark: [cell.strip(' "') for cell in header.split(mark)] for mark in ",;\t"}
    return next((mark for mark, cells in names.items() if prompt_columns(cells)), ",")


def _convert_column(cells: list[str]) -> list[Any]:
    """The cells of a column as numbers or booleans if all of them are, else as text; None for empty cells.

    Numbers are written as in JSON, so that 007 is a text.
    """
    texts = [cell or None for cell in cells]
    try:
        values = [json.loads(cell.lower()) if cell else None for cell in cells]
    except (ValueError, RecursionError):
        return texts
    kinds = {type(value) for value, text in zip(values, texts, strict=True) if text}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return values if kinds <= {int} or kinds <= {float} or kinds <= {bool} else texts


def _parquet_table(file: Path, name: str) -> Table:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file).read()
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        raise FlowGRPOError(f"{name} could not be read as Parquet: {' '.join(str(error).split())}") from error
    return Table(table.column_names, rows, [f"row {n}" for n in range(1, len(rows) + 1)])


def read_images(cells: Sequence[Any], table: Table, name: str, column: str) -> list[tuple[SourceImage, ...]]:
    """Read the images of each prompt, from the cells of a column.

    Args:
        cells: each a path, a list of paths, a mapping with `bytes` or `path` as hub data sets have, a PIL image, or None.
        table: with the folder of the paths, and the locations of the cells, for errors.
        name: of the table, for errors.

    Raises:
        FlowGRPOError: an image does not exist, is damaged, too large or no image, or is outside the folder; names the location.
    """

    def read_cell(cell: Any, location: str) -> tuple[SourceImage, ...]:
        where = f"{name}, {location}"
        return tuple(_read_image(image, table, where, column) for image in _cell_images(cell, where, column))

    read = []
    with ThreadPoolExecutor() as threads, phase("reading the prompts' images", total=len(cells)) as done:
        for images in threads.map(read_cell, cells, table.locations):
            read.append(images)
            done.advance(1)
    return read


def _cell_images(cell: Any, where: str, column: str) -> list[Any]:
    """The images of a cell, each still a path, content or mapping."""
    if isinstance(cell, str) and cell.strip().startswith("["):  # of a .csv file
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise FlowGRPOError(
                f"{where}: the column `{column}` holds {cell[:80]!r}, which is not a list of paths."
            ) from error
    if cell is None or cell == "":
        return []
    return list(cell) if isinstance(cell, list | tuple) else [cell]


def _read_image(image: Any, table: Table, where: str, column: str) -> SourceImage:
    if isinstance(image, Image.Image):
        return SourceImage.from_pil(image, f"of {where}")
    source = image_source(image, table.folder, where, column, table.stay_inside)
    if isinstance(source, bytes):
        return SourceImage.read(source, f"of {where}")
    return SourceImage.read(source, f"{source} ({where})")


def image_source(image: Any, folder: Path | None, where: str, column: str, stay_inside: bool) -> Path | bytes:
    """The path of an image, or its content, as a table names it.

    Args:
        image: a path, or a mapping with `bytes` or `path` as hub data sets have.
        folder: which paths are relative to; None if there is none, as for a file at an address.
        where: the row, for errors.
        stay_inside: refuse paths that lead out of the folder, since the table may be a stranger's.

    Raises:
        FlowGRPOError: it is none of these, or is outside the folder.
    """
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str | Path) or not str(image).strip():
        raise FlowGRPOError(f"{where}: the column `{column}` holds {repr(image)[:80]}: give the path of an image.")
    if folder is None:
        raise FlowGRPOError(
            f"{where}: the image {str(image)[:200]} has no folder to be found in: download the file and its images."
        )
    path = folder / image
    return inside(folder, os.path.relpath(path, folder), where) if stay_inside else path
