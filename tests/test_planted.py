"""The list of planted bugs fits the code as it is. `python tests/planted.py` plants them."""

import pytest
from planted import BUGS, ROOT


@pytest.mark.parametrize(("file", "old", "new", "tests"), [bug[1:] for bug in BUGS], ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_has_one_place_and_a_test_file(file, old, new, tests):
    assert (ROOT / file).read_text().count(old) == 1
    assert old != new
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert files
    assert all((ROOT / test).exists() for test in files)
