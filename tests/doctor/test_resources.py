"""The doctor's checks of the machine and of what the run costs."""

import pytest

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor import resources
from flow_grpo.doctor.result import ERROR, OK, WARNING


def test_the_time_of_a_run_is_its_steps_and_evaluations():
    args = FlowGRPOConfig(steps=20, evaluation={"every": 10})
    result = resources.run_time(args, [{"time/step": 60.0}], 30.0)
    assert result.value == "21 min 30 s"
    assert (
        result.message
        == "20 steps and 3 evaluations take 21 min 30 s; the evaluation at step 10 ends after 11 min 0 s, on one process"
    )


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (resources.device_speed("cpu", "bf16", 1e10, 1e12, False), WARNING),
        (resources.device_speed("cpu", "fp32", 1e12, 1e12, True), WARNING),
        (resources.device_speed("cuda", "bf16", 9e14, 5e13, True), OK),
        (resources.threads(1, 16, 8), WARNING),
        (resources.threads(8, 16, 8), OK),
        (resources.threads(16, 16, 8), OK),
        (resources.threads(2, 2, 8), OK),
        (resources.threads(15, 16, None), WARNING),
        (resources.step_time("a step", {"time/reward": 1.0, "time/update": 9.0, "time/step": 10.0}, 2.0), WARNING),
        (resources.step_time("a step", {"time/reward": 9.0, "time/update": 1.0, "time/step": 10.0}, 2.0), OK),
        (resources.memory(15.5e9, 16e9, None, model_alone=True), WARNING),
        (resources.memory(2e9, 16e9, 1e9, model_alone=False), OK),
        (resources.disk(2e9, 1e9), ERROR),
        (resources.disk(1e8, 1e9), OK),
    ],
)
def test_each_measured_resource_gets_its_status_and_advice(result, status):
    assert result.status == status
    assert status == OK or result.message.endswith("."), "it says what to do"


def test_a_run_folder_that_holds_a_run_is_a_warning(tmp_path):
    assert resources.run_folder(tmp_path).status == OK
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert resources.run_folder(tmp_path).status == WARNING
