"""A hook of mkdocs: the pages of the site that are generated from the code, so that they cannot differ from it.

The first page is the README. The reference of settings comes from the config's own documentation, that of commands from typer, and
there is a page for each shipped config.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer.main
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from flow_grpo.cli.app import app
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import section_types
from flow_grpo.config.template import json_schema

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "reference/cli.md": commands(),
        "reference/config.md": settings(),
        "reference/schema.json": json.dumps(json_schema(), indent=2),
        "recipes/index.md": recipes(),
        **{f"recipes/{file.stem}.md": recipe(file) for file in shipped()},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Make the README's links relative to docs/, and name what is outside of docs/ without a link."""
    is_readme = page.file.src_uri == "index.md"
    folder = ROOT if is_readme else (DOCS / page.file.src_uri).parent

    def relative(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path = (folder / target).resolve()
        if not path.is_relative_to(DOCS):
            return label
        return f"{mark}[{label}]({path.relative_to(DOCS)})" if is_readme else match[0]

    return "".join(
        part if place % 2 else with_formulas(LINK.sub(relative, part)) for place, part in enumerate(CODE.split(markdown))
    )


def with_formulas(markdown: str) -> str:
    """LaTeX between dollars as MathML, which browsers draw without a script."""

    def inline(match: re.Match[str]) -> str:
        return f"<span>{convert(match[1])}</span>"  # Markdown ends the paragraph at a line that begins with <math>

    def formula(match: re.Match[str]) -> str:
        return f'<div class="formula">{convert(match[1], display="block")}</div>'

    markdown = re.sub(r"\$\$(.+?)\$\$", formula, markdown, flags=re.DOTALL)
    return re.sub(r"\$([^$\n]+)\$", inline, markdown)


def shipped() -> list[Path]:
    """The config files of the package, by name."""
    return sorted((ROOT / "configs").glob("*.yaml"))


def recipes() -> str:
    """The table of all shipped configs."""
    rows = [(file.stem, yaml.safe_load(file.read_text()), comment(file)[0]) for file in shipped()]
    table = [f"| [{name}]({name}.md) | `{values.get('model', 'tiny')}` | {cell(first)} |" for name, values, first in rows]
    text = "A recipe is a config that ships with the package: `flow-grpo train NAME` trains it, and any setting may follow its name."
    return "\n".join(["# Recipes", "", text, "", "| recipe | model | task |", "|---|---|---|", *table, ""])


def recipe(file: Path) -> str:
    """The page of a shipped config: its comment, the commands, the file."""
    text = file.read_text()
    lines = [f"# {file.stem}", "", " ".join(comment(file)), "", "```bash", f"flow-grpo train {file.stem}"]
    lines += [
        f"flow-grpo plan {file.stem}   # memory and time, before the model's weights are downloaded",
        "```",
        "",
        "```yaml",
    ]
    return "\n".join([*lines, text.rstrip(), "```", ""])


def comment(file: Path) -> list[str]:
    """The lines of the comment that a config begins with."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return lines or [""]


def settings() -> str:
    """Every setting with its default and documentation, section by section."""
    parts = [
        "# Settings\n\nA config is a YAML file with these settings; a command line overrides one by `key.sub=value`. Settings that are not "
        "in a file have their default. The [JSON schema](schema.md) has the same, for editors.\n",
        table("Run", "", FlowGRPOConfig),
        *(
            table(f"`{place}`", f"{place}.", kind)
            for place, kind in sections_of(FlowGRPOConfig)
            if not place.startswith("objective")
        ),
        "## `objective`\n\n`objective.name` chooses the objective. Each has its own settings.\n",
    ]
    sections = section_types()
    parts += [table(f"`objective.name: {name}`", "objective.", kind) for name, kind in sections.items()]
    inner = {place: kind for section in sections.values() for place, kind in sections_of(section, "objective.")}
    parts += [table(f"`{place}`", f"{place}.", kind) for place, kind in inner.items()]
    return "\n".join(parts)


def sections_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections in the fields of a section, at any depth, each with its place."""
    for name, field in kind.model_fields.items():
        for place, inner in models_in(field.annotation, f"{prefix}{name}"):
            yield place, inner
            yield from sections_of(inner, f"{place}.")


def models_in(annotation: Any, place: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections that a type is made of, with their places: NAME is a key of a mapping, [] an entry of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield place, annotation
    inner = place + {dict: ".NAME", list: "[]"}.get(get_origin(annotation), "")
    for part in get_args(annotation):
        yield from models_in(part, inner)


def table(title: str, prefix: str, kind: type[BaseModel]) -> str:
    """The settings of a section, without those that are sections of their own."""
    lines = [f"## {title}", "", "| setting | default | what it is |", "|---|---|---|"]
    for name, field in kind.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            value = field.get_default(call_default_factory=True, validated_data={"model": "tiny"})
            default = "required" if field.is_required() else f"`{cell(shown(value))}`"
            lines.append(f"| `{prefix}{name}` | {default} | {cell(field.description or '')} |")
    return "\n".join([*lines, ""])


def shown(value: Any) -> str:
    """A default as YAML has it, in one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        value = {
            key: v.model_dump(mode="json", exclude_defaults=True) if isinstance(v, BaseModel) else v
            for key, v in value.items()
        }
    return json.dumps(
        list(value) if isinstance(value, tuple) else value, default=lambda one: one.model_dump(exclude_unset=True)
    ).strip('"')


def commands() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_command(app)
    text = (
        "# Command options\n\n`flow-grpo COMMAND --help` prints the same. `--traceback`, anywhere in a command, shows the full traceback "
        "of an error, and `flow-grpo --version` prints the version.\n"
    )
    return "\n".join([text, *(command(words, one) for words, one in commands_of(group))])


def commands_of(group: Any, words: tuple[str, ...] = ("flow-grpo",)) -> Iterator[tuple[str, Any]]:
    """The commands of a group and of the groups in it, each with the words that call it."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_of(one, (*words, name))
        else:
            yield " ".join((*words, name)), one


def command(words: str, one: Any) -> str:
    """The section of a command."""
    first, _, rest = (one.help or "").partition("\n")
    examples = [line for line in map(plain, rest.splitlines()) if line.startswith("flow-grpo")]
    more = " ".join(line for line in map(plain, rest.splitlines()) if line and not line.startswith("flow-grpo"))
    lines = [f"## {words}", "", f"{plain(first)} {more}".strip(), ""]
    lines += ["```bash", *examples, "```", ""] if examples else []
    lines += ["| argument or option | default | what it is |", "|---|---|---|"]
    for parameter in one.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            is_option = parameter.opts[0].startswith("-")
            name = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
            default = "required" if parameter.required else default_of(parameter.default)
            lines.append(f"| `{name}` | {default} | {cell(plain(parameter.help or ''))} |")
    return "\n".join([*lines, ""])


def default_of(value: Any) -> str:
    """The default of an option; nothing for a flag and for an option that has none."""
    return "" if value is None or value is False or value == () else f"`{cell(str(value))}`"


def plain(text: str) -> str:
    """Help text without rich's marks."""
    return re.sub(r"\[/?(?:bold|dim|italic)\]", "", text).strip()


def cell(text: str) -> str:
    """Text for a cell of a table: one line, no bar that would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")
