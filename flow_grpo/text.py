"""Numbers, names and untrusted text, as the terminal, Markdown, CSV and HTML show them.

Prompts, names of files and settings may come from anybody. `visible` makes them safe for a terminal, `plain` for HTML (the templates
escape its marks), `escape_markdown`, `inline_code` and `code_block` for Markdown, `escape_formula` for CSV.
"""

import difflib
import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first characters that a spreadsheet takes for a formula
PASSWORD = re.compile(r"(\w\w:/{1,2})[^/\s'\"]+@")  # user and password in an address; pathlib takes one slash out of it
# What is no text in a page: control characters, halves of surrogate pairs, and marks that change the direction of the text around them.
CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)]
DIRECTIONS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F, 0xFEFF]
NOT_PLAIN = dict.fromkeys(CONTROLS + DIRECTIONS, "\ufffd") | dict.fromkeys(map(ord, "\t\n\r\u2028\u2029"), " ")

# -- numbers ----------------------------------------------------------------------------------------------------------


def number(value: float | None, decimals: int = 3, large: float = 10.0, sign: bool = False) -> str:
    """A number with `decimals` digits after the point, one from `large` on, none from 1000 on; a power of ten for tiny ones; – for none.

    Args:
        sign: whether a positive number gets a plus.
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if 0 < size < 0.5 * 10**-decimals:
        text = f"{value:.1e}".replace("e-0", "e-")
    else:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.{decimals if size < large else 1}f}"
    return ("+" if sign and value > 0 else "") + text.replace("-", "−")


def six_digits(values: Iterable[float]) -> list[float]:
    """Numbers without the digits that no page shows."""
    return [float(f"{value:.6g}") for value in values]


def duration(seconds: float) -> str:
    """Seconds as `14.9 days`, `3 h 2 min`, `1 min 25 s` or `9 s`."""
    total = round(seconds)
    if total >= 48 * 3600:
        return f"{total / 86400:.1f} days"
    hours, minutes = total // 3600, total // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {total % 60} s" if minutes else f"{total} s"


def step_time(seconds: float) -> str:
    """Seconds of one step: below a minute with three digits, as `0.0123 s` or `3.4 s`, else as `duration` writes them."""
    return f"{seconds:.3g} s" if seconds < 59.95 else duration(seconds)


def gigabytes(size: float, decimals: int = 2) -> str:
    """Bytes as `9.41 GB`, in units of 1e9."""
    return f"{size / 1e9:,.{decimals}f} GB"


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 image`, `2 images`, `0 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def format_value(value: Any) -> str:
    """A setting as YAML writes it: numbers in short, – for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None or value == {} else str(value)


# -- names and errors -------------------------------------------------------------------------------------------------


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts names as people do: `2.png` before `10.png`, and equal numbers by their text."""
    parts = re.split(r"([0-9]+)", name)  # texts and numbers in turns
    return [(int(part[:18]), part) if i % 2 else (0, part.casefold()) for i, part in enumerate(parts)] + [(0, name)]


def short_name(name: str) -> str:
    """A name for people: `path/to/file.py:redness` is redness, and org/model is model."""
    return str(name).rpartition(":")[2].rstrip("/").rpartition("/")[2]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"(?<=\d)\.(?=[A-Z])", ". ", line)  # diffusers leaves out the space between some of its sentences


# -- untrusted text ---------------------------------------------------------------------------------------------------


def has_password(text: str) -> bool:
    """Whether an address in the text has a user or password."""
    return PASSWORD.search(text) is not None


def without_passwords(text: object) -> str:
    """A text in which no address has a user or password."""
    return PASSWORD.sub(r"\1…@", str(text))


def visible(text: object) -> str:
    r"""For a terminal: control characters, and those that turn the direction of text, as codes such as \x1b; no passwords of addresses."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in without_passwords(text))


def escape_markup(text: object) -> str:
    """For where rich reads markup: no markup of its own, control characters as codes."""
    from rich.markup import escape  # an isolated reward's interpreter need not have it

    return escape(visible(text))


def plain(text: object) -> str:
    """For a page: one line that keeps its direction, with U+FFFD for control characters; no passwords of addresses."""
    return without_passwords(text).translate(NOT_PLAIN)


def escape_formula(value: object) -> object:
    """For CSV: a text that a spreadsheet would compute gets an apostrophe before it; anything else is unchanged."""
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA) else value


# -- Markdown ---------------------------------------------------------------------------------------------------------


def escape_markdown(text: object) -> str:
    """Text in a paragraph or cell: no HTML, markup, formula, link or mention.

    A mention can't be escaped, so an invisible word joiner follows each @.
    """
    shown = html.escape(plain(text).strip(), quote=False)
    escaped = re.sub(r"([\\`*_{}\[\]|~#!$]|:(?=//)|(?<=www)\.)", r"\\\1", shown, flags=re.IGNORECASE)
    return escaped.replace("@", "@\u2060")


def inline_code(text: object) -> str:
    """Text as code within a line, where no mark means anything."""
    inside = plain(text).strip() or " "
    fence = _fence(inside, 1)
    return f"{fence} {inside} {fence}" if "`" in inside else f"{fence}{inside}{fence}"


def code_block(text: str, language: str) -> str:
    """A block of code, in a fence that no line of it can close."""
    fence = _fence(text, 3)
    lines = "\n".join(plain(line) if line.strip() else "" for line in text.strip("\n").split("\n"))
    return f"{fence}{language}\n{lines}\n{fence}"


def _fence(text: str, shortest: int) -> str:
    """More backticks than the text has anywhere in a row."""
    return "`" * max(shortest, 1 + max(map(len, re.findall("`+", text)), default=0))


def link(address: str) -> str:
    """A link, if the text is nothing but an address."""
    return f"<{address}>" if re.fullmatch(r"https://[^\s<>\"'`]+", address) else inline_code(address)


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> str:
    """A table of cells that are Markdown already. A | in a cell does not end it.

    Args:
        left: the number of columns before those of numbers, which are aligned to the right; by default no column is.
    """
    lines = ["| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) + " |" for row in [heading, *rows]]
    texts = len(heading) if left is None else left
    return "\n".join([lines[0], "|---" * texts + "|---:" * (len(heading) - texts) + "|", *lines[1:]])


def suggest(word: str, known: Mapping[str, str] | Collection[str]) -> str:
    """The hint ` Did you mean lr?` with the closest known word, "" if none is close. A mapping gives the text shown for each word."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f" Did you mean {known[close[0]] if isinstance(known, Mapping) else close[0]}?" if close else ""
