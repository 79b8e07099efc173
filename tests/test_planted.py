"""The list of planted bugs fits the code as it is. `python tools/planted.py` plants them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted import BUGS, ROOT


@pytest.mark.parametrize(("file", "old", "new", "tests"), [bug[1:] for bug in BUGS], ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_has_one_place_and_a_test_file(file, old, new, tests):
    assert (ROOT / file).read_text().count(old) == 1
    assert old != new
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert files
    assert all((ROOT / test).exists() for test in files)


def test_no_planted_bug_is_an_undefined_name(tmp_path):
    """Which any test would catch. Ruff takes jaxtyping's shapes for undefined names, before and after."""
    for i, (_, file, old, new, _) in enumerate(BUGS):
        if file.endswith(".py"):
            code = (ROOT / file).read_text()
            (tmp_path / f"{i}_before.py").write_text(code)
            (tmp_path / f"{i}_after.py").write_text(code.replace(old, new))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "json", "."]
    checked = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
    undefined = {"before": set(), "after": set()}
    for finding in json.loads(checked.stdout):
        number, _, when = Path(finding["filename"]).stem.partition("_")
        undefined[when].add((number, finding["message"]))
    assert undefined["before"], "ruff looked"
    assert undefined["after"] <= undefined["before"]
