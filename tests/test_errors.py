"""Which errors a command prints as one sentence, and which keep their traceback."""

import errno
from pathlib import Path

import pytest
import torch
from support import small_policy as small

from flow_grpo import FlowGRPOConfig
from flow_grpo.cli.console import exit_on_error
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError, RetryableError, is_retryable
from flow_grpo.files import write_errors
from flow_grpo.rewards.downloads import HubUnreachable
from flow_grpo.rewards.serving.client import NoServer
from flow_grpo.rewards.user_code import guarded


@pytest.mark.parametrize(
    "error", [FlowGRPOError("set lr lower."), FileNotFoundError(errno.ENOENT, "no such file", "prompts.txt")]
)
def test_an_error_that_the_user_can_mend_is_one_sentence_and_status_2(error, capsys):
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def full_disk():
    with write_errors(Path("runs")):
        raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_of_a_library():
    """As safetensors says it, whose error is none of the system's."""
    with write_errors(Path("runs/.best.0123ab-4.partial/weights.safetensors")):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def dead_server():
    with guarded("reward ocr", lambda kind: f"reward ocr raised {kind}"):
        raise NoServer("no server is left.")


def failed_rank():
    class Pair(Processes):
        def all_gather(self, value):
            return [value, (None, None)]

    Pair(0, 2).gather_or_raise(dead_server)


def unreachable_hub():
    raise HubUnreachable("the model is not in the cache.")


@pytest.mark.parametrize("fail", [full_disk, full_disk_of_a_library, dead_server, failed_rank, unreachable_hub])
def test_what_a_retry_may_mend_ends_with_status_75(fail, capsys):
    with pytest.raises(SystemExit) as end, exit_on_error():
        fail()
    assert end.value.code == 75
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "partial" not in said, "the file, and not where it is written first"


def test_an_error_of_the_user_is_not_retryable_whatever_it_follows():
    assert not is_retryable(FlowGRPOError("set lr lower."))
    assert not is_retryable(FileNotFoundError(errno.ENOENT, "no such file", "prompts.txt"))
    assert issubclass(RetryableError, FlowGRPOError)


@pytest.mark.parametrize("error", [ValueError("of a library"), torch.linalg.LinAlgError("singular"), OSError("no path")])
def test_an_error_that_nobody_foresaw_keeps_its_traceback(error):
    with pytest.raises(type(error)), exit_on_error():
        raise error


@pytest.mark.usefixtures("no_report")
def test_a_step_that_fails_by_a_library_is_rolled_back_and_the_run_goes_on_to_the_same_metrics(tmp_path, monkeypatch):
    settings = [
        "steps=2",
        "prompts_per_step=2",
        "images_per_prompt=2",
        "microbatch=4",
        "evaluation.prompts=null",
        "trackers=[]",
        "dtype=fp32",
        "rewards={jpeg_size: 1}",
    ]

    def trainer(name):
        return small.trainer(FlowGRPOConfig.from_yaml("tiny_ocr", [*settings, f"output_dir={tmp_path / name}"]))

    whole, failing = trainer("whole"), trainer("failing")
    whole.train()
    call, calls = torch.optim.AdamW.step, []

    def step(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("a library's")
        return call(*args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(ValueError, match="a library's"):
        failing.train()
    resumed = trainer("failing")
    resumed.train(resume=True)
    for name, weights in whole.policy.adapter_state().items():
        assert torch.equal(weights, resumed.policy.adapter_state()[name]), name


def test_what_an_error_quotes_writes_no_second_line_no_terminal_code_and_no_password():
    error = RetryableError("there is no setting a\r\n\x1b[2J\u202eb; see https://me:secret@host/x.")
    assert str(error) == r"there is no setting a \x1b[2J\u202eb; see https://…@host/x."
    assert str(FlowGRPOError("a\rb")) == r"a\rb"
    assert str(FlowGRPOError(error)) == str(error)
