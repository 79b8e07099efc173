"""Guidance in the rollout, in the trained velocity and at inference, on both embedded worlds.

    python benchmarks/guidance.py --seeds 3

Each world is trained without guidance, with guidance in the rollout alone (`sampling.guidance`) and with it in rollout and velocity
(`guidance`); then all are measured with and without guidance. Finished runs are kept, so the same command goes on. Values are means
over the seeds, the lowest and the highest in brackets; they depend on no time, so other work may run beside it.
"""

import argparse
import json
from pathlib import Path

from anchors import cell

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer

SCALE = 1.5
WORLDS = {  # config and measure: its settings
    ("tiny_ocr", "ocr_exact"): ["steps=8", "evaluation.every=4", "evaluation.max_prompts=256"],
    ("tiny_shapes", "shapes_exact"): ["steps=24", "evaluation.every=8", "images_per_prompt=4", "microbatch=96"],
}
ARMS = {"none": [], "rollout": [f"sampling.guidance={SCALE}"], "rollout and velocity": [f"guidance={SCALE}"]}


def trained(folder: Path, config: str, settings: list[str]) -> Path:
    """The LoRA of a run, which is resumed if it was left."""
    if not (folder / "lora").is_dir():
        args = FlowGRPOConfig.from_yaml(config, [*settings, "trackers=[]", "dtype=fp32", f"output_dir={folder}"])
        FlowGRPOTrainer(args=args).train(resume=(folder / "checkpoints").is_dir())
    return folder / "lora"


def measured(file: Path, config: str, name: str, lora: Path | None, guidance: float) -> float:
    """A held-out measure of a LoRA, or of the base model, at that guidance."""
    if not file.is_file():
        start = [f"lora.init_from={lora}"] if lora else []
        args = FlowGRPOConfig.from_yaml(
            config, [f"evaluation.guidance={guidance}", "evaluation.max_prompts=256", "dtype=fp32", *start]
        )
        value = FlowGRPOTrainer(args=args).evaluate().means()[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({name: value}))
    return json.loads(file.read_text())[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/guidance"))
    args = parser.parse_args()
    out = args.out.resolve()
    for (config, name), settings in WORLDS.items():
        print(f"\n| `{config}`: guidance in training | `{name}` at guidance 1 | at {SCALE} |\n|---|---|---|")
        base = [measured(out / f"{config}_base_at_{scale}.json", config, name, None, scale) for scale in (1.0, SCALE)]
        print(f"| not trained | {base[0]:.3f} | {base[1]:.3f} |", flush=True)
        for arm, own in ARMS.items():
            stems = [out / f"{config}_{arm.replace(' ', '_')}_seed{seed}" for seed in range(args.seeds)]
            loras = [trained(stem, config, [*settings, *own, f"seed={seed}"]) for seed, stem in enumerate(stems)]
            cells = [
                cell(
                    [
                        measured(Path(f"{stem}_at_{scale}.json"), config, name, lora, scale)
                        for stem, lora in zip(stems, loras, strict=True)
                    ]
                )
                for scale in (1.0, SCALE)
            ]
            print(f"| {arm} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
