"""Runs over several hosts, and what goes wrong there: `python tests/campaigns/clusters.py`.

The hosts are Linux namespaces on this machine with addresses, names and links of their own; the run folder is shared. A run of two
hosts is compared with that of one process. Then each fault is tried: all hosts must end within two minutes of the stated time, with a
sentence, and the same command with `--resume auto` must give the metrics, the LoRA and the last checkpoint of the run without a
fault, to the last bit. Launchers that restart do it by themselves.

Prints a line for each row, and exits with 1 if one failed; with 77 if this machine can't have such hosts.
"""

import argparse
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kills import differences, numbers
from support.cli_process import Command
from support.embedded import short_run, tiny_policy
from support.hosts import Host, inside
from support.paths import ROOT

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.run_folder import layout
from flow_grpo.training.setup import prepare_policy

SKIPPED = 77
PATIENCE = 15  # FLOW_GRPO_PEER_TIMEOUT of these runs
GRACE = 30  # flow_grpo.distributed.peers
AT_ONCE, KILLED, MISSING, SILENT = 10, 20, PATIENCE, PATIENCE + GRACE  # seconds that docs/clusters.md states
SERVER = 60  # five attempts of five seconds, with pauses, and the wait of the other rank's sentence
LATER = 120  # seconds that a busy machine may take in addition
STEP = 3  # in which the faults happen, with two steps saved
PORT = 29500
REWARD = f"""
import os
import time
from pathlib import Path

CALLS, RANK = 0, os.environ.get("RANK", "0")

def bright(images, prompts):
    global CALLS
    CALLS += 1
    fault = os.environ.get("FAULT", "") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else ""
    if CALLS == {STEP} and fault:
        Path(os.environ["HERE"], f"in_step_{{RANK}}").touch()
        if fault == f"error of {{RANK}}":
            raise OSError("no paper")
        if fault == f"dies {{RANK}}":
            os.kill(os.getpid(), 9)
        time.sleep(4 if fault == "waits" else 0)
    return [float(image.mean()) for image in images]
"""
STEPS = 5
SETTINGS = [f"steps={STEPS}", "save_every=1", "prompts_per_step=4", "images_per_prompt=2", "microbatch=4", "device=cpu"]
# a small eps would make steps of rounding errors
SETTINGS += ["evaluation.prompts=null", "trackers=[]", "keep_checkpoints=9", "optimizer.eps=1.0e-4"]


REMOTE = "{remote: http://10.0.0.3:8000, options: {timeout: 5, attempts: 5}}"


