"""The noise levels of objectives on final latents: how they are distributed, and which rows share them."""

import pytest
import torch
from scipy import stats
from support import small_policy as small

from flow_grpo import sampling
from flow_grpo.config.objective_by_name import section_type
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.training.forward_process_loss import add_noise, draw_noise_level
from flow_grpo.types import NoisedImage, Schedule

SIGMAS = torch.linspace(1, 0, 11)
STRAIGHT = Schedule(1000 * SIGMAS[:-1], SIGMAS)  # without shift
SHIFTED = Schedule(1000 * (3 * SIGMAS / (1 + 2 * SIGMAS))[:-1], 3 * SIGMAS / (1 + 2 * SIGMAS))


def drawn(prompts=3, images=2, draw=0, schedule=STRAIGHT, step=4, shape=(2,), **settings):
    objective = section_type("sft")(name="sft", **settings)
    batch = small.PromptSet(["a"] * prompts, [{}] * prompts).repeat(images)
    return draw_noise_level(batch, schedule, shape, objective, seed=1, step=step, draw=draw)


def test_levels_of_the_schedule_are_its_own_pairs_equally_often():
    level = drawn(3000, 1, schedule=SHIFTED, sigma_distribution="schedule", sigma_range=(0.2, 0.9))
    sigma = level.sigma
    counts = torch.stack([sigma == one for one in SHIFTED.sigmas]).sum(1)
    assert counts[[0, 9, 10]].tolist() == [0, 0, 0], "noisier than 0.9, or less noisy than 0.2, before the shift"
    assert int(counts.sum()) == 3000
    assert stats.chisquare(counts[1:9].numpy()).pvalue > 0.01
    place = torch.stack([SHIFTED.sigmas == one for one in sigma]).int().argmax(1)
    assert torch.equal(level.timestep, SHIFTED.timesteps[place])
    assert abs(stats.spearmanr(level.eps[:, 0].numpy(), sigma.numpy()).statistic) < 0.08


def test_several_levels_of_the_schedule_are_different_steps():
    settings = {"sigma_distribution": "schedule", "sigma_range": (0.2, 1.0), "num_noise_levels": 9}
    sigmas = [drawn(4, 2, draw, shared_noise=False, **settings).sigma for draw in range(9)]
    for row in torch.stack(sigmas, 1):
        assert row.sort(descending=True).values.tolist() == SIGMAS[:9].tolist()
    assert len({tuple(row.tolist()) for row in torch.stack(sigmas, 1)}) > 4, "each image has an order of its own"


@pytest.mark.parametrize(("preset", "steps"), [("sd35_medium_ocr_nft", range(10)), ("sd35_medium_ocr_awm", range(1, 12))])
def test_presets_noise_each_image_by_itself_to_different_steps_of_the_published_ones(preset, steps):
    config = FlowGRPOConfig.from_yaml(preset)
    objective, sigmas = config.objective, torch.linspace(1, 0, config.sampling.steps + 1)
    batch = small.PromptSet(["a"] * 8, [{}] * 8).repeat(config.images_per_prompt)
    levels = [
        draw_noise_level(batch, Schedule(1000 * sigmas[:-1], sigmas), (2,), objective, seed=1, step=4, draw=draw)
        for draw in range(objective.num_noise_levels)
    ]
    image_sigmas = torch.stack([level.sigma for level in levels], 1)
    assert all(len(set(row)) == len(levels) for row in image_sigmas.tolist())
    assert set(image_sigmas.flatten().tolist()) == {float(sigmas[step]) for step in steps}
    assert len(image_sigmas[: config.images_per_prompt].unique(dim=0)) > 12, "images of a group have their own steps"
    assert len(levels[0].eps.unique(dim=0)) == len(batch.prompts), "and their own noise"


@pytest.mark.parametrize("distribution", ["uniform", "schedule"])
@pytest.mark.parametrize("shared", [True, False])
def test_noise_is_shared_by_a_group_or_each_images_own(distribution, shared):
    for values in vars(drawn(40, 2, sigma_distribution=distribution, shared_noise=shared)).values():
        one, other = values.view(40, 2, -1).unbind(1)
        assert torch.equal(one, other) == shared
        assert len(one.unique(dim=0)) > 5


def test_a_step_draws_its_levels_of_the_schedule_anew():
    settings = {"sigma_distribution": "schedule"}
    one, other = (drawn(40, 1, step=step, **settings).sigma for step in (4, 5))
    assert not torch.equal(one, other)


def test_an_images_own_noise_is_of_the_streams_by_these_names():
    level = drawn(2, 2, draw=1, shared_noise=False)
    assert torch.equal(level.eps[3], sampling.noise((2,), 1, "eps", 4, 1, 1, 1))
    u = stats.norm.cdf(float(sampling.noise((), 1, "sigma", 4, 1, 1, 1)))
    assert float(level.sigma[3]) == pytest.approx(u, abs=1e-6)


def test_noised_latents_lie_between_image_and_noise_and_are_those_that_objectives_see():
    x0, eps = torch.full((3, 1, 2, 2), 3.0), torch.full((3, 1, 2, 2), -1.0)
    noised = add_noise(x0, eps, torch.tensor([0.25, 0.5, 1.0]))
    assert [values.unique().tolist() for values in noised] == [[2.0], [1.0], [-1.0]]
    x0, eps, sigma = torch.randn(3, 1, 2, 2), torch.randn(3, 1, 2, 2), torch.rand(3)
    assert torch.equal(add_noise(x0, eps, sigma), NoisedImage(x0, eps, sigma, x0, x0).x)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (
            {"name": "sft", "sigma_distribution": "schedule", "num_noise_levels": 4, "sigma_range": (0.5, 1.0)},
            "sigma_range has 3 of the 4 sampling steps: set a wider sigma_range, or fewer noise levels",
        ),
        ({"name": "sft", "sigma_distribution": "schedule", "sigma_range": (0.8, 0.9)}, "set a wider sigma_range\\."),
        ({"name": "dpo", "shared_noise": False}, "dpo compares a pair at the same noise: set objective.shared_noise=true"),
    ],
)
def test_settings_of_noise_levels_that_do_not_go_together_are_refused(objective, words):
    with pytest.raises(ValueError, match=words):
        small.settings(objective=objective)
    small.settings(objective={"name": objective["name"]})
