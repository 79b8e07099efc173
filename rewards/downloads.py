"""Load files from the cache or the Hugging Face hub; without a connection, fail at once with one sentence."""

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import constants, hf_hub_download

from flow_grpo.errors import FlowGRPOError, RetryableError

VARIABLE = "HF_HUB_OFFLINE"
PATHS = ("/", "./", "../", "~")  # prefixes of names that can only be paths
PATIENCE = 5.0  # seconds to wait for the hub's answer
_loading = threading.RLock()  # the settings of `downloads` are the process's


class NotDownloaded(FlowGRPOError):
    """A file is not in the cache, and nothing may be downloaded."""


class HubUnreachable(NotDownloaded, RetryableError):
    """A file is not in the cache, and the hub can't be reached now."""


@contextmanager
def downloads(*names: str | Path | None) -> Iterator[None]:
    """Context for code that loads these files, folders, hub ids or URLs.

    huggingface_hub retries an unreachable hub six times for each file, with growing pauses and log lines. This context asks the hub once
    per process; if it does not answer, only the cache is used. Where a file names code of its author, transformers would ask the user
    whether to run it; here it refuses. Other threads wait until the context is left.

    Raises:
        FileNotFoundError: a name can only be a path, and does not exist.
        NotDownloaded: a name is neither a file nor in the cache, and the variable HF_HUB_OFFLINE is set; HubUnreachable, which is
            one: the hub can't be reached.
    """
    not_local = [str(name) for name in names if name is not None and not Path(name).exists()]
    if missing := next((name for name in not_local if name.startswith(PATHS)), None):
        raise FileNotFoundError(f"there is no {missing}")
    with _loading:
        offline, disabled = constants.HF_HUB_OFFLINE, logging.root.manager.disable
        unreachable = bool(not_local) and (offline or not _answers(constants.ENDPOINT))
        constants.HF_HUB_OFFLINE = unreachable or offline
        logging.disable(logging.CRITICAL)
        try:
            with _no_questions():
                yield
        except Exception as error:
            if unreachable and any(isinstance(cause, OSError) for cause in _causes(error)):
                why = f"{VARIABLE} is set" if offline else f"the hub ({constants.ENDPOINT}) can't be reached"
                kind = NotDownloaded if offline else HubUnreachable
                raise kind(f"{' or '.join(not_local)}: not in the cache, and {why}.") from error
            raise
        finally:
            constants.HF_HUB_OFFLINE = offline
            logging.disable(disabled)


@contextmanager
def _no_questions() -> Iterator[None]:
    """Context in which transformers does not wait for an answer on whether it may run the code of a model's author."""
    if "transformers" not in sys.modules:
        yield
        return
    code: Any = importlib.import_module("transformers.dynamic_module_utils")
    seconds, code.TIME_OUT_REMOTE_CODE = code.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    finally:
        code.TIME_OUT_REMOTE_CODE = seconds


def hub_file(repo: str, name: str) -> str:
    """Return the local path of a file of a hub repository, downloaded if it is not in the cache."""
    with downloads(f"{name} of {repo}"):
        return hf_hub_download(repo, name)


def hub_is_reachable() -> bool:
    """Whether the hub answers and offline mode is off."""
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@contextmanager
def offline_mode() -> Iterator[None]:
    """Context in which nothing is downloaded from the hub, in this process and in subprocesses."""
    offline, variable = constants.HF_HUB_OFFLINE, os.environ.get(VARIABLE)
    constants.HF_HUB_OFFLINE, os.environ[VARIABLE] = True, "1"  # inherited by subprocesses
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        if variable is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = variable


def is_missing_download(error: BaseException) -> bool:
    """Whether an error was caused by a file that is not in the cache and was not allowed to be downloaded."""
    ours, names = ("NotDownloaded", "HubUnreachable"), ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
    return any(
        type(cause).__name__ in (*ours, *names) or any(name in str(cause) for name in ours)  # a subprocess's error is a text
        for cause in _causes(error)
    )


@functools.cache
def _answers(endpoint: str) -> bool:
    try:
        httpx.head(endpoint, timeout=PATIENCE)
    except httpx.HTTPError:
        return False
    return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
