"""Save the trained parts as a SanaPipeline in 16 bit, and draw with plain diffusers: drawn_GUIDANCE.npz for judge.py.

python draw.py FOLDER
"""

import json
import sys
from pathlib import Path

import architecture
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline
from pictures import caption, moved
from PIL import Image

PROMPTS, STEPS, GUIDANCE = 200, 20, (1.0, 2.0, 3.0)


def trained(module: torch.nn.Module, file: Path, key: str) -> torch.nn.Module:
    """The module with the averaged weights of a stage."""
    module.load_state_dict(torch.load(file)[f"{key}_ema"])
    return module.eval()


def pipeline(folder: Path) -> SanaPipeline:
    """The trained pipeline, in float32."""
    tokenizer = architecture.tokenizer(folder / "names.json")
    vae = trained(architecture.vae(), folder / "vae.pt", "vae")
    vae.register_to_config(scaling_factor=1 / json.loads((folder / "std.json").read_text()))
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=trained(architecture.text_encoder(len(tokenizer)), folder / "flow.pt", "text"),
        vae=vae,
        transformer=trained(architecture.transformer(), folder / "flow.pt", "transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


@torch.no_grad()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    pipe = pipeline(folder)
    pipe.to(torch.float16).save_pretrained(folder / "pipeline")
    files = [file for file in (folder / "pipeline").rglob("*") if file.is_file()]
    print(round(sum(file.stat().st_size for file in files) / 1e6, 2), "MB")
    pipe = SanaPipeline.from_pretrained(folder / "pipeline", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    names, pictures = json.loads((folder / "names.json").read_text()), np.load(folder / "pictures.npz")["centred"]
    pictures = pictures.reshape(-1, *pictures.shape[2:])
    chosen = np.random.default_rng(5).choice(len(pictures), PROMPTS, replace=False)
    rng = np.random.default_rng(99)
    # sizes and places that no training picture has
    new = np.stack([moved(Image.fromarray(pictures[i]), rng) for i in chosen])
    x = torch.from_numpy(new).permute(0, 3, 1, 2).float() / 127.5 - 1
    rebuilt = pipe.vae(x).sample.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez(folder / "drawn_vae.npz", images=rebuilt, target=chosen)
    prompts = [caption(names[i // 2][0], i % 2) for i in chosen]
    for guidance in GUIDANCE:
        images = pipe(
            prompt=prompts,
            height=64,
            width=64,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            use_resolution_binning=False,
            complex_human_instruction=None,
            max_sequence_length=architecture.LENGTH,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        np.savez(folder / f"drawn_{guidance:g}.npz", images=(255 * images).round().astype(np.uint8), target=chosen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
