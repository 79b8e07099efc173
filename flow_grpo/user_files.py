"""Modules of a user's files, such as `flow_grpo.user_files.my_reward_2f686f6d65`: the name ends with the file's path in hexadecimal.

So any process can import them by name, as a worker of a process pool does to unpickle a function of the file, however it was started.
"""

import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # makes a package of this module


def module_name(file: Path) -> str:
    """The name of the module of a file."""
    return f"{__name__}.{re.sub(r'[^a-zA-Z0-9_]', '_', file.stem)}_{os.fsencode(file.resolve()).hex()}"


class _UserFiles(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        file = re.fullmatch(rf"{re.escape(__name__)}\.\w*_((?:[0-9a-f]{{2}})+)", name)
        if file is None:
            return None
        path = os.fsdecode(bytes.fromhex(file[1]))
        return spec_from_file_location(name, path, loader=SourceFileLoader(name, path))  # a link may lead to any name


sys.meta_path.append(_UserFiles())
