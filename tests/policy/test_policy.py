"""The contract: the pipeline is the model. On the embedded pipeline, through the code that any other would take."""

import copy

import pytest
import torch
from support import families
from support import small_policy as small
from support.embedded import CALL, LATENTS, PROMPTS, ROWS, euler, stir, tiny_policy
from support.method_names import STOCHASTIC
from support.rollouts import of_rows, rollout

from flow_grpo import sampling
from flow_grpo.data.prompts import PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.policy import policy as policy_module
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.memory import compile_blocks
from flow_grpo.policy.policy import Policy
from flow_grpo.types import StochasticSteps


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_noise_0_is_the_pipelines_own_call(guidance):
    policy = tiny_policy(guidance_scale=guidance)
    policy.pipe.set_progress_bar_config(disable=True)
    call = {**CALL, "guidance_scale": guidance}
    expected = policy.pipe(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **call).images
    torch.testing.assert_close(euler(policy, LATENTS, 4), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("transition", STOCHASTIC)
def test_replaying_stored_steps_with_gradients_gives_a_ratio_of_exactly_1(dtype, transition):
    policy = tiny_policy(dtype)
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    stir(policy)
    batch = PromptSet(PROMPTS, [{}] * 2).repeat(3)
    conditioning = policy.encode(batch.prompts)
    schedule, shape = policy.schedule(4)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    trajectory = rollout(
        velocity,
        schedule,
        sampling.batch_noise(shape, batch, 0, "start"),
        microbatch=3,
        stochastic=StochasticSteps([0, 1, 2], transition, noise_level=0.7),
        noise=lambda i: sampling.batch_noise(shape, batch, 0, "step", i),
    )
    for k in range(3):
        for rows in torch.arange(6).split(3):
            log_prob = sampling.replay(of_rows(velocity, rows), trajectory, k, rows).log_prob
            assert log_prob.requires_grad
            assert torch.equal(log_prob, trajectory.log_prob[rows, k])


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


@pytest.mark.parametrize("context", [lambda p: p.base_model(), lambda p: p.ema.applied(), lambda p: p.lora.use("old")])
def test_what_is_switched_for_a_while_comes_back_after_an_error(policy, context):
    policy.lora.add_adapter_copy("old")
    policy.ema.start()
    stir(policy, seed=1)
    conditioning = policy.encode(PROMPTS)

    def velocity():
        with torch.no_grad():
            return policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)

    def fail():
        inside.append(velocity())
        raise KeyError

    before, inside = velocity(), []
    with pytest.raises(KeyError), context(policy):
        fail()
    assert not torch.equal(inside[0], before)
    assert torch.equal(velocity(), before)
    assert all(parameter.requires_grad for parameter in policy.trainable_parameters().values())


def test_states_are_copies_that_can_be_put_back(policy):
    policy.lora.add_adapter_copy("old")
    policy.ema.start()
    kept = policy.adapter_state(), policy.adapter_state("old"), policy.ema.state_dict()
    expected = copy.deepcopy(kept)
    assert all(kept)
    assert policy.adapter_state(keep_on_this_rank=False) == policy.ema.state_dict(keep_on_this_rank=False) == {}
    stir(policy, seed=1)
    policy.ema.update(0.5)
    policy.lora.update_copy("old", 0.5)
    now = policy.adapter_state(), policy.adapter_state("old"), policy.ema.state_dict()
    for before, after in zip(kept, now, strict=True):
        assert not any(torch.equal(before[name], value) for name, value in after.items() if value.any())
    assert not any(
        value.requires_grad for value in [*policy.ema.average.values(), *policy.trainable_parameters("old").values()]
    )
    policy.load_adapter_state(kept[0])
    policy.load_adapter_state(kept[1], "old")
    policy.ema.load_state_dict(kept[2])
    assert not any(value.requires_grad for value in policy.ema.average.values())
    for before, after in zip(
        expected, (policy.adapter_state(), policy.adapter_state("old"), policy.ema.state_dict()), strict=True
    ):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], value) for name, value in after.items())
    with pytest.raises(ValueError, match="other names or shapes"):
        policy.load_adapter_state({name: value for name, value in kept[0].items() if "to_q" in name})


