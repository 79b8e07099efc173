"""What launchers set in the environment of their processes, and what is made of it."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from support.paths import ROOT
from torch.distributed import run as torchrun

from flow_grpo.cli.app import app
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.launchers import VARIABLES, adopt, restarts
from flow_grpo.distributed.processes import shared_microbatch

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-09,12],big1"}


# what a rank makes of its environment, in place of a run
COMMAND = f"""#!{sys.executable}
import os, sys
from flow_grpo.distributed.launchers import adopt
adopt()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
os.write(1, (" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]) + "\\n").encode())
"""
SRUN_STUB = """#!/bin/sh
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$rank SLURM_STEP_NODELIST='n[3-4]' SLURM_JOB_ID=7 "$@"
done
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    others = (
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "ACCELERATE_MIXED_PRECISION",
        "SLURM_RESTART_COUNT",
    )
    for name in (*TORCH, *(name for row in VARIABLES for name in row), *others):
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SRUN, ["5", "8", "1", "gpu07"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "n1,n2"}, ["5", "8", "1", "n1"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "rack3-[2]-ib"}, ["5", "8", "1", "rack3-2-ib"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "rack[1-2]n[01-04],big1"}, ["5", "8", "1", "rack1n01"]),
        ({**OMPI, "MASTER_ADDR": "head"}, ["3", "4", "1", "head"]),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ["3", "4", "1", "localhost"]),
        ({**OMPI, **SRUN, "SLURM_JOB_NODELIST": "a[1-2]"}, ["3", "4", "1", "a1"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ["1", "2", "1", "localhost"]),
    ],
)
def test_srun_and_mpirun_tell_each_process_its_rank(environment, expected):
    os.environ.update(environment)
    adopt()
    assert [os.environ[name] for name in TORCH[:4]] == expected


def test_an_interactive_shell_of_slurm_is_one_process_and_torchrun_is_left_alone():
    os.environ.update({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"})
    adopt()
    assert "RANK" not in os.environ
    os.environ.update({**SRUN, "RANK": "2"})
    adopt()
    assert os.environ["RANK"] == "2"


def test_two_jobs_on_a_machine_get_two_ports():
    ports = set()
    for job in ("101", "102", "101"):
        os.environ.update({**SRUN, "SLURM_JOB_ID": job})
        os.environ.pop("RANK", None)
        os.environ.pop("MASTER_PORT", None)
        adopt()
        ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 2
    assert all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (OMPI, r"set MASTER_ADDR to its machine \(mpirun -x MASTER_ADDR=HOST\), or use torchrun"),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "a"},
            "starts no ranks on machines without a GPU: use torchrun",
        ),
    ],
)
def test_a_launcher_that_says_too_little_is_refused_with_the_torchrun_line(environment, sentence):
    os.environ.update(environment)
    with pytest.raises(ValueError, match=sentence):
        adopt()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, True),
    ],
)
def test_a_launcher_that_restarts_is_known_by_its_variables(monkeypatch, environment, expected):
    for name in ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert restarts() is expected


@pytest.mark.parametrize(("script", "host"), [("slurm.sh", "n3"), ("mpirun.sh", "localhost")])
def test_an_example_script_starts_connected_ranks(tmp_path, script, host):
    if script == "mpirun.sh" and not shutil.which("mpirun"):
        pytest.skip("no mpirun here")
    programs = {"flow-grpo": COMMAND} | ({"srun": SRUN_STUB} if script == "slurm.sh" else {})
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    env = {**os.environ, **root, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [str(Path(ROOT) / "examples" / script), "tiny_ocr", "steps=2"]
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert sorted(output.splitlines()) == [f"{rank} 2 {rank} {host} train tiny_ocr steps=2 --resume auto" for rank in (0, 1)]


def test_the_pytorchjob_starts_ranks_on_both_nodes_by_the_operators_variables(monkeypatch):
    job = yaml.safe_load((ROOT / "examples" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas, processes = job["spec"]["pytorchReplicaSpecs"], job["spec"]["nprocPerNode"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    for rank, kind in enumerate(("Master", "Worker")):
        pod = replicas[kind]["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "pytorch", "else the operator sets no variables"
        program, *words = container["command"]
        assert program == "torchrun"
        sent = {"NNODES": nodes, "NPROC_PER_NODE": processes, "NODE_RANK": rank, "MASTER_ADDR": "flow-grpo-master-0"}
        for name, value in {**sent, "MASTER_PORT": 23456}.items():
            monkeypatch.setenv(f"PET_{name}", str(value))
        given = torchrun.parse_args(words)
        assert (given.nnodes, given.nproc_per_node, given.node_rank) == (str(nodes), processes, rank)
        assert (given.master_addr, given.master_port) == ("flow-grpo-master-0", 23456)
        assert (given.module, given.training_script) == (True, "flow_grpo")
        command, *more = given.training_script_args
        train = typer.main.get_command(app).commands[command].make_context(command, more).params
        assert train["resume"] == "auto"
        args = FlowGRPOConfig.from_yaml(train["config"], train["overrides"])
        shared_microbatch(nodes * int(processes), args.prompts_per_step, args.images_per_prompt, 1, updates=2)
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounted[str(Path(args.output_dir).parent)]], "all pods write there"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(processes)
