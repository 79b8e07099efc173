"""Atomic writes: a file or folder is complete or absent, with the permissions of the umask. And paths that a found file may name.

What can't be written raises WriteError with the path and the system's reason, such as a full disk.
"""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flow_grpo.errors import FlowGRPOError


class WriteError(FlowGRPOError):
    """A file or folder could not be written. The message is a sentence with the path and the system's reason."""


def write_atomic(file: Path, content: str | bytes) -> None:
    """Write a file. After a kill -9 or a loss of power it has the new content or the former one."""
    with atomic_file(file) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `file` when the block ends without an error."""
    partial = file.with_name(f".{file.stem}.{os.getpid()}.partial{file.suffix}")
    with write_errors(file):
        if file.exists() and not file.is_file():  # such as /dev/stdout, which can't be replaced
            yield file
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            _sync(partial)
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                remove(partial)  # its space is needed
            raise
        _sync(file.parent)


def append_line(file: Path, line: str) -> None:
    """Append a line to a file. A line that does not fit on the disk is removed again."""
    with write_errors(file), file.open("ab", buffering=0) as stream:
        end = stream.tell()
        content = f"{line}\n".encode()
        try:
            while content:  # the system may write a part, and refuse the rest at the next call
                content = content[stream.write(content) :]
            os.fsync(stream.fileno())
        except BaseException:
            stream.truncate(end)
            raise


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty temporary folder, which replaces `target` when the block ends without an error.

    Only one process at a time may write `target`. All files are synced to disk before the folder is renamed.
    """
    partial, former = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "former"))
    with write_errors(target):
        try:
            remove(partial)
            partial.mkdir(parents=True)
            yield partial
            for path in [*partial.rglob("*"), partial]:
                _sync(path)
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


def inside(folder: Path, name: object, named_by: str | None = None) -> Path:
    """The path `folder / name`, if it stays inside the folder when links are followed. It need not exist.

    For names in files that may come from a stranger: a table of images, a run, a report. The links of the hub's cache, from
    `snapshots` to the `blobs` beside it, are allowed.

    Args:
        named_by: the file that has the name, for the error.

    Raises:
        FlowGRPOError: it is no path, is absolute or leads out of the folder.
    """
    source = named_by or f"a file in {folder}"
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise FlowGRPOError(f"{source} has {repr(name)[:200]} instead of a path.")
    real = folder.resolve()
    try:
        target = (folder / name).resolve()
    except (RuntimeError, OSError) as error:  # links in a circle, or a path that is too long
        raise FlowGRPOError(f"{source} names {name[:200]!r}, which can't be followed.") from error
    allowed = [real, *(parent.parent / "blobs" for parent in real.parents if parent.name == "snapshots")]
    if Path(name).is_absolute() or not any(map(target.is_relative_to, allowed)):
        raise FlowGRPOError(f"{source} names {name[:200]!r}, which is outside its folder: give paths inside the folder.")
    return folder / name


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def normalize_safetensors(file: Path) -> None:
    """Give a new safetensors file the permissions of other files and sort its header, so that equal weights are equal files.

    The safetensors library writes files with mode 0600 and with their metadata in random order.
    """
    probe = file.with_name(f".{file.name}.mode")
    probe.touch()
    file.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink()
    with file.open("rb+") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        content = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(content) <= size, "the same JSON in another order has the same length"
        stream.seek(8)
        stream.write(content.ljust(size))


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns the system's errors within the block into `WriteError` with the path."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))  # in an error of safetensors
        if not isinstance(error, OSError) and code is None:
            raise
        reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or str(error)
        raise WriteError(f"{path} could not be written: {reason[:1].lower()}{reason[1:]}.") from error


def _sync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno != errno.EINVAL:  # some network file systems can't sync folders
            raise
    finally:
        os.close(descriptor)