class Lab:
    """Four hosts, and a folder that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [Host(number, folder) for number in (1, 2, 3, 4)]
        (folder / "reward.py").write_text(REWARD)

    def config(self, name: str, reward: str = "1", *more: str) -> Path:
        """The file of a run, whose folder lies beside it."""
        file = self.folder / f"{name}.yaml"
        rewards = f"rewards={{'{self.folder}/reward.py:bright': {reward}}}"
        file.write_text(short_run(self.folder / name, "model=tiny", *SETTINGS, rewards, *more).to_yaml())
        return file

    def in_step(self, *names: str) -> None:
        """Wait until these processes are in the step of the faults."""
        deadline = time.monotonic() + 300
        while not all((self.folder / f"in_step_{name}").exists() for name in names):
            assert time.monotonic() < deadline, f"not all of {names} have come to step {STEP}"
            time.sleep(0.05)

    def serve(self, fault: str) -> None:
        """Start a reward server on the third host."""
        words = ["serve", f"{self.folder}/reward.py:bright", "--host", self.hosts[2].address]
        environment = {"REWARD_TOKEN": "secret", "RANK": "server", "HERE": str(self.folder), "FAULT": fault}
        server = self.hosts[2].begin(*words, cwd=self.folder, environment=environment)
        server.wait_for(lambda: "http://" in server.output)

    def repair(self) -> None:
        for host in self.hosts:
            host.repair()
        for file in self.folder.glob("in_step_*"):
            file.unlink()


class Run:
    """A command on one of the hosts."""

    def __init__(self, process: Command | subprocess.Popen, output: Path | None = None) -> None:
        self.process, self.output_file, self.began = process, output, time.monotonic()
        self.seconds: float | None = None

    @property
    def status(self) -> int | None:
        return self.process.process.exitcode if isinstance(self.process, Command) else self.process.poll()

    @property
    def output(self) -> str:
        return self.process.output if isinstance(self.process, Command) else self.output_file.read_text()

    @property
    def sentence(self) -> str:
        """The first line that says what is wrong."""
        lines = [line.partition("error: ")[2] for line in self.output.splitlines() if line.startswith("error: ")]
        return lines[0] if lines else ""


Start = Callable[[Lab, Host, int, Path, list[str], dict[str, str]], Run]


def by_variables(lab: Lab, host: Host, rank: int, config: Path, words: list[str], environment: dict[str, str]) -> Run:
    """As srun does it, which gives each process its rank."""
    srun = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "node[1-2]"}
    variables = {**srun, "SLURM_JOB_ID": "7", **environment}
    return Run(host.begin("train", str(config), *words, cwd=lab.folder, environment=variables))


def by_torchrun(*options: str) -> Start:
    """Torch's launcher on each host."""

    def start(lab: Lab, host: Host, rank: int, config: Path, words: list[str], environment: dict[str, str]) -> Run:
        output = lab.folder / f"torchrun_{host.name}.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
        where = [word.format(rank=rank) for word in options]
        command = [*torchrun, *where, "-m", "flow_grpo", "train", str(config), *words]
        return Run(host.popen(command, lab.folder, {"PYTHONPATH": str(ROOT), **environment}, output), output)

    return start


def by_mpirun(lab: Lab, host: Host, rank: int, config: Path, words: list[str], environment: dict[str, str]) -> Run:
    """Open MPI on the first host, which starts the other one by an agent in the place of ssh."""
    if rank:
        return Run(host.popen(["true"], lab.folder, {}, lab.folder / "none.log"), lab.folder / "none.log")
    agent, output = lab.folder / "agent.sh", lab.folder / "mpirun.log"
    other = lab.hosts[1].enter
    agent.write_text(f'#!/bin/sh\nshift\nexec {" ".join(other)} sh -c "$*"\n')
    agent.chmod(0o700)
    options = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent), "-H", "node1,node2", "-np", "2"]
    options += [word for name in ("MASTER_ADDR", "PYTHONPATH", "HERE", "FAULT", *environment) for word in ("-x", name)]
    command = ["mpirun", *options, sys.executable, "-m", "flow_grpo", "train", str(config), *words]
    variables = {"MASTER_ADDR": "node1", "PYTHONPATH": str(ROOT), "HERE": "", "FAULT": "", **environment}
    return Run(host.popen(command, lab.folder, variables, output), output)


STATIC = by_torchrun("--nnodes=2", "--node-rank={rank}", "--master-addr=node1", f"--master-port={PORT}")
RESTARTING = by_torchrun(
    "--nnodes=2", "--node-rank={rank}", "--master-addr=node1", f"--master-port={PORT}", "--max-restarts=2"
)
RENDEZVOUS = ("--rdzv-backend=c10d", f"--rdzv-endpoint=node1:{PORT}", "--rdzv-id=7", "--max-restarts=3")


def nothing(lab: Lab) -> None:
    """No fault."""


