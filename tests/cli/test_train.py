"""`flow-grpo train` through its real entry point."""

import re

import pytest
from support.cli_process import run, run_anew


def test_train_says_where_its_results_are_and_libraries_say_nothing(trained):
    output = run_anew("train", "short.yaml", "output_dir=runs/again", cwd=trained)
    for foreign in ("warning", "Warning", "deprecat", "INFO", "Loading", "it/s"):  # of imports
        assert foreign not in output, output
    for part in (
        "step 0  held out:",
        "step 2/2",
        "before",
        "after",
        "lora/pytorch_lora_weights.safetensors",
        "before_after.png",
    ):
        assert part in output.replace("\n", ""), output


def test_dry_run_says_in_a_few_lines_what_it_checked_and_trains_nothing(trained):
    output = run("train", "short.yaml", "output_dir=runs/dry", "optimizer.lr=0.25", "--dry-run", cwd=trained)
    assert "2232 prompts, 2 held-out prompts, the model's files" in output
    assert "brightness, each on 2 images" in output
    assert re.search(r"a step: 8 images of 32 x 80 in \S+ s without rewards, \S+ GB", output)
    assert "nothing was trained" in output
    phases = re.compile(r".*: \d+ s")  # what it is doing, printed where the machine is slow
    assert len([line for line in output.splitlines() if not phases.fullmatch(line)]) < 6
    assert not (trained / "runs" / "dry").exists()


@pytest.mark.parametrize("words", [["output_dir=runs/short"], ["output_dir=runs/none", "--resume"]])
def test_a_dry_run_ends_as_the_run_where_the_run_folder_does_not_fit(trained, words):
    run_says = run("train", "short.yaml", *words, cwd=trained, code=2).splitlines()[-1]
    assert run_says.startswith("error: runs/")
    checked = run("train", "short.yaml", *words, "--dry-run", cwd=trained, code=2)
    assert checked.splitlines()[-1] == run_says
    assert "nothing was trained" in checked


def test_the_first_word_is_a_config_or_a_setting(tmp_path):
    file = "runs/lr=1e-4/my=config.yaml"
    output = run("init", file, cwd=tmp_path)
    assert output.rstrip().endswith(f"flow-grpo train {file}")
    assert "lr: 0.25" in run("train", file, "optimizer.lr=0.25", "--show-config", cwd=tmp_path)
    assert "lr: 0.25" in run("train", "optimizer.lr=0.25", "--show-config", cwd=tmp_path)
    for command in ("plan", "doctor"):
        assert "there is no config runs/lr=2" in run(command, "runs/lr=2", cwd=tmp_path, code=2)
        assert "there is no setting optimizer.lrr" in run(command, "optimizer.lrr=2", cwd=tmp_path, code=2)


def test_more_processes_than_a_machine_can_run_are_refused(tmp_path):
    assert "--num-processes=99999 is too many" in run("train", "--num-processes", "99999", cwd=tmp_path, code=2)


def test_a_profile_of_a_run_of_one_step_is_refused(tmp_path):
    assert "leaves out the first step" in run("train", "tiny_ocr", "steps=1", "--profile", "1", cwd=tmp_path, code=2)


def test_show_config_prints_every_setting_and_trains_nothing(trained):
    output = run("train", "short.yaml", "output_dir=runs/dry", "optimizer.lr=0.25", "--show-config", cwd=trained)
    assert "lr: 0.25" in output
    assert not (trained / "runs" / "dry").exists()
