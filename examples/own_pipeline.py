"""Train a diffusers pipeline that you have loaded, built or changed yourself.

Run it from the root of the repository. It takes some seconds on a CPU:

    python examples/own_pipeline.py

A pipeline that needs no change is shorter by its name: `FlowGRPOTrainer("stabilityai/stable-diffusion-3.5-medium", ...)`.
"""

import diffusers

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, Policy
from flow_grpo.policy.hub import BUNDLED_MODELS

CALL = {"height": 32, "width": 80, "max_sequence_length": 14}  # arguments of every call of the pipeline
PROMPT = 'red text "CAT" on a blue background'


def redness(images, prompts, **metadata):
    red, green, blue = images.unbind(1)
    return (red - (green + blue) / 2).mean((1, 2))


# Any pipeline with a flow-matching scheduler and a transformer; this one is the embedded model with another time shift.
pipe = diffusers.DiffusionPipeline.from_pretrained(BUNDLED_MODELS["tiny"])
pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=2.0)

args = FlowGRPOConfig.model_validate(
    {
        "steps": 2,
        "prompts_per_step": 2,
        "images_per_prompt": 4,
        "sampling": {"steps": 6},
        "objective": {"name": "grpo", "transition": "cps", "noise_level": 0.8},
        "lora": {"rank": 8, "alpha": 16},
        "trackers": {},
        "output_dir": "runs/own_pipeline",
    }
)
trainer = FlowGRPOTrainer(
    Policy(pipe, **CALL),
    reward_funcs=redness,
    args=args,
    train_dataset=[PROMPT, 'white text "DOG" on a green background'],
)
trainer.train()

# The LoRA is in runs/own_pipeline/lora, where `pipe.load_lora_weights` finds it. `pipe` itself has it already:
pipe(PROMPT, **CALL, guidance_scale=1.0).images[0].save("runs/own_pipeline/cat.png")
