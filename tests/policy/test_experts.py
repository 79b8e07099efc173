"""Pipelines with two transformers, each for a part of the schedule, such as Wan 2.2."""

from contextlib import nullcontext

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from support.embedded import stir
from support.families import TINY, awake

from flow_grpo import sampling
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan.estimate import weight_bytes
from flow_grpo.policy import hub
from flow_grpo.policy.hub import WEIGHTS, expert_weights
from flow_grpo.policy.loading import load_policy, save_merged
from flow_grpo.policy.policy import Policy
from flow_grpo.types import StochasticSteps

CALL = {"height": 32, "width": 48, **TINY["wan22"].call}
PROMPTS = ["a red cat", "a big dog"]
ROWS = torch.arange(2)
STEPS = 3  # of which the first is the first expert's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("wan22")
    awake(TINY["wan22"].build()).save_pretrained(place)
    return place


@pytest.fixture
def policy(folder) -> Policy:
    policy = load_policy(str(folder), "cpu", "fp32", **CALL)
    policy.add_lora(2, 4, None, seed=0)
    stir(policy)
    return policy


def velocities(policy: Policy) -> list[torch.Tensor]:
    """At each step, at the same state."""
    schedule, shape = policy.schedule(STEPS)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    velocity = policy.velocity_fn(schedule, policy.encode(PROMPTS), ROWS)
    with torch.no_grad():
        return [velocity(x, i) for i in range(STEPS)]


def test_each_expert_has_a_lora_of_its_own(policy):
    names = list(policy.trainable_parameters())
    second = [name for name in names if name.startswith("transformer_2.")]
    assert len(second) == len(names) / 2
    with torch.no_grad():
        before = velocities(policy)
        for name in second:
            policy.trainable_parameters()[name].zero_()
        after = velocities(policy)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("step", range(STEPS - 1))  # the last one has no noise
def test_the_window_decides_which_expert_is_trained(policy, step):
    schedule, shape = policy.schedule(STEPS)
    velocity = policy.velocity_fn(schedule, policy.encode(PROMPTS), ROWS)
    start, noise = torch.randn(2, 2, *shape, generator=torch.Generator().manual_seed(0))
    stochastic = StochasticSteps([step], "cps", noise_level=0.7)
    rollout = sampling.rollout(velocity, schedule, start, stochastic=stochastic, noise=lambda i: noise)
    now = sampling.replay(velocity, rollout, 0, ROWS).log_prob
    assert torch.equal(now, rollout.log_prob[:, 0])
    now.sum().backward()
    received = {name for name, p in policy.trainable_parameters().items() if p.grad is not None and p.grad.any()}
    of_second = {name.startswith("transformer_2.") for name in received}
    assert of_second == {step > 0}


def test_a_lora_without_the_second_experts_file_leaves_that_expert_as_it_is(policy, folder, tmp_path):
    expected = velocities(policy)
    with policy.base_model():
        base = velocities(policy)
    policy.save(tmp_path)
    (tmp_path / expert_weights("transformer_2")).unlink()
    assert (tmp_path / WEIGHTS).is_file()
    policy.reset_to_base()
    with pytest.warns(UserWarning, match="has no file for transformer_2, which stays as it is"):
        policy.load_lora(tmp_path)
    again = velocities(policy)
    assert torch.equal(again[0], expected[0])
    assert torch.equal(again[2], base[2])
    assert not torch.equal(base[2], expected[2])


@pytest.mark.parametrize("place", ["", "signs_high_noise.safetensors", "signs_low_noise.safetensors"])
@pytest.mark.parametrize("only_low", [False, True])
def test_two_files_for_high_and_low_noise_are_one_lora(policy, tmp_path, place, only_low):
    """As ComfyUI's and other programs' LoRAs for Wan 2.2 are named."""
    expected = velocities(policy)
    with policy.base_model():
        base = velocities(policy)
    policy.save(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "signs_high_noise.safetensors")
    (tmp_path / expert_weights("transformer_2")).rename(tmp_path / "signs_low_noise.safetensors")
    policy.reset_to_base()
    if only_low:
        (tmp_path / "signs_high_noise.safetensors").unlink()
    if only_low and "high" in place:
        with pytest.raises(FlowGRPOError, match="there is no LoRA at"):
            policy.load_lora(tmp_path / place)
        return
    with pytest.warns(UserWarning, match="no file for transformer, which stays") if only_low else nullcontext():
        policy.load_lora(tmp_path / place)
    again = velocities(policy)
    assert torch.equal(again[0], base[0] if only_low else expected[0])
    assert torch.equal(again[2], expected[2])


@pytest.mark.parametrize("has_second", [True, False])
def test_the_second_experts_file_is_looked_for_on_the_hub(policy, tmp_path, monkeypatch, has_second):
    policy.save(tmp_path)

    def hub_file(repo: str, name: str) -> str:
        assert repo == "me/wan-lora"
        if not has_second:
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hub_file", hub_file)
    found = hub.expert_lora("me/wan-lora", "transformer_2")
    assert found == (tmp_path / expert_weights("transformer_2") if has_second else None)


def test_copies_and_states_have_both_experts(policy):
    before = {name: value.clone() for name, value in policy.adapter_state().items()}
    policy.lora.add_adapter_copy("old")
    stir(policy, seed=1)
    with policy.lora.use("old"):
        old = velocities(policy)
    policy.load_adapter_state(before)
    assert all(torch.equal(a, b) for a, b in zip(velocities(policy), old, strict=True))


def test_a_copy_has_each_experts_own_rank(policy, folder, tmp_path):
    other = load_policy(str(folder), "cpu", "fp32", **CALL)
    other.add_lora(4, 4, ["to_q"], seed=1)
    stir(other)
    for one, name in ((policy, "first"), (other, "second")):
        one.save(tmp_path / name)
    (tmp_path / "second" / expert_weights("transformer_2")).replace(tmp_path / "first" / expert_weights("transformer_2"))
    both = load_policy(str(folder), "cpu", "fp32", **CALL)
    both.load_lora(tmp_path / "first")
    both.lora.add_adapter_copy("old")
    shapes = [[p.shape for p in both.trainable_parameters(adapter).values()] for adapter in ("default", "old")]
    assert shapes[0] == shapes[1]
    assert {min(shape) for shape in shapes[0]} == {2, 4}
    expected = velocities(both)
    with both.lora.use("old"):
        assert all(torch.equal(a, b) for a, b in zip(velocities(both), expected, strict=True))


def test_a_merged_model_has_both_loras(policy, folder, tmp_path):
    expected = velocities(policy)
    save_merged(policy, tmp_path, str(folder))
    merged = load_policy(str(tmp_path), "cpu", "fp32", **CALL)
    for one, other in zip(velocities(merged), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5)


def test_memory_settings_reach_both_experts(folder):
    policy = load_policy(str(folder), "cpu", "fp32", memory=MemoryConfig(gradient_checkpointing=True), **CALL)
    assert policy.pipe.transformer.gradient_checkpointing
    assert policy.pipe.transformer_2.gradient_checkpointing
    sizes = {name: weight_bytes(one, None) for name, one in policy.lora.transformers.items()}
    assert sizes[""] == sizes["transformer_2."] > 0


def test_what_two_experts_cannot_do_is_refused(folder):
    policy = load_policy(str(folder), "cpu", "fp32", **CALL)
    with pytest.raises(ValueError, match="WanPipeline has 2 transformers, which get a LoRA each: set lora"):
        policy.enable_full_finetuning()
    with pytest.raises(ValueError, match=r"memory\.shard is for one transformer, and WanPipeline has several"):
        policy.shard(Processes())
