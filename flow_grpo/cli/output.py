"""Where a command writes: seen to before its work, so that no work is lost."""

import os
import tempfile
from pathlib import Path


def prepare_folder(folder: Path, option: str = "--out") -> None:
    """Makes the folder, and sees that files can be written to it. ValueError, which names the option, if they can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"nothing can be written to {folder} ({reason}): give another place by {option}.") from error


def prepare_file(file: Path, option: str = "--out") -> None:
    """Makes the file's folder, and sees that it can be written. ValueError, which names the option, if it can't."""
    prepare_folder(file.parent, option)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give a file by {option}.")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{file} can't be written: give another file by {option}.")
