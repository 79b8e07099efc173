"""What `rewards test` prints and writes."""

import math
import re

import pytest
import torch
from rich.console import Console

from flow_grpo.data.grid import read_grid
from flow_grpo.doctor.reward_probe import measure, perturbed, save_ranked, show
from flow_grpo.rewards.calls import RewardInputs

PROMPTS = ["a fox", "a fox", "a cat", "a cat"]


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
    inputs = RewardInputs(images, prompts, {})
    console = Console(width=200)
    with console.capture() as output:
        show(console, "mine", "mine", measure("mine", reward, inputs, perturbed(inputs)))
    return output.get()


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def likes_cats(images, prompts):
    """Whatever the image shows, so that wrong prompts score as high as right ones."""
    return images.mean((1, 2, 3)) + torch.tensor(["cat" in prompt for prompt in prompts])


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda images, prompts: [0.5] * len(prompts), "ERROR: all are equal"),
        (lambda images, prompts: [float("cat" in p) for p in prompts], "ERROR: the images of a prompt all get the same value"),
        (brightness, "0.17 ok: of 0.37 over all images"),
        (likes_cats, "mine: reads the prompt yes ok: +0 with a wrong prompt, too small to tell from 0 by 4 images"),
        (brightness, "mine: reads the prompt no warning: the images may stop matching"),
        (lambda images, prompts: [float("nan")] * len(prompts), "4 of 4 ERROR: are not finite"),
    ],
)  # fmt: skip
def test_the_results_say_what_a_run_can_learn(reward, words):
    assert words in " ".join(shown(reward).split())


def test_a_clear_effect_of_wrong_prompts_is_not_called_small():
    """The later half of the images is brighter, and of cats."""

    def fits(images, prompts):
        bright = images.mean((1, 2, 3))
        return bright + ((bright > 0.5) == torch.tensor(["cat" in prompt for prompt in prompts]))

    output = shown(fits)
    assert "ok: -1 with a wrong prompt" in output
    assert "too small" not in output


def test_what_images_without_a_second_prompt_or_image_do_not_show_is_left_out():
    assert "reads the prompt" in shown(brightness)
    assert "reads the prompt" not in shown(brightness, ["a fox"] * 4)
    for prompts in ([""] * 4, list("abcd")):
        assert "within groups" not in shown(brightness, prompts)
    assert "mine: " not in shown(brightness, ["a fox"], 1)


def test_values_that_are_not_finite_are_left_out_of_the_numbers_and_come_last(tmp_path):
    inputs, values = RewardInputs(torch.zeros(3, 3, 8, 8), list("abc"), {}), torch.tensor([math.nan, 1.0, 2.0])
    save_ranked(tmp_path / "ranked.png", "mine", inputs, list("abc"), values)
    assert [cell.prompt for cell in read_grid(tmp_path / "ranked.png")[1]] == ["c", "b", "a"]
    output = shown(lambda images, prompts: [math.nan, *images.mean((1, 2, 3)).tolist()[1:]])
    assert "nan" not in output
    assert re.search(r"original +0\.6667 +0\.2722 +0\.3333 +1\.0000", output)
    assert "█" not in shown(lambda images, prompts: [math.nan] * len(prompts))


def test_the_histogram_has_a_bar_for_each_value():
    bars = [line.split("█")[-1].strip() for line in shown(brightness).splitlines() if "█" in line]
    assert bars == ["1"] * 4


def test_the_gradient_of_a_differentiable_reward_is_shown(monkeypatch):
    assert "gradient" not in shown(brightness)
    monkeypatch.setattr(brightness, "differentiable", True, raising=False)
    output = shown(brightness)
    assert "of the predicted slope" in output
    assert "mine: sharpness S1" in output


def test_a_zero_has_no_sign():
    output = shown(lambda images, prompts: -1e-6 * images.mean((1, 2, 3)))
    assert "0.0000" in output
    assert "-0.0000" not in output
