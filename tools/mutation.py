"""Mutation run: plants small bugs by rule and counts those that the tests meant for the file catch: `python tools/mutation.py`.

    python tools/mutation.py --file sde --file sampling      # only these files
    python tools/mutation.py --file sde --sample 20 --seed 1 # a random part of the mutants
    python tools/mutation.py --id 3fa9c1d2                   # one mutant
    python tools/mutation.py --list --file sde               # show the mutants, run nothing

`mutation.yaml` says which tests are meant for which file. A mutant is caught when one of them fails, or when they take too long,
in seconds of the processor, so that a busy machine makes no difference.
What survives is printed as a diff. A mutant that no test can catch is listed by its id, with the reason, in
`mutation_equivalent.txt`.

Two public tools were considered. mutmut 3 forks its mutants too, but it skips all code outside functions and all functions and
classes with a decorator (the dataclasses of `types.py`, what runs under `torch.no_grad`, every property and context manager),
and finds the tests of a function by running the whole suite. cosmic-ray starts a new interpreter for each mutant: six seconds of
imports, thousands of times. Here a parent process imports the libraries once and forks a child for each mutant; the child imports
flow_grpo anew, with the mutated text in place of the file's, and begins with the tests that execute the mutated line, the fastest
first. A test that starts a new interpreter sees the file as it is, so it catches nothing here. Device moves (`.to`, `.cpu`) are not
mutated, because a CPU does not show them.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SHORTEST_LIMIT, TIMES_UNMUTATED = 30, 5  # processor seconds for a mutant, whichever is more
HANGS = 20  # times as many seconds of the clock: it waits for something that does not come
GOAL = 95  # percent

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*", ast.Pow: "*"}
OPERATORS |= {ast.BitAnd: "|", ast.BitOr: "&"}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
UNARY = {ast.USub: b"-", ast.Not: b"not", ast.Invert: b"~"}
DROPPED = {
    "detach",
    "clone",
    "clamp",
    "clamp_min",
    "clamp_max",
    "sqrt",
    "abs",
    "square",
    "exp",
    "log",
    "float",
    "double",
    "eval",
}
OTHER_NAMES = {"min": "max", "amin": "amax", "minimum": "maximum", "any": "all", "mean": "sum", "clamp_min": "clamp_max"}
OTHER_NAMES |= {"floor": "ceil", "sin": "cos", "argmin": "argmax", "zeros_like": "ones_like", "zeros": "ones"}
OTHER_NAMES |= {other: name for name, other in OTHER_NAMES.items()}
TYPES = {"Callable", "Literal", "Bool", "Float", "Int", "Real"}  # also where an alias is assigned
CHECKS = {"strict", "frozen", "non_blocking"}  # arguments that only assert something, or make a difference on a GPU only
COMMUTING = {"min", "max", "minimum", "maximum", "equal", "isclose"}
UNSWAPPED = COMMUTING | {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "__setattr__",
    "__delattr__",
    "print",
    "warn",
}


@dataclass(frozen=True)
class Edit:
    """`new` in place of the bytes from `start` to `end`."""

    rule: str
    start: int
    end: int
    new: bytes


class Source:
    """A file's bytes and syntax tree, and where the nodes of the tree are in the bytes."""

    def __init__(self, text: bytes) -> None:
        self.bytes, self.tree = text, ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        return self.bytes[self.start(node) : self.end(node)]

    def replaced(self, rule: str, node: ast.AST, new: bytes) -> Edit:
        return Edit(rule, self.start(node), self.end(node), new)

    def operator(self, rule: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit:
        """Another operator between two operands, comments and brackets between them aside."""
        start, gap = self.end(left), self.bytes[self.end(left) : self.start(right)]
        match = re.search(rb"(?:#[^\n]*\n|[\s()\\])*(" + re.escape(old).replace(r"\ ", r"\s+").encode() + rb")", gap)
        assert match, (old, gap)
        return Edit(rule, start + match.start(1), start + match.end(1), new.encode())

    def without(self, rule: str, parts: list[ast.AST], place: int) -> Edit:
        """Without one argument of a call, and one comma."""
        start, end = self.start(parts[place]), self.end(parts[place])
        if place:
            return Edit(rule, self.bytes.index(b",", self.end(parts[place - 1])), end, b"")
        if len(parts) > 1:
            return Edit(rule, start, self.start(parts[1]), b"")
        return Edit(rule, start, end, b"")


# -- the rules: each gives the edits of one node, given the nodes that hold it, the nearest last --------------------------


def operators(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _makes_text(node):
        old = {ast.Pow: "**", ast.FloorDiv: "//"}.get(type(node.op)) or _symbol(node.op)
        yield source.operator("operator", node.left, node.right, old, OPERATORS[type(node.op)])
        if isinstance(node.op, ast.Add) and source.text(node.left).endswith(b".sqrt()"):
            inside = source.text(node.left)[: -len(b".sqrt()")]
            yield source.replaced("inside the root", node, b"(%s + %s).sqrt()" % (inside, source.text(node.right)))
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS and not _makes_text(node.value):
        yield source.operator("operator", node.target, node.value, f"{_symbol(node.op)}=", "=")
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        start, word = source.start(node), UNARY[type(node.op)]
        yield Edit("operator", start, start + len(word), b"")
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values[:-1], node.values[1:], strict=True):
            yield source.operator("and, or", left, right, old, new)


def comparisons(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right, op in zip(operands[:-1], operands[1:], node.ops, strict=True):
            yield source.operator("comparison", left, right, _symbol(op), COMPARISONS[type(op)])
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
    for test in tests:
        sharp = isinstance(test, ast.Compare) and isinstance(
            test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        )
        if not sharp and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield source.replaced("condition", test, b"not (%s)" % source.text(test))


def constants(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield source.replaced("constant", node, str(not value).encode())
    elif isinstance(value, int):
        yield source.replaced("constant", node, str(value + 1).encode())
    elif isinstance(value, float):
        other = 1.0 if value == 0 else 10 * value if value <= 1e-3 else 2 * value
        yield source.replaced("constant", node, repr(other).encode())
    elif isinstance(value, str) and not isinstance(above[-1], ast.Expr) and " " not in value and "\n" not in value:
        yield source.replaced("constant", node, repr(f"{value}_").encode())


def calls(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    func, whole = node.func, source.end(node)
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    if isinstance(func, ast.Attribute) and name in DROPPED:
        dot = source.bytes.index(b".", source.end(func.value))
        yield Edit("call dropped", dot, whole, b"")
    if name in OTHER_NAMES:
        end = source.end(func)
        yield Edit("other function", end - len(name), end, OTHER_NAMES[name].encode())
    if name == "clamp" and len(node.args) == 2:
        for bound, word in ((node.args[1], b"max"), (node.args[0], b"min")):
            yield Edit("one bound", source.start(node.args[0]), source.end(node.args[1]), word + b"=" + source.text(bound))
    if name not in UNSWAPPED:
        for left, right in zip(node.args[:-1], node.args[1:], strict=True):
            if _kind(left) == _kind(right) and source.text(left) != source.text(right):
                between = source.bytes[source.end(left) : source.start(right)]
                swapped = source.text(right) + between + source.text(left)
                yield Edit("arguments swapped", source.start(left), source.end(right), swapped)
    parts = [*node.args, *node.keywords]
    for keyword in (one for one in node.keywords if one.arg not in CHECKS):
        yield source.without(
            "argument dropped", sorted(parts, key=source.start), sorted(parts, key=source.start).index(keyword)
        )


def statements(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield source.replaced("statement dropped", node, b"pass")
    if isinstance(node, ast.Continue | ast.Break):
        yield source.replaced("statement dropped", node, b"pass")
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    if any(isinstance(part, ast.Attribute | ast.Subscript) for target in targets for part in _parts(target)):
        yield source.replaced("statement dropped", node, b"pass")
    if isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
        last = source.end(node.items[-1].context_expr)
        yield Edit("context dropped", source.start(node), last, b"if True")
    for decorator in getattr(node, "decorator_list", []):
        if source.text(decorator).startswith(b"torch."):
            at = source.bytes.rindex(b"@", 0, source.start(decorator))
            yield Edit("context dropped", at, source.end(decorator), b"")
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and node.value.args:
        function = next((one for one in reversed(above) if isinstance(one, ast.FunctionDef)), None)
        given = {one.arg for one in function.args.args} if function else set()
        first = node.value.args[0]
        if isinstance(first, ast.Name) and first.id in given:
            yield source.replaced("argument returned", node.value, source.text(first))


def slices(source: Source, node: ast.AST, above: list[ast.AST]) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                yield source.replaced("slice", bound, b"(%s) + 1" % source.text(bound))


RULES: list[Callable[[Source, ast.AST, list[ast.AST]], Iterator[Edit]]]
RULES = [operators, comparisons, constants, calls, statements, slices]


def _symbol(op: ast.AST) -> str:
    left = ast.Name("a", ast.Load())
    if isinstance(op, ast.operator):
        return ast.unparse(ast.BinOp(left, op, left))[1:-1].strip()
    return ast.unparse(ast.Compare(left, [op], [left]))[1:-1].strip()


def _kind(argument: ast.AST) -> type:
    """Arguments of one kind may be swapped: a text and a list never make sense for each other."""
    if isinstance(argument, ast.Constant):
        return float if type(argument.value) in (int, float) else type(argument.value)
    made = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.Starred)
    return type(argument) if isinstance(argument, made) else float


def _parts(target: ast.AST) -> list[ast.AST]:
    return list(target.elts) if isinstance(target, ast.Tuple) else [target]


def _makes_text(node: ast.AST) -> bool:
    return any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", 0), str) for one in ast.walk(node))


# -- mutants --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One edit of a file. The id stays when other parts of the file change."""

    id: str
    file: str
    line: int
    rule: str
    before: bytes
    after: bytes

    def diff(self) -> str:
        old, new = (text.decode().splitlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, lineterm="", n=1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def __str__(self) -> str:
        return f"{self.id}  {self.file}:{self.line}  {self.rule}"


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = Source((root / file).read_bytes())
    mutants: dict[bytes, Mutant] = {}
    seen: Counter[str] = Counter()
    for name, edit in _edits(source):
        after = source.bytes[: edit.start] + edit.new + source.bytes[edit.end :]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(after)
        except SyntaxError:
            continue
        if after in mutants:
            continue
        first = source.bytes.count(b"\n", 0, edit.start)
        last = source.bytes.count(b"\n", 0, edit.end)
        lines = b"".join(source.lines[first : last + 1])
        indent = len(lines) - len(lines.lstrip())
        context = repr((file, name, lines.strip(), edit.start - source.starts[first] - indent, edit.rule, edit.new))
        seen[context] += 1
        number = hashlib.sha256(f"{context}{seen[context]}".encode()).hexdigest()[:8]
        mutants[after] = Mutant(number, file, first + 1, edit.rule, source.bytes, after)
    return sorted(mutants.values(), key=lambda mutant: mutant.line)


def _edits(source: Source) -> Iterator[tuple[str, Edit]]:
    """Every edit by every rule, with the name of the function or class that holds it."""
    waiting: list[tuple[ast.AST, list[ast.AST]]] = [(source.tree, [])]
    while waiting:
        node, above = waiting.pop()
        name = ".".join(one.name for one in above if isinstance(one, ast.FunctionDef | ast.ClassDef))
        for rule in RULES:
            for edit in rule(source, node, above):
                yield name, edit
        waiting += [(child, [*above, node]) for child in _mutated_children(node)]


def _mutated_children(node: ast.AST) -> list[ast.AST]:
    """Without imports, checks, error messages, annotations and texts for people."""
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Raise | ast.JoinedStr):
        return []
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in TYPES:
        return []
    if isinstance(node, ast.FunctionDef):
        skipped.append(node.returns)
    if isinstance(node, ast.arg | ast.AnnAssign):
        skipped.append(node.annotation)
    if isinstance(node, ast.keyword) and node.arg in CHECKS:
        return []
    return [child for child in ast.iter_child_nodes(node) if child not in skipped]


# -- a child for each mutant ----------------------------------------------------------------------------------------------


class Planted(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module with another text than its file's."""

    def __init__(self, name: str, file: Path, text: bytes) -> None:
        super().__init__(name, str(file))
        self.mutated = text

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.mutated, self.path, "exec", dont_inherit=True)


class FirstFailure:
    """A pytest plugin that notes the test that failed first, and runs some tests before the others."""

    def __init__(self, first: list[str]) -> None:
        self.name, self.rank = "", {test: place for place, test in enumerate(first)}

    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: self.rank.get(item.nodeid, len(self.rank)))

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


class LinesOfTests:
    """A pytest plugin that notes which lines of a file each test executes, and the seconds of each test."""

    def __init__(self, file: Path) -> None:
        self.file, self.test = str(file), ""
        self.lines: dict[int, set[str]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test = item.nodeid
        started = time.process_time()
        sys.settrace(self._calls)
        threading.settrace(self._calls)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.seconds[item.nodeid] = time.process_time() - started

    def _calls(self, frame, event, arg):
        return self._lines if frame.f_code.co_filename == self.file else None

    def _lines(self, frame, event, arg):
        self.lines.setdefault(frame.f_lineno, set()).add(self.test)
        return self._lines

    def fastest_first(self) -> dict[int, list[str]]:
        """The tests that execute each line."""
        return {line: sorted(tests, key=lambda test: self.seconds[test]) for line, tests in self.lines.items()}


@dataclass
class Outcome:
    """What became of a child: the exit status of pytest (None: it took too long), processor seconds, and the test that failed."""

    status: int | None
    seconds: float
    test: str = ""
    modules: tuple[str, ...] = ()
    output: str = ""
    tests_of_line: dict[int, list[str]] = field(default_factory=dict)

    @property
    def word(self) -> str:
        return "timed out" if self.status is None else "survived" if self.status == 0 else "caught"


def _child(
    root: Path, folder: Path, selections: list[str], planted: Mutant | Path | None, first: list[str], limit: int
) -> None:
    """Run the tests in a forked process, with the mutant in place, and leave what came of it in the folder. Never returns.

    Args:
        planted: the mutant; or a file whose executed lines are to be noted; or nothing.
        first: the tests to begin with.
    """
    os.setpgid(0, 0)  # so that what the tests start ends with it
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ.pop("PYTEST_ADDOPTS", None)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    status, failure = 0, FirstFailure(first)
    plugins: list[object] = [failure]
    if isinstance(planted, Mutant):
        name = planted.file.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, Planted(name, root / planted.file, planted.after))
    elif planted is not None:
        plugins.append(LinesOfTests(planted))
    for number, selection in enumerate(selections):
        words = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests{number}", *shlex.split(selection)]
        words.append("--jaxtyping-packages=")  # its import hook would load the file in place of the mutated text
        status = int(pytest.main(words, plugins=plugins))
        if status:
            break
    ours = str(root) + os.sep
    others = [name for name, module in sys.modules.items() if not str(getattr(module, "__file__", "")).startswith(ours)]
    tests_of_line = plugins[1].fastest_first() if isinstance(plugins[-1], LinesOfTests) else {}
    (folder / "result.json").write_text(json.dumps([failure.name, others, tests_of_line]))
    sys.stdout.flush()
    os._exit(status)


def run(
    root: Path,
    selections: list[str],
    mutants: Sequence[Mutant | Path | None],
    jobs: int,
    limit: int,
    tests_of_line: dict[int, list[str]] | None = None,
) -> Iterator[tuple[Mutant | Path | None, Outcome]]:
    """Give each mutant's outcome as soon as it is known.

    Args:
        mutants: None is the file as it is; so is a path, of which `tests_of_line` is noted.
        limit: in processor seconds.
        tests_of_line: the tests to begin with, by line of the file.
    """
    waiting, alive = list(reversed(mutants)), {}

    def start(mutant: Mutant | Path | None) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            first = _tests_of(mutant, tests_of_line) if isinstance(mutant, Mutant) and tests_of_line else []
            _child(root, Path(folder.name), selections, mutant, first, limit)
        alive[child] = mutant, folder, time.monotonic() + HANGS * limit

    def outcome_if_ended(child: int) -> Iterator[tuple[Mutant | Path | None, Outcome]]:
        mutant, folder, deadline = alive[child]
        ended, status, used = os.wait4(child, os.WNOHANG)
        if not ended and time.monotonic() < deadline:
            return
        del alive[child]
        _end(child, bool(ended))
        exit_code = os.waitstatus_to_exitcode(status) if ended else None
        yield mutant, _outcome(Path(folder.name), exit_code, used.ru_utime + used.ru_stime)
        folder.cleanup()

    try:
        while waiting or alive:
            while waiting and len(alive) < jobs:
                start(waiting.pop())
            time.sleep(0.02)
            for child in list(alive):
                yield from outcome_if_ended(child)
    finally:
        for child in alive:
            _end(child, ended=False)


def _tests_of(mutant: Mutant, tests_of_line: dict[int, list[str]]) -> list[str]:
    """The tests that execute a mutant's line, or the nearest line before it that any test executes: its statement's first."""
    before = [line for line in tests_of_line if line <= mutant.line]
    return tests_of_line[max(before)] if before else []


def _end(child: int, ended: bool) -> None:
    """Kill a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _outcome(folder: Path, status: int | None, seconds: float) -> Outcome:
    output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    if status == -signal.SIGXCPU:
        status = None
    if status is None or not (folder / "result.json").exists():
        return Outcome(status, seconds, output=output)
    test, modules, lines = json.loads((folder / "result.json").read_text())
    return Outcome(status, seconds, test, tuple(modules), output, {int(line): tests for line, tests in lines.items()})


def unmutated(root: Path, file: str, selections: list[str]) -> tuple[float, dict[int, list[str]]]:
    """Processor seconds of the tests without a mutant, which must pass; and the tests that execute each line, the fastest first.

    Imports what they import, so that children need not.
    """
    ((_, first),) = run(root, selections, [None], 1, 3600)
    if first.status != 0:
        raise SystemExit(f"the tests meant for {file} fail as it is:\n{first.output}")
    for name in first.modules:
        with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    ((_, second),) = run(root, selections, [None], 1, 3600)
    ((_, traced),) = run(root, selections, [root / file], 1, 3600)
    return second.seconds, traced.tests_of_line


# -- the run --------------------------------------------------------------------------------------------------------------


@dataclass
class Score:
    """The mutants of a file by what became of them."""

    file: str
    seconds: float
    equivalent: int
    outcomes: dict[str, Outcome]

    def count(self, word: str) -> int:
        return sum(outcome.word == word for outcome in self.outcomes.values())

    @property
    def percent(self) -> float:
        return 100 * (1 - self.count("survived") / max(1, len(self.outcomes)))

    def row(self) -> str:
        counts = " ".join(f"{self.count(word):>9}" for word in ("caught", "timed out", "survived"))
        return f"{self.file:<28} {len(self.outcomes):>8} {counts} {self.equivalent:>10} {self.percent:>8.1f} {self.seconds:>8.1f}"


HEADER = f"{'file':<28} {'mutants':>8} {'caught':>9} {'timed out':>9} {'survived':>9} {'equivalent':>10} {'percent':>8} {'seconds':>8}"


def equivalents(root: Path, file: str) -> set[str]:
    """Ids of a file's mutants that no test can catch, of the lines `ID FILE REASON` of the list."""
    known = root / "tools" / "mutation_equivalent.txt"
    lines = known.read_text().splitlines() if known.exists() else []
    rows = [line.split(maxsplit=2) for line in lines if line.strip() and not line.startswith("#")]
    return {number for number, name, reason in rows if name == file and reason}


def measure(root: Path, file: str, mutants: list[Mutant], selections: list[str], asked: argparse.Namespace) -> Score:
    """Run a file's mutants and print those that survive."""
    known = equivalents(root, file)
    left = [mutant for mutant in mutants if asked.id or mutant.id not in known]
    if asked.sample is not None and asked.sample < len(left):
        left = random.Random(asked.seed).sample(left, asked.sample)
    seconds, tests_of_line = unmutated(root, file, selections)
    limit = math.ceil(max(asked.shortest, TIMES_UNMUTATED * seconds))
    score = Score(file, seconds, len(mutants) - len([m for m in mutants if m.id not in known]), {})
    for mutant, outcome in run(root, selections, left, asked.jobs, limit, tests_of_line):
        assert isinstance(mutant, Mutant)
        score.outcomes[mutant.id] = outcome
        if outcome.word == "survived":
            print(f"SURVIVED  {mutant}\n{mutant.diff()}\n", flush=True)
        elif asked.verbose:
            print(f"{outcome.word}  {mutant}  {outcome.seconds:.1f} s  {outcome.test}", flush=True)
        if len(score.outcomes) % 25 == 0:
            print(f"{file}: {len(score.outcomes)} of {len(left)}", file=sys.stderr, flush=True)
    print(f"{HEADER}\n{score.row()}\n", flush=True)
    return score


def write(file: Path, scores: list[Score], mutants: dict[str, Mutant]) -> None:
    """The outcome of every mutant, as JSON."""
    rows = [
        {
            "id": one,
            "file": score.file,
            "line": mutants[one].line,
            "rule": mutants[one].rule,
            "outcome": outcome.word,
            "seconds": round(outcome.seconds, 2),
            "test": outcome.test,
        }
        for score in scores
        for one, outcome in score.outcomes.items()
    ]
    file.write_text(json.dumps(rows, indent=1))


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", default=[], help="name of a source file, such as sde; all by default")
    parser.add_argument("--id", action="append", default=[], help="one mutant, even if it is listed as equivalent")
    parser.add_argument("--sample", type=int, help="number of mutants of each file; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--shortest", type=float, default=SHORTEST_LIMIT, help="least limit of a mutant, in processor seconds"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--verbose", action="store_true", help="show the mutants that are caught, too")
    parser.add_argument("--json", type=Path, help="file for the outcome of every mutant")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository, with tools/mutation.yaml")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Exit status 1 if a file is below the goal."""
    asked = arguments(words)
    root = asked.root.resolve()
    table = yaml.safe_load((root / "tools" / "mutation.yaml").read_text())
    scores, by_id = [], {}
    for file in table:
        if asked.file and Path(file).stem not in asked.file:
            continue
        mutants = mutants_of(root, file)
        by_id |= {mutant.id: mutant for mutant in mutants}
        for stale in sorted(equivalents(root, file) - by_id.keys()):
            print(f"STALE  {stale}  {file}: no mutant any more; delete it from mutation_equivalent.txt or find its new id")
        chosen = [mutant for mutant in mutants if not asked.id or mutant.id in asked.id]
        if not chosen:
            continue
        if asked.list:
            print("\n\n".join(f"{mutant}\n{mutant.diff()}" for mutant in chosen))
        else:
            scores.append(measure(root, file, chosen, table[file], asked))
    if len(scores) > 1:
        print(HEADER, *(score.row() for score in scores), sep="\n")
    if asked.json:
        write(asked.json, scores, by_id)
    return int(any(score.percent < GOAL for score in scores))


if __name__ == "__main__":
    sys.exit(main())
