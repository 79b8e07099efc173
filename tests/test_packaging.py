"""What the package says about itself: its version, its types, the Pythons and the torch that CI runs."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from support.paths import ROOT

import flow_grpo

PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_the_version_stands_in_one_file_and_the_citation_has_it():
    assert 'dynamic = ["version"]' in PROJECT
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == flow_grpo.__version__


@pytest.mark.parametrize("package", ["flow_grpo", "rewards"])
def test_both_packages_say_that_they_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_ci_runs_every_python_that_the_package_names_and_the_oldest_version_of_every_dependency():
    runs = WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]["include"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert [run["python"] for run in runs] == named
    oldest = WORKFLOWS["tests"]["jobs"]["oldest"]["steps"]
    assert [step["with"]["python-version"] for step in oldest if "python-version" in step.get("with", {})] == named[:1]
    assert any("--resolution lowest-direct -e '.[test]'" in step.get("run", "") for step in oldest)
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_the_nightly_run_has_the_slow_tests_of_every_folder():
    commands = [step.get("run", "") for step in WORKFLOWS["nightly"]["jobs"]["diffusers"]["steps"]]
    (words,) = (shlex.split(command) for command in commands if command.startswith("pytest"))
    assert words[words.index("-m") + 1] == "slow or not slow"
    named = [word for word in words[1:] if (ROOT / word).exists() or word in ("-k", "--ignore", "--deselect")]
    assert named == [], "all of testpaths"


def test_a_bug_report_asks_for_the_doctor():
    for name in ("bug", "model"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        asked = [field["attributes"].get("description", "") for field in form["body"] if field.get("validations")]
        assert any("doctor CONFIG --json" in text for text in asked)


def test_a_warning_of_our_own_code_is_an_error(request):
    """As pytest's settings say: a deprecated call of a library shows in the tests first."""
    filters = request.config.getini("filterwarnings")
    assert any(one.startswith("error:::flow_grpo") for one in filters)
    code = compile("import warnings; warnings.warn('old', DeprecationWarning)", "x", "exec")
    with pytest.raises(DeprecationWarning):
        exec(code, {"__name__": "flow_grpo.some.module"})
    exec(code, {"__name__": "diffusers.some.module"})


def test_no_file_of_a_package_is_newer_python_than_the_oldest():
    """`tomllib`, `Self` of typing and exception groups came after 3.10."""
    assert sys.version_info >= (3, 10)
    newer = re.compile(r"^\s*(import tomllib|from typing import .*\b(Self|assert_never|override)\b|except\*)", re.MULTILINE)
    files = [file for package in ("flow_grpo", "rewards") for file in (ROOT / package).rglob("*.py")]
    found = [str(Path(file).relative_to(ROOT)) for file in files if newer.search(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
    ids=["none", "own spins", "own policy"],
)
def test_importing_the_package_lets_waiting_threads_spin_briefly_unless_told_otherwise(given, spins):
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = "import os, flow_grpo; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {**kept, "PYTHONPATH": str(ROOT), **given}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == spins, done.stderr


def test_the_source_distribution_has_all_that_the_wheel_is_built_of(tmp_path):
    """Links are left out of it: without more, rewards/ was in neither place, and no wheel could be built."""
    archive = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path)))
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"flow_grpo-{flow_grpo.__version__}"
    ours, theirs = (
        {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()} for root in (ROOT, unpacked)
    )
    assert ours == theirs
    assert {"flow_grpo/rewards/ocr.py", "rewards/__init__.py", "flow_grpo/configs/tiny_ocr.yaml"} <= ours
