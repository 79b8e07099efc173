"""The console: one line per message, and one sentence per expected error."""

import gc
import inspect
import io
import os
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest

from flow_grpo.cli.console import (
    Output,
    errors,
    exit_on_error,
    prepare_streams,
    say,
    without_collection,
    without_library_messages,
)
from flow_grpo.errors import FlowGRPOError
from flow_grpo.tracking.tracker import Tracker


class OutOfMemoryError(RuntimeError):
    """As torch's by its name."""


def test_a_message_is_one_line_that_moves_no_cursor_and_sets_no_style(capsys):
    message = "[bold]\x1b[2J\rwords :fire: " * 50 + "end"
    say(message)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == message.replace("\x1b", "\\x1b").replace("\r", "\\r")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FlowGRPOError("a.py:fire: a [red]setting[/red]\n   is wrong."), "error: a.py:fire: a [red]setting[/red] is wrong."),
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


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1"])
def test_what_a_terminal_can_not_show_is_replaced(monkeypatch, encoding):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    Tracker(Path(), 1).info("\u2212 0.1")  # of a trainer in Python
    prepare_streams()
    say("a \u00b1 b \u2212 c \U0001f98a")
    errors.print("\u2212")
    out.flush()
    err.flush()
    sign = (
        "\u00b1" if encoding == "latin-1" else "\u00a1\u00c0".encode("latin-1").decode("gbk") if encoding == "gbk" else "+-"
    )
    assert out.buffer.getvalue().decode(encoding) == f"- 0.1\na {sign} b - c ?\n", "a number keeps its sign"
    assert err.buffer.getvalue() == b"-\n"


@pytest.mark.parametrize(
    ("device", "is_result", "lost"), [("pipe", True, False), ("/dev/full", False, False), ("/dev/full", True, True)]
)
def test_a_stream_that_fails_ends_nothing_but_a_lost_result_does(device, is_result, lost):
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads
    with open(writer if device == "pipe" else device, "w") as stream:
        output = Output(stream, is_result)
        with pytest.raises(FlowGRPOError, match="could not be written: No space") if lost else nullcontext():
            output.write("x" * 100_000)
            output.flush()
        output.write("x" * 100_000)  # it goes nowhere
        output.flush()


def test_closed_streams_are_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    prepare_streams()
    say("words")
    errors.print("words")
