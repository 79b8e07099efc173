"""The contract: the pipeline is the model. On the embedded pipeline, through the code that any other would take."""

import pytest
import torch
from conftest import CALL, PROMPTS, stir, tiny_policy
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from flow_grpo import sampling, sde
from flow_grpo.evaluate import draw
from flow_grpo.hub import SHIPPED
from flow_grpo.policy import Policy, load_policy
from flow_grpo.prompts import PromptSet

LATENTS = torch.randn(2, 8, 8, 20, generator=torch.Generator().manual_seed(0))
ROWS = torch.arange(2)


def euler(policy: Policy, latents: torch.Tensor, steps: int) -> torch.Tensor:
    """Noise 0 through our path, from the same latents as `pipe(...)`."""
    schedule, _ = policy.schedule(steps)
    conditioning = policy.encode(PROMPTS)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    final = sampling.rollout(velocity, schedule, latents, [], "ode", 0.0, lambda i: latents, microbatch=2).final
    return policy.decode(final)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_noise_0_is_the_pipelines_own_call(guidance):
    policy = tiny_policy(guidance_scale=guidance)
    policy.pipe.set_progress_bar_config(disable=True)
    call = {**CALL, "guidance_scale": guidance}
    expected = policy.pipe(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **call).images
    torch.testing.assert_close(euler(policy, LATENTS, 4), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("transition", ["flow_sde", "dance_sde", "cps", "exact_sde"])
def test_replaying_stored_steps_with_gradients_gives_a_ratio_of_exactly_1(dtype, transition):
    policy = tiny_policy(dtype)
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    stir(policy)
    batch = PromptSet(PROMPTS, [{}] * 2).repeat(3)
    conditioning = policy.encode(batch.prompts)
    schedule, shape = policy.schedule(4)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    trajectory = sampling.rollout(
        velocity,
        schedule,
        sampling.batch_noise(shape, batch, 0, "start"),
        [0, 1, 2],
        transition,
        0.7,
        lambda i: sampling.batch_noise(shape, batch, 0, "step", i),
        microbatch=3,
    )
    for k in range(3):
        for rows in torch.arange(6).split(3):
            _, mean, std = sampling.replay(velocity, trajectory, k, rows, transition, 0.7)
            log_prob = sde.log_prob(trajectory.x_next[rows, k], mean, std)
            assert log_prob.requires_grad
            assert torch.equal(log_prob, trajectory.log_prob_BK[rows, k])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_timestep_per_sample_equals_one_call_each(guidance):
    policy = tiny_policy(guidance_scale=guidance)
    conditioning = policy.encode(PROMPTS)
    timesteps = torch.tensor([900.0, 300.0])
    with torch.no_grad():
        both = policy.velocity(LATENTS, timesteps, conditioning, ROWS)
        for i in range(2):
            alone = policy.velocity(LATENTS[i : i + 1], timesteps[i], conditioning, torch.tensor([i]))
            torch.testing.assert_close(both[i : i + 1], alone, rtol=0, atol=1e-5)


def test_gradients_reach_every_lora_parameter_and_no_other(policy):
    v = policy.velocity(LATENTS, torch.tensor(500.0), policy.encode(PROMPTS), ROWS)
    v.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.parameters().values())
    trained = {id(p) for p in policy.parameters().values()}
    assert all(p.grad is None for p in policy.pipe.transformer.parameters() if id(p) not in trained)


def test_a_fresh_adapter_and_a_switched_off_one_are_the_base():
    base = tiny_policy()
    conditioning = base.encode(PROMPTS)
    with torch.no_grad():
        expected = base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        base.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
        assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), expected)
        stir(base)
        moved = base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        assert (moved - expected).abs().max() > 1e-3
        with base.reference():
            assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), expected)
        assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), moved)


@pytest.mark.parametrize("targets", [["to_q", "to_out.0"], "all"])
def test_the_saved_lora_gives_the_same_picture_in_plain_diffusers(targets, tmp_path):
    policy = tiny_policy()
    policy.add_lora(4, 8, targets, seed=0)
    stir(policy)
    file = policy.save_lora(tmp_path)
    assert file.name == "pytorch_lora_weights.safetensors"
    plain = StableDiffusion3Pipeline.from_pretrained(SHIPPED["tiny"], torch_dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    without = plain(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **CALL).images
    plain.load_lora_weights(str(tmp_path))
    found = plain(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **CALL).images
    torch.testing.assert_close(found, euler(policy, LATENTS, 4), rtol=0, atol=2e-5)
    assert (found - without).abs().max() > 1e-3
    again = load_policy("tiny", "cpu", "fp32", lora=tmp_path, **CALL)
    torch.testing.assert_close(euler(again, LATENTS, 4), found, rtol=0, atol=2e-5)


def test_the_lora_is_float32_whatever_the_model_is():
    policy = tiny_policy("bf16")
    policy.add_lora(4, 8, ["to_q"], seed=0)
    assert policy.pipe.transformer.dtype == torch.bfloat16 or policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
    v = policy.velocity(LATENTS, torch.tensor(500.0), policy.encode(PROMPTS), ROWS)
    assert v.dtype == torch.float32


def test_the_average_is_in_place_only_within_its_context(policy):
    policy.start_ema()
    before = policy.adapter_state()
    stir(policy, seed=1)
    policy.update_ema(0.75)
    trained = policy.adapter_state()
    with policy.averaged():
        for name, value in policy.adapter_state().items():
            torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * trained[name])
    assert all(torch.equal(value, trained[name]) for name, value in policy.adapter_state().items())


