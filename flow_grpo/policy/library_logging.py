"""Other libraries' warnings, log lines and progress bars, kept out of the output."""

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
    "accelerate",
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
    "torch.utils.cpp_extension",
)


def before_imports() -> None:
    """What libraries say while they are imported."""
    warnings.filterwarnings("ignore")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")


def quiet_libraries() -> None:
    """And what they say later. Imports them."""
    before_imports()
    for library in _libraries():
        library.set_verbosity_error()
        library.disable_progress_bar()
    threading.excepthook = _thread_failed


@contextmanager
def quietly() -> Iterator[None]:
    """Keep warnings, log lines and progress bars out while a pipeline is loaded and probed; afterwards all is as it was."""
    before = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in _libraries()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for library, _, _ in before:
                library.set_verbosity_error()
                library.disable_progress_bar()
            yield
        finally:
            for library, verbosity, enabled in before:
                library.set_verbosity(verbosity)
                if enabled:
                    library.enable_progress_bar()


def _libraries() -> list[Any]:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    return [diffusers_logging, transformers_logging]


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread that writes raises again where it is asked next, which is then said in a sentence."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
