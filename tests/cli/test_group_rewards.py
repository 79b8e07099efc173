"""Rewards that see several images of a prompt, wherever the command line runs them; `eval` is in tests/evaluation."""

import json
import re

import pytest
import torch
from PIL import Image
from support import sample_rewards
from support.checks import statuses
from support.paths import SAMPLE_REWARDS

from flow_grpo.cli.rewards import probe as rewards_test
from flow_grpo.cli.score import score
from flow_grpo.data.grid import ImageInfo, read_grid, save_grid
from flow_grpo.doctor import reward_probe
from flow_grpo.doctor.rewards import check_rewards
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.calls import RewardInputs

NAMES = ("brighter", "spread")
PROMPTS = ["a cat", "a dog", "a cat", "a dog", "a dog", "a cat", "a dog"]  # groups of three and four, mixed


@pytest.fixture
def grid(tmp_path):
    """A grid of images of two prompts, each brighter than the one before, and its pixels as they are read again."""
    generator = torch.Generator().manual_seed(0)
    images = 0.3 * torch.rand(7, 3, 8, 8, generator=generator) + torch.linspace(0, 0.6, 7).view(7, 1, 1, 1)
    save_grid(tmp_path / "grid.png", images, [ImageInfo(prompt, i, "tiny") for i, prompt in enumerate(PROMPTS)], columns=7)
    return tmp_path / "grid.png", read_grid(tmp_path / "grid.png")[0]


def by_hand(images):
    """The values of both rewards: an image's mean chance against each of the others of its prompt, and its group's spread."""
    bright = images.mean((1, 2, 3))
    values = {name: torch.zeros(len(images)) for name in NAMES}
    for i, prompt in enumerate(PROMPTS):
        group = [j for j, other in enumerate(PROMPTS) if other == prompt]
        others = bright[[j for j in group if j != i]]
        values["brighter"][i] = torch.sigmoid(50 * (bright[i] - others)).mean()
        values["spread"][i] = (bright[i] - bright[group].mean()).abs() + len(group)
    return values


def inputs(images):
    return RewardInputs(images, PROMPTS, {})


def test_score_gives_the_values_of_each_group_in_the_order_of_the_images(grid, tmp_path):
    file, images = grid
    score(file, [f"{SAMPLE_REWARDS}:{name}" for name in NAMES], out=tmp_path / "scores.json")
    found = json.loads((tmp_path / "scores.json").read_text())
    assert [row["prompt"] for row in found] == PROMPTS
    for name, values in by_hand(images).items():
        assert [row[name] for row in found] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rewards_test_calls_a_reward_with_whole_groups(grid, tmp_path, name, capsys):
    """One by one means group by group, so that nothing differs from all at once; and it is no fault to see the others."""
    file, images = grid
    rewards_test(f"{SAMPLE_REWARDS}:{name}", file, out=tmp_path / "ranked.png")
    printed, expected = capsys.readouterr().out, by_hand(images)[name]
    row = next(line for line in printed.splitlines() if line.strip().startswith(reward_probe.ORIGINAL))
    numbers = [float(cell) for cell in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", row)]
    wanted = [expected.mean(), expected.std(correction=0), expected.min(), expected.max()]
    assert numbers == pytest.approx([float(value) for value in wanted], rel=2e-2, abs=1e-3)
    assert "depends on other images" not in printed
    with Image.open(tmp_path / "ranked.png") as ranked:
        assert ranked.size[0] > 0
    reward = getattr(sample_rewards, name)
    stats = reward_probe.measure(name, reward, inputs(images), {})
    torch.testing.assert_close(stats.values[reward_probe.ORIGINAL], expected)
    assert torch.equal(stats.original, stats.again)
    assert not stats.depends_on_group


def test_the_doctor_checks_such_rewards_on_whole_groups_and_finds_no_fault_in_seeing_them(grid):
    _, images = grid
    own, prompts = images[:6], ["a cat"] * 3 + ["a dog"] * 3
    seen = []

    def noted(images, prompts):
        seen.append((len(images), len(set(prompts))))
        return sample_rewards.spread(images, prompts)

    noted.scope = "group"
    both = WeightedSum({"brighter": sample_rewards.brighter, "noted": noted}, {"brighter": 1.0, "noted": 1.0})
    checks = check_rewards(both, list(both.rewards), RewardInputs(own, prompts, {}), sampling_seconds=1.0)
    assert set(seen) == {(3, 1)}
    found = statuses(checks.results)
    assert {name for name, status in found.items() if status == "error"} == set()
    assert not [name for name in found if name.endswith("depends on other images")]
    for name in both.rewards:
        for check in ("values", "std within groups", "deterministic"):
            assert found[f"{name}: {check}"] == "ok"
    bright = own.mean((1, 2, 3)).view(2, 3)
    wins = torch.sigmoid(50 * (bright[:, :, None] - bright[:, None]))
    torch.testing.assert_close(checks.stats["brighter"].original, ((wins.sum(2) - 0.5) / 2).flatten())
    torch.testing.assert_close(checks.stats["noted"].original, ((bright - bright.mean(1, keepdim=True)).abs() + 3).flatten())
