"""What `rewards test` prints and writes."""

import torch

from flow_grpo.data.grid import read_grid
from flow_grpo.doctor.show_reward import histogram, save_ranked
from flow_grpo.evaluation.group_dependence import RewardInputs

PROMPTS = ["a fox", "a fox", "a cat", "a cat"]


def test_a_histogram_counts_all():
    bins = histogram(torch.tensor([0.0, 0.05, 0.5, 1.0]))
    assert sum(count for *_, count in bins) == 4
    assert (bins[0][2], bins[-1][2], bins[0][0], bins[-1][1]) == (2, 1, 0, 1)
    assert histogram(torch.tensor([2.0, 2.0])) == [(2, 2, 2)]


def test_the_grid_is_sorted_by_score(tmp_path):
    images = torch.rand(4, 3, 8, 8)
    inputs = RewardInputs(images, PROMPTS, {})
    values = torch.tensor([0.1, 0.4, 0.3, 0.2])
    save_ranked(tmp_path / "sheet.png", "mine", inputs, list("abcd"), values)
    ranked, cells = read_grid(tmp_path / "sheet.png")
    assert [cell.model for cell in cells] == ["b", "c", "d", "a"]
    assert torch.allclose(ranked, images[[1, 2, 3, 0]], atol=1 / 255)
