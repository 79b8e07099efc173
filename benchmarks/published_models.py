"""What a training step of the published models takes, computed from their config files: without their weights and without a GPU.

    python benchmarks/published_models.py

Each line is a shipped config on one GPU, with one image a micro-batch. The GB of a step are those after its prompts were encoded, with
text encoders on the CPU. `plan` counts operations and live
bytes of diffusers' own code on the meta device. The configs of the models are in flow_grpo/plan/model_configs, in the hub's layout;
SOURCES.md there says where each comes from.
"""

import sys

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import ENCODING, StepEstimator, text_encoder_bytes
from flow_grpo.plan.hardware import GB, TERA, Hardware, Rates
from flow_grpo.plan.meta_pipeline import FOLDER, FOLDERS
from flow_grpo.policy.library_logging import quiet_libraries

PRESETS = [
    "sd35_medium_ocr",
    "sd35_medium_ocr_awm",
    "sd35_large_ocr",
    "flux_dev_ocr",
    "flux2_klein_ocr",
    "qwen_image_ocr",
    "z_image_ocr",
    "sana_ocr",
    "wan21_ocr",
]
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
    "GB, text encoders",
)


def row(preset: str) -> list[str]:
    """The cells of a config's line."""
    model = FlowGRPOConfig.from_yaml(preset).model
    own = [f"model={FOLDER / FOLDERS[model]}", *PLAIN]
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
        *(f"{estimator.estimate(1).peak_without(ENCODING) / GB:.1f}" for estimator in plans),
        f"{text_encoder_bytes(plan.trace.policy.pipe) / GB:.1f}",
    ]


def main() -> None:
    quiet_libraries()
    print(f"Computed with torch {torch.__version__} at {RATES.how}.\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for preset in sys.argv[1:] or PRESETS:
        print("| " + " | ".join(row(preset)) + " |", flush=True)


if __name__ == "__main__":
    main()
