"""Writing to disk: a file or folder is there whole or not at all, with the modes of the umask, and a full disk is said with the path."""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class WriteError(ValueError):
    """A file or folder could not be written. The message is a sentence with its path and the system's reason."""


def write_atomic(file: Path, content: str | bytes) -> None:
    """Writes a file that then holds this content, or what it held before: also after a kill -9 or a loss of power."""
    with atomic_file(file) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yields the name of a file to write, which takes the place of `file` when the block ends without an error."""
    partial = file.with_name(f".{file.stem}.{os.getpid()}.partial{file.suffix}")
    with write_errors(file):
        if file.exists() and not file.is_file():  # /dev/stdout, whose place nothing may take
            yield file
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            _sync(partial)
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                remove(partial)  # what could not be written makes room
            raise
        _sync(file.parent)


def append_line(file: Path, line: str) -> None:
    """Adds a line to the end of a file. One that does not fit on the disk is taken away again."""
    with write_errors(file), file.open("ab", buffering=0) as stream:
        end = stream.tell()
        content = f"{line}\n".encode()
        try:
            while content:  # the system may take a part, and refuse the rest when asked again
                content = content[stream.write(content) :]
            os.fsync(stream.fileno())
        except BaseException:
            stream.truncate(end)
            raise


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder, which takes the place of `target` when the block ends without an error.

    One process at a time may write a `target`. Its files are on disk before it gets its name.
    """
    partial, former = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "former"))
    with write_errors(target):
        try:
            remove(partial)
            partial.mkdir(parents=True)
            yield partial
            for place in [*partial.rglob("*"), partial]:
                _sync(place)
            remove(former)
            if target.exists():
                target.rename(former)
            partial.rename(target)
        except BaseException:
            with suppress(OSError):
                remove(partial)
            raise
        _sync(target.parent)
        remove(former)


def remove(place: Path) -> None:
    """Deletes a file, a link or a folder, if it is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def normalize_safetensors(file: Path) -> None:
    """Gives a safetensors file that was just written the mode of other files, and sorts its header: equal weights are equal files.

    Its writer gives the mode 0600, and leaves the metadata in random order.
    """
    probe = file.with_name(f".{file.name}.mode")
    probe.touch()
    file.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink()
    with file.open("rb+") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        content = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(content) <= size, "the same JSON in another order is as long"
        stream.seek(8)
        stream.write(content.ljust(size))


@contextmanager
def write_errors(place: Path) -> Iterator[None]:
    """Raises `WriteError` with the path for what the system refuses within the block."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))  # safetensors' own kind of error
        if not isinstance(error, OSError) and code is None:
            raise
        reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or str(error)
        raise WriteError(f"{place} could not be written: {reason[:1].lower()}{reason[1:]}.") from error


def _sync(place: Path) -> None:
    """Puts what a file holds, or the names in a folder, from the system's memory on the disk."""
    if place.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    number = os.open(place, os.O_RDONLY if place.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if not place.is_dir() or error.errno != errno.EINVAL:  # some network file systems sync no folders
            raise
    finally:
        os.close(number)
