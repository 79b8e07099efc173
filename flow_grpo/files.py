"""Writes that survive a kill -9, a loss of power and a full disk: a result is the earlier one or the new one, never a mixture.

One file is written beside its place and renamed (`atomic_file`), and so is a folder, which changes places with the earlier one in one
step (`atomic_folder`). Files in a folder that has others too are first all written to FOLDER/.NAME.complete and then moved from there
(`new_files`): while that folder exists, it holds what is still to be moved, and the next command that writes this result moves it.

A temporary file or folder is named `.NAME.HOST-PID.partial`. One whose process is dead is deleted by the next command that writes there.
What can't be written raises WriteError with the path and the system's reason, such as a full disk. And `inside`: paths that a found
file may name.
"""

import ctypes
import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flow_grpo.errors import FlowGRPOError

# a folder may be shared by machines, on which a PID is another process
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:6]
# without a host as 0.4 wrote it
PARTIAL = re.compile(r"\.(?P<stem>.+)\.(?:(?P<host>[0-9a-f]{6})-)?(?P<pid>\d+)\.partial(?P<suffix>\.\w+)?")
OBSOLETE = ".obsolete"  # in FOLDER/.NAME.complete: a JSON list of files of the earlier result that the new one has not
MAX_NAME = 255  # bytes of a file's name
MAX_JSON = 64 << 20  # bytes of a JSON file that we have written
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
# in the header of a safetensors file: our checksum of all of it, and that of its tensors, which other programs know
CHECKSUM, DATA_HASH = "flow_grpo.sha256", "modelspec.hash_sha256"
UNKNOWN_HASH = "0x" + "0" * 64  # in place of a checksum that is not computed yet
MAX_HEADER = 100_000_000  # bytes, safetensors' own limit


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of `~`. FlowGRPOError if this user has none, as in some containers, or it is no path."""
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise FlowGRPOError(f"{repr(path)[:80]} is of type {type(path).__name__}: give a path.") from error
    except RuntimeError as error:
        raise FlowGRPOError(f"there is no home folder for {path}: set HOME, or give the whole path.") from error


class WriteError(FlowGRPOError):
    """A file or folder could not be written. The message is a sentence with the path and the system's reason.

    Attributes:
        errno: the system's number of the reason, if it gave one.
    """

    errno: int | None = None


def write_atomic(file: Path, content: str | bytes) -> None:
    """Write a file. After a kill -9 or a loss of power it has the new content or the former one."""
    with atomic_file(file) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `file` when the block ends without an error."""
    partial = _partial(file)
    with write_errors(file):
        if file.exists() and not file.is_file():  # such as /dev/stdout, which can't be replaced
            yield file
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        _sweep(file.parent)
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
    """Yield an empty temporary folder, which replaces `target` when the block ends without an error.

    All files are synced to disk before the two folders change places. Where the system can't do that in one step, which Linux can, the
    earlier folder is .NAME.former while NAME is missing, until the next call.
    """
    target = target.resolve()  # a link stays, and what it leads to is replaced
    partial, former = _partial(target, is_folder=True), _former(target)
    with write_errors(target, NO_ROOM):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(target.parent)
            _bring_back(target)
            remove(partial)
            partial.mkdir()
            yield partial
            _sync_all(partial)
            if not target.exists():
                partial.rename(target)
            elif not _exchange(partial, target):
                remove(former)
                target.rename(former)
                partial.rename(target)
            _sync(target.parent)
            remove(former)
            remove(partial)
        except BaseException:
            with suppress(OSError):
                remove(partial)  # its space is needed
            raise


@contextmanager
def new_files(folder: Path, name: str, previous: Iterable[str] = ()) -> Iterator[Path]:
    """Yield an empty temporary folder. When the block ends without an error, its files replace those of an earlier result together.

    Args:
        name: of the result, for the temporary folder's name.
        previous: the files of the earlier result, relative to `folder`. Those that the new one has not are deleted. Other files stay.

    Raises:
        WriteError: the disk is full, or nothing can be written there. The earlier result is as it was.
    """
    with write_errors(folder, NO_ROOM):
        finish_files(folder, name)
        if folder.exists():
            _sweep(folder)
    previous = [file for file in previous if _is_within(folder, file)]
    if not folder.exists() or _holds_only(folder, previous):
        with atomic_folder(folder) as partial:
            yield partial
        return
    partial, complete = folder / _partial(folder / name, is_folder=True).name, _complete(folder, name)
    with write_errors(folder, NO_ROOM):
        try:
            remove(partial)
            partial.mkdir()
            yield partial
            obsolete = [file for file in previous if not (partial / file).exists()]
            (partial / OBSOLETE).write_text(json.dumps(obsolete))
            _sync_all(partial)
            partial.rename(complete)
            _sync(folder)
        except BaseException:
            with suppress(OSError):
                remove(partial)
            raise
        finish_files(folder, name)


