"""The data of a training step: its rows can be taken apart and joined, and its formulas are the ones of its docstrings."""

import dataclasses

import pytest
import torch

from flow_grpo.types import Evaluation, Loss, NoisedImage, PromptBatch, Schedule, Scores, StochasticSteps, Trajectory

ROWS = torch.tensor([2, 0])
SCHEDULE = Schedule(torch.tensor([1000.0, 600.0]), torch.tensor([1.0, 0.5, 0.2]))  # it need not end at 0


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_a_schedule_without_a_shift_is_linear_between_its_pairs_and_its_last_timestep_falls_as_its_sigma():
    level = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    timestep, sigma = SCHEDULE.at(level)
    torch.testing.assert_close(sigma, torch.tensor([1.0, 0.75, 0.5, 0.35, 0.2]))
    torch.testing.assert_close(timestep, torch.tensor([1000.0, 800, 600, 420, 240]))
    assert len(SCHEDULE) == 2


def test_timesteps_that_are_shares_of_the_image_rise_to_their_end():
    shares = Schedule(torch.tensor([0.0, 0.25, 0.5, 0.75]), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))
    timestep, sigma = shares.at(torch.tensor([1.0, 0.625, 0.125, 0.0]))
    torch.testing.assert_close(timestep, torch.tensor([0.0, 0.375, 0.875, 1.0]))
    torch.testing.assert_close(timestep, 1 - sigma)


def test_noise_levels_are_shifted_by_the_schedulers_table_where_there_is_one():
    table = torch.tensor([[1.0, 900.0, 1.0], [0.25, 700.0, 0.5], [0.0, 100.0, 0.0]])
    timestep, sigma = dataclasses.replace(SCHEDULE, shift=table).at(torch.tensor([1.0, 0.625, 0.25, 0.125, 0.0]))
    torch.testing.assert_close(sigma, torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))
    torch.testing.assert_close(timestep, torch.tensor([900.0, 800, 700, 400, 100]))


def test_metadata_become_columns_with_none_where_a_row_has_none():
    batch = PromptBatch(["a", "b"], [{"target": 1, "bound": 2}, {"target": 3}], torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert batch.columns() == {"bound": [2, None], "target": [1, 3]}


def test_a_batch_is_taken_apart_with_all_that_belongs_to_a_row():
    batch = PromptBatch(["a", "b", "c"], [{"n": 0}, {"n": 1}, {"n": 2}], torch.tensor([4, 4, 9]), torch.tensor([0, 1, 0]))
    taken = batch.take(ROWS)
    assert (taken.prompts, taken.columns()) == (["c", "a"], {"n": [2, 0]})
    assert (taken.group.tolist(), taken.image.tolist()) == ([9, 4], [0, 0])


def test_a_trajectory_is_taken_apart_and_joined_with_all_that_belongs_to_a_row():
    tensors = [numbered(3, 2, 5, start=100 * i) for i in range(3)]
    whole = Trajectory(SCHEDULE, StochasticSteps([0, 1], "cps", 0.7), *tensors, numbered(3, 2), numbered(3, 5))
    parts = [whole.take(torch.tensor([0, 1])), whole.take(torch.tensor([2]))]
    assert torch.equal(parts[1].x_next, tensors[1][2:])
    joined = Trajectory.join(parts)
    assert (joined.graphs, joined.steps) == ({}, [0, 1])
    assert joined.schedule is SCHEDULE
    for name in ("x", "x_next", "mean", "log_prob", "final"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name


def test_scores_are_taken_apart_and_joined_by_the_name_of_the_reward():
    whole = Scores(numbered(3), {"ocr": numbered(3, start=10), "clip": numbered(3, start=20)})
    joined = Scores.join([whole.take(ROWS), whole.take(torch.tensor([1]))])
    assert joined.total.tolist() == [2, 0, 1]
    assert {name: values.tolist() for name, values in joined.by_name.items()} == {"ocr": [12, 10, 11], "clip": [22, 20, 21]}


def test_the_mean_of_an_evaluation_leaves_out_what_could_not_be_scored():
    values = {"ocr": torch.tensor([1.0, float("nan"), 4.0])}
    assert Evaluation(values, torch.zeros(3), torch.zeros(1), {}).means() == {"ocr": 2.5}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_noised_image_and_the_error_of_a_velocity(dtype):
    x0, eps = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigma = torch.tensor([0.25, 0.5], dtype=torch.float64)
    image = NoisedImage(x0, eps, sigma, x0, x0)
    assert image.column.shape == (2, 1, 1)
    torch.testing.assert_close(image.x, torch.stack([0.75 * x0[0] + 0.25 * eps[0], 0.5 * x0[1] + 0.5 * eps[1]]))
    off = torch.full_like(x0, 0.5)
    off[1] = 2
    error = image.error((eps - x0 + off).to(dtype))
    torch.testing.assert_close(error, torch.tensor([0.25, 4.0], dtype=torch.float64), rtol=0.02, atol=0)


def test_a_loss_reports_nothing_unless_asked():
    assert Loss(torch.zeros(1)).metrics == {}