@dataclass
class Row:
    """A way to run on two hosts, and a fault.

    Attributes:
        stated: seconds within which all hosts end, from the fault on; 0 if the run goes on.
        sentence: a regular expression of what each host says; None if the run goes on to its end.
        before: what is wrong from the start.
        during: what happens in the third step, when both are in it.
        gone: hosts of which nothing can be expected.
        fault: what the reward does in the third step: "error of RANK", "dies RANK".
        words, environment: what is added to the command, of each rank and of all.
        starts: ranks that are started.
        server: the third host serves the reward.
        is_equal: to the last bit; else up to rounding, as after a step on another number of hosts.
    """

    stated: float = 0
    sentence: str | None = None
    start: Start = by_variables
    before: Callable[[Lab], Any] = nothing
    during: Callable[[Lab], Any] | None = None
    gone: tuple[int, ...] = ()
    fault: str = ""
    words: Mapping[int, list[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    starts: tuple[int, ...] = (0, 1)
    server: bool = False
    is_equal: bool = True


def spoil_folder(host: int, *mounts: str) -> Callable[[Lab], None]:
    """Mount something in the place of the run folder of a host."""

    def spoil(lab: Lab) -> None:
        folder = lab.folder / "run"
        folder.mkdir(exist_ok=True)
        for options in mounts:
            lab.hosts[host].mount(folder, options.format(folder=folder))

    return spoil


def begun(lab: Lab) -> None:
    """A run that was stopped after two steps."""
    run = lab.folder / "run"
    shutil.copytree(lab.folder / "reference", run)
    for step in range(STEP, STEPS + 1):
        shutil.rmtree(layout.step_folder(run / layout.CHECKPOINTS, step))


def begun_elsewhere(lab: Lab) -> None:
    """The second host does not see the folder."""
    begun(lab)
    spoil_folder(1, *UNSHARED)(lab)


def restart_server(lab: Lab) -> None:
    """Kill it, and start it again some seconds later."""
    lab.hosts[2].signal(signal.SIGKILL)
    time.sleep(3)
    lab.serve("")


READ_ONLY = ("--bind {folder}", "-o remount,bind,ro")
UNSHARED = ("-t tmpfs none",)


def taken_port(lab: Lab) -> None:
    """Another program has the port of the job."""
    script = f"import socket, time; s = socket.create_server(('', {PORT})); print(flush=True); time.sleep(600)"
    lab.hosts[0].popen([sys.executable, "-c", script], lab.folder, {}, lab.folder / "taken.log")
    time.sleep(1)


def signal_host(host: int, number: int) -> Callable[[Lab], None]:
    return lambda lab: lab.hosts[host].signal(number)


GONE = r"rank {} of 2 on node{} is gone: no sign of life for \d+ s\. Go on, when it is back, with: "
DEBIAN = {"node1": "127.0.1.1"}  # how Debian's installer writes a machine's own name
ROWS: dict[str, Row] = {
    "torchrun, static": Row(start=STATIC),
    "torchrun, c10d": Row(start=by_torchrun("--nnodes=2", *RENDEZVOUS)),
    "srun": Row(),
    "mpirun": Row(start=by_mpirun),
    "own name is 127.0.1.1 (Debian)": Row(
        before=lambda lab: [host.knows({host.name: "127.0.1.1"}) for host in lab.hosts], start=STATIC
    ),
    "own name is unknown": Row(before=lambda lab: lab.hosts[1].knows({"node2": ""})),
    "wrong host name on node2": Row(
        MISSING,
        r"don't meet at ",
        before=lambda lab: lab.hosts[1].knows({"node1": ""}),
        environment={"MASTER_PORT": str(PORT)},
    ),
    "wrong address on node2": Row(MISSING, "don't meet at ", before=lambda lab: lab.hosts[1].knows({"node1": "10.0.0.77"})),
    "node2 does not start": Row(MISSING, r"without rank 1 after \d+ s", starts=(0,)),
    "node1 does not start": Row(MISSING, "don't meet at ", starts=(1,)),
    "taken port": Row(AT_ONCE, "set MASTER_PORT", before=taken_port, gone=(1,), environment={"MASTER_PORT": str(PORT)}),
    "config is not there on node2": Row(AT_ONCE, "missing.yaml", words={1: ["MISSING"]}),
    "config is not there on node1": Row(AT_ONCE, "missing.yaml", words={0: ["MISSING"]}),
    "config is not there on node2, torchrun": Row(AT_ONCE, "missing.yaml", words={1: ["MISSING"]}, start=STATIC),
    "prompts are not there on node2": Row(AT_ONCE, "missing.txt", words={1: ["prompts=missing.txt"]}),
    "read-only folder on node1": Row(AT_ONCE, "nothing can be written to", before=spoil_folder(0, *READ_ONLY)),
    "read-only folder on node2": Row(before=spoil_folder(1, *READ_ONLY)),
    "--resume without a checkpoint": Row(
        AT_ONCE, "has no checkpoint to resume from", words={0: ["--resume"], 1: ["--resume"]}
    ),
    "error of rank 1": Row(AT_ONCE, "no paper", fault="error of 1"),
    "error of rank 0": Row(AT_ONCE, "no paper", fault="error of 0"),
    "error of rank 1, torchrun": Row(AT_ONCE, "no paper", fault="error of 1", start=STATIC),
    "killed rank 1": Row(KILLED, GONE.format(1, 2), during=signal_host(1, signal.SIGKILL), gone=(1,)),
    "killed rank 0": Row(KILLED, GONE.format(0, 1), during=signal_host(0, signal.SIGKILL), gone=(0,)),
    "killed rank 1, torchrun": Row(KILLED, GONE.format(1, 2), fault="dies 1", start=STATIC, gone=(1,)),
    "stopped rank 1": Row(SILENT, GONE.format(1, 2), during=signal_host(1, signal.SIGSTOP), gone=(1,)),
    "stopped rank 0": Row(SILENT, GONE.format(0, 1), during=signal_host(0, signal.SIGSTOP), gone=(0,)),
    "dead link": Row(SILENT, r"rank . of 2 on node. is gone", during=lambda lab: lab.hosts[1].cut()),
    "lost node2": Row(SILENT, GONE.format(1, 2), during=lambda lab: lab.hosts[1].lose_power(), gone=(1,)),
    "lost node1": Row(SILENT, GONE.format(0, 1), during=lambda lab: lab.hosts[0].lose_power(), gone=(0,)),
    "lost node2, torchrun": Row(
        SILENT, GONE.format(1, 2), during=lambda lab: lab.hosts[1].lose_power(), gone=(1,), start=STATIC
    ),
    "killed rank 1, torchrun restarts": Row(fault="dies 1", start=RESTARTING),
    "killed rank 0, torchrun restarts": Row(fault="dies 0", start=RESTARTING),
    "lost node2, torchrun --nnodes 1:2": Row(
        start=by_torchrun("--nnodes=1:2", *RENDEZVOUS),
        during=lambda lab: lab.hosts[1].lose_power(),
        gone=(1,),
        is_equal=False,
    ),
    "requeued by SLURM": Row(before=begun, environment={"SLURM_RESTART_COUNT": "1"}),
    "unshared folder on node2": Row(
        AT_ONCE, "no whole checkpoint", before=begun_elsewhere, environment={"SLURM_RESTART_COUNT": "1"}
    ),
    "server": Row(server=True),
    "server is killed and comes back": Row(server=True, during=restart_server),
    "lost server": Row(
        SERVER, "no server is left for the reward", server=True, during=lambda lab: lab.hosts[2].lose_power()
    ),
}


def started(lab: Lab, row: Row, config: Path, *more: str, faulty: bool) -> dict[int, Run]:
    """Start a row's command on its hosts, with its fault or without."""
    runs = {}
    for rank in row.starts if faulty else (0, 1):
        words = [*more, *(row.words.get(rank, []) if faulty else [])]
        fault = row.fault or ("waits" if row.during else "")
        variables = {"FLOW_GRPO_PEER_TIMEOUT": str(PATIENCE), "HERE": str(lab.folder), "OMP_NUM_THREADS": "1"}
        variables |= {"REWARD_TOKEN": "secret", "FAULT": fault if faulty else "", **row.environment}
        path = config.with_name("missing.yaml") if "MISSING" in words else config
        words = [word for word in words if word != "MISSING"]
        runs[rank] = row.start(lab, lab.hosts[rank], rank, path, words, variables)
    return runs


def wait(runs: Mapping[int, Run], since: float, seconds: float) -> None:
    """Wait until all have ended, and note when each did."""
    while any(run.seconds is None for run in runs.values()) and time.monotonic() < since + seconds:
        for run in runs.values():
            if run.seconds is None and run.status is not None:
                run.seconds = time.monotonic() - since
        time.sleep(0.1)


def largest_difference(run: Path, reference: Path) -> tuple[float, str]:
    """Of a metric, and its name, relative to the metric's largest value of all steps; infinite if the runs have other metrics."""
    left, right = numbers(run), numbers(reference)
    if len(left) != len(right) or any(a.keys() != b.keys() for a, b in zip(left, right, strict=True)):
        return math.inf, "their names"
    found = (0.0, "none")
    unlike = ("loss", "ratio/max_deviation")  # a sum of advantages that cancel; a rounding error
    for name in {name for row in left for name, value in row.items() if isinstance(value, float) and name not in unlike}:
        pairs = [(row[name], other[name]) for row, other in zip(left, right, strict=True) if name in row]
        size = max(abs(value) for value, _ in pairs)
        found = max(found, (max(abs(a - b) for a, b in pairs) / (size or 1.0), name))
    return found


def tried(lab: Lab, row: Row, reference: Path) -> tuple[list[str], str]:
    """What is wrong with a row, and its line of the table."""
    folder = lab.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    config = lab.config("run", REMOTE if row.server else "1")
    row.before(lab)
    if row.server:
        lab.serve("waits" if row.during else "")
    since = time.monotonic()
    runs = started(lab, row, config, faulty=True)
    if row.during is not None:
        lab.in_step(*("server",) if row.server else ("0", "1"))
        since = time.monotonic()
        row.during(lab)
    elif row.fault:
        lab.in_step(row.fault[-1])
        since = time.monotonic()
    watched = {rank: run for rank, run in runs.items() if rank not in row.gone or row.fault}
    wait(watched, since, row.stated + LATER + 120 * (row.sentence is None))
    wrong = []
    for rank, run in watched.items():
        if run.seconds is None:
            wrong.append(f"node{rank + 1} has not ended: {run.output[-1500:]}")
        elif (run.status != 0) != (row.sentence is not None):
            wrong.append(f"node{rank + 1} ended with status {run.status}: {run.output[-1500:]}")
        elif row.sentence is not None and rank not in row.gone and not re.search(row.sentence, run.sentence):
            wrong.append(f"node{rank + 1} said: {run.output[-1500:]}")
    ends = ", ".join(f"{run.seconds or -1:.0f} s ({run.status})" for run in watched.values())
    sentence = next((run.sentence for run in watched.values() if run.sentence), "")
    lab.repair()
    how = "went on"
    if row.sentence is not None and not wrong:
        if row.server:
            lab.serve("")
        again = started(lab, row, config, "--resume", "auto", faulty=False)
        wait(again, time.monotonic(), 300)
        wrong += [f"resumed, node{rank + 1}: {run.output[-1500:]}" for rank, run in again.items() if run.status != 0]
        how = "resumed"
    if not wrong:
        difference, metric = largest_difference(folder, reference)
        wrong = differences(folder, reference) if row.is_equal else [metric] * (difference > 1e-3)
        how += ", equal" if row.is_equal else f", equal up to {difference:.0e}"
    lab.repair()
    return wrong, f"{row.stated:.0f} s | {ends} | {how if not wrong else 'FAILED'} | {sentence}"


PLACES = {"2 hosts": (0, 1), "3 hosts": (0, 1, 2), "4 hosts": (0, 1, 2, 3), "2 hosts with 2 processes": (0, 0, 1, 1)}
LARGE = "lora={rank: 64, alpha: 64}"  # beside which what else is sent is small
KINDS = {
    "LoRA": [LARGE],
    "LoRA, fsdp2": [LARGE, "memory.shard=fsdp2"],
    "all weights": ["lora=null"],
    "all weights, fsdp2": ["lora=null", "memory.shard=fsdp2"],
    "LoRA, fsdp2 within nodes": [LARGE, "memory.shard=hsdp"],
    "all weights, fsdp2 within nodes": ["lora=null", "memory.shard=hsdp"],
}


def sent(lab: Lab, places: tuple[int, ...], settings: list[str]) -> list[int]:
    """The bytes that leave each host in a step: a run of three steps less one of one step, by half."""
    of_runs = []
    for steps in (1, 3):
        shutil.rmtree(lab.folder / "traffic", ignore_errors=True)
        few = [f"steps={steps}", "save_every=100", "prompts_per_step=12", "images_per_prompt=2", "microbatch=6"]
        config = lab.config("traffic", "1", *few, *settings)
        before = [host.bytes_sent() for host in lab.hosts]
        runs = {}
        for rank, place in enumerate(places):
            local = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": str(places[:rank].count(place))}
            variables = {**local, "MASTER_ADDR": "node1", "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
            runs[rank] = Run(lab.hosts[place].begin("train", str(config), cwd=lab.folder, environment=variables))
        wait(runs, time.monotonic(), 400)
        assert all(run.status == 0 for run in runs.values()), [run.output for run in runs.values()]
        of_runs.append([host.bytes_sent() - former for host, former in zip(lab.hosts, before, strict=True)])
        lab.repair()
    return [(three - one) // 2 for one, three in zip(*of_runs, strict=True)]


def print_bytes(lab: Lab) -> None:
    """What a step sends."""
    print("| run | MB of what is trained | where | MB that leave each host in a step |\n|---|---|---|---|")
    for kind, settings in KINDS.items():
        policy = tiny_policy()
        prepare_policy(policy, FlowGRPOConfig.from_yaml(lab.config("traffic", "1", *settings)), Processes())
        count = 4 * sum(parameter.numel() for parameter in policy.trainable_parameters().values())
        for where, places in PLACES.items():
            if "within" in kind and len(set(places)) == len(places):
                continue  # each process has all weights
            of_hosts = sent(lab, places, settings)[: max(places) + 1]
            words = ", ".join(f"{number / 1e6:.2f}" for number in of_hosts)
            print(f"| {kind} | {count / 1e6:.2f} | {where} | {words} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), metavar="WORD", help="rows whose names have one of these words"
    )
    parser.add_argument("--bytes", action="store_true", help="measure what a step sends between hosts, in place of the rows")
    args = parser.parse_args()
    if (reason := inside()) is not None:
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    chosen = {name: row for name, row in ROWS.items() if any(word in name for word in args.rows)}
    lost = []
    with tempfile.TemporaryDirectory() as place:
        lab = Lab(Path(place))
        if args.bytes:
            print_bytes(lab)
            return
        for name, both in (("alone", False), ("reference", True)):
            config = lab.config(name)
            ranks = (
                started(lab, Row(), config, faulty=False)
                if both
                else {0: Run(lab.hosts[0].begin("train", str(config), cwd=lab.folder, environment={}))}
            )
            wait(ranks, time.monotonic(), 300)
            assert all(run.status == 0 for run in ranks.values()), [run.output for run in ranks.values()]
        reference = lab.folder / "reference"
        difference, metric = largest_difference(lab.folder / "alone", reference)
        print(f"two hosts and one process differ by {difference:.1e} ({metric})", flush=True)
        print("| row | stated | ended after (status), by host | then | sentence |\n|---|---|---|---|---|")
        for name, row in chosen.items():
            try:
                wrong, line = tried(lab, row, reference)
            except AssertionError as error:
                wrong, line = [str(error)], "FAILED"
                lab.repair()
            print(f"| {name} | {line} |", flush=True)
            lost += [f"{name}: {what}" for what in wrong]
    print("\n".join(lost) or f"{len(chosen)} rows, nothing lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
