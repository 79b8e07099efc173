"""`flow-grpo doctor` through its real entry point."""

import pytest
from support.cli_process import run


def test_doctor_measures_the_variance_of_each_step(trained):
    words = ["--step-variance", "--transitions", "cps", "--noise-levels", "0.8"]
    output = run("doctor", "short.yaml", "sampling.steps=3", "objective=grpo", *words, cwd=trained)
    assert "reward variance x 1000 from the noise of each step" in output
    assert "0 to 1" in output.partition("best window of 2")[2]  # not of 3, as objective.window.size says
    assert (trained / "step_variance.png").stat().st_size > 10_000


def test_a_plot_of_another_suffix_is_refused_before_anything_is_measured(trained):
    words = ["doctor", "short.yaml", "--step-variance", "--transitions", "cps", "--noise-levels", "0.8"]
    output = run(*words, "--out", "variance.csv", cwd=trained, code=2)
    assert "--out variance.csv does not end in .png" in output
    assert "reward variance" not in output


def test_doctor_checks_what_train_trains_by_default(trained):
    setting = "objective.beta=2"  # which neither reads: the error names the objective of the config
    assert "objective awm does not use beta" in run("train", setting, cwd=trained, code=2)
    assert "objective awm does not use beta" in run("doctor", setting, cwd=trained, code=2)
    assert "objective grpo does not use beta" in run("doctor", setting, "--step-variance", cwd=trained, code=2)


@pytest.mark.slow
def test_doctor_of_a_model_says_that_it_checked_no_config(trained):
    output = " ".join(run("doctor", "short.yaml", "--model", "tiny", cwd=trained).split())
    assert "No check failed, 0 warnings: the pipeline can be trained." in output
    assert "The config was not checked, as --model checks a pipeline alone: run flow-grpo doctor short.yaml." in output
    assert "config" not in run("doctor", "height=32", "--model", "tiny", cwd=trained)
