"""The hacking monitor: what it warns of, what it leaves alone, and two real runs that it has to tell apart."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from flow_grpo.evaluation import hacking, image_metrics
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER, EvaluationRecord

RECORDED = Path(__file__).parent / "recorded"


def reading(step: int, reward: float, clip: float, noise: float = 0.0, seed: int = 0, prompts: int = 64) -> EvaluationRecord:
    """Prompts that differ by much, each moved alike but for the noise."""
    draw = random.Random(1000 * seed + step)
    of = [0.3 * ((i * 37) % prompts) / prompts for i in range(prompts)]

    def near(mean: float, spread: float) -> list[float]:
        return [mean + o + draw.gauss(0, spread) for o in of]

    image_metrics = {HIGH_FREQUENCY_POWER: near(0.05, noise / 10), DIVERSITY: near(0.3, noise)[:16]}
    return EvaluationRecord(step, near(reward, noise), {"clip": near(clip, noise)}, image_metrics)


def test_a_held_out_reward_that_falls_while_the_trained_one_rises_is_caught():
    history = [reading(0, 0.5, 0.80), reading(10, 0.6, 0.85), reading(20, 0.7, 0.80)]
    assert hacking.detect_drops(history[:2]) == {}
    assert list(hacking.detect_drops(history)) == ["clip"]
    since, share, risen = hacking.detect_drops(history)["clip"]
    assert (since, risen) == (10, "the trained reward"), "since its best evaluation"
    assert share == pytest.approx(0.05 / 1.0, rel=0.05)
    sentence = hacking.warnings(history, best=10)["clip"]
    assert "clip, which is not trained on, has fallen by 5% since step 10 while the trained reward rose" in sentence
    assert sentence.endswith("best/ holds the weights of step 10.")
    assert "best/" not in hacking.warnings(history)["clip"]


def test_what_falls_together_with_the_trained_reward_is_not_hacking():
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.5, 0.6)]) == {}
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.3, 0.6)]) == {}
    setback = [reading(0, 0.5, 0.8), reading(10, 0.9, 0.9), reading(20, 0.8, 0.85)]
    assert hacking.detect_drops(setback) == {}, "both are above the first, and have fallen since"


def trained_on_two(step: int, ocr: float, jpeg: float) -> EvaluationRecord:
    """A run on two rewards, whose sum stays."""
    one = reading(step, ocr, 0.8, noise=0.02)
    other = reading(step + 100, jpeg, 0.8, noise=0.02).reward
    return replace(one, reward=[0.1 * (i % 7) for i in range(64)], trained_rewards={"ocr": one.reward, "jpeg_size": other})


def test_a_trained_reward_that_falls_while_another_rises_is_caught():
    """The sum says nothing of it: gdpo weighs rewards anew in each group."""
    history = [trained_on_two(0, 0.9, -2.0), trained_on_two(4, 0.02, -1.2)]
    assert list(hacking.detect_drops(history)) == ["ocr"]
    sentence = hacking.warnings(history)["ocr"]
    assert sentence.startswith("ocr, which is trained on, has fallen by 8")
    assert "since step 0 while jpeg_size rose" in sentence
    assert hacking.detect_drops([trained_on_two(0, 0.9, -2.0), trained_on_two(4, 0.02, -2.0)]) == {}, "none rose"
    assert hacking.detect_drops([trained_on_two(0, 0.9, -2.0), trained_on_two(4, 0.9, -1.2)]) == {}, "none fell"


def test_a_share_that_falls_from_two_thirds_to_two_fifths_is_caught_at_the_next_evaluation():
    """ocr_exact of 128 prompts while a reward for one colour rises: .672 and .422, as if each image were drawn anew."""
    before, after = [1.0] * 86 + [0.0] * 42, [1.0] * 36 + [0.0] * 50 + [1.0] * 18 + [0.0] * 24
    image_metrics = {HIGH_FREQUENCY_POWER: [0.05] * 128, DIVERSITY: [0.3] * 16}
    held_out = {"clip": [0.9] * 128, "color": [1.0] * 128}
    history = [
        EvaluationRecord(step, [0.2 * step + 0.001 * i for i in range(128)], {**held_out, "ocr_exact": exact}, image_metrics)
        for step, exact in ((0, before), (4, after))
    ]
    assert list(hacking.detect_drops(history)) == ["ocr_exact"]


def test_a_penalty_that_grows_has_fallen():
    """A reward of negative weight is turned round, so that more is better."""

    def evaluation(step: int, jpeg: float, errors: float) -> dict:
        spread = [0.01 * (i * 7 % 16) for i in range(16)]
        values = {"jpeg": [jpeg + s for s in spread], "errors": [errors - s for s in spread]}
        values["reward"] = [a - b for a, b in zip(values["jpeg"], values["errors"], strict=True)]
        images = {"high_frequency_power": [0.1] * 16, "diversity": [0.2] * 16, "sizes": {}}
        return {
            "step": step,
            "trained": ["jpeg", "errors"],
            "weights": {"jpeg": 1.0, "errors": -1.0},
            "values": values,
            **images,
        }

    assert hacking.detect_drops(hacking.read_history([evaluation(0, 0.2, 0.5), evaluation(4, 0.9, 0.1)])) == {}
    more_errors = hacking.read_history([evaluation(0, 0.2, 0.5), evaluation(4, 0.9, 0.9)])
    assert hacking.detect_drops(more_errors)["errors"].risen == "jpeg"


def test_a_trifle_that_all_prompts_share_does_not_warn():
    assert hacking.detect_drops([reading(0, 0.5, 0.8), reading(10, 0.7, 0.79)]) == {}


def test_a_fall_from_0_of_every_prompt_is_a_warning():
    """A reward of penalties, such as minus the number of errors, is 0 for each prompt before training."""
    image_metrics = {HIGH_FREQUENCY_POWER: [0.05] * 8, DIVERSITY: [0.3] * 8}
    history = [EvaluationRecord(step, [0.1 * step] * 8, {"errors": [-1.0 * step] * 8}, image_metrics) for step in (0, 1)]
    assert hacking.detect_drops(history) == {"errors": (0, 1.0, "the trained reward")}
    assert "has fallen by 100% since step 0" in hacking.warnings(history)["errors"]


EVALUATIONS = 41  # the first, and 40 after it


def autoregressive(runs: int, prompts: int, correlation: float, seed: int) -> np.ndarray:
    """Standard normal values (runs, evaluations, prompts) with that correlation between an evaluation and the next."""
    values = np.random.default_rng(seed).standard_normal((runs, EVALUATIONS, prompts))
    for k in range(1, EVALUATIONS):
        values[:, k] = correlation * values[:, k - 1] + math.sqrt(1 - correlation**2) * values[:, k]
    return values


def ever_falls(values: np.ndarray, num_metrics: int = 3, share: float = 0.0) -> np.ndarray:
    """Whether an evaluation of a run (runs, evaluations, prompts) is below an earlier one by more than noise and the share."""
    fallen = np.zeros(len(values), bool)
    for k in range(1, EVALUATIONS):
        before, now = values[:, :k], values[:, k]
        large = before.mean(-1) - now.mean(-1)[:, None] > share * np.sqrt((before**2).mean(-1))
        fallen |= (hacking.is_significant_fall(values[:, : k + 1], num_metrics) & large).any(-1)
    return fallen


def test_at_most_a_twentieth_of_runs_in_which_nothing_falls_warn():
    """Three metrics in 40 evaluations: a continuous one, a skewed one, a share; independent, and slowly drifting prompt by prompt.

    The threshold on the size of a fall, which makes warnings rarer still, is left out. At a rate of .05, at most 4 of 240 runs warn with
    a probability of .01.
    """
    difficulty, runs = np.linspace(-2, 2, 64), 240
    drawn = [
        np.concatenate([autoregressive(runs // 2, 64, correlation, seed) for correlation in (0.0, 0.95)])
        for seed in range(3)
    ]
    metrics = [0.8 + 0.1 * difficulty + 0.1 * drawn[0], np.exp(drawn[1]), (drawn[2] > difficulty).astype(float)]
    fallen = np.logical_or.reduce([ever_falls(values) for values in metrics])
    assert stats.binom.cdf(4, runs, hacking.FALSE_ALARMS) < 0.012
    assert fallen.sum() <= 4


@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_a_fall_of_3_percent_from_the_middle_of_a_run_on_is_found(correlation):
    """Prompts whose values tremble by 5 % of their size, as the embedded model's ocr does.

    At a rate of .95, all of 80 runs are found with a probability of .017.
    """
    values = 0.8 + 0.1 * np.linspace(-2, 2, 128) + 0.04 * autoregressive(80, 128, correlation, seed=3)
    assert ever_falls(values, share=hacking.REWARD_DROP).mean() < 0.05
    values[:, EVALUATIONS // 2 :] -= 0.03 * 0.8
    assert ever_falls(values, share=hacking.REWARD_DROP).all()


def test_the_level_of_a_run_is_spent_once_over_all_evaluations():
    parts = [hacking.HALF_SPENT / ((k + hacking.HALF_SPENT - 1) * (k + hacking.HALF_SPENT)) for k in range(1, 100_000)]
    assert sum(parts) == pytest.approx(1, abs=1e-3)
    assert sum(parts[: hacking.HALF_SPENT]) == pytest.approx(0.5)


def test_few_prompts_say_nothing_and_prompts_without_a_number_are_left_out():
    few = [reading(0, 0.5, 0.8, prompts=7), reading(10, 0.7, 0.4, prompts=7)]
    assert hacking.detect_drops(few) == {}
    history = [reading(0, 0.5, 0.8), reading(10, 0.7, 0.7)]
    history[1].untrained_rewards["clip"][0] = float("nan")
    history[0].reward[1] = float("nan")
    assert list(hacking.detect_drops(history)) == ["clip"]


@pytest.mark.parametrize(("name", "enough", "trifle"), [(HIGH_FREQUENCY_POWER, 0.6, 0.7), (DIVERSITY, 0.2, 0.3)])
def test_images_that_lose_quality_are_caught(name, enough, trifle):
    for factor, caught in ((enough, [hacking.of_images(name)]), (trifle, [])):
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


def test_an_evaluation_at_which_another_reward_has_fallen_is_not_the_best():
    def with_color(record: EvaluationRecord, color: float) -> EvaluationRecord:
        return replace(record, untrained_rewards={**record.untrained_rewards, "color": [color] * len(record.reward)})

    first, second = reading(0, 0.5, 0.5), reading(10, 0.6, 0.6)
    for color, best in ((0.9, 20), (0.8, 10)):
        history = [with_color(first, 0.9), with_color(second, 0.9), with_color(reading(20, 0.9, 0.95), color)]
        assert ("color" in hacking.detect_drops(history)) == (best == 10)
        assert hacking.best_step(history) == best, "though the mean of clip and color is largest at step 20"


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
