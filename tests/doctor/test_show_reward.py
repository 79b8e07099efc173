"""What `rewards test` prints and writes."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from flow_grpo.data.grid import read_grid
from flow_grpo.doctor.reward_probe import histogram, measure, save_ranked, show
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


def shown(reward, prompts: list[str] = PROMPTS, count: int = 4) -> str:
    """What `rewards test` prints for a reward of images whose brightness rises from 0 to 1."""
    images = torch.linspace(0, 1, count)[:, None, None, None].expand(-1, 3, 8, 8)
    console = Console(width=200)
    with console.capture() as output:
        show(console, "mine", measure("mine", lambda: reward, RewardInputs(images, prompts, {})))
    return output.get()


def brightness(images, prompts):
    return images.mean((1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        (lambda images, prompts: [0.5] * len(prompts), "constant: all 4 images have the value 0.5000, so there is nothing to learn."),
        (lambda images, prompts: [float("cat" in p) for p in prompts], "std within a prompt: 0.0000 (of 0.5000 over all images)"),
        (lambda images, prompts: [float("cat" in p) for p in prompts], "depends on the prompt only: "),
        (brightness, "std within a prompt: 0.1667 (of 0.3727 over all images)"),
        (brightness, "reads the prompt: no, wrong prompts have the same values"),
        (brightness, "The images of a prompt have different values, which a run can learn from."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_a_run_can_learn(reward, line):
    assert line in shown(reward)


def test_a_reward_that_most_images_satisfy_is_saturated():
    prompts = ["a fox"] * 10
    bright = shown(lambda images, prompts: (images.mean((1, 2, 3)) > 0.05).float(), prompts, 10)
    assert "saturated: 9 of 10 images have the highest value; use harder prompts" in bright
    assert "saturated: 9 of 10 images have the lowest value; use easier prompts" in shown(
        lambda images, prompts: (images.mean((1, 2, 3)) > 0.95).float(), prompts, 10
    )
    assert "saturated" not in shown(lambda images, prompts: (images.mean((1, 2, 3)) > 0.25).float(), prompts, 10)


def test_a_wrong_prompt_that_there_is_not_is_said_to_be_missing():
    assert "wrong prompt: not measured, all images have the same prompt" in shown(brightness, ["a fox"] * 4)
    assert "wrong prompt: not measured, the images have no prompts" in shown(brightness, [""] * 4)
    assert "within a prompt" not in shown(brightness, [""] * 4)
    assert "within a prompt" not in shown(brightness, list("abcd"))
    assert "not measured" not in shown(brightness)


def test_the_gradient_of_a_differentiable_reward_is_shown(monkeypatch):
    assert "gradient" not in shown(brightness)
    monkeypatch.setattr(brightness, "differentiable", True, raising=False)
    output = shown(brightness)
    slope = 192**-0.5
    assert f"gradient: predicts a slope of {slope:.4f}, measured {slope:.4f}" in output
    assert "in 1% of the image: 2% (1% if" in output, "one of 64 positions"
    assert f"sharpness S1: {slope / 100:.4f}" in output
    monkeypatch.setattr(brightness, "differentiable", False)
    assert "gradient" not in shown(brightness)


def test_a_zero_has_no_sign():
    output = shown(lambda images, prompts: -1e-6 * images.mean((1, 2, 3)))
    assert "0.0000" in output
    assert "-0.0000" not in output


def test_large_numbers_have_no_decimals():
    inputs = RewardInputs(torch.rand(4, 3, 8, 8), PROMPTS, {})
    stats = measure("mine", lambda: brightness, inputs)
    console = Console(width=200)
    with console.capture() as output:
        show(console, "mine", replace(stats, seconds_per_batch=0.001, seconds_per_image=0.03125))
    assert "31.2 ms per image one by one, 4,000 images per second in a batch" in output.get()
