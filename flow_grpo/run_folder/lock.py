"""The lock on a run folder: one process at a time trains in it. Reading needs no lock.

It is the system's file lock (flock; msvcrt.locking on Windows), taken through filelock. It ends with its process, even after a
kill, and forked processes don't hold it. Tested on a local file system on Linux; not tested on Windows, macOS and network file
systems. An NFS server may keep the lock of a dead machine for a minute or two. Mounted with `local_lock`, NFS does not show the
lock to other machines. Some file systems have no locks at all.
"""

import errno
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from flow_grpo.errors import RetryableError
from flow_grpo.files import MAX_JSON, regular_bytes, write_atomic, write_errors
from flow_grpo.run_folder.layout import LOCK, OWNER  # two files, as a locked one can't be read everywhere

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def locked(folder: Path, info: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a folder within the block. Creates the folder if it does not exist.

    Args:
        info: shows a message.

    Raises:
        RetryableError: another process holds the lock. The message names it.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RetryableError(
            f"{folder} is in use by {_owner(folder)}: wait until that has ended, end it, or set another folder by output_dir=..."
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        info(f"warning: the file system of {folder} has no locks, so nothing keeps a second run from writing there.")
        yield
        return
    try:
        owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_atomic(folder / OWNER, json.dumps(owner))
        yield
    finally:
        lock.release()


def _owner(folder: Path) -> str:
    """The process that holds the lock, as it has noted itself."""
    try:
        owner = json.loads(regular_bytes(folder / OWNER, MAX_JSON))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just taken the lock
        return "another process"
