"""Runs of several processes on this machine, and what two runs must have in common."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.run_folder import checkpoint
from flow_grpo.trainer import FlowGRPOTrainer
from support import cli_process
from support.embedded import short_run
from support.paths import ROOT
from support.run_contents import MEASURED

WHOLE = ("lora=null", "optimizer.lr=1.0e-4")
UNEVEN = """
def uneven(images, prompts):
    words = open(__file__.replace("uneven.py", "loud.txt")).read().splitlines()
    return [float(x.mean()) if p in words else 0.0 for x, p in zip(images, prompts)]
"""
SETTINGS = [
    "steps=2",
    "prompts_per_step=6",
    "images_per_prompt=2",
    "microbatch=2",
    "save_every=1",
    "device=cpu",
    "evaluation.max_prompts=4",
    # AdamW's first steps are the gradient's sign, which the last bit of one near 0 decides: a large eps makes them smooth
    "optimizer.eps=1.0e-4",
]


# without a GPU it starts two processes only when told that there are several
ACCELERATE = (
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines=1",
    "--num_processes=2",
    "--mixed_precision=no",
    "--dynamo_backend=no",
)


def start(config: Path, processes: int, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    """By the command's own launcher, or by another one; in a process group of its own, as a terminal's foreground job is."""
    own = [] if launcher else [f"--num-processes={processes}"]
    through = ["-m", *launcher, "-m", "flow_grpo"] if launcher else ["-m", "flow_grpo"]
    words = [sys.executable, *through, "train", str(config), *more, *own]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=env, cwd=config.parent, start_new_session=True, **streams)


def finished(process: subprocess.Popen, code: int = 0, seconds: float = 180) -> str:
    output = process.communicate(timeout=seconds)[0]
    assert process.returncode == code, output
    return output


def environments(processes: int) -> list[dict[str, str]]:
    """The variables by which a launcher tells each rank where the others are."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(processes))]


def begin_ranks(config: Path, processes: int, *more: str) -> list[cli_process.Command]:
    """The ranks without their launcher, forked from a process that has imported everything: seconds less for each."""
    return [
        cli_process.begin("train", str(config), *more, cwd=config.parent, environment=environment)
        for environment in environments(processes)
    ]


def call_in_ranks(work: Callable[[], None], processes: int) -> None:
    """Call a function, which a support module has, in each of these ranks; none may raise."""
    ranks = [cli_process.FORKS.Process(target=_call, args=(work, environment)) for environment in environments(processes)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * processes


def _call(work: Callable[[], None], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    work()


def train_on_machines(file: Path, processes_of_each: int) -> None:
    """Train in this rank, whose machine has so many."""
    name = f"node{int(os.environ['RANK']) // processes_of_each}"
    socket.gethostname = lambda: name
    run_alone(file)


def forked(config: Path, processes: int, *more: str, code: int = 0) -> str:
    """Runs these ranks to their end; returns what they wrote."""
    return "".join([rank.finish(code, seconds=600) for rank in begin_ranks(config, processes, *more)])


def run_alone(config: Path, resume: bool = False) -> None:
    """One process, which is this one."""
    FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml(config)).train(resume)


def config(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(short_run(folder / "run", *SETTINGS, *overrides).to_yaml())
    return file


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    state, _ = checkpoint.latest(folder / "run" / "checkpoints")
    assert state
    return state["adapter"]


def same(one: Path, other: Path) -> None:
    for a, b in zip(rows(one), rows(other), strict=True):
        assert {k for k in a if not k.startswith(MEASURED)} == {k for k in b if not k.startswith(MEASURED)}
        for name, value in a.items():
            if not name.startswith(MEASURED) and name != "ratio/max_deviation":
                # the loss is a sum of advantages that cancel
                assert b[name] == pytest.approx(value, rel=2e-3, abs=1e-4 if name == "loss" else 1e-6), name
    left, right = adapter(one), adapter(other)
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=0, atol=2e-5)
