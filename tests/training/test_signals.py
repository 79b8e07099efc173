"""Whatever hangs, a run can be stopped: it is saved, nothing is lost, and no process stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.cli_process import begin
from support.embedded import short_run
from support.process_runs import begin_ranks
from support.reward_servers import Server, serving
from support.run_contents import MEASURED

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.errors import Interrupted
from flow_grpo.rewards.threads import DaemonThread, background, wait_for
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training import signals

# Brightness. While a file `hang` with a number and a manner is there, the call of that number hangs in that manner.
MINE = """
import pathlib, os, re, time
folder, calls = pathlib.Path(FOLDER), []
def mine(images, prompts):
    calls.append(1)
    if (folder / "hang").exists():
        number, how = (folder / "hang").read_text().split()
        if len(calls) == int(number) and os.environ.get("RANK", "1") == "1":
            (folder / "hanging").write_text(str(os.getpid()))
            while how == "asleep":
                time.sleep(3600)
            while how == "deaf":
                try:
                    time.sleep(3600)
                except KeyboardInterrupt:
                    (folder / "heard").touch()
            re.match("(a+)+$", "a" * 64 + "b")  # for years, and python does nothing else
    return images.mean((1, 2, 3))
"""


def write(folder: Path, hang: str = "") -> str:
    """The reward above, in a file of this folder; its name."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE.replace("FOLDER", repr(str(folder))))
    if hang:
        (folder / "hang").write_text(hang)
    return f"{folder / 'mine.py'}:mine"


def settings(folder: Path, where: str = "1", *more: str) -> FlowGRPOConfig:
    return short_run(
        folder / "run", f"rewards={{'{folder / 'mine.py'}:mine': {where}}}", "microbatch=4", "trackers=[]", *more
    )


def start(folder: Path, where: str = "1", *more: str):
    """The command that trains."""
    (folder / "run.yaml").write_text(settings(folder, where, *more).to_yaml())
    return begin("train", str(folder / "run.yaml"), cwd=folder)


def in_it(command, folder: Path) -> int:
    """Waits until the reward hangs; the process in which it does."""
    hanging = folder / "hanging"
    command.wait_for(lambda: hanging.exists() and hanging.read_text())  # it is empty for a moment
    assert hanging.exists(), command.output
    return int(hanging.read_text())