def finish_files(folder: Path, name: str) -> None:
    """Move what a process that was killed had written as `new_files`, but not all moved."""
    _bring_back(folder.resolve())
    complete = _complete(folder, name)
    if not complete.is_dir() or complete.is_symlink():
        return
    for file in _read_obsolete(complete):
        _remove_file(folder, file)
    for path in sorted(complete.rglob("*")):
        file = str(path.relative_to(complete))
        if path.is_file() and file != OBSOLETE and _is_within(folder, file):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            path.replace(folder / file)
    _sync(folder)
    remove(complete)


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


def check_regular(file: Path, name: str, max_bytes: int) -> None:
    """FlowGRPOError if a path is no regular file, such as a device or a pipe, which may never end, or if it is too large."""
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise FlowGRPOError(f"{name} could not be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise FlowGRPOError(f"{name} is not a regular file: give a file on disk.")
    if found.st_size > max_bytes:
        raise FlowGRPOError(f"{name} has {found.st_size >> 20:,} MB; at most {max_bytes >> 20:,} MB are read.")


def regular_bytes(file: Path, max_bytes: int = 1 << 62) -> bytes:
    """The content of a file. FlowGRPOError if it is missing or not regular, such as a device that never ends, or if it is too large."""
    check_regular(file, str(file), max_bytes)
    return file.read_bytes()


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seal_safetensors(file: Path) -> None:
    """Give a new safetensors file the permissions of other files, a sorted header so that equal weights are equal files, and checksums.

    The safetensors library writes files with mode 0600 and with their metadata in random order. A checksum is written where the header
    has `UNKNOWN_HASH` in its place: `CHECKSUM` is of the whole file, with `UNKNOWN_HASH` in its own place; `DATA_HASH` of the tensors.
    """
    probe = _hidden(file, file.name, "mode")
    probe.touch()
    file.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink()
    with file.open("rb+") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        metadata = header.get("__metadata__", {})
        if DATA_HASH in metadata:
            metadata[DATA_HASH] = _sha256(stream, size + 8)
        content = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(content) <= size, "the same JSON in another order has the same length"
        content = content.ljust(size)
        if CHECKSUM in metadata:
            digest = _sha256(stream, size + 8, size.to_bytes(8, "little") + content)
            content = content.replace(UNKNOWN_HASH.encode(), digest.encode(), 1)
        stream.seek(8)
        stream.write(content)


def check_safetensors(file: Path) -> None:
    """Raise FlowGRPOError if a safetensors file has another checksum than it was written with. Files of other programs have none."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = int.from_bytes(start, "little")
        if size > MAX_HEADER:
            return  # no such file, which reading it says
        content = stream.read(size)
        found = re.search(rf'"{re.escape(CHECKSUM)}":"(0x[^"]*)"'.encode(), content)
        if found is None:
            return
        unsealed = content[: found.start(1)] + UNKNOWN_HASH.encode() + content[found.end(1) :]
        if _sha256(stream, size + 8, start + unsealed).encode() != found[1]:
            raise FlowGRPOError(
                f"{file} has another checksum than it was written with: it is damaged: copy it again; a program that changes such a "
                f"file on purpose takes {CHECKSUM} out of its header."
            )


def _sha256(stream: BinaryIO, start: int, before: bytes = b"") -> str:
    """The SHA-256 of `before` and of what a file holds from `start` on, as the header of a model states it."""
    digest = hashlib.sha256(before)
    stream.seek(start)
    while chunk := stream.read(2**22):
        digest.update(chunk)
    return f"0x{digest.hexdigest()}"


@contextmanager
def write_errors(path: Path, codes: set[int] | None = None) -> Iterator[None]:
    """Turn the system's errors within the block into `WriteError` with the path.

    Args:
        codes: of the errors, where the block does more than write; by default all.
    """
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        named = re.search(r"(?:os error |Errno )(\d+)", str(error))  # in an error of safetensors and of shutil
        code = getattr(error, "errno", None) or (int(named[1]) if named else None)
        is_systems = isinstance(error, OSError) or named is not None
        if not is_systems or (codes is not None and code not in codes):
            raise
        stated = os.strerror(code) if code else str(error)
        link = next((one for one in (path, *path.parents) if os.path.islink(one) and not os.path.exists(one)), None)
        reason = f"{stated[:1].lower()}{stated[1:]}"
        if link is not None:
            reason = f"{link} is a link to {os.readlink(link)}, which does not exist"
        write_error = WriteError(f"{_final(path)} could not be written: {reason}.")
        write_error.errno = code
        raise write_error from error


def _sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
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


def _read_obsolete(complete: Path) -> list[str]:
    """The files to be deleted; none if they were deleted before."""
    try:
        return list(json.loads((complete / OBSOLETE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _remove_file(folder: Path, name: str) -> None:
    """Delete a file within a folder, and its own folder if that is empty then."""
    if not _is_within(folder, name):
        return
    with suppress(OSError):  # it is a folder, or its folder has other files
        (folder / name).unlink(missing_ok=True)
        if (folder / name).parent != folder:
            (folder / name).parent.rmdir()


def _sync_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _partial(target: Path, is_folder: bool = False) -> Path:
    """The temporary file or folder of this process for a target."""
    stem, suffix = (target.name, "") if is_folder else (target.stem, target.suffix)
    return _hidden(target, stem, f"{HOST}-{os.getpid()}.partial{suffix}")


def _hidden(target: Path, name: str, ending: str) -> Path:
    """`.NAME.ENDING` beside a target. A name that file systems would refuse as too long is cut, and gets a checksum."""
    content, room = os.fsencode(name), MAX_NAME - len(os.fsencode(ending)) - 2
    if len(content) > room:
        digest = hashlib.sha256(content).hexdigest()[:8]
        name = f"{content[: room - 9].decode(errors='ignore')}~{digest}"
    return target.with_name(f".{name}.{ending}")


def _final(path: Path) -> Path:
    """The path of a file, also of one that is written in a temporary folder first."""
    for folder in (path, *path.parents):
        if named := PARTIAL.fullmatch(folder.name):
            return folder.with_name(named["stem"] + (named["suffix"] or "")) / path.relative_to(folder)
    return path


def _complete(folder: Path, name: str) -> Path:
    return folder / f".{name}.complete"


def _former(target: Path) -> Path:
    return _hidden(target, target.name, "former")


def _bring_back(target: Path) -> None:
    """Put the earlier folder back where a process was killed before it had put the new one there."""
    if _former(target).is_dir() and not (target.exists() and any(target.iterdir())):
        if target.is_dir():
            target.rmdir()
        _former(target).rename(target)


def _holds_only(folder: Path, files: list[str]) -> bool:
    """Whether a folder holds no other files, so that another folder can take its place. The working folder and a mounted one can't move."""
    here = {folder / file for file in files}
    movable = not folder.samefile(".") and not folder.is_mount() and os.access(folder.resolve().parent, os.W_OK)
    return movable and all(path in here for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _is_within(folder: Path, name: object) -> bool:
    """Whether a file lies in a folder; it may be a link, which is moved or deleted itself. A downloaded folder may name any file."""
    return isinstance(name, str) and "\0" not in name and (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step. False where the system, or this file system, has no such step."""
    if not sys.platform.startswith("linux"):
        return False
    library = _libc()
    if library is None:
        return False
    here = -100  # AT_FDCWD
    if library.renameat2(here, os.fsencode(one), here, os.fsencode(other), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_ROOM:
        raise OSError(code, os.strerror(code), str(other))
    return False


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library, if it has renameat2."""
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "renameat2") else None


_swept: set[Path] = set()


def _sweep(folder: Path) -> None:
    """Delete the temporary files that dead processes of this machine have left in a folder, once in a process."""
    import psutil  # here: the environment of an isolated reward may lack it

    if folder in _swept:
        return
    _swept.add(folder)
    for path in list(folder.iterdir()):
        match = PARTIAL.fullmatch(path.name)
        if match and match["host"] in (None, HOST) and not psutil.pid_exists(int(match["pid"])):
            with suppress(OSError):
                remove(path)
