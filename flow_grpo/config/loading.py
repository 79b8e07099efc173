"""Text and YAML from files that users wrote: one sentence on what is wrong with them, and where."""

import codecs
import json
import re
from collections.abc import Hashable
from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from yaml.resolver import Resolver

from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

SUFFIXES = (".yaml", ".yml")
# the prompts that each bundled model was made for
TRAINING_PROMPTS = {"tiny": "prompts/signs_train.txt", "tiny_shapes": "prompts/shapes_train.jsonl"}
OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
MAX_NODES = 100_000  # of a YAML document with its aliases written out
MAX_BYTES = 16 << 20  # of a config, or a model's index
TOO_DEEP = "it is nested too deeply"


def bundled_file(name: str) -> Path:
    """A file of `configs/`, which is next to the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parent.parent
    installed, checkout = package / "configs" / name, package.parent / "configs" / name
    return installed if installed.exists() else checkout


def find_config(path: str | Path) -> Path:
    """A config file, by its path or by the name of a bundled one.

    Raises:
        FlowGRPOError: there is none.
    """
    if not isinstance(path, str | PathLike):
        raise FlowGRPOError(
            f"the config is of type {type(path).__name__}: give the path of a file, or FlowGRPOConfig(...) settings."
        )
    for candidate in (Path(path), bundled_file(f"{path}.yaml"), bundled_file(str(path))):
        if candidate.is_file():
            return candidate
    names = sorted(p.stem for p in bundled_file("").glob("*.yaml"))
    if Path(path).is_dir() and (inside := sorted(Path(path).glob("*.yaml"))):
        raise FlowGRPOError(f"{path} is a folder and no config: give a config in it, {inside[0]}.")
    if Path(path).is_dir():
        raise FlowGRPOError(f"{path} is a folder without a config: give a .yaml file.")
    if Path(path).suffix in SUFFIXES:
        hint = suggest(Path(path).stem, names) or suggest(str(path), [str(p) for p in Path(path).parent.glob("*.yaml")])
        raise FlowGRPOError(f"there is no file {path}.{hint} `flow-grpo init {path}` writes a new config.")
    raise FlowGRPOError(f"there is no config {path}.{suggest(str(path), names)} Bundled ones: {', '.join(names)}.")


def read_text(file: Path, limit: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file of at most `limit` bytes, without a byte order mark.

    Raises:
        FlowGRPOError: the file can't be read, is too large or a named pipe, has another encoding, or is no text.
    """
    try:
        if file.is_fifo() and not str(file).startswith("/dev/"):  # a pipe may never end; /dev/fd/63 is a shell's <(command)
            raise FlowGRPOError(f"{file} is a named pipe: give a file.")
        with file.open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise FlowGRPOError(f"{file} could not be read: {error.strerror or error}.") from error
    if len(content) > limit:
        raise FlowGRPOError(f"{file} has more than {limit >> 20} MB, which no such file should.")
    encoding = next((name for mark, name in OTHER_ENCODINGS.items() if content.startswith(mark)), None)
    if encoding is not None:
        raise FlowGRPOError(f"{file} is {encoding} text: save it as UTF-8.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FlowGRPOError(
            f"{file} is not UTF-8 text: line {line} has the byte 0x{content[error.start]:02x}. Save it as UTF-8."
        ) from error
    if "\0" in text:
        raise FlowGRPOError(f"{file} holds zero bytes, so it is not UTF-8 text: save it as UTF-8.")
    return text


def read_json(file: Path) -> Any:
    """The content of a JSON file. FlowGRPOError as in `read_text`, or if it is not JSON or nested too deeply."""
    try:
        return json.loads(read_text(file))
    except RecursionError:
        raise FlowGRPOError(f"{file} is not a usable JSON file: {TOO_DEEP}.") from None
    except FlowGRPOError:
        raise
    except ValueError as error:
        raise FlowGRPOError(f"{file} is not valid JSON: {' '.join(str(error).split())}.") from error


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, as `parse_yaml`. FlowGRPOError as there, or as in `read_text`."""
    return parse_yaml(read_text(file), str(file))


def parse_yaml(text: str, source: str) -> Any:
    """The content of a YAML text.

    Args:
        source: name of the text, with which error messages begin.

    Raises:
        FlowGRPOError: not YAML, a duplicate key in a mapping, or a document that is nested too deeply or too large.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except _Refused as error:
        raise FlowGRPOError(f"{source} {error}.") from error
    except RecursionError:
        raise FlowGRPOError(f"{source} is not a usable YAML document: {TOO_DEEP}.") from None
    except yaml.MarkedYAMLError as error:
        raise FlowGRPOError(f"{source} is not valid YAML{_describe_error(error)}.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise FlowGRPOError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error


def dump_yaml(values: Any, **style: Any) -> str:
    """The YAML text from which `parse_yaml` reads these values.

    Args:
        style: arguments of `yaml.dump`.
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


class _Refused(Exception):
    """Valid YAML that is refused here: duplicate keys, recursive or oversized aliases, half a surrogate pair."""


INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Numbers(Resolver):
    """YAML 1.2's numbers. To PyYAML, which has those of 1.1, 1e-3 is a text, 010 is 8, and 16:9 is 969."""


_Numbers.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag not in (INT, FLOAT)]
    for first, rows in Resolver.yaml_implicit_resolvers.items()
}
_Numbers.add_implicit_resolver(INT, re.compile(r"[-+]?[0-9]+(_[0-9]+)*$|0x[0-9a-fA-F]+$"), list("-+0123456789"))
_Numbers.add_implicit_resolver(
    FLOAT,
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


class _Loader(_Numbers, yaml.SafeLoader):
    """PyYAML's safe loader, but duplicate keys are an error, and numbers are those of YAML 1.2."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """The whole number, whose first zeros mean nothing."""
        text = self.construct_scalar(node)
        return int(text, 16 if text.startswith("0x") else 10)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """The text, in which JSON's two escapes of one character are that character."""
        text = super().construct_scalar(node)
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(text, str) else text
        except UnicodeDecodeError:
            raise _Refused(f"has the escape of half a character in line {node.start_mark.line + 1}") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            merges = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if merges else self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue  # for which PyYAML has a sentence
            if key in lines:
                position = f"in line {line}" if lines[key] == line else f"in lines {lines[key]} and {line}"
                raise _Refused(f"has the key {key!r} twice, {position}: keep one of them")
            lines[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_constructor(INT, _Loader.construct_yaml_int)


class _Dumper(_Numbers, yaml.SafeDumper):
    """PyYAML's safe dumper, but quotes a text that `_Loader` would read as a number."""


def _check_size(root: yaml.Node) -> None:
    """Refuse a document with recursive aliases, or one that is too large once all aliases are expanded."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, ancestors: frozenset[int]) -> int:
        if id(node) in ancestors:
            raise _Refused(f"has an alias of itself, in line {node.start_mark.line + 1}")
        if id(node) not in sizes:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            inner = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
            sizes[id(node)] = 1 + sum(size(part, ancestors | {id(node)}) for part in inner)
        return sizes[id(node)]

    if size(root, frozenset()) > MAX_NODES:
        raise _Refused(f"holds more than {MAX_NODES:,} values: its aliases are written out too often")


def _describe_error(error: yaml.MarkedYAMLError) -> str:
    """Where a YAML error is and what it is, as the end of a sentence."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "it can't be parsed"
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    if "\\t" in problem:
        problem = "lines are indented by spaces, and this one has a tab"
    return f", line {mark.line + 1}: {problem}" if mark else f": {problem}"