def test_a_copy_of_the_adapter_follows_slowly_and_takes_no_gradient(policy):
    policy.add_copy("old")
    conditioning = policy.encode(PROMPTS)
    start = policy.adapter_state()
    with torch.no_grad():
        v = policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        with policy.using("old"):
            assert torch.equal(policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), v)
    stir(policy, seed=1)
    policy.follow("old", 0.9)
    moved, copied = policy.adapter_state(), policy.adapter_state("old")
    for name, value in moved.items():
        torch.testing.assert_close(copied[name.replace(".default.", ".old.")], 0.9 * start[name] + 0.1 * value)
    policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS).mean().backward()
    assert all(p.grad is None for p in policy.parameters("old").values())
    assert all(p.requires_grad for p in policy.parameters().values())


def test_the_users_pipeline_stays_as_it_was():
    pipe = StableDiffusion3Pipeline.from_pretrained(SHIPPED["tiny"], torch_dtype=torch.float32)
    scheduler, encode_prompt, config = pipe.scheduler, pipe.encode_prompt, dict(pipe.config)
    policy = Policy(pipe, **CALL)
    euler(policy, LATENTS, 3)
    assert pipe.scheduler is scheduler
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler
    assert pipe.encode_prompt == encode_prompt
    assert dict(pipe.config) == config


def test_prompts_are_encoded_once_and_in_any_company():
    policy = tiny_policy()
    _, alone = policy.encode(PROMPTS[:1]).take(torch.tensor([0]))
    others = [f'green text "{a}{b}{c}" on a white background' for a in "XYZ" for b in "XYZ" for c in "XY"]
    for place in (1, 3, 7, 12, 17):
        company = [*others[:place], PROMPTS[0], *others[place:]]
        _, together = tiny_policy().encode(company).take(torch.tensor([place]))
        for (_, a), (_, b) in zip(alone, together, strict=True):
            for x, y in zip(a, b, strict=True):
                assert (x is None and y is None) or torch.equal(x, y), place
    calls = []
    encode = policy.pipe.encode_prompt
    policy.pipe.encode_prompt = lambda *a, **k: calls.append(a or k) or encode(*a, **k)
    policy.encode([PROMPTS[1], *PROMPTS])
    policy.encode(PROMPTS)
    assert len(calls) == 1, "only the prompt that was new"


def test_replay_does_not_depend_on_the_micro_batch(policy):
    schedule, shape = policy.schedule(4)
    velocity = policy.along(schedule, policy.encode(PROMPTS * 2))
    start, noise = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(0))
    trajectories = [
        sampling.rollout(velocity, schedule, start, [0, 1], "cps", 0.7, lambda i: noise, microbatch) for microbatch in (4, 1)
    ]
    torch.testing.assert_close(trajectories[0].final, trajectories[1].final, rtol=0, atol=1e-4)
    rows = torch.arange(4)
    whole = sampling.replay(velocity, trajectories[0], 1, rows, "cps", 0.7)[0]
    single = torch.cat([sampling.replay(velocity, trajectories[0], 1, rows[i : i + 1], "cps", 0.7)[0] for i in range(4)])
    torch.testing.assert_close(whole, single, rtol=0, atol=1e-4)


def test_an_unknown_argument_of_the_pipeline_is_a_sentence():
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline takes no argument max_lenght"):
        tiny_policy(max_lenght=3)


def test_a_device_that_is_not_there_is_a_sentence():
    with pytest.raises(ValueError, match="device=warp can't be used here"):
        load_policy("tiny", "warp")


def test_pictures_depend_on_their_own_seed_alone():
    policy = tiny_policy()
    three = draw(policy, [PROMPTS[0]] * 3, [5, 6, 7], 3, microbatch=3)
    one = draw(policy, [PROMPTS[0]], [6], 3)
    torch.testing.assert_close(three[1:2], one, rtol=0, atol=1e-5)
    assert (three[0] - three[1]).abs().max() > 0.01


def test_what_is_no_flow_is_refused():
    pipe = StableDiffusion3Pipeline.from_pretrained(SHIPPED["tiny"])
    pipe.scheduler = EulerDiscreteScheduler()
    with pytest.raises(ValueError, match="does not sample a flow"):
        Policy(pipe)


@pytest.mark.parametrize("name", ["no_such_folder", "./models/sd", "/models/sd", "a/b/c", "tests/missing"])
def test_a_missing_folder_is_said_to_be_missing_at_once(name):
    with pytest.raises(ValueError, match="there is no model folder"):
        load_policy(name)


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        load_policy(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_policy(str(tmp_path))


def test_a_lora_for_other_modules_and_unknown_targets_are_refused(policy, tmp_path):
    with pytest.raises(ValueError, match="no linear layer"):
        tiny_policy().add_lora(4, 8, ["to_nothing"], seed=0)
    with pytest.raises(ValueError, match="there is no LoRA"):
        tiny_policy().load_lora(tmp_path / "a" / "missing")


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_only_on_a_cpu_with_instructions_for_it(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert tiny_policy("auto").dtype == tiny_policy("auto").pipe.transformer.dtype == dtype
