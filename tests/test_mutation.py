"""The mutation run itself: what it plants, and that it tells mutants that are caught from those that survive."""

import json
import subprocess
import sys
from pathlib import Path

import mutation
import pytest

SMALL = """
def countdown(n):
    while n > 0:
        n -= 1
    return n


def positive(x):
    return x if x > 0 else 0
"""
TESTS = """
from small import countdown, positive


def test_both_slowly():
    assert sum(range(10**6)) and countdown(3) == 0 and positive(5) == 5


def test_countdown():
    assert countdown(3) == 0


def test_positive():
    assert positive(5) == 5
"""


def planted(folder: Path, text: str) -> list[mutation.Mutant]:
    (folder / "small.py").write_text(text)
    return mutation.mutants_of(folder, "small.py")


def test_mutants_are_caught_survive_time_out_or_are_known_to_be_equivalent(tmp_path):
    by_text = {mutant.after.decode(): mutant.id for mutant in planted(tmp_path, SMALL)}
    endless = by_text[SMALL.replace("n -= 1", "n = 1")]
    equivalent = by_text[SMALL.replace("x > 0", "x >= 0")]
    missed, other = by_text[SMALL.replace("x > 0", "x > 1")], by_text[SMALL.replace("else 0", "else 1")]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    (tmp_path / "tools" / "mutation.yaml").write_text("small.py: [tests/test_small.py]")
    (tmp_path / "tools" / "mutation_equivalent.txt").write_text(
        f"# a list\n{equivalent} small.py 0 is 0\n00000000 small.py gone\n"
    )
    command = [
        sys.executable,
        mutation.__file__,
        "--root",
        tmp_path,
        "--json",
        tmp_path / "outcomes.json",
        "--shortest",
        "3",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    rows = json.loads((tmp_path / "outcomes.json").read_text())
    outcomes = {row["id"]: row["outcome"] for row in rows}
    caught_by = {row["line"]: row["test"].partition("::")[2] for row in rows if row["outcome"] == "caught"}
    assert caught_by[9] == "test_positive", "the fastest test that executes the line comes first"
    assert outcomes.keys() == set(by_text.values()) - {equivalent}
    assert outcomes.pop(endless) == "timed out"
    assert {one for one, outcome in outcomes.items() if outcome == "survived"} == {missed, other}
    assert f"SURVIVED  {missed}  small.py:9" in done.stdout
    assert "-    return x if x > 0 else 0\n+    return x if x > 1 else 0" in done.stdout
    assert "STALE  00000000" in done.stdout
    assert done.returncode == 1, "a file is below the goal"


def test_tests_that_fail_without_a_mutant_stop_the_run(tmp_path):
    planted(tmp_path, SMALL)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text("def test_it():\n    assert 1 == 2")
    (tmp_path / "tools" / "mutation.yaml").write_text("small.py: [tests/test_small.py]")
    done = subprocess.run([sys.executable, mutation.__file__, "--root", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the tests meant for small.py fail as it is" in done.stderr
    assert "assert 1 == 2" in done.stderr


@pytest.mark.parametrize(
    ("text", "mutated"),
    [
        ("a + (b)", {"a - (b)"}),
        ("a ** b", {"a * b"}),
        ("a = -b", {"a = b"}),
        ("a += b", {"a = b"}),
        ("a < b <= c", {"a <= b <= c", "a < b < c"}),
        ("a in b", {"a not in b"}),
        ("a is  not b", {"a is b"}),
        ("a and b or c", {"a or b or c", "a and b and c"}),
        (
            "a = 1 if not b else -1",
            {"a = 2 if not b else -1", "a = 1 if  b else -1", "a = 1 if not b else 1", "a = 1 if not b else -2"},
        ),
        ("a = 1e-4, 0.5, True", {"a = 0.001, 0.5, True", "a = 1e-4, 1.0, True", "a = 1e-4, 0.5, False"}),
        ("a = b == 'all'", {"a = b != 'all'", "a = b == 'all_'"}),
        ("a = f(b, c, d=e, strict=True)", {"a = f(c, b, d=e, strict=True)", "a = f(b, c, strict=True)"}),
        ("a = f(b, 'c', *d)", {"a = f(b, 'c_', *d)"}),
        ("a = f(d=(e), **g)", {"a = f(**g)", "a = f(d=(e))"}),
        ("a = (b - c).detach()", {"a = (b + c).detach()", "a = (b - c)"}),
        ("a = b.clamp(c, d)", {"a = b", "a = b.clamp(d, c)", "a = b.clamp(max=d)", "a = b.clamp(min=c)"}),
        ("a = b.sqrt() + c", {"a = b.sqrt() - c", "a = (b + c).sqrt()", "a = b + c"}),
        ("a = min(b)", {"a = max(b)"}),
        ("a = b[c:]", {"a = b[(c) + 1:]"}),
        ("a.b = c", {"pass"}),
        ("f()", {"pass"}),
        ("with a:\n    b", {"if True:\n    b"}),
        ("@torch.no_grad()\ndef f(a): return g(a)", {"\ndef f(a): return g(a)", "@torch.no_grad()\ndef f(a): return a"}),
    ],
)
def test_what_is_planted(text, mutated, tmp_path):
    assert {mutant.after.decode() for mutant in planted(tmp_path, text)} == mutated


def test_texts_annotations_checks_and_imports_stay(tmp_path):
    text = '''"""Doc 1 + 1."""
from a import b
KIND = Literal["a", "b"]

def f(x: "int" = None) -> "float":
    """1 < 2."""
    assert x == 1, "no"
    raise ValueError(f"{x + 1} is " + "wrong")
'''
    assert planted(tmp_path, text) == []


def test_an_id_stays_when_other_lines_change(tmp_path):
    before = {mutant.id: mutant.line for mutant in planted(tmp_path, SMALL)}
    after = {mutant.id: mutant.line for mutant in planted(tmp_path, "import os\n" + SMALL)}
    assert after == {one: line + 1 for one, line in before.items()}
    assert len(before) == len(planted(tmp_path, SMALL))
