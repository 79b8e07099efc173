"""Text from anybody, such as prompts and names of files, made harmless for where it is shown."""

import html
import re

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def visible(text: object) -> str:
    """As a terminal shows it without doing anything: control characters, and those that turn the direction, as their codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def markdown(text: object) -> str:
    """As a cell of a Markdown table shows it: no HTML, markup, formula, link or mention, and no end of the cell.

    After an @ comes an invisible word joiner, as a mention can't be escaped.
    """
    shown = html.escape(visible(text).strip(), quote=False)
    escaped = re.sub(r"([\\`*_\[\]|~#$]|:(?=//)|(?<=www)\.)", r"\\\1", shown, flags=re.IGNORECASE)
    return escaped.replace("@", "@\u2060")


def spreadsheet(value: object) -> object:
    """A text that a spreadsheet would take for a formula gets an apostrophe before it; anything else is as it was."""
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA) else value
