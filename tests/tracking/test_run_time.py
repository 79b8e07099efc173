"""The time of a run: its steps and evaluations, from the first one or from where it is."""

import pytest

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.text import duration
from flow_grpo.tracking.tracker import RunTime


def test_a_run_takes_its_steps_and_evaluations():
    args = FlowGRPOConfig(steps=2000, evaluation={"every": 50})
    time = RunTime.of(args, lambda stage: 642.0, 1000.0)
    assert (time.steps, time.evaluations, time.evaluated) == (2000, 41, 50)
    assert time.seconds == 2000 * 642 + 41 * 1000
    assert time.seconds_to_evaluation == 50 * 642 + 2 * 1000
    assert str(time) == "2000 steps and 41 evaluations take 15.3 days; the evaluation at step 50 ends after 9 h 28 min"


def test_the_rest_of_a_run_is_without_what_is_done():
    args = FlowGRPOConfig(steps=100, evaluation={"every": 50})
    rest = RunTime.of(args, lambda stage: 10.0, 7.0, done=50)
    assert (rest.steps, rest.evaluations, rest.evaluated) == (50, 2, 50)
    assert rest.seconds == 50 * 10 + 2 * 7
    assert rest.seconds_to_evaluation == 7.0
    after_one = RunTime.of(args, lambda stage: 10.0, 7.0, done=1)
    assert (after_one.steps, after_one.evaluations, after_one.seconds_to_evaluation) == (99, 2, 49 * 10 + 7)


def test_each_stage_has_its_own_seconds_and_no_held_out_prompts_no_evaluation():
    stages = [{"steps": 30, "prompts_per_step": 4}, {"steps": 20, "prompts_per_step": 8}]
    args = FlowGRPOConfig(stages=stages, evaluation={"every": 40})
    time = RunTime.of(args, lambda stage: float(stage.prompts_per_step), 0.0)
    assert (time.seconds, time.evaluations, time.evaluated) == (30 * 4 + 20 * 8, 0, None)
    assert str(time) == "50 steps take 4 min 40 s"
    assert RunTime.of(args, lambda stage: float(stage.prompts_per_step), 1.0).seconds_to_evaluation == 30 * 4 + 10 * 8 + 2


@pytest.mark.parametrize(("seconds", "text"), [(3 * 86400, "3.0 days"), (47.9 * 3600, "47 h 54 min"), (59.6, "1 min 0 s")])
def test_long_durations_are_days(seconds, text):
    assert duration(seconds) == text
