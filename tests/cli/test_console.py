"""The console: one line per message, and one sentence per expected error."""

import gc
import inspect
import weakref

import pytest

from flow_grpo.cli.console import exit_on_error, say, without_collection, without_library_messages


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
        (ValueError("a [red]setting[/red]\n   is wrong."), "error: a [red]setting[/red] is wrong."),
        (FileNotFoundError("there is no file."), "error: there is no file."),
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


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), AssertionError("a bug"), KeyboardInterrupt()])
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
