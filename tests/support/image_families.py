"""Tiny random checkpoints of pipelines whose prompts carry images, in the hub's layout. As in `families`, which has the parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers as d
import numpy as np
import pytest
import torch
import transformers as t
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from flow_grpo.image_prompt import SourceImage
from support import families
from support.families import CHAT, WIDTH, Tiny

SMALLER = 144  # the Qwen pipelines know pictures of a million pixels only: in these tests, of that many times fewer


def flux_kontext() -> d.FluxKontextPipeline:
    flux = families.flux()
    return d.FluxKontextPipeline(**flux.components)


def qwen_edit(kind: type = d.QwenImageEditPipeline) -> Any:
    qwen = families.qwen_image()
    images, videos = t.Qwen2VLImageProcessor(), t.Qwen2VLVideoProcessor()
    return kind(processor=t.Qwen2VLProcessor(images, qwen.tokenizer, videos, chat_template=CHAT), **qwen.components)


def qwen_edit_plus() -> d.QwenImageEditPlusPipeline:
    return qwen_edit(d.QwenImageEditPlusPipeline)


def qwen_image21() -> d.QwenImage21Pipeline:
    tokenizer, levels = families.byte_tokenizer(), 5
    processor = t.Qwen3VLProcessor(
        t.Qwen2VLImageProcessor(patch_size=16), tokenizer, t.Qwen3VLVideoProcessor(), chat_template=CHAT
    )
    return d.QwenImage21Pipeline(
        scheduler=families.dynamic(), processor=processor,
        text_encoder=t.Qwen3VLForConditionalGeneration(families.qwen3_vl(tokenizer)),
        vae=d.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1] * levels, num_res_blocks=1,
            latents_mean=[0.0, 0.1, 0.2, 0.3], latents_std=[1.0, 1.1, 1.2, 1.3],
        ),
        transformer=d.QwenImage21Transformer2DModel(
            in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, context_in_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )  # fmt: skip


IMAGE_TINY = {
    "flux_kontext": Tiny(flux_kontext, {"max_sequence_length": 16, "_auto_resize": False}, size=(32, 48)),
    "flux2": Tiny(families.flux2, families.TINY["flux2"].call),
    "flux2_klein": Tiny(families.flux2_klein, families.TINY["flux2_klein"].call),
    "qwen_edit": Tiny(qwen_edit),
    "qwen_edit_plus": Tiny(qwen_edit_plus),
    "qwen_image21": Tiny(qwen_image21, {"output_resolution": 128}, size=(64, 96)),
}
SEVERAL = ("flux2", "flux2_klein", "qwen_edit_plus", "qwen_image21")  # take several images to a prompt


def fitted_kontext() -> d.FluxKontextPipeline:
    """One whose autoencoder was fitted to squares of colour, so that its latents say which; the transformer stays random."""
    vae = d.AutoencoderTiny(
        latent_channels=4, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1), scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip
    optimizer = torch.optim.Adam(vae.parameters(), lr=5e-3)
    for _ in range(100):
        images = 2 * torch.nn.functional.interpolate(torch.rand(16, 3, 4, 6), size=(32, 48)) - 1
        loss = (vae.decode(vae.encode(images).latents).sample - images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return d.FluxKontextPipeline(**{**families.awake(flux_kontext()).components, "vae": vae})


@contextmanager
def small_pictures() -> Iterator[None]:
    """Within it, the Qwen pipelines bring images to fewer pixels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            patch.setattr(module, "calculate_dimensions", _smaller(module.calculate_dimensions))
        yield


def _smaller(dimensions: Callable) -> Callable:
    return lambda area, ratio: dimensions(area / SMALLER, ratio)


def picture(seed: int, size: tuple[int, int] = (64, 96)) -> SourceImage:
    """An image of coloured squares; `size` is height and width."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return SourceImage.from_pil(Image.fromarray(squares).resize(size[::-1], Image.Resampling.NEAREST), f"picture {seed}")
