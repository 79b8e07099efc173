"""The rules of the house: who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "flow_grpo").glob("*.py")), *sorted((ROOT / "rewards").glob("*.py"))]
PURE = {
    "methods": set(),
    "types": set(),
    "sde": set(),
    "advantages": {"flow_grpo.methods"},
    "objectives": {"flow_grpo.types", "flow_grpo.sde", "flow_grpo"},
    "sampling": {"flow_grpo.types", "flow_grpo.sde", "flow_grpo.advantages", "flow_grpo.objectives", "flow_grpo"},
}
MODELS = {"diffusers", "transformers", "peft"}


def imports(file: Path) -> set[str]:
    """Full names of all modules that a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_imports(file):
    room, found = file.stem, roots(file)
    if file.parent.name == "rewards":
        assert "flow_grpo" not in found
        return
    if room in PURE:
        ours = {name for name in imports(file) if name.startswith("flow_grpo")}
        assert ours <= PURE[room]
        assert found - {"flow_grpo"} - set(sys.stdlib_module_names) <= {"torch"}
    if room not in ("policy", "pipeline", "probe", "memory", "merging", "model_files", "hollow", "quiet"):
        assert not found & MODELS, "these alone meet the model libraries"
    if room not in ("tracking", "quiet", "launch"):
        assert "logging" not in found, "tracking alone logs"
    assert "open_clip" not in found, "open_clip stays in rewards"
    if room not in ("cli", "__init__", "__main__"):
        assert not imports(file) & {"flow_grpo.cli"}
    drivers = ("train", "evaluate", "measures", "compare", "doctor", "checkup", "plan", "dry_run")
    if room not in ("cli", "eval_cli", "__init__", *drivers):
        assert not imports(file) & {"flow_grpo.train", "flow_grpo.evaluate"}


def test_there_are_no_rooms_without_a_name():
    forbidden = {"utils", "util", "helpers", "common", "misc", "base", "abc", "manager", "factory"}
    assert not {file.stem for file in ROOT.rglob("*.py") if ".venv" not in file.parts} & forbidden


def test_importing_the_package_loads_nothing_heavy():
    heavy = "diffusers transformers peft torch pydantic open_clip rapidocr matplotlib fastapi uvicorn httpx"
    code = f"import sys, flow_grpo, rewards; print([m for m in '{heavy}'.split() if m in sys.modules and m != 'torch'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_nothing_asks_whether_the_model_is_the_tiny_one():
    for name in ("policy", "pipeline", "families", "train", "sampling", "evaluate", "grid", "tracking", "checkpoint"):
        text = (ROOT / "flow_grpo" / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                assert "tiny" not in ast.unparse(node)
