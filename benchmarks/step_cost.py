"""What a training step costs beyond the transformer's own arithmetic.

`python benchmarks/step_cost.py [config] [key.sub=value ...]` times rollout plus update of a training step against the bare
transformer forwards and backwards that they contain: the same shapes and dtypes, called directly. Both are interleaved in
one run, and the medians are compared. Beside it, the shares of decoding, rewards and everything else in the whole step.

`python benchmarks/step_cost.py --kept-graphs [config] [key.sub=value ...]` compares `objective.keep_graphs` with a replay: two
trainers that take the same steps in turns, with one update each. Set `optimizer.lr=1e-12` to let them keep the untrained model's
share of groups with signal.
"""

import statistics
import sys
import tempfile
import time

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.trainer import FlowGRPOTrainer

ROUNDS = 12
WARMUP = 3


class Recorder:
    """Notes the arguments of every call of the transformer in a training step, to make the same calls again."""

    def __init__(self, trainer: FlowGRPOTrainer) -> None:
        self.trainer, self.calls = trainer, []
        self.transformer = trainer.policy.pipe.transformer

    def step(self) -> dict[str, float]:
        self.calls = []
        hook = self.transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            return self.trainer.training_step()
        finally:
            hook.remove()

    def _note(self, module, args, kwargs):
        self.calls.append((torch.is_grad_enabled(), args, kwargs))

    def wait(self) -> None:
        """Until a GPU has done what it was told: only then do seconds count."""
        if self.trainer.policy.device.type == "cuda":
            torch.cuda.synchronize()

    def bare(self) -> float:
        """Seconds of the noted calls alone, each with gradients followed by a backward pass."""
        policy = self.trainer.policy
        autocast = torch.autocast(policy.device.type, policy.dtype, enabled=policy.dtype != torch.float32)
        self.wait()
        started = time.perf_counter()
        for graded, args, kwargs in self.calls:
            with torch.set_grad_enabled(graded):
                with autocast:
                    out = self.transformer(*args, **kwargs)[0]
                if graded:
                    out.backward(torch.ones_like(out))
        self.wait()
        seconds = time.perf_counter() - started
        self.transformer.zero_grad(set_to_none=True)
        return seconds


def kept_graphs(arguments: list[str]) -> None:
    """Print the seconds of steps with kept graphs, with a replay, and their ratio."""
    config = arguments.pop(0) if arguments and "=" not in arguments[0] else "tiny_grpo"
    metrics_of: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*arguments, "updates=1", "epochs=1"]
        trainers = {
            keep: FlowGRPOTrainer(
                args=FlowGRPOConfig.from_yaml(
                    config, [*arguments, f"objective.keep_graphs={keep}", f"output_dir={folder}/{keep}"]
                )
            )
            for keep in metrics_of
        }
        for _ in range(WARMUP + ROUNDS):
            for keep, trainer in trainers.items():
                metrics_of[keep].append(trainer.training_step())
    metrics_of = {keep: steps[WARMUP:] for keep, steps in metrics_of.items()}
    table = Table(title=f"{config} {' '.join(arguments)}: median of {ROUNDS} steps")
    for column in ("", "kept graphs, s", "replay, s", "ratio, median", "least", "most"):
        table.add_column(column, justify="left" if not column else "right")
    for name, parts in {
        "rollout": ["rollout"],
        "update": ["update"],
        "rollout + update": ["rollout", "update"],
        "whole step": ["step"],
    }.items():
        kept, replayed = ([sum(m[f"time/{part}"] for part in parts) for m in metrics_of[keep]] for keep in (True, False))
        ratios = [a / b for a, b in zip(kept, replayed, strict=True)]
        numbers = (statistics.median(kept), statistics.median(replayed), statistics.median(ratios), min(ratios), max(ratios))
        table.add_row(name, *(f"{number:.3f}" for number in numbers))
    Console(emoji=False).print(table)
    zero = statistics.mean(m["frac_reward_zero_std"] for m in metrics_of[True])
    print(f"kept graphs take {numbers[2]:.3f} of a step with a replay; {zero:.0%} of the groups had no signal")


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] == "--kept-graphs":
        kept_graphs(arguments[1:])
    else:
        step_cost(arguments)


def step_cost(arguments: list[str]) -> None:
    """Print the seconds of rollout and update, of the bare transformer, and the shares of the rest."""
    config = arguments.pop(0) if arguments and "=" not in arguments[0] else "tiny_ocr"
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml(config, [*arguments, f"output_dir={folder}"])))
        ours, bare, parts = [], [], []
        for turn in range(WARMUP + ROUNDS):
            metrics = recorder.step()
            seconds = recorder.bare()
            if turn >= WARMUP:
                ours.append(metrics["time/rollout"] + metrics["time/update"])
                bare.append(seconds)
                parts.append(metrics)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    table = Table(title=f"{config} {' '.join(arguments)}: {len(recorder.calls)} transformer calls a step, {ROUNDS} steps")
    for column in ("", "median", "least", "most"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, values: list[float], form: str) -> None:
        table.add_row(name, *(form.format(f(values)) for f in (statistics.median, min, max)))

    row("rollout + update, s", ours, "{:.3f}")
    row("bare transformer, s", bare, "{:.3f}")
    row("ratio", ratios, "{:.3f}")
    whole = [m["time/step"] for m in parts]
    for name in ("rollout", "decode", "reward", "update"):
        row(f"{name}, share of the step", [m[f"time/{name}"] / w for m, w in zip(parts, whole, strict=True)], "{:.1%}")
    rest = [
        w - sum(m[f"time/{n}"] for n in ("rollout", "decode", "reward", "update")) for m, w in zip(parts, whole, strict=True)
    ]
    row("everything else, share of the step", [r / w for r, w in zip(rest, whole, strict=True)], "{:.1%}")
    row("whole step, s", whole, "{:.3f}")
    Console(emoji=False).print(table)
    print(f"step cost {statistics.median(ours) / statistics.median(bare):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
