"""Several processes on one CPU by gloo: what they do is what one process does, up to the order of additions."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.cli_process import begin
from support.gradient_sums import add_up_gradients, exchange_values_apart_from_gradients, step_like_one_process
from support.group_ends import keep_a_found_group, leave_no_group
from support.paths import ROOT
from support.process_runs import (
    ACCELERATE,
    UNEVEN,
    adapter,
    call_in_ranks,
    config,
    finished,
    forked,
    rows,
    run_alone,
    same,
    start,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.launchers import first_dead
from flow_grpo.distributed.processes import Processes, _buckets, shared_microbatch
from flow_grpo.errors import PEER_LOST, FlowGRPOError
from flow_grpo.run_folder import checkpoint
from flow_grpo.run_folder.opening import locked
from flow_grpo.training.callbacks import CallbackList

BROKEN = """
import os
import sys


def broken(images, prompts):
    if os.environ["RANK"] == "1":
        {end}
    return [0.0] * len(prompts)
"""


def in_step(process: subprocess.Popen, folder: Path) -> None:
    """Waits until the run has made a step."""
    deadline = time.monotonic() + 120
    while not (folder / "run" / "metrics.jsonl").exists() or len(rows(folder)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


# copies of the adapter that all processes must move and renew alike
ANCHORS = "objective.anchors=[{to: ema, weight: 0.1, decay: 0.5}, {to: base, weight: 0.1}]"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_alone(config(folder, ANCHORS))
    return folder


@pytest.mark.parametrize(
    ("processes", "setting", "launcher"),
    [
        pytest.param(2, "memory.shard=true", (), marks=pytest.mark.slow),
        pytest.param(2, "memory.shard=false", ACCELERATE, marks=pytest.mark.slow),
        (3, "memory.shard=false", None),
    ],
)
def test_processes_do_what_one_does(alone, tmp_path, processes, setting, launcher):
    file = config(tmp_path, setting, ANCHORS)
    output = forked(file, processes) if launcher is None else finished(start(file, processes, launcher=launcher))
    same(alone, tmp_path)
    assert json.loads((tmp_path / "run" / "machine.json").read_text())["processes"] == processes
    assert output.count("held out: ") == 2, "one of them speaks"
    assert len(list((tmp_path / "run" / "tensorboard").glob("events*"))) == 1, "and tracks"
    assert (tmp_path / "run" / "before_after.png").exists()


@pytest.mark.slow
def test_a_checkpoint_of_2_is_resumed_by_1_and_by_3(alone, tmp_path):
    forked(config(tmp_path / "first", ANCHORS), 2, "steps=1")
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        file = config(folder, ANCHORS)
        shutil.copytree(tmp_path / "first" / "run", folder / "run")
        run_alone(file, resume=True) if processes == 1 else forked(file, processes, "--resume")
        assert [row["step"] for row in rows(folder) if "loss" in row] == [1, 2]
        left, right = adapter(alone), adapter(folder)
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, rtol=0, atol=2e-5)


def ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes of the run, by rank."""
    workers = [child for child in psutil.Process(launcher.pid).children() if "RANK" in child.environ()]
    return sorted(workers, key=lambda child: int(child.environ()["RANK"]))


def go_on(file: Path, step: int) -> str:
    command = f"flow-grpo train {file} --num-processes=2 --resume"
    return f"which ended the run. The checkpoint of step {step} is saved. Go on with: {command}\n"


def test_one_that_is_killed_ends_all_and_is_named_with_the_command_to_go_on(tmp_path):
    file = config(tmp_path, "steps=500", "save_every=500")
    process = start(file, 2)
    in_step(process, tmp_path)
    ranks(process)[1].kill()
    output = finished(process, code=75)
    step = checkpoint.steps(tmp_path / "run" / "checkpoints")[0]
    assert step >= 1, "the other one saves its last whole step"
    sentence = "error: rank 1 of 2 was ended by SIGKILL (as the system does when memory runs out), " + go_on(file, step)
    assert sentence in output, output
    assert "Traceback" not in output


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed_and_leave_the_folder_free(tmp_path):
    process = start(config(tmp_path, "steps=500"), 2)
    in_step(process, tmp_path)
    left = ranks(process)
    assert len(left) == 2
    with pytest.raises(ValueError, match=f"is in use by process {left[0].pid} on "), locked(tmp_path / "run", print):
        pass
    process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    process.communicate()
    with locked(tmp_path / "run", print):
        pass


def test_a_rank_ends_with_another_launcher_that_is_killed(tmp_path):
    """What `train` calls, in ranks that need no imports."""
    file = tmp_path / "rank.py"
    file.write_text(
        "import os, time; from flow_grpo.distributed.launchers import end_with_launcher; end_with_launcher()\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", *ACCELERATE, str(file)], env=env, stdout=subprocess.PIPE, text=True)
    left = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    process.communicate()


def test_the_rank_that_died_first_is_named_and_not_those_that_ended_with_it():
    def failures(**statuses: int) -> dict[int, ProcessFailure]:
        return {int(rank[1:]): ProcessFailure(int(rank[1:]), 1, status, "") for rank, status in statuses.items()}

    assert first_dead(failures(r0=PEER_LOST, r1=-9), 2) == (1, -9)
    assert first_dead(failures(r0=-15, r1=3, r2=PEER_LOST), 3) == (1, 3)
    assert first_dead(failures(r0=PEER_LOST, r2=-15), 3) == (1, 0), "it ended without a failure"
    assert first_dead(failures(r0=PEER_LOST, r1=-15), 2) == (0, PEER_LOST)
    assert first_dead(failures(r0=-15, r1=-15), 2) == (0, -15), "somebody ended both"


