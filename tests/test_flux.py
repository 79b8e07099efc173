"""Another family through the same path, without a line for it: a tiny random FLUX.1, packed latents, embedded guidance."""

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel

from flow_grpo import sampling, sde
from flow_grpo.policy import load_policy
from flow_grpo.tiny import architecture

CALL = {"height": 32, "width": 48, "guidance_scale": 3.5, "max_sequence_length": 16}
PROMPTS = ["a cat", "two dogs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A FLUX.1 folder in the hub's layout, with the real component classes."""
    torch.manual_seed(0)
    clip, t5 = architecture.clip_tokenizer(), architecture.t5_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=architecture.CLIP_LENGTH, bos_token_id=clip.bos_token_id, eos_token_id=clip.eos_token_id,
    )  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=AutoencoderKL(
            block_out_channels=(4,), latent_channels=4, norm_num_groups=1, shift_factor=0.1, scaling_factor=0.4,
            use_quant_conv=False, use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=clip,
        text_encoder_2=architecture.t5_encoder(t5),
        tokenizer_2=t5,
        transformer=FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=2 * architecture.TEXT_WIDTH, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
        ),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("flux")
    pipe.save_pretrained(path)
    return path


def drawn(policy, latents):
    schedule, shape = policy.schedule(3)
    assert shape == latents.shape[1:], "the state is packed"
    conditioning = policy.encode(PROMPTS)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    return policy.decode(sampling.rollout(velocity, schedule, latents, [], "ode", 0.0, lambda i: latents, 2).final)


def test_flux_goes_the_same_way(folder, tmp_path):
    policy = load_policy(str(folder), "cpu", "fp32", **CALL)
    latents = torch.randn(2, 16 * 24, 16, generator=torch.Generator().manual_seed(0))
    policy.pipe.set_progress_bar_config(disable=True)

    def plain():
        return policy.pipe(PROMPTS, latents=latents, num_inference_steps=3, output_type="pt", **CALL).images

    torch.testing.assert_close(drawn(policy, latents), plain(), rtol=0, atol=2e-5)

    policy.add_lora(4, 8, ["to_q", "to_v"], seed=0)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    schedule, _ = policy.schedule(3)
    conditioning, rows = policy.encode(PROMPTS), torch.arange(2)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    trajectory = sampling.rollout(velocity, schedule, latents, [0, 1], "cps", 0.7, lambda i: torch.ones_like(latents), 2)
    for k in range(2):
        _, mean, std = sampling.replay(velocity, trajectory, k, rows, "cps", 0.7)
        log_prob = sde.log_prob(trajectory.x_next[:, k], mean, std)
        assert torch.equal(log_prob, trajectory.log_prob_BK[:, k])
    log_prob.sum().backward()
    assert all(p.grad is not None for p in policy.parameters().values())

    with_lora = plain()
    policy.save_lora(tmp_path)
    again = FluxPipeline.from_pretrained(folder)
    again.set_progress_bar_config(disable=True)
    again.load_lora_weights(str(tmp_path))
    found = again(PROMPTS, latents=latents, num_inference_steps=3, output_type="pt", **CALL).images
    torch.testing.assert_close(found, with_lora, rtol=0, atol=2e-5)
    with policy.reference():
        assert (plain() - with_lora).abs().max() > 1e-4
