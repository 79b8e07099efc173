"""Evaluations with rewards that see several images, and with several images of a prompt."""

import pytest
import torch
from support import small_policy as small
from support.thread_processes import run_as_processes

from flow_grpo.evaluation import generate
from flow_grpo.evaluation.generate import evaluate, generate_images, image_seed
from flow_grpo.rewards import WeightedSum


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def brighter(first, second, prompts):
    return torch.sigmoid(50 * (brightness(first, prompts) - brightness(second, prompts)))


def spread(images, prompts):
    return [float(images.std()) + len(prompts)] * len(prompts)


spread.scope, brighter.scope = "group", "pair"
KIT = {"brightness": brightness, "brighter": brighter, "spread": spread}


def measure(policy, processes=None, **more):
    names = more.pop("names", KIT)
    kit = WeightedSum({name: KIT[name] for name in names}, dict.fromkeys(names, 1.0))
    return evaluate(
        policy,
        small.PROMPTS.head(5),
        kit,
        base=policy.base_model,
        steps=2,
        seed=7,
        microbatch=5,
        processes=processes,
        **more,
    )


def images(policy, number=0):
    return generate_images(policy, small.PROMPTS.prompts[:5], [image_seed(7, i, number) for i in range(5)], 2, 5)


def test_a_pair_reward_is_the_win_rate_against_the_base_models_image_of_the_same_noise():
    policy = small.policy()
    values = measure(policy, names=["brighter"]).values
    with policy.base_model():
        of_base = images(policy)
    expected = brighter(images(policy), of_base, [""] * 5)
    assert (expected - 0.5).abs().max() > 0.01
    torch.testing.assert_close(values["brighter"], expected)
    assert measure(small.policy(lora=False), names=["brighter"]).values["brighter"].tolist() == [0.5] * 5


def test_rewards_are_averaged_over_the_images_of_a_prompt_and_a_group_has_all_of_them(monkeypatch):
    monkeypatch.setattr(generate, "NUM_DIVERSITY_PROMPTS", 3)
    policy = small.policy()
    evaluation = measure(policy, images_per_prompt=2)
    both = torch.stack([images(policy, number) for number in range(2)], 1)
    torch.testing.assert_close(evaluation.values["brightness"], both.mean((1, 2, 3, 4)))
    expected = torch.tensor([float(pair.std()) + 2 for pair in both])
    torch.testing.assert_close(evaluation.values["spread"], expected)
    total = sum(evaluation.values[name] for name in KIT)
    torch.testing.assert_close(evaluation.values["reward"], total)
    difference = (both[:3, 0] - both[:3, 1]).square().mean((1, 2, 3)).sqrt()
    torch.testing.assert_close(evaluation.diversity, difference)


def broken(images, prompts):
    raise RuntimeError("its server is down")


def test_where_prompts_name_rewards_and_all_were_dropped_the_sum_has_no_numbers():
    policy, prompts = small.policy(), small.PROMPTS.head(2)
    naming = type(prompts)(prompts.prompts, [{"rewards": {"broken": None}}] * 2)
    kit = WeightedSum({"broken": broken, "brightness": brightness}, {"broken": 1.0, "brightness": 1.0}, ["broken"])
    evaluation = evaluate(policy, naming, kit, base=policy.base_model, steps=2, seed=7, num_kept_images=2)
    assert list(evaluation.values) == ["reward"]
    assert evaluation.values["reward"].isnan().all()
    assert sorted(evaluation.images) == [0, 1]


@pytest.mark.parametrize("count", [2, 8])
def test_processes_measure_the_same_also_more_than_prompts(monkeypatch, count):
    monkeypatch.setattr(generate, "NUM_DIVERSITY_PROMPTS", 3)
    whole = measure(small.policy(), images_per_prompt=2)
    for evaluation in run_as_processes(count, lambda processes: measure(small.policy(), processes, images_per_prompt=2)):
        for name, values in whole.values.items():
            torch.testing.assert_close(evaluation.values[name], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(evaluation.diversity, whole.diversity, rtol=1e-4, atol=1e-5)
