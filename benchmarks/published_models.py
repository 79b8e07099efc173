"""What a training step of the published models takes, computed from their config files: without their weights and without a GPU.

    python benchmarks/published_models.py

Each line is a shipped config on one GPU, with one image a micro-batch and text encoders on the CPU. `plan` counts operations and live
bytes of diffusers' own code on the meta device. The configs of the models are in benchmarks/model_configs, in the hub's layout; SOURCES.md
there says where each comes from. Tokenizers are those of the tests' small pipelines, which make prompts of several hundred tokens where
a model does not pad them.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.hardware import GB, TERA, Hardware, Rates
from flow_grpo.policy.library_logging import quiet_libraries

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "benchmarks" / "model_configs"
PRESETS = {  # the model's folder, and the family of its tokenizers
    "sd35_medium_ocr": ("sd35_medium", "sd3"),
    "sd35_medium_ocr_awm": ("sd35_medium", "sd3"),
    "sd35_large_ocr": ("sd35_large", "sd3"),
    "flux_dev_ocr": ("flux_dev", "flux"),
    "flux2_klein_ocr": ("flux2_klein", "flux2_klein"),
    "qwen_image_ocr": ("qwen_image", "qwen_image"),
    "z_image_ocr": ("z_image", "z_image"),
    "sana_ocr": ("sana", "sana"),
    "wan21_ocr": ("wan21", "wan"),
}
GPU = Hardware.from_name("H100")
RATES = Rates.of_peak(GPU.peak_flops)
PLAIN = [
    "memory={offload_text_encoders: true, embedding_cache_dir: null, gradient_checkpointing: false, compile: false, quantize: null}",
    "microbatch=1",
    "evaluation.prompts=null",
]
MEMORY = {
    "plain": [],
    "checkpointing": ["memory.gradient_checkpointing=true"],
    "that and nf4": ["memory.gradient_checkpointing=true", "memory.quantize=nf4"],
    "that and offload": ["memory.gradient_checkpointing=true", "memory.offload=groups"],
}
HEAD = (
    "config",
    "weights",
    "image",
    "TFLOP a velocity",
    "images a step",
    f"seconds, {GPU.name}",
    *(f"GB, {name}" for name in MEMORY),
)


def hub_folder(model: str, family: str, out: Path) -> Path:
    """A copy of a model's config files with tokenizers that can be loaded."""
    from support.families import TINY

    folder = out / model
    if not folder.exists():
        shutil.copytree(MODELS / model, folder)
        for name, part in TINY[family].build().components.items():
            if name.startswith("tokenizer"):
                part.save_pretrained(folder / name)
    return folder


def row(preset: str, folder: Path) -> list[str]:
    """The cells of a config's line."""
    own = [f"model={folder}", *PLAIN]
    plans = [StepEstimator(FlowGRPOConfig.from_yaml(preset, [*own, *more]), cuda=True) for more in MEMORY.values()]
    plan, args = plans[0], plans[0].args
    weights = sum(p.numel() for name, p in plan.trace.policy.pipe.transformer.named_parameters() if "lora_" not in name)
    seconds = plan.estimate(1).seconds(RATES)
    return [
        f"`{preset}`",
        f"{weights / 1e9:.2f} B",
        " x ".join(map(str, plan.trace.image_shape[-2:])),
        f"{plan.trace.operations['rollout'] / 2 / TERA:.2f}",
        str(args.prompts_per_step * args.images_per_prompt),
        f"{seconds:.0f}",
        *(f"{one.estimate(1).peak / GB:.1f}" for one in plans),
    ]


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    quiet_libraries()
    print(f"Computed with torch {torch.__version__} at {RATES.how}.\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    with tempfile.TemporaryDirectory() as out:
        for preset in sys.argv[1:] or PRESETS:
            print("| " + " | ".join(row(preset, hub_folder(*PRESETS[preset], Path(out)))) + " |", flush=True)


if __name__ == "__main__":
    main()
