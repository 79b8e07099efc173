"""The architecture: which package may import which, no cycles, flat functions, and what an import costs."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder, prefix in (("flow_grpo", ""), ("rewards", "flow_grpo."))  # flow_grpo/rewards is a link to rewards/
    for path in sorted((ROOT / folder).rglob("*.py"))
}
ALGORITHM = {"types", "sde", "advantages", "objectives", "sampling"}
# Text, atomic writes, the line that says which phase a command is in, file names of a run folder, prompts with images.
LEAVES = {"text", "files", "figures", "progress", "layout", "image_prompt"}
# What each package may import of ours. A package may import itself.
MAY_IMPORT: dict[str, set[str]] = {
    "rewards": {"files", "user_files"},
    "user_files": set(),
    "types": set(),
    "sde": {"types"},
    "text": set(),
    "files": set(),
    "figures": {"files", "text"},
    "progress": set(),
    "image_prompt": {"rewards"},
    "layout": set(),  # flow_grpo/run_folder/layout.py, which policy needs to find a run's LoRA
    "advantages": set(),
    "objectives": {"types", "sde"},
    "sampling": {"types", "sde"},
    "distributed": {"text"},
    "config": {"types", "sde", "advantages", "objectives", "text"},
    "data": {"types", "sampling", "config", "rewards"} | LEAVES,
    "policy": {"types", "sampling", "config", "distributed", "rewards"} | LEAVES,
    "run_folder": {"config", "types", "data", "policy", "distributed"} | LEAVES,
    "tracking": {"config", "run_folder"} | LEAVES,
    "report": {"config", "run_folder", "evaluation", "rewards"} | LEAVES,  # evaluation.hacking: what the monitor watches
    "training": {"config", "data", "distributed", "policy", "rewards", "run_folder"} | ALGORITHM | LEAVES,
    "evaluation": {"config", "data", "distributed", "policy", "rewards", "run_folder", "tracking", "training"}
    | ALGORITHM
    | LEAVES,
}
TRAINER = {*MAY_IMPORT, "export"}  # `push_to_hub`, as TRL's trainer has it
MAY_IMPORT["trainer"] = TRAINER
MAY_IMPORT["plan"] = (
    {"config", "data", "policy", "distributed", "training", "rewards", "tracking", "evaluation"} | ALGORITHM | LEAVES
)
MAY_IMPORT["doctor"] = MAY_IMPORT["compare"] = TRAINER | {"trainer", "plan"}
MAY_IMPORT["export"] = {"config", "data", "policy", "report", "run_folder", "tracking", "rewards", "evaluation"} | LEAVES
MAY_IMPORT["cli"] = {*MAY_IMPORT}
# Libraries that these packages alone may import.
ONLY_IN = {
    "diffusers": {"policy", "plan"},
    "transformers": {"policy", "plan", "rewards"},
    "peft": {"policy"},
    "open_clip": {"rewards"},
    "typer": {"cli"},
    "jinja2": {"report", "export", "rewards"},
    "scipy": {"evaluation"},
    "logging": {"tracking", "policy", "distributed", "rewards"},
}


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@functools.cache
def imports(name: str) -> set[str]:
    """Full names of what a file imports, inside functions and for type checking too; of ours, the modules."""
    modules = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            modules |= {module_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            modules |= {module_of(f"{node.module}.{alias.name}") for alias in node.names}
    return modules - {name}


def module_of(name: str) -> str:
    """The module that holds a name: ours in full, another library's as a whole."""
    if name.split(".")[0] != "flow_grpo":
        return name.split(".")[0]
    while name not in FILES:
        name = name.rpartition(".")[0]
    return name


def ours(name: str) -> set[str]:
    any_may_import = {"flow_grpo.errors", "flow_grpo.rewards_alias"}
    return {module for module in imports(name) if module in FILES} - any_may_import


def package(name: str) -> str:
    """What the rules are about: `policy` of flow_grpo.policy.hub, `sde` of flow_grpo.sde."""
    if name == "flow_grpo.run_folder.layout":
        return "layout"
    _, *rest = name.split(".")
    return rest[0] if rest else "flow_grpo"


PACKAGES = sorted({package(name) for name in FILES} - {"flow_grpo", "__main__", "rewards_alias", "errors"})


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_imports_only_what_it_may(name):
    for file in (one for one in FILES if package(one) == name):
        others = {package(module) for module in ours(file)} - {name, "flow_grpo"}
        assert others <= MAY_IMPORT[name], f"{file} imports {others - MAY_IMPORT[name]}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_met_by_its_packages_alone(library):
    assert {package(name) for name in FILES if library in imports(name)} <= ONLY_IN[library]


