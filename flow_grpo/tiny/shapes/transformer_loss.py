"""The loss of the transformer and the text encoder of the model of shapes."""

import torch
import torch.nn.functional as F
from diffusers import Flux2KleinPipeline
from torch import Tensor

from flow_grpo.tiny.shapes import architecture
from flow_grpo.tiny.shapes.examples import Examples

SHIFT = 4.0  # of the noise levels; shapes and colours are decided between 0.7 and 0.95


def transformer_loss(
    pipe: Flux2KleinPipeline,
    captions: list[str],
    examples: Examples,
    text_length: int = architecture.TEXT_LENGTH,
    teacher: Flux2KleinPipeline | None = None,
    guidance: float = 1.0,
) -> Tensor:
    """The squared error of the velocity, given the captions, at logit-normal noise levels that are shifted towards noise.

    Its target is noise minus latents (flow matching, arXiv 2210.02747), or the velocity of a teacher with guidance, which knows the
    true captions (arXiv 2210.03142). Without guidance, the model then generates as crisply as the teacher with it.
    """
    x0 = examples.images
    eps = torch.randn_like(x0)
    u = torch.sigmoid(1.2 * torch.randn(len(x0)))
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    states = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * eps
    if teacher is None:
        target = pipe._pack_latents(eps - x0)
    else:
        true = [str(described) for described in examples.described]
        with torch.no_grad():
            target = velocity(teacher, true, states, sigma, examples.sources)
            if guidance != 1.0:
                target = torch.lerp(velocity(teacher, [""] * len(x0), states, sigma, examples.sources), target, guidance)
    predicted = velocity(pipe, captions, states, sigma, examples.sources, text_length=text_length)
    return F.mse_loss(predicted, target)


def velocity(
    pipe: Flux2KleinPipeline,
    captions: list[str],
    states: Tensor,
    sigma: Tensor,
    reference: Tensor | None,
    text_length: int = architecture.TEXT_LENGTH,
) -> Tensor:
    """The transformer's velocity (B, tokens, C) of latents (B, C, H, W) at noise levels (B,), with references of the same shape."""
    hidden, ids = pipe._pack_latents(states), pipe._prepare_latent_ids(states)
    if reference is not None:
        hidden = torch.cat([hidden, pipe._pack_latents(reference)], 1)
        ids = torch.cat([ids, pipe._prepare_image_ids([reference[:1]]).expand(len(states), -1, -1)], 1)
    embeds, text_ids = pipe.encode_prompt(
        captions,
        device="cpu",
        max_sequence_length=text_length,
        text_encoder_out_layers=architecture.TEXT_LAYERS,
    )
    predicted = pipe.transformer(
        hidden_states=hidden,
        timestep=sigma,
        guidance=None,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=ids,
        return_dict=False,
    )[0]
    return predicted[:, : states.shape[2] * states.shape[3]]
