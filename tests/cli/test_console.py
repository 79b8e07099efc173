"""The console: one line per message, and one sentence per expected error."""

import gc
import inspect
import os
import subprocess
import sys
import weakref

import pytest

from flow_grpo.cli.console import exit_on_error, say, without_collection, without_library_messages
from flow_grpo.errors import FlowGRPOError


class OutOfMemoryError(RuntimeError):
    """As torch's by its name."""


def test_a_message_is_one_line_that_moves_no_cursor_and_sets_no_style(capsys):
    message = "[bold]\x1b[2J\rwords " * 50 + "end"
    say(message)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == message.replace("\x1b", "\\x1b").replace("\r", "\\r")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FlowGRPOError("a [red]setting[/red]\n   is wrong."), "error: a [red]setting[/red] is wrong."),
        (FileNotFoundError(2, "No such file", "a.txt"), "error: [Errno 2] No such file: 'a.txt'"),
        (OutOfMemoryError("of 80 GB"), "error: the device ran out of memory: set a smaller microbatch"),
    ],
)
def test_an_expected_error_is_one_sentence_and_status_2(capsys, error, sentence):
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise error
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(sentence)
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug"),
        ValueError("a bug"),
        OSError("a bug"),
        KeyError("a bug"),
        AssertionError("a bug"),
        KeyboardInterrupt(),
    ],
)
def test_any_other_error_is_left_alone(capsys, error):
    with pytest.raises(type(error)) as raised, exit_on_error():
        raise error
    assert raised.value is error
    assert capsys.readouterr().err == ""


def test_a_decorated_command_keeps_its_options():
    def command(model: str, seeds: int = 4) -> str:
        return model * seeds

    decorated = without_library_messages(command)
    assert inspect.signature(decorated) == inspect.signature(command)
    assert decorated("a", seeds=2) == "aa"


class Node:
    """An object that refers to itself, so that only a collection frees it."""

    def __init__(self):
        self.itself = self


def test_while_a_model_is_loaded_nothing_is_collected_and_afterwards_all_that_is_new():
    with without_collection():
        kept = weakref.ref(Node())
        assert not gc.isenabled()
    assert gc.isenabled()
    new = weakref.ref(Node())
    gc.collect()
    assert kept() is not None, "what was there when the block ended is not looked at again"
    assert new() is None
    gc.unfreeze()
    gc.collect()
    assert kept() is None


SAYS = "from flow_grpo.cli import console; console.prepare_streams(); "


def python(code: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run Python code, with these redirections of its output."""
    words = ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, code]
    return subprocess.run(words, capture_output=True, env={**os.environ, **environment})


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1"])
def test_what_a_terminal_can_not_show_is_replaced(encoding):
    done = python(
        SAYS + "console.say('a \u00b1 b \u2212 c \U0001f98a'); console.errors.print('\u2212')", PYTHONIOENCODING=encoding
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding)
    assert text == f"a {'?' if encoding == 'ascii' else chr(0xB1)} b ? c ?\n"
    assert done.stderr == b"?\n"


def test_a_trainers_own_messages_need_no_unicode_either():
    code = "from pathlib import Path; from flow_grpo.tracking.tracker import Tracker; Tracker(Path(), 1).info('\u2212 0.1')"
    assert python(code, PYTHONIOENCODING="ascii").stdout == b"? 0.1\n"


@pytest.mark.parametrize(
    ("shell", "code"),
    [("| true", 0), ("2>/dev/full", 0), (">&-", 0), ("2>&-", 0), ("> /dev/full", 2)],
    ids=["nobody reads", "full stderr", "no stdout", "no stderr", "full stdout"],
)
def test_a_stream_that_fails_ends_no_command_but_a_lost_result_does(shell, code):
    commands = (
        "with console.exit_on_error():",
        "  [(console.say('x' * 5000), console.errors.print('y' * 5000)) for i in range(50)]",
    )
    done = python("\n".join([SAYS, *commands]), f"{shell}; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    if code:
        assert b"error: the output could not be written: No space left on device." in done.stderr
