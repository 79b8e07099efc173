"""A LoRA that has hacked its reward, applied in the first sampling steps alone (MixGRPO's advice): does the base model mend the rest?

    python benchmarks/lora_range.py --seeds 3

`flowbp` is trained on the gradient of the embedded CLIP without a KL at twice its learning rate, which hacks it (docs/comparison.md). Then
128 held-out signs are drawn with the LoRA in the first part of the ten steps and the base model in the others. Finished runs are kept,
so the same command goes on. Values are means over the seeds, the lowest and the highest in brackets; they depend on no time, so other
work may run beside it.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from anchors import cell
from guidance import trained
from torch import Tensor

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, sampling
from flow_grpo.policy.policy import Policy

CONFIG = "compare/flowbp_free"
HACKING = ["optimizer.lr=2.4e-3", "steps=40", "evaluation.every=20", "evaluation.max_prompts=64"]
STEPS, FIRST = 10, (10, 8, 6, 4, 2, 0)  # sampling steps, and how many of them have the LoRA
MEASURES = ("clip", "ocr_exact", "diversity")


@contextmanager
def lora_in_first(policy: Policy, count: int) -> Iterator[None]:
    """Context in which the policy samples with its LoRA in the first `count` steps, and without it in the others."""
    whole = policy.velocity_fn

    def limited(*args: Any) -> sampling.Velocity:
        velocity = whole(*args)

        def in_range(x: Tensor, i: int) -> Tensor:
            with nullcontext() if i < count else policy.lora.base_model():
                return velocity(x, i)

        return in_range

    with mock.patch.object(policy, "velocity_fn", limited):
        yield


def measured(file: Path, lora: Path, count: int) -> dict[str, float]:
    """Held-out measures with a LoRA in the first `count` steps."""
    if not file.is_file():
        settings = ["evaluation.max_prompts=128", "dtype=fp32", f"lora.init_from={lora}", f"evaluation.steps={STEPS}"]
        trainer = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml(CONFIG, settings))
        with lora_in_first(trainer.policy, count):
            evaluation = trainer.evaluate()
        values = {**evaluation.means(), "diversity": evaluation.diversity.mean().item()}
        file.write_text(json.dumps({name: values[name] for name in MEASURES}))
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/lora_range"))
    args = parser.parse_args()
    out = args.out.resolve()
    print(f"| steps with the LoRA, of {STEPS} | " + " | ".join(f"`{name}`" for name in MEASURES) + " |")
    print("|---" * (1 + len(MEASURES)) + "|")
    stems = [out / f"{Path(CONFIG).name}_seed{seed}" for seed in range(args.seeds)]
    loras = [trained(stem, CONFIG, [*HACKING, f"seed={seed}"]) for seed, stem in enumerate(stems)]
    for count in FIRST:
        values = [measured(Path(f"{stem}_first_{count}.json"), lora, count) for stem, lora in zip(stems, loras, strict=True)]
        print(f"| {count} | {' | '.join(cell([value[name] for value in values]) for name in MEASURES)} |", flush=True)


if __name__ == "__main__":
    main()
