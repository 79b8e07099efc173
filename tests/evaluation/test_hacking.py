"""The hacking monitor: what it warns of, what it leaves alone, and two real runs that it has to tell apart."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flow_grpo.evaluation import hacking, image_metrics
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER, EvaluationRecord

RECORDED = Path(__file__).parent / "recorded"


def reading(step: int, reward: float, clip: float, noise: float = 0.0, seed: int = 0, prompts: int = 64) -> EvaluationRecord:
    """Prompts that differ by much, each moved alike but for the noise."""
    draw = random.Random(1000 * seed + step)
    of = [0.3 * ((i * 37) % prompts) / prompts for i in range(prompts)]
    near = lambda mean, spread: [mean + o + draw.gauss(0, spread) for o in of]  # noqa: E731
    image_metrics = {HIGH_FREQUENCY_POWER: near(0.05, noise / 10), DIVERSITY: near(0.3, noise)[:16]}
    return EvaluationRecord(step, near(reward, noise), {"clip": near(clip, noise)}, image_metrics)


def test_a_held_out_reward_that_falls_while_the_trained_one_rises_is_caught():
    history = [reading(0, 0.5, 0.80), reading(10, 0.6, 0.85), reading(20, 0.7, 0.80)]
    assert hacking.detect_drops(history[:2]) == {}
    assert list(hacking.detect_drops(history)) == ["clip"]
    since, share = hacking.detect_drops(history)["clip"]
    assert since == 10, "its best evaluation"
    assert share == pytest.approx(0.05 / 1.0, rel=0.05)
    sentence = hacking.warnings(history, best=10)["clip"]
    assert "clip, which is not trained on, has fallen by 5% since step 10" in sentence
    assert sentence.endswith("best/ holds the weights of step 10.")
    assert "best/" not in hacking.warnings(history)["clip"]


def test_what_falls_together_with_the_trained_reward_is_not_hacking():
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.5, 0.6)]) == {}
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.3, 0.6)]) == {}
    setback = [reading(0, 0.5, 0.8), reading(10, 0.9, 0.9), reading(20, 0.8, 0.7)]
    assert hacking.detect_drops(setback) == {}, "both are above the first, and have fallen since"


def test_a_trifle_that_all_prompts_share_does_not_warn():
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.7, 0.79)]) == {}


def test_a_fall_from_0_of_every_prompt_is_a_warning():
    """A reward of penalties, such as minus the number of errors, is 0 for each prompt before training."""
    image_metrics = {HIGH_FREQUENCY_POWER: [0.05] * 8, DIVERSITY: [0.3] * 8}
    history = [EvaluationRecord(step, [0.1 * step] * 8, {"errors": [-1.0 * step] * 8}, image_metrics) for step in (0, 1)]
    assert hacking.detect_drops(history) == {"errors": (0, 1.0)}
    assert "has fallen by 100% since step 0" in hacking.warnings(history)["errors"]


def test_noise_does_not_warn():
    """A trained reward that rises, and a measure that only trembles by 12 % of its size from prompt to prompt, in 10 evaluations."""
    runs = 300
    histories = [[reading(step, 0.5 + 0.02 * step, 0.8, 0.12, seed) for step in range(10)] for seed in range(runs)]
    caught = sum(any(hacking.detect_drops(history[: n + 1]) for n in range(1, 10)) for history in histories)
    assert caught / runs < 0.05
    fallen = [[*history[:9], reading(9, 0.68, 0.8 - 0.12, 0.12, seed)] for seed, history in enumerate(histories)]
    assert sum("clip" in hacking.detect_drops(history) for history in fallen) / runs > 0.95, (
        "and a fall of that size is seen in it"
    )


def test_few_prompts_say_nothing_and_prompts_without_a_number_are_left_out():
    few = [reading(0, 0.5, 0.8, prompts=7), reading(10, 0.7, 0.4, prompts=7)]
    assert hacking.detect_drops(few) == {}
    history = [reading(0, 0.5, 0.8), reading(10, 0.7, 0.7)]
    history[1].untrained_rewards["clip"][0] = float("nan")
    history[0].reward[1] = float("nan")
    assert list(hacking.detect_drops(history)) == ["clip"]


@pytest.mark.parametrize(("name", "enough", "trifle"), [(HIGH_FREQUENCY_POWER, 0.6, 0.7), (DIVERSITY, 0.2, 0.3)])
def test_images_that_lose_quality_are_caught(name, enough, trifle):
    for factor, caught in ((enough, [name]), (trifle, [])):
        history = [reading(0, 0.5, 0.8), reading(10, 0.7, 0.8)]
        history[1].image_metrics[name] = [factor * value for value in history[0].image_metrics[name]]
        assert list(hacking.detect_drops(history)) == caught


def test_the_best_evaluation_is_that_of_the_rewards_that_are_not_trained_on():
    history = [reading(0, 0.5, 0.8), reading(10, 0.6, 0.9), reading(20, 0.9, 0.7)]
    assert hacking.best_step(history) == 10
    assert hacking.best_step([reading(0, 0.5, 0.8), reading(10, 0.9, 0.7)]) == 0, "the base model"
    alone = [EvaluationRecord(r.step, r.reward, {}, r.image_metrics) for r in history]
    assert hacking.best_step(alone) == 20, "without others, the trained one decides"
    assert hacking.best_step([history[0], reading(10, 0.5, 0.8)]) == 0, "the earliest of equals"


def test_a_reward_without_values_at_first_does_not_decide_which_evaluation_is_best():
    history = [reading(0, 0.5, 0.8), reading(10, 0.9, 0.7), reading(20, 0.6, 0.9)]
    nothing = [math.nan] * len(history[0].reward)

    def best(name: str) -> int:
        """Of the history, where that reward has no values at first."""
        values = [nothing if record.step == 0 else record.reward for record in history]
        return hacking.best_step(
            [replace(r, untrained_rewards={**r.untrained_rewards, name: v}) for r, v in zip(history, values, strict=True)]
        )

    assert best("clip") == 10, "there is no other, so the trained one decides"
    assert best("other") == 20, "clip decides"
    unmeasured = [replace(r, untrained_rewards={}, reward=nothing if r.step == 0 else r.reward) for r in history]
    assert hacking.best_step(unmeasured) == 10, "nor does the trained one's first evaluation stay the best"


def test_sharpness_is_what_a_blur_takes_away_and_distance_is_symmetric():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, 24, 24, generator=generator)
    blurred = torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    assert (image_metrics.high_frequency_power(blurred) < 0.5 * image_metrics.high_frequency_power(images)).all()
    assert image_metrics.high_frequency_power(torch.full((2, 3, 8, 8), 0.7)).abs().max() < 1e-6
    edge = torch.zeros(1, 3, 6, 6)
    edge[..., 3:] = 1.0
    assert image_metrics.high_frequency_power(edge).item() == pytest.approx((2 / 6 * (1 / 3) ** 2) ** 0.5, rel=1e-5)
    other = images.flip(0)
    assert torch.equal(image_metrics.rms_difference(images, other), image_metrics.rms_difference(other, images))
    assert image_metrics.rms_difference(images, images + 0.25).tolist() == pytest.approx([0.25] * 3, rel=1e-5)


def recorded(name: str) -> list[EvaluationRecord]:
    """The held-out prompts of a run with other rewards, as it kept them, seed 0.

    128 of `compare/awm_attention`, 24 steps; count_shapes: 126 of `tiny_shapes`, 15 steps, four images of each.
    """
    rows = json.loads((RECORDED / f"{name}.json").read_text())
    image_metrics = [{HIGH_FREQUENCY_POWER: row["sharpness"], DIVERSITY: row["diversity"]} for row in rows]
    return [
        EvaluationRecord(row["step"], row["reward"], row["held_out"], metrics)
        for row, metrics in zip(rows, image_metrics, strict=True)
    ]


def test_a_run_on_jpeg_size_alone_is_caught_before_ocr_has_lost_a_tenth():
    history = recorded("jpeg_size")
    caught = [n for n in range(1, len(history)) if hacking.detect_drops(history[: n + 1])]
    assert caught
    ocr = [sum(reading.untrained_rewards["ocr"]) / len(reading.untrained_rewards["ocr"]) for reading in history]
    assert 0.9 * ocr[0] < ocr[caught[0]] < ocr[0]
    assert ocr[-1] < ocr[caught[0]], "and it goes on to fall"
    assert all("ocr" in hacking.detect_drops(history[: n + 1]) for n in caught)


def test_a_run_that_counts_shapes_alone_is_caught_before_shapes_exact_has_lost_a_tenth():
    history = recorded("count_shapes")
    caught = [n for n in range(1, len(history)) if "shapes_exact" in hacking.detect_drops(history[: n + 1])]
    exact = [
        sum(reading.untrained_rewards["shapes_exact"]) / len(reading.untrained_rewards["shapes_exact"])
        for reading in history
    ]
    assert 0.9 * exact[0] < exact[caught[0]] < exact[0]
    assert exact[-1] < exact[caught[0]], "and it goes on to fall"


def test_a_run_on_ocr_and_clip_is_not_flagged():
    history = recorded("ocr_clip")
    assert history[-1].untrained_rewards["ocr_exact"].count(1.0) > 1.3 * history[0].untrained_rewards["ocr_exact"].count(
        1.0
    ), "it learned"
    for n in range(1, len(history)):
        assert hacking.detect_drops(history[: n + 1]) == {}
    assert hacking.best_step(history) == 24
