"""The typer app with all commands, and its entry point."""

import atexit
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from flow_grpo import __version__
from flow_grpo.cli import rewards
from flow_grpo.cli.compare import compare
from flow_grpo.cli.console import TRACEBACK, console, errors, exit_on_error, fail, prepare_streams
from flow_grpo.cli.doctor import doctor
from flow_grpo.cli.evaluate import evaluate
from flow_grpo.cli.export import export
from flow_grpo.cli.init import init, schema
from flow_grpo.cli.options import ImagesCommand
from flow_grpo.cli.plan import plan
from flow_grpo.cli.report import report
from flow_grpo.cli.sample import sample
from flow_grpo.cli.score import score
from flow_grpo.cli.serve import serve
from flow_grpo.cli.train import NEWEST, train
from flow_grpo.distributed.launchers import AUTO
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.library_logging import before_imports
from flow_grpo.progress import show_phases
from flow_grpo.training import signals

COMMANDS: dict[str, Callable[..., None]] = {  # in the order of --help
    "train": train,
    "sample": sample,
    "compare": compare,
    "doctor": doctor,
    "eval": evaluate,
    "score": score,
    "report": report,
    "export": export,
    "plan": plan,
    "init": init,
    "schema": schema,
    "serve": serve,
}
app = typer.Typer(
    help="Fine-tune a text-to-image flow model with a reward: any diffusers flow pipeline, any Python function as reward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class SettingsCommand(TyperCommand):
    """A typer command with overrides among its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. FlowGRPOError for `--steps 3`, which is written steps=3."""
        options = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for i, word in enumerate(args):
            option, equals, value = word.partition("=")
            if word == "--":
                break
            if option.startswith("--") and option not in (*options, "--help") and (path := _setting(option)):
                following = next((next_word for next_word in args[i + 1 : i + 2] if not next_word.startswith("--")), "VALUE")
                raise FlowGRPOError(f"{option} is a setting and no option: write {path}={value if equals else following}.")
        return super().parse_args(ctx, _with_value_of_resume(args))


def _with_value_of_resume(words: list[str]) -> list[str]:
    """`--resume` and `--resume auto` with their values, since another word after it is the config."""
    found: list[str] = []
    for word in words:
        if word == AUTO and found[-1:] == [f"--resume={NEWEST}"]:
            found[-1] = f"--resume={AUTO}"
        else:
            found.append(f"--resume={NEWEST}" if word == "--resume" else word)
    return found


def _setting(option: str) -> str | None:
    """The dotted path of the setting that an option names, if there is one."""
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.config.run_config import setting_paths

    *_, word = option.removeprefix("--").replace("-", "_").split(".")
    return next(iter(setting_paths(FlowGRPOConfig, word)), None)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flow-grpo {__version__}")
        raise typer.Exit


@app.callback()
def all_commands(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help=f"Show full tracebacks of errors, like {TRACEBACK}=1 in the environment.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands. `run` reads --traceback itself, so that it may stand anywhere."""


for name, command in COMMANDS.items():
    parameters = inspect.signature(command).parameters
    kind = SettingsCommand if "overrides" in parameters else ImagesCommand if "images" in parameters else None
    app.command(name, cls=kind)(command)
app.add_typer(rewards.app, name="rewards")


def run() -> None:
    """Run a command: expected errors are one sentence, Ctrl-C works at any time, and a hanging reward does not delay the exit."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["MPLBACKEND"] = "agg"  # a notebook's, which its commands inherit, need not exist here
    # loading the libraries makes a million objects, and by default garbage is looked for after every 700 of them, which takes a second
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)  # without it, the last collection takes over a second
    before_imports()
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signals.exit_on_second_interrupt(_interrupted)
    words = [word for word in sys.argv[1:] if word != "--traceback"]
    if len(words) < len(sys.argv[1:]):
        os.environ[TRACEBACK] = "1"
    is_main_rank = os.environ.get("RANK", "0") == "0"
    # one console in a terminal, so that a result is printed above the line that shows a phase
    phases = console if console.is_terminal and errors.is_terminal else errors
    if sys.flags.optimize > 1:
        fail(
            "Python's option -OO (PYTHONOPTIMIZE=2) takes out docstrings that transformers and diffusers read: leave it out, or give -O."
        )
    try:
        with exit_on_error(), show_phases(phases) if is_main_rank else nullcontext():
            app(words, standalone_mode=True)
    except SystemExit as end:
        signals.exit_if_busy(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _interrupted() -> None:
    raise KeyboardInterrupt