def test_a_port_in_use_gets_a_clear_error(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        command = begin("train", str(config(tmp_path)), "evaluation.prompts=null", cwd=tmp_path, environment=env)
        said = [line for line in command.finish(75).splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert f"the 2 processes of the run don't meet at localhost:{port} (" in said[0]
    assert "set MASTER_PORT to a port that no other program uses" in said[0]


@pytest.mark.slow
def test_ctrl_c_stops_all_between_two_steps_and_saves(tmp_path):
    process = start(config(tmp_path, "steps=500", "save_every=500"), 2)
    in_step(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output = finished(process, code=130, seconds=60)
    assert output.count("Stopped; the run is saved. Go on with:") == 1
    assert "Traceback" not in output
    state, warnings = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert not warnings
    assert state
    assert state["step"] == rows(tmp_path)[-1]["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ('raise OSError("no paper")', "no paper (broken.py:"),
        ("sys.exit(0)", "SystemExit"),
    ],
)
def test_an_error_of_one_rank_is_printed_once_and_ends_all(tmp_path, end, sentence):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.format(end=end))
    output = finished(start(config(tmp_path, f"rewards={{'{file}:broken': 1}}"), 2), code=2)
    assert output.count(sentence) == 1
    assert output.count("error:") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_process_without_signal_neither_stops_nor_biases_the_others(tmp_path):
    """Only the groups of the first process have rewards that differ: with three as with one."""
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN)
    args = FlowGRPOConfig.from_yaml(config(tmp_path / "look"))
    dealt = PromptSampler(load_prompts(args.prompts), args.seed).sample(0, 6, 1).prompts
    (tmp_path / "loud.txt").write_text("\n".join([dealt[0], dealt[3]]))  # groups 0 and 3 are the first of three's
    settings = [f"rewards={{'{file}:uneven': 1}}", "steps=1"]
    run_alone(config(tmp_path / "1", *settings))
    forked(config(tmp_path / "3", *settings), 3)
    same(tmp_path / "1", tmp_path / "3")
    assert rows(tmp_path / "1")[1]["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_an_uneven_share_is_refused_in_a_clear_error(tmp_path):
    output = forked(config(tmp_path, "prompts_per_step=4"), 3, code=2)
    assert "prompts_per_step=4 is not divisible by updates x processes = 1 x 3" in output


@pytest.mark.parametrize(("rank", "world_size"), [("5", "2"), ("2", "2"), ("1", "1"), ("x", "2"), ("0", "-3")])
def test_a_rank_that_the_run_does_not_have_is_refused_and_does_not_wait(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=r"RANK=|WORLD_SIZE="):
        Processes.from_environment()


def test_a_process_takes_the_largest_micro_batch_that_divides_its_rows():
    assert shared_microbatch(2, 4, 3, 4, updates=1) == 3
    assert shared_microbatch(2, 4, 3, 4, updates=1, pairs=True) == 2
    with pytest.raises(ValueError, match="dpo compares pairs of rows, but a process has 3"):
        shared_microbatch(2, 2, 3, 4, updates=1, pairs=True)


def test_gradients_add_up_missing_ones_count_as_0_and_errors_are_shared():
    call_in_ranks(add_up_gradients, 2)


def test_an_expert_that_no_process_has_called_is_not_moved():
    call_in_ranks(step_like_one_process, 2)


def test_gradients_are_put_into_messages_in_order_each_counted_once(monkeypatch):
    monkeypatch.setattr("flow_grpo.distributed.processes.BUCKET_NUMEL", 10)
    counted = []

    class Gradient(torch.Tensor):
        def numel(self) -> int:
            counted.append(self)
            return super().numel()

    sizes = [4, 4, 4, 20, 1, *[1] * 8, 9]
    buckets = list(_buckets([torch.ones(size).as_subclass(Gradient) for size in sizes]))
    assert [[len(gradient) for gradient in bucket] for bucket in buckets] == [[4, 4], [4], [20], [1] * 9, [9]]
    assert len(counted) <= 2 * len(sizes)


def test_values_are_exchanged_apart_from_gradients_and_waited_for_longer():
    call_in_ranks(exchange_values_apart_from_gradients, 2)


@pytest.mark.parametrize("work", [leave_no_group, keep_a_found_group])
def test_a_run_destroys_the_process_group_that_it_made_and_none_that_it_found(tmp_path, no_report, work):
    call_in_ranks(partial(work, tmp_path), 2)


def test_what_processes_exchange_after_they_have_left_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: None)
    processes = Processes(0, 2, value_group="found")
    monkeypatch.setattr(Processes, "current", processes)
    processes.destroy()
    with pytest.raises(FlowGRPOError, match=r"was left at the end of train\(\): make another trainer"):
        processes.all_gather(1)


def test_a_callback_that_calls_what_all_processes_do_together_is_one_sentence():
    processes = Processes(0, 2, value_group="found")
    callback = SimpleNamespace(on_step_end=lambda *_, **__: processes.all_gather(1))
    callbacks = CallbackList([callback], FlowGRPOConfig(), None, processes)
    with pytest.raises(FlowGRPOError, match=r"runs on the main process alone .*: ask for it by control\.should_evaluate"):
        callbacks.call("on_step_end")
    assert not processes.in_callback
