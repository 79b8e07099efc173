"""Speed and memory of whole training steps on this GPU, with models of the real shapes and random weights.

    python benchmarks/gpu.py sd35_medium flux_dev    # for the part "Measured" of docs/performance.md

Each setting runs in a process of its own: two steps to warm up, then STEPS. The share of the peak is the floating point operations
that `plan` counts over those of a large matrix product measured in the same process. `--small` shrinks the models, to try it out.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time

import diffusers
import torch
import transformers

from flow_grpo.policy.library_logging import quiet_libraries

STEPS = 3
SIZE = ["height=512", "width=512", "pipeline_kwargs={max_sequence_length: 128}", "dtype=bf16"]
RUN = [
    "prompts_per_step=2", "images_per_prompt=12", "microbatch=12", "lora={rank: 32, alpha: 64}", "evaluation.prompts=null",
    "sampling={steps: 10, transition: cps, noise_level: 0.8, window: {schedule: random, size: 3, last_step: 5}}",
    "objective={name: grpo, clip_low: 1.0e-5, clip_high: 1.0e-5}",
]  # fmt: skip
SD3 = {"sd35_medium": (24, 24, 13), "sd3_450m": (12, 16, 0)}  # layers, heads, and layers with two attentions
SMALL = ["height=64", "width=64", "microbatch=4", "images_per_prompt=2"]
SETTINGS = {
    "sd35_medium": {
        "plain": [],
        "compile": ["memory.compile=true"],
        "checkpointing": ["memory.gradient_checkpointing=true"],
        "compile + checkpointing": ["memory={compile: true, gradient_checkpointing: true}"],
        "attention _native_cudnn": ["memory.attention_backend=_native_cudnn"],
        "base in int8": ["memory.quantize=int8"],
        "base in fp8": ["memory.quantize=fp8"],
        "base in nf4": ["memory.quantize=nf4"],
        "offload groups": ["memory={offload: groups, gradient_checkpointing: true}"],
        "8-bit AdamW": ["optimizer.name=adamw_8bit"],
        "vae slicing": ["memory.vae_slicing=true"],
        "guidance 4.5": ["guidance=4.5"],
        "microbatch 4, checkpointing": ["microbatch=4", "memory={gradient_checkpointing: true, vae_slicing: true}"],
    },
    "flux_dev": {
        "checkpointing": ["guidance=3.5", "microbatch=4", "memory.gradient_checkpointing=true"],
        "compile + checkpointing": ["guidance=3.5", "microbatch=4", "memory={compile: true, gradient_checkpointing: true}"],
        "base in nf4, checkpointing": [
            "guidance=3.5", "microbatch=2", "memory={quantize: nf4, gradient_checkpointing: true, vae_slicing: true}",
        ],
    },
}  # fmt: skip


def build(kind: str, small: bool) -> diffusers.DiffusionPipeline:
    """A pipeline of the real transformer and VAE shapes, with text encoders of the real widths and one layer."""
    from flow_grpo.tiny import architecture

    clip, t5 = architecture.clip_tokenizer(), architecture.t5_tokenizer()
    layers, heads, width = (2, 4, 64) if small else (None, 24, 4096)

    def clip_text(hidden: int, projected: bool) -> torch.nn.Module:
        config = transformers.CLIPTextConfig(
            vocab_size=len(clip), hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=1,
            projection_dim=hidden, eos_token_id=clip.eos_token_id, bos_token_id=clip.bos_token_id,
        )  # fmt: skip
        return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)

    text = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=len(t5), d_model=width, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    )
    blocks = (32,) * 4 if small else (128, 256, 512, 512)
    vae = diffusers.AutoencoderKL(
        latent_channels=16, block_out_channels=blocks, layers_per_block=1 if small else 2, use_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, use_post_quant_conv=False,
        scaling_factor=1.5305, shift_factor=0.0609, sample_size=1024,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        if kind in SD3:
            deep, wide, dual = SD3[kind]
            heads = heads if small else wide
            first, second = (16, 32) if small else (768, 1280)
            transformer = diffusers.SD3Transformer2DModel(
                sample_size=128, num_layers=layers or deep, attention_head_dim=64, num_attention_heads=heads,
                joint_attention_dim=width, caption_projection_dim=heads * 64, pooled_projection_dim=first + second,
                out_channels=16, pos_embed_max_size=384, qk_norm="rms_norm",
                dual_attention_layers=tuple(range(layers or dual)),
            )  # fmt: skip
            encoders = {
                "text_encoder": clip_text(first, True),
                "text_encoder_2": clip_text(second, True),
                "text_encoder_3": text,
            }
            tokenizers = {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5}
            return diffusers.StableDiffusion3Pipeline(transformer, scheduler, vae, **encoders, **tokenizers)
        transformer = diffusers.FluxTransformer2DModel(
            num_layers=layers or 19, num_single_layers=layers or 38, attention_head_dim=128, num_attention_heads=heads,
            joint_attention_dim=width, pooled_projection_dim=768, guidance_embeds=True,
        )  # fmt: skip
        return diffusers.FluxPipeline(scheduler, vae, clip_text(768, False), clip, text, t5, transformer)
    finally:
        torch.set_default_dtype(torch.float32)


def brightness(images, prompts):
    return images.mean((1, 2, 3)).tolist()


def measure(folder: str, overrides: list[str]) -> dict[str, float]:
    """One setting, in this process."""
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.plan.estimate import StepEstimator
    from flow_grpo.policy.device_speed import matmul_speed
    from flow_grpo.policy.memory import peak_memory
    from flow_grpo.trainer import FlowGRPOTrainer

    with tempfile.TemporaryDirectory() as out:
        args = FlowGRPOConfig.for_model(folder, [*SIZE, *RUN, *overrides, f"output_dir={out}"])
        forecast = StepEstimator(args, torch.cuda.is_available()).estimate(args.microbatch)
        trainer = FlowGRPOTrainer(args=args, reward_funcs=[brightness])
        device = trainer.policy.device
        transformer = [0.0]
        velocity = trainer.policy.velocity

        def timed(*words):
            started = time.perf_counter()
            v = velocity(*words)
            if device.type == "cuda":
                torch.cuda.synchronize()
            transformer[0] += time.perf_counter() - started
            return v

        for _ in range(2):
            trainer.training_step()
        steps = [trainer.training_step() for _ in range(STEPS)]
        trainer.policy.velocity = timed
        forwards = trainer.training_step()
    seconds, drawn = (statistics.median(step[name] for step in steps) for name in ("time/step", "time/rollout"))
    images = args.prompts_per_step * args.images_per_prompt
    outside = statistics.median(step["time/decode"] + step["time/reward"] for step in steps)
    speed = matmul_speed(device, torch.bfloat16)
    return {
        "images/s, rollout": images / drawn,
        "images/s, step": images / seconds,
        "of the matrix peak": forecast.operations / seconds / speed,
        "forward passes": transformer[0] / forwards["time/step"],
        "decoding, rewards": outside / seconds,
        "peak GB": peak_memory(device) / 1e9,
        "planned GB": (forecast.peak - forecast.persistent.get("CUDA", 0.0)) / 1e9,
        "peak TFLOP/s": speed / 1e12,
    }


def print_table(folder: str, settings: dict[str, list[str]], more: list[str]) -> None:
    headed = False
    for name, overrides in settings.items():
        command = [sys.executable, __file__, "measure", folder, *overrides, *more]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"| {name} | failed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:150]} |", flush=True)
            continue
        row = json.loads(ran.stdout.splitlines()[-1])
        if not headed:
            print("| setting | " + " | ".join(row) + " |\n" + "|---" * (len(row) + 1) + "|")
            headed = True
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |", flush=True)


def main() -> None:
    quiet_libraries()
    words = [word for word in sys.argv[1:] if word != "--small"]
    small = "--small" in sys.argv
    if words[:1] == ["measure"]:
        print(json.dumps(measure(words[1], words[2:])))
        return
    if not small and not torch.cuda.is_available():
        sys.exit("This needs a CUDA GPU; --small tries it out on a CPU.")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, small models"
    print(
        f"# Performance\n\n`python benchmarks/gpu.py` on {card}, torch {torch.__version__}, diffusers {diffusers.__version__}."
    )
    for kind in words or list(SETTINGS):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            build(kind, small).save_pretrained(folder)
            print(f"\n## {kind}, {64 if small else 512} px, random weights\n", flush=True)
            print_table(folder, SETTINGS[kind], SMALL if small else [])


if __name__ == "__main__":
    main()
