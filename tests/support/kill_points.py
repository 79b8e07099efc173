"""What a kill -9 leaves: the state of a folder before each call to the file system that an action makes.

A process that is killed before its n-th call leaves the folder as it was at that moment. So one run of the action, which copies the folder
before each call that Python reports to its audit hooks, shows what a kill at each of them leaves. Calls of other libraries, such as
safetensors, are not reported; what they write is seen at the next call.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flow_grpo import files

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "os.chmod", "os.utime")
_watched: list[Callable[[], None]] = []  # audit hooks stay for ever, and this one does nothing while the list is empty


def _hook(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if _watched and (writes or event in CHANGES):
        _watched[-1]()


@contextmanager
def before_each_call(action: Callable[[], None]) -> Iterator[None]:
    """Within the block, `action` is called before each call that changes files; its own calls don't count."""
    if not hasattr(sys, "_flow_grpo_hook"):
        sys.addaudithook(_hook)
        sys._flow_grpo_hook = True  # type: ignore[attr-defined]
    sync, exchange = files._sync, files._exchange

    def called() -> None:
        _watched.append(lambda: None)
        try:
            action()
        finally:
            _watched.pop()

    def then(function: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            called()
            return function(*args)

        return both

    files._sync, files._exchange = then(sync), then(exchange)  # neither is reported
    _watched.append(called)
    try:
        yield
    finally:
        _watched.remove(called)
        files._sync, files._exchange = sync, exchange


def states(folder: Path, into: Path, action: Callable[[], object]) -> list[Path]:
    """Copies of `folder`, made before each call of the action, and the last when it has ended."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(into / f"{len(copies):04d}")
        shutil.copytree(folder, copies[-1], symlinks=True)

    with before_each_call(copy):
        action()
    copy()
    return copies


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths in it, without hidden ones."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not any(p.startswith(".") for p in Path(name).parts)}
