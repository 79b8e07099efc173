"""Keep other libraries' warnings, log lines and progress bars out of the output."""

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOGGERS = (
    "huggingface_hub",
    "peft",
    "matplotlib",
    "accelerate",
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
    "torch.utils.cpp_extension",
)


def before_imports() -> None:
    """Silence libraries while they are imported, but not the files of the user's rewards."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"flow_grpo\.user_files\.")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")


def quiet_libraries() -> None:
    """Silence libraries for the rest of the process. Imports them."""
    before_imports()
    for library in _libraries():
        library.set_verbosity_error()
        library.disable_progress_bar()
    threading.excepthook = _thread_failed


@contextmanager
def quietly() -> Iterator[None]:
    """Silence libraries within a block, such as while a pipeline is loaded, and restore their settings afterwards."""
    settings = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in _libraries()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for library, _, _ in settings:
                library.set_verbosity(logging.CRITICAL)  # an error is raised too
                library.disable_progress_bar()
            yield
        finally:
            for library, verbosity, had_progress_bar in settings:
                _restore(library, verbosity, had_progress_bar)


def _restore(library: Any, verbosity: int, had_progress_bar: bool) -> None:
    library.set_verbosity(verbosity)
    if had_progress_bar:
        library.enable_progress_bar()


def _libraries() -> list[Any]:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    return [diffusers_logging, transformers_logging]


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, unless it is TensorBoard's: that raises again at the next call, where it is handled."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
