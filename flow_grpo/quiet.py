"""Other libraries' warnings, log lines and progress bars, kept out of the output."""

import logging
import os
import threading
import warnings

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
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for chatty in (diffusers_logging, transformers_logging):
        chatty.set_verbosity_error()
        chatty.disable_progress_bar()
    threading.excepthook = _thread_failed


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread that writes raises again where it is asked next, which is then said in a sentence."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
