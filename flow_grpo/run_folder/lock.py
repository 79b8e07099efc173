"""The lock on a run folder: one process at a time trains in it. Whoever only reads needs none.

The lock is the system's (flock, on Windows msvcrt.locking), through filelock: it ends with the process that holds it, however that
ends, and processes that it has forked don't keep it. Tested on a local file system on Linux. Not tested: Windows, macOS and network file
systems. NFS passes the lock on to its server, which may keep that of a machine that died for a minute or two; mounted with
`local_lock`, and on file systems without locks, it does not reach other machines, or there is none.
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

from flow_grpo.files import write_atomic, write_errors
from flow_grpo.run_folder.layout import LOCK, OWNER  # two files, as a locked one can't be read everywhere

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a folder within the block; makes the folder if it is not there.

    Raises:
        ValueError: another process holds it; the sentence names it.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{folder} is in use by {_owner(folder)}: wait until that has ended, end it, or set another folder by output=..."
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        say(f"warning: the file system of {folder} has no locks, so nothing keeps a second run from writing there.")
        yield
        return
    try:
        owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_atomic(folder / OWNER, json.dumps(owner))
        yield
    finally:
        lock.release()


def _owner(folder: Path) -> str:
    """Who holds the lock, as noted."""
    try:
        owner = json.loads((folder / OWNER).read_bytes())
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has this moment taken the lock
        return "another process"