@pytest.mark.parametrize("pads", [True, False])
def test_the_blocks_that_repeat_are_compiled(policy, pads, monkeypatch):
    """For each size, where prompts are padded: of many lengths, each would take minutes on a GPU."""
    settings = []
    monkeypatch.setattr(
        policy_module, "compile_blocks", lambda *args, **kw: settings.append(kw) or compile_blocks(*args, **kw)
    )
    policy.encode(PROMPTS)
    monkeypatch.setattr(policy.encoder, "pads_to_one_length", pads)
    assert not policy.compiled
    policy.compile()
    assert settings == [{"for_each_size": pads}]
    assert policy.compiled
    compiled = [module for module in policy.pipe.transformer.modules() if module._compiled_call_impl is not None]
    assert compiled == list(policy.pipe.transformer.transformer_blocks)


def test_no_block_is_compiled_for_the_one_row_that_asks_for_the_schedule(monkeypatch):
    torch._dynamo.reset()
    compiled, own = [], torch.nn.Module.compile

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **settings: own(block, backend=backend, **settings))
    policy = small.policy()
    policy.compile()
    schedule, shape = policy.schedule(4)
    assert not compiled
    policy.velocity(torch.zeros(2, *shape), schedule.timesteps[1], policy.encode(PROMPTS), torch.arange(2))
    assert compiled, "a velocity is compiled"


def test_sharded_processes_call_the_transformer_as_often_as_the_one_that_needs_most(policy, monkeypatch):
    """Nothing is sharded here: two processes do it in test_full_finetuning.py."""
    given, asked = [], []

    class Others(Processes):
        def all_gather(self, value):
            asked.append(value)
            return [value, 3]

    monkeypatch.setattr(policy_module, "fully_shard_blocks", lambda *arguments: given.append(arguments))
    conditioning = policy.encode(PROMPTS)
    calls = []
    with torch.no_grad():
        expected = policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
    policy.supports_per_sample_timesteps = None
    policy.shard(Others())
    assert policy.supports_per_sample_timesteps is not None, "it was tried while all processes are alike"
    transformer = policy.pipe.transformer
    assert given == [(transformer, list(transformer.transformer_blocks), set(policy.trainable_parameters().values()), None)]
    assert policy.uses_fsdp
    assert not policy.meter.counts_flops, "the call that counts would have to be one of all processes"
    assert policy.supports_images_per_row is None, "a pipeline that takes no images is not tried with one"
    assert not policy.is_sharded, "a LoRA is whole on every process"
    policy.pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert torch.equal(policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), expected)
    assert (len(calls), asked) == (3, [1])
    assert not tiny_policy().uses_fsdp


def test_all_weights_can_be_trained_in_place_of_a_lora(tmp_path):
    policy = tiny_policy()
    assert not policy.is_full_finetuning
    policy.enable_full_finetuning()
    first = policy.trained
    policy.enable_full_finetuning()
    assert policy.trained is first
    assert policy.is_full_finetuning
    assert not policy.is_sharded
    assert policy.trainable_parameters().keys() == dict(policy.pipe.transformer.named_parameters()).keys()
    assert all(parameter.requires_grad for parameter in policy.trainable_parameters().values())
    policy.trained.store_base_weights("cpu")
    base = policy.adapter_state()
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(0.01)
    assert policy.save(tmp_path / "none", write=False) == tmp_path / "none"
    assert not (tmp_path / "none").exists()
    again = load_policy("tiny", "cpu", "fp32", lora=policy.save(tmp_path / "whole"), **CALL)
    assert again.is_full_finetuning
    trained = policy.adapter_state()
    assert not any(torch.equal(value, base[name]) for name, value in trained.items())
    with policy.base_model():
        assert all(torch.equal(value, base[name]) for name, value in policy.adapter_state().items())
    for one in (policy, again):
        assert all(torch.equal(value, trained[name]) for name, value in one.adapter_state().items())
        one.reset_to_base()
        assert not one.is_full_finetuning
        assert all(torch.equal(value, base[name]) for name, value in one.pipe.transformer.named_parameters())


