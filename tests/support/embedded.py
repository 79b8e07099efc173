"""The embedded model as users load it, and configs of short runs with its first and last block."""

import functools
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.hub import BUNDLED_MODELS, check_weight_files
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from support.paths import SAMPLE_REWARDS

CALL = {"height": 32, "width": 80, "guidance_scale": 1.0, "max_sequence_length": 14}
PROMPTS = ['red text "CAT" on a blue background', 'white text "HORSE" on a black background']
LATENTS = torch.randn(2, 8, 8, 20, generator=torch.Generator().manual_seed(0))  # for PROMPTS
ROWS = torch.arange(2)


def tiny_policy(dtype: str = "fp32", **call) -> Policy:
    return load_policy("tiny", "cpu", dtype, **{**CALL, **call})


def stir(policy: Policy, seed: int = 0) -> None:
    """Moves every LoRA parameter, so that the adapter changes the velocity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def euler(policy: Policy, latents: torch.Tensor, steps: int) -> torch.Tensor:
    """Noise 0 through our path, from the same latents as `pipe(...)`."""
    schedule, _ = policy.schedule(steps)
    velocity = policy.velocity_fn(schedule, policy.encode(PROMPTS), torch.arange(len(PROMPTS)))
    return policy.decode(sampling.rollout(velocity, schedule, latents).final)


@functools.cache
def short_model() -> Path:
    """The embedded model with the first and the last of its six blocks: a third of the time, and no pictures."""
    place = tempfile.TemporaryDirectory()
    _kept.append(place)  # to the end of the process
    folder = shutil.copytree(BUNDLED_MODELS["tiny"], Path(place.name) / "model")
    config, file = (folder / "transformer" / name for name in ("config.json", "diffusion_pytorch_model.safetensors"))
    settings, weights = json.loads(config.read_text()), load_file(file)
    last = f"transformer_blocks.{settings['num_layers'] - 1}."
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("transformer_blocks.")}
    kept |= {name: tensor for name, tensor in weights.items() if name.startswith("transformer_blocks.0.")}
    kept |= {
        name.replace(last, "transformer_blocks.1."): tensor for name, tensor in weights.items() if name.startswith(last)
    }
    save_file(kept, file)
    config.write_text(json.dumps({**settings, "num_layers": 2}))
    return folder


_kept: list[tempfile.TemporaryDirectory] = []
_check_once = functools.cache(check_weight_files)


def check_other_models(folder: str | Path, left_out: Collection[str] = (), file: Path | None = None) -> None:
    """`check_weight_files`, but once for the models that no test changes: it takes half of the time of loading them."""
    if file is None and Path(folder) in (short_model(), *BUNDLED_MODELS.values()):
        _check_once(Path(folder))
    else:
        check_weight_files(folder, left_out, file)


def short_run(output: Path, *overrides: str) -> FlowGRPOConfig:
    """The shipped config cut down to seconds; brightness as reward, so that no OCR runs."""
    reward = f"{SAMPLE_REWARDS}:brightness"
    common = [
        f"model={short_model()}",
        f"output_dir={output}",
        "steps=2",
        "prompts_per_step=2",
        "images_per_prompt=4",
        "microbatch=8",
        f"rewards={{{reward}: 1}}",
        "evaluation={prompts: prompts/signs_eval.txt, max_prompts: 2, every: 0, steps: 3}",
        "sampling={steps: 4}",
        "objective={name: grpo, transition: cps, noise_level: 0.8, clip_low: 1.0e-3, clip_high: 1.0e-3}",
        "lora={rank: 4, alpha: 8, targets: [to_q, to_out.0]}",
        "optimizer={lr: 1.0e-3}",
        "dtype=fp32",
    ]
    return FlowGRPOConfig.from_yaml("tiny_ocr", [*common, *overrides])
