"""Kills runs at random moments and resumes them: `python tests/campaigns/kills.py --kills 100`.

A run of each objective with state of its own is trained once without a disturbance. Then it is trained again, and SIGKILL ends it at a
random moment, again and again, until it has ended by itself: its LoRA, its metrics (but for the seconds) and its last checkpoint must
equal the first run's, tensor by tensor. Two more parts kill one rank of two, or the launcher of two ranks.

Prints a line a run and the counts, and exits with 1 if anything was lost.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.cli_process import begin
from support.embedded import short_run
from support.run_contents import MEASURED

from flow_grpo.run_folder import checkpoint
from flow_grpo.run_folder.metrics_file import read_metrics

ODE = "sampling={steps: 3}"
STEPS = ["steps=4", "save_every=1", "evaluation.every=2", "ema_decay=0.9"]
RUNS = {  # settings over tests/conftest.py:short_run, of runs whose checkpoints hold more than a LoRA and its optimizer
    "grpo, two updates, auto clip": ["updates=2", "objective={name: grpo, clip_low: auto, clip_high: auto}"],
    "grpo, random window": ["objective.window={schedule: random, size: 1}"],
    "grpo, resampling and prompt skipping": [
        "prompts_per_step=3",
        "microbatch=12",
    ],
    "nft": ["objective={name: nft}", ODE],
    "awm with a KL": [
        "objective={name: awm, kl_weight: 0.1}",
        ODE,
        "optimizer.final_lr_ratio=0.2",
        "optimizer.warmup_steps=2",
    ],
    "ppo": ["objective={name: ppo, clip_low: 1.0e-3, clip_high: 1.0e-3}"],
    "stages": [f"stages=[{{steps: 2, objective: {{name: nft}}, {ODE.replace('=', ': ')}}}, {{steps: 2}}]"],
    "all weights": ["lora=null", "objective={name: awm}", ODE],
}


def numbers(folder: Path) -> list[dict]:
    """The metrics without the seconds, which no run repeats, and without the warnings of a resume."""
    rows = [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(folder)]
    return [row for row in rows if "warning" not in row]


def same(one: object, other: object) -> bool:
    """Equal to the last bit, whatever is in it."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]
    return one == other or (one != one and other != other)


def differences(run: Path, reference: Path) -> list[str]:
    """What of a finished run is not the reference's."""
    differing = [] if same(numbers(run), numbers(reference)) else ["metrics"]
    for file in sorted(reference.glob("*/*.safetensors")):
        name = file.relative_to(reference)
        if not (run / name).exists() or not same(load_file(run / name), load_file(file)):
            differing.append(str(name))
    ends = [checkpoint.latest(folder / "checkpoints")[0] for folder in (run, reference)]
    return differing if same(*ends) else [*differing, "last checkpoint"]


def started(folder: Path, name: str, settings: list[str]) -> tuple[Path, Path]:
    """The config file and the run folder of a run."""
    config, output = folder / f"{name}.yaml", folder / name
    config.write_text(short_run(output, "model=tiny", *STEPS, *settings).to_yaml())
    return config, output


def kill_until_it_ends(
    folder: Path, settings: list[str], kills: int, seconds: float, rng: random.Random
) -> tuple[Path, int]:
    """A run that is killed `kills` times, each time up to `seconds` after it was begun or resumed, and then left to end."""
    config, output = started(folder, "killed", settings)
    done = 0
    while True:
        resume = ["--resume"] if (output / "checkpoints").exists() and list((output / "checkpoints").glob("step_*")) else []
        if not resume and (output / "metrics.jsonl").exists():
            raise AssertionError("metrics without a checkpoint: such a run can be neither resumed nor begun")
        command = begin("train", str(config), *resume, cwd=folder)
        command.process.join(rng.uniform(0, seconds) if done < kills else None)
        if command.process.exitcode == 0:
            return output, done
        if command.process.is_alive():
            command.process.kill()
            command.process.join()
            done += 1
        else:
            raise AssertionError(f"exit status {command.process.exitcode}: {command.output}")


def killed_runs(settings: list[str], kills: int, rng: random.Random) -> tuple[int, list[str]]:
    """Kill runs with these settings at random moments. Returns the number of kills, and what differs from a run left alone."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config, reference = started(folder, "reference", settings)
        begin("--version", cwd=folder).finish(0, 600)  # waits for the imports, which are not a run's time
        begin_at = time.monotonic()
        begin("train", str(config), cwd=folder).finish(0, 3600)
        seconds = time.monotonic() - begin_at
        done, lost = 0, []
        while done < kills:  # a run that ended between two kills is begun anew
            try:
                output, more = kill_until_it_ends(folder, settings, kills - done, 1.2 * seconds, rng)
                lost += differences(output, reference)
            except AssertionError as error:
                more, lost = 1, [*lost, str(error)]
            done += more
            shutil.rmtree(folder / "killed", ignore_errors=True)
        return done, lost


def one_process(kills: int, rng: random.Random) -> list[str]:
    lost, total = [], 0
    for i, (name, settings) in enumerate(RUNS.items()):
        share = kills * (i + 1) // len(RUNS) - kills * i // len(RUNS)
        if not share:
            continue
        done, wrong = killed_runs(settings, share, rng)
        total += done
        lost += [f"{name}: {what}" for what in wrong]
        print(f"{name}: {done} kills, {'LOST' if wrong else 'equal'}", flush=True)
    print(f"one process: {total} kills, {len(lost)} differences")
    return lost


def two_processes(rng: random.Random, which: str, rounds: int) -> list[str]:
    """Kills rank 1, or the launcher, of two; the others must end, with a sentence, and a resumed run must be the reference."""
    lost = []
    settings = ["prompts_per_step=4", "microbatch=4", "device=cpu", "evaluation.max_prompts=4"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config, reference = started(folder, "reference", settings)
        begin("train", str(config), "--num-processes", "2", cwd=folder).finish(0, 3600)
        for round_ in range(rounds):
            config, output = started(folder, f"killed_{round_}", settings)
            command = begin("train", str(config), "--num-processes", "2", cwd=folder)
            steps = rng.randrange(1, 4)
            command.wait_for((output / "checkpoints" / f"step_{steps:06d}").exists, 3600)
            launcher = psutil.Process(command.process.pid)
            ranks = [p for p in launcher.children(recursive=True) if "flow_grpo" in " ".join(p.cmdline())]
            victim = launcher if which == "launcher" else next(p for p in ranks if p.environ().get("RANK") == "1")
            victim.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(ranks, timeout=60)
            lost += [f"{which}: rank {p.pid} still runs a minute after the kill" for p in alive]
            for process in alive:
                process.kill()
            command.process.join(60)
            if which == "rank" and "rank 1" not in command.output:
                lost.append(f"{which}: no word about the dead rank: {command.output[-500:]}")
            begin("train", str(config), "--resume", "--num-processes", "2", cwd=folder).finish(0, 3600)
            lost += [f"{which}: {what}" for what in differences(output, reference)]
    print(f"two processes, {which} killed: {rounds} kills, {len(lost)} differences", flush=True)
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills of runs of one process")
    parser.add_argument("--rounds", type=int, default=3, help="kills of a rank, and of a launcher, of two processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lost = one_process(args.kills, rng)
    for which in ("rank", "launcher") if args.rounds else ():
        lost += two_processes(rng, which, args.rounds)
    print("\n".join(lost) or "nothing lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