def test_replay_does_not_depend_on_the_micro_batch(policy):
    schedule, shape = policy.schedule(4)
    conditioning = policy.encode(PROMPTS * 2)

    def velocity(x, i, rows):
        return policy.velocity(x, schedule.timesteps[i], conditioning, rows)

    start, noise = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(0))
    stochastic = StochasticSteps([0, 1], "cps", noise_level=0.7)
    trajectories = [
        rollout(velocity, schedule, start, microbatch, stochastic=stochastic, noise=lambda i: noise) for microbatch in (4, 1)
    ]
    torch.testing.assert_close(trajectories[0].final, trajectories[1].final, rtol=0, atol=1e-4)
    rows = torch.arange(4)
    whole = sampling.replay(of_rows(velocity, rows), trajectories[0], 1, rows).v
    single = torch.cat([sampling.replay(of_rows(velocity, row), trajectories[0], 1, row).v for row in rows.split(1)])
    torch.testing.assert_close(whole, single, rtol=0, atol=1e-4)


def test_images_depend_on_their_own_seed_alone():
    policy = tiny_policy()
    three = generate_images(policy, [PROMPTS[0]] * 3, [5, 6, 7], 3, microbatch=3)
    one = generate_images(policy, [PROMPTS[0]], [6], 3)
    torch.testing.assert_close(three[1:2], one, rtol=0, atol=1e-5)
    assert (three[0] - three[1]).abs().max() > 0.01


def test_the_transformers_of_a_policy_are_frozen_and_in_evaluation_mode_and_nothing_else_is_changed():
    """One family has a second denoiser."""
    pipe = families.ideogram4()
    denoisers = [pipe.transformer, pipe.unconditional_transformer]
    for part in [*denoisers, pipe.vae]:
        part.train()
    policy = Policy(pipe, height=32, width=48, max_sequence_length=512)
    for part in denoisers:
        assert not part.training
        assert not any(parameter.requires_grad for parameter in part.parameters())
    assert pipe.vae.training
    assert all(parameter.requires_grad for parameter in pipe.vae.parameters())
    assert not policy.trainable_parameters()


def test_a_lora_of_the_hub_that_can_not_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FlowGRPOError, match=r"^nobody/nothing: not in the cache, and HF_HUB_OFFLINE is set"):
        tiny_policy().load_lora("nobody/nothing")


def test_a_damaged_transformer_is_named_and_taken_off(tmp_path):
    trained = small.policy(lora=False)
    trained.enable_full_finetuning()
    with torch.no_grad():
        next(iter(trained.trainable_parameters().values())).fill_(torch.nan)
    trained.save(tmp_path)
    other = small.policy(lora=False)
    base = {name: value.clone() for name, value in other.pipe.transformer.state_dict().items()}
    with pytest.raises(ValueError, match=r"^the transformer .* holds values that are not finite, in 1 of"):
        other.load_lora(tmp_path)
    assert not other.is_full_finetuning
    assert all(torch.equal(base[name], value) for name, value in other.pipe.transformer.state_dict().items())


def test_a_transformer_without_blocks_that_repeat_can_not_be_sharded(monkeypatch):
    policy = small.policy()
    monkeypatch.setattr(type(policy.pipe.transformer), "_repeated_blocks", None)
    monkeypatch.setattr(type(policy.pipe.transformer), "_no_split_modules", None)
    with pytest.raises(
        ValueError, match=r"^memory\.shard: diffusers does not name the repeated blocks of SD3Transformer2DModel"
    ):
        policy.shard(Processes())
