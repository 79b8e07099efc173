"""A tree of an earlier commit of this repository, for benchmarks that run it in turns with this one."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION_03 = "c0ccec3"  # version 0.3


def checkout(commit: str, folder: Path) -> Path:
    """The tree of `commit`, made below `folder` if it is not there; without a commit this tree."""
    if not commit:
        return ROOT
    tree = folder / commit
    if not tree.is_dir():
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", tree, commit], check=True, capture_output=True)
    return tree
