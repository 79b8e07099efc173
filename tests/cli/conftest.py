"""A short run, which the tests of the command line share."""

from pathlib import Path

import pytest
from support.cli_process import run
from support.embedded import short_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder in which a short run was trained."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "short.yaml").write_text(short_run(folder / "runs" / "short", "model=tiny").to_yaml())
    run("train", "short.yaml", cwd=folder)
    return folder