def numbers(folder: Path) -> list[dict]:
    """The metrics without the seconds."""
    rows = read_metrics(folder / "run")
    return [{k.replace(str(folder), ""): v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "lora" / "pytorch_lora_weights.safetensors")


def gone(process: int) -> bool:
    """Whether a process ends."""
    try:
        psutil.Process(process).wait(60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    FlowGRPOTrainer(args=settings(folder)).train()
    return folder


@pytest.mark.parametrize(
    ("hang", "where", "number"),
    [
        ("2 asleep", "1", signal.SIGTERM),
        pytest.param("1 asleep", "1", signal.SIGINT, marks=pytest.mark.slow),  # in the evaluation before the first step
        pytest.param("2 for_years", "{isolate: true}", signal.SIGINT, marks=pytest.mark.slow),
        # of the second half of the first step's images
        pytest.param("3 asleep", "{remote: URL}", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_reward_hangs_is_stopped_and_resumed_to_the_same_numbers(tmp_path, whole, hang, where, number):
    name = write(tmp_path, hang)
    server = Server(name) if "URL" in where else None
    with serving(*[server] if server else []):
        command = start(tmp_path, where.replace("URL", server.url) if server else where)
        hanging = in_it(command, tmp_path)
        if server:
            server.process.send_signal(signal.SIGSTOP)
        os.kill(command.process.pid, number)
        assert "--resume" in command.finish(130)
        assert server or gone(hanging)
    (tmp_path / "hang").unlink()
    FlowGRPOTrainer(args=settings(tmp_path)).train(resume=True)
    assert numbers(tmp_path) == numbers(whole)
    one, other = weights(tmp_path), weights(whole)
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_the_second_ctrl_c_ends_a_command_that_does_not_heed_the_first(tmp_path):
    name = write(tmp_path, "1 deaf")
    save_grid(tmp_path / "grid.png", torch.rand(1, 3, 32, 80), [ImageInfo("a", 0, "m")], columns=1)
    command = begin("score", "grid.png", "--reward", name, cwd=tmp_path)
    in_it(command, tmp_path)
    os.kill(command.process.pid, signal.SIGINT)
    command.wait_for((tmp_path / "heard").exists)
    time.sleep(1.2 * signals.DEBOUNCE)
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(130)


@pytest.mark.parametrize(
    "verb", ["score", *(pytest.param(v, marks=pytest.mark.slow) for v in ("rewards test", "eval", "doctor", "compare"))]
)
def test_the_first_ctrl_c_ends_the_other_commands(tmp_path, verb):
    name = write(tmp_path, "1 asleep")
    save_grid(tmp_path / "grid.png", torch.rand(2, 3, 32, 80), [ImageInfo("a", 0, "m"), ImageInfo("b", 0, "m")], columns=2)
    (tmp_path / "run.yaml").write_text(settings(tmp_path).to_yaml())
    words = {
        "score": ("score", "grid.png", "--reward", name),
        "rewards test": ("rewards", "test", name, "--images", "grid.png"),
        "eval": ("eval", "grid.png", "--reward", name),
        "doctor": ("doctor", "run.yaml"),
        "compare": ("compare", "run.yaml", "--seeds", "1", "--budget", "images=8", "--evaluations", "1"),
    }[verb]
    command = begin(*words, cwd=tmp_path)
    hanging = in_it(command, tmp_path)
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(130)
    assert gone(hanging)


@pytest.mark.slow
def test_the_process_of_a_run_ends_with_a_comparison_that_is_terminated(tmp_path):
    write(tmp_path, "1 for_years")
    (tmp_path / "run.yaml").write_text(settings(tmp_path).to_yaml())
    command = begin("compare", "run.yaml", "--seeds", "1", "--budget", "images=8", "--evaluations", "1", cwd=tmp_path)
    hanging = in_it(command, tmp_path)
    os.kill(command.process.pid, signal.SIGTERM)
    command.process.join(60)
    assert command.process.exitcode == -signal.SIGTERM
    assert gone(hanging)


def test_one_ctrl_c_stops_two_processes_of_which_one_hangs(tmp_path):
    """The other waits for the first's rewards."""
    write(tmp_path, "2 asleep")
    more = ("device=cpu", "prompts_per_step=4", "save_every=500", "steps=500")
    (tmp_path / "run.yaml").write_text(settings(tmp_path, "1", *more).to_yaml())
    ranks = begin_ranks(tmp_path / "run.yaml", 2)
    hanging = in_it(ranks[1], tmp_path)
    assert hanging == ranks[1].process.pid
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGINT)
    output = "".join([rank.finish(130) for rank in ranks])
    assert output.count("Stopped; the run is saved. Go on with:") == 1


# -- the parts ----------------------------------------------------------------------------------------------------------


def test_a_wait_returns_the_result_or_the_error_and_ends_when_the_run_is_to_stop():
    never, stop = threading.Event(), threading.Event()

    def fails() -> None:
        raise TimeoutError("its own")

    with background(lambda: False) as thread:
        assert wait_for(thread.submit(lambda: 5), lambda: False) == 5
        failing = thread.submit(fails)
        with pytest.raises(TimeoutError, match="its own"):
            wait_for(failing, lambda: False)
    threading.Timer(0.05, stop.set).start()
    futures = []

    def waits() -> None:
        with background(stop.is_set) as thread:
            futures.extend([thread.submit(never.wait), thread.submit(lambda: 1)])
            wait_for(futures[0], stop.is_set)

    with pytest.raises(Interrupted):
        waits()
    assert futures[1].cancelled(), "nothing begins after the end"
    assert DaemonThread.any_busy(), "nobody has waited"
    never.set()
    assert futures[0].result(60)


SCRIPT = """
import time, torch
from flow_grpo.rewards.threads import DaemonThread
def multiply():
    x, end = torch.randn(500, 500), time.monotonic() + 0.5
    while time.monotonic() < end:
        x = x @ x
thread, other = DaemonThread(), DaemonThread()
thread.submit(multiply), thread.submit(time.sleep)
while not thread.busy:
    pass
raise SystemExit(3)
"""


def test_a_script_ends_in_its_own_way_while_a_reward_is_within_torch():
    """A thread that is in C++ when the interpreter is taken down would abort it."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_an_error_waits_for_the_call_that_is_under_way():
    """The step that is made anew calls the same reward: never twice at a time."""
    begun, go_on, over = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go_on.wait(60)
        over.append(1)

    def step() -> None:
        with background(lambda: False) as thread:
            thread.submit(slow)
            begun.wait(60)
            threading.Timer(0.05, go_on.set).start()
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    assert over == [1]


TWICE = """
import signal, time
from flow_grpo.training import signals
signals.exit_on_second_interrupt(lambda: print("asked", flush=True))
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGINT)
print("goes on", flush=True)
time.sleep(1.1 * signals.DEBOUNCE)
signal.raise_signal(signal.SIGINT)
print("never", flush=True)
"""


def test_one_key_that_is_heard_twice_does_not_end_the_process():
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "asked\ngoes on\n")
