"""Reads prompt files: all rows of a .txt, .jsonl, .json, .csv, .tsv or .parquet file."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.config.loading import read_text
from flow_grpo.errors import FlowGRPOError

COLUMNS = ("prompt", "prompts")  # names of the prompt column, upper or lower case
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
MAX_BYTES = 1 << 30  # of a file of text
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
LEADING_ZERO = re.compile(r"[+-]?0\d.*")  # 007 is a text
BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Table:
    """The rows of a file, each with a value for every column, and the location of each row, such as `line 3`, for errors."""

    columns: list[str]
    rows: list[dict[str, Any]]
    locations: list[str]


def read_table(file: Path, name: str, suffix: str) -> Table:
    """Read all rows of a file. Blank lines are skipped; a .txt file has one column, `prompt`.

    Args:
        name: of the file in errors.
        suffix: one of `SUFFIXES`, which decides the format.

    Raises:
        FlowGRPOError: the file can't be read, or one of its lines is invalid; names the line.
    """
    if suffix == ".parquet":
        return _parquet_table(file, name)
    if suffix not in SUFFIXES:
        raise FlowGRPOError(f"{name} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")
    text = read_text(file, MAX_BYTES)
    if suffix == ".txt":
        return _table_from_rows((f"line {n}", {COLUMNS[0]: line}) for n, line in _lines(text))
    if suffix in (".csv", ".tsv"):
        return _csv_table(text, name, tabs=suffix == ".tsv")
    return _table_from_rows(_json_rows(text, name))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    r"""The lines that are not blank, and their numbers. Only \n and \r\n end a line, not Unicode's other line breaks."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def _table_from_rows(rows: Iterator[tuple[str, dict[str, Any]]]) -> Table:
    listed = list(rows)
    columns = list(dict.fromkeys(key for _, row in listed for key in row))
    filled = [{key: row.get(key) for key in columns} for _, row in listed]
    return Table(columns, filled, [location for location, _ in listed])


def _json_rows(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines or of a JSON list, each with its location."""
    if text.lstrip().startswith("["):
        entries = [(f"entry {n}", row) for n, row in enumerate(_parse_json(text, name), 1)]
    else:
        entries = [(f"line {n}", _parse_json(line, f"{name}, line {n}")) for n, line in _lines(text)]
    for location, row in entries:
        if not isinstance(row, dict):
            raise FlowGRPOError(f'{name}, {location}: give an object such as {{"prompt": "a red fox"}}, not {_short(row)}.')
        yield location, row


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
    numbered = list(_csv_rows(text, name, tabs))
    if not numbered:
        return Table([], [], [])
    (_, header), *body = numbered
    columns = [cell.strip() for cell in header]
    _check_unique(columns, name)
    for number, cells in body:
        if any(cells[len(columns) :]):
            raise FlowGRPOError(
                f"{name}, line {number}: it has {len(cells)} cells under {len(columns)} column names; put a text with "
                f"{'tabs' if tabs else 'commas'} in double quotes{', in a .csv file' if tabs else ''}."
            )
    values = {}
    for i, column in enumerate(columns):
        if column:  # the column of an index has no name
            cells = [row[i] if i < len(row) else "" for _, row in body]
            values[column] = cells if column.lower() in COLUMNS else _convert_column(cells)
    rows = [{column: cells[i] for column, cells in values.items()} for i in range(len(body))]
    return Table(list(values), rows, [f"line {number}" for number, _ in body])


def _csv_rows(text: str, name: str, tabs: bool) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with the number of its first line."""
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    former = csv.field_size_limit(len(text) + 1)
    try:
        reader, first = csv.reader(io.StringIO(text, newline=""), **dialect), 1
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
        table = ParquetFile(file).read()
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise FlowGRPOError(f"{name} could not be read as Parquet: {' '.join(str(error).split())}") from error
    _check_unique(table.column_names, name)
    return Table(table.column_names, rows, [f"row {n}" for n in range(1, len(rows) + 1)])


def _check_unique(columns: list[str], name: str) -> None:
    duplicate = next((column for column in columns if column and columns.count(column) > 1), None)
    if duplicate is not None:
        raise FlowGRPOError(f"{name} has two columns `{duplicate}`: rename one of them.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