def test_the_algorithm_needs_torch_alone():
    for name in ("types", "sde", "sampling", "advantages", "objectives"):
        others = {module for module in imports(f"flow_grpo.{name}") if module not in FILES}
        assert others - set(sys.stdlib_module_names) <= {"torch", "jaxtyping"}  # shapes, checked under pytest
    for name, libraries in (("text", {"rich"}),):
        others = {module for module in imports(f"flow_grpo.{name}") if module not in FILES}
        assert others - set(sys.stdlib_module_names) <= libraries


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, empty if it has none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if first_cycle := visit(other, [*path, node]):
                return first_cycle
        done.add(node)
        return []

    return next((first_cycle for node in graph if (first_cycle := visit(node, []))), [])


def test_files_have_no_import_cycle():
    assert cycle({name: ours(name) - {"flow_grpo"} for name in FILES}) == []


def test_packages_have_no_import_cycle():
    graph: dict[str, set[str]] = {}
    for name in FILES:
        graph.setdefault(package(name), set()).update({package(one) for one in ours(name)} - {package(name), "flow_grpo"})
    assert cycle(graph | {"flow_grpo": set()}) == []


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@functools.cache
def functions(name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef)]


BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.Match)


def depth(node: ast.AST) -> int:
    """Blocks within blocks of a function's body; an `elif` is no deeper than its `if`."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                elif_ = field == "orelse" and isinstance(node, ast.If) and len(value) == 1 and isinstance(child, ast.If)
                deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not elif_))
    return deepest


TESTS = sorted(
    file for folder in ("tests", "tools", "benchmarks", "examples", "docs", "dev") for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("file", [*FILES.values(), *TESTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_functions_are_flat(file):
    defined = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not {one.name: depth(one) for one in defined if depth(one) > 3}


HAS_VARARG = {one.name for name in FILES for one in functions(name) if one.args.vararg}
DEFINED = {
    one.name
    for name in FILES
    for one in ast.walk(tree(name))
    if (isinstance(one, ast.ClassDef) and not (one.bases and one.bases[0].__dict__.get("id") in {"Progress"}))
    or (isinstance(one, ast.FunctionDef) and not one.args.vararg)
}


@pytest.mark.parametrize("name", FILES)
def test_long_calls_of_our_functions_use_keywords_and_none_unpacks_a_tuple(name):
    of_this_file = {one.name for one in functions(name)}
    forwarded = {one.args.vararg.arg for one in functions(name) if one.args.vararg}
    for call in (node for node in ast.walk(tree(name)) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if (called in DEFINED and called[0] != "_") or called in of_this_file:
            assert len(call.args) <= 5, f"line {call.lineno}: {ast.unparse(call)}"
            starred = {ast.unparse(argument.value) for argument in call.args if isinstance(argument, ast.Starred)}
            assert called in HAS_VARARG or starred <= forwarded, f"line {call.lineno}: {ast.unparse(call)}"


def test_no_test_file_imports_another():
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(part.startswith("test_") or part == "conftest" for name in names for part in name.split("."))


def test_no_file_has_a_name_that_says_nothing():
    forbidden = {"utils", "util", "helpers", "common", "misc", "base", "abc", "manager", "factory"}
    assert not {file.stem for file in ROOT.rglob("*.py") if ".venv" not in file.parts} & forbidden


def test_importing_the_package_loads_nothing_heavy():
    heavy = "diffusers transformers peft torch pydantic open_clip rapidocr matplotlib fastapi uvicorn httpx"
    code = f"import sys, flow_grpo, rewards; print([m for m in '{heavy}'.split() if m in sys.modules and m != 'torch'])"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_importing_the_trainer_loads_no_library_of_a_single_reward():
    heavy = "open_clip timm rapidocr onnxruntime cv2 matplotlib fastapi uvicorn tensorboard"
    code = f"import sys, flow_grpo.trainer; print([m for m in '{heavy}'.split() if m in sys.modules])"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_nothing_asks_whether_the_model_is_the_embedded_one():
    packages = ("policy", "trainer", "sampling", "training", "evaluation", "data", "tracking", "run_folder")
    for name in (one for one in FILES if package(one) in packages):
        comparisons = [ast.unparse(node) for node in ast.walk(tree(name)) if isinstance(node, ast.Compare)]
        assert not [one for one in comparisons if "tiny" in one]


def test_no_console_replaces_words_in_colons_by_pictures():
    files = [file for folder in ("flow_grpo", "rewards", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    consoles = [ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] == "Console"]
    assert consoles
    assert not [call for call in consoles if "emoji=False" not in call]
