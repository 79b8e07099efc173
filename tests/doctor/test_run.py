"""The doctor on whole runs: a healthy one passes, a broken one ends early with the reason; what the command shows and writes."""

import io
import json
import os
import signal

import pytest
import torch
from rich.console import Console
from support.checks import statuses
from support.cli_process import begin, run
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS
from support.sample_rewards import nan, raises
from support.traces import two_blocks

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.doctor import resources
from flow_grpo.doctor.result import ERROR, OK, CheckResult, conclusion, show
from flow_grpo.doctor.run import RunChecks, run_checks
from flow_grpo.plan import estimate
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.hardware import Rates
from flow_grpo.plan.trace import ModelTrace


def test_a_healthy_run_has_no_error_and_nothing_is_written(tmp_path, monkeypatch):
    # what a step costs is known sooner of a model with fewer blocks, and without a measurement
    small = two_blocks(tmp_path / "model")

    def traced(args, *more, **given):
        return ModelTrace(args.model_copy(update={"model": str(small)}), *more, **given)

    monkeypatch.setattr(estimate, "ModelTrace", traced)
    monkeypatch.setattr(StepEstimator, "rates", lambda self, microbatch: Rates(1e12, 1e12))
    settings = [
        "prompts_per_step=6", "microbatch=12", "updates=2", "sampling.steps=6", "objective.window={schedule: fixed, size: 2}",
        "objective.keep_graphs=false", "lora.targets=[to_q, to_out.0]",
        "evaluation={prompts: prompts/signs_eval.txt, max_prompts: 8, steps: 4}", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    sections = list(run_checks(FlowGRPOConfig.from_yaml("tiny_grpo", settings)))
    assert [title for title, _ in sections] == ["machine", "start", "prompts", "rewards", "groups", "update", "cost"]
    by_name = {result.name: result for _, results in sections for result in results}
    assert not [result for result in by_name.values() if result.status == ERROR]
    assert conclusion(by_name.values()).startswith("No check failed")
    for name in ("ratio before the first update", "gradient vs Adam's eps", "reward variance from trained-step noise",
                 "clip range", "batch invariance", "longest prompt", "ocr: reads the prompt", "ocr: deterministic"):  # fmt: skip
        assert by_name[name].status == OK, by_name[name]
    assert {name for name in by_name if name.startswith("step ")} == {"step 0 at sigma 1.00", "step 1 at sigma 0.92"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_stages_with_offline_images_final_latents_and_a_critic_skip_what_does_not_apply(tmp_path, signs):
    save_grid(tmp_path / "signs.png", signs.images, [ImageInfo(prompt, 0, "") for prompt in signs.prompts], columns=2)
    stages = [
        {
            "steps": 1,
            "objective": {"name": "sft", "dataset": str(tmp_path / "signs.png")},
        },
        {"steps": 1, "objective": {"name": "awm"}},
        {"steps": 1, "objective": {"name": "ppo"}},
    ]
    sections = dict(run_checks(short_run(tmp_path / "run", f"stages={json.dumps(stages)}")))
    assert not [result for results in sections.values() for result in results if result.status == ERROR]
    first, second, third = "stage 1, sft", "stage 2, awm", "stage 3, ppo"
    assert [title for title in sections if title.startswith("rewards")] == ["rewards"], "they are the same in all stages"
    assert f"groups of {first}" not in sections
    names = {title: statuses(results) for title, results in sections.items()}
    noise = "reward variance from trained-step noise"
    assert noise not in names[f"groups of {second}"]
    assert noise in names[f"groups of {third}"]
    assert "groups with zero reward std" not in names[f"groups of {third}"], "a critic needs no other image"
    assert "clip range" in names[f"update of {third}"]
    assert not [name for name in names[f"update of {second}"] if name.startswith(("clip", "step"))]
    assert {"a step of stage 1", "a step of stage 3", "the run"} <= names["cost"].keys()


def test_the_conclusion_says_what_is_possible_only_if_no_check_failed():
    fine, broken = CheckResult("a", "1", OK), CheckResult("b", "2", ERROR)
    assert conclusion([fine], "the pipeline can be trained") == "No check failed, 0 warnings: the pipeline can be trained."
    assert "can be trained" not in conclusion([fine, broken], "the pipeline can be trained")


@pytest.mark.parametrize("reward", [raises, nan])
def test_a_broken_reward_ends_the_checks_with_its_name(tmp_path, reward):
    name = f"{SAMPLE_REWARDS}:{reward.__name__}"
    sections = dict(run_checks(short_run(tmp_path, f"rewards={{{name}: 1}}")))
    assert list(sections)[-1] == "rewards"
    (broken,) = [result for result in sections["rewards"] if result.status == ERROR]
    assert broken.name == f"{reward.__name__}: values"
    if reward is raises:
        assert "the camera is off" in broken.message


@pytest.mark.slow
def test_out_of_memory_in_an_evaluation_has_a_result_too(tmp_path, monkeypatch):
    def generate(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def stage(self, of_stage):
        self.step_metrics.append({"time/step": 1.0})
        yield from ()

    monkeypatch.setattr(RunChecks, "_stage", stage)
    monkeypatch.setattr(resources, "generate_images", generate)
    title, (failed,) = list(run_checks(short_run(tmp_path / "run")))[-1]
    assert (title, failed.name, failed.status) == ("cost", "an evaluation", ERROR)


def test_the_command_prints_80_columns_writes_its_results_and_exits_with_an_error(tmp_path):
    """A table of 80 columns, results in a file, the exit status of an error, and no more output after Ctrl-C."""
    reward = f"{SAMPLE_REWARDS}:nan"
    args = short_run(tmp_path / "run", f"rewards={{{reward}: 1}}")
    (tmp_path / "short.yaml").write_text(args.to_yaml())
    lines = run("doctor", "short.yaml", "--json", "look/found.json", cwd=tmp_path, code=2).splitlines()
    table, (sentence, file) = lines[:-2], lines[-2:]
    assert all(len(line) <= 80 for line in table)
    assert any("ERROR: are not finite" in line for line in table)
    content = json.loads((tmp_path / "look/found.json").read_text())
    assert content["conclusion"] == sentence
    assert "fix this before you train" in sentence
    assert [row["name"] for row in content["checks"] if row["status"] == ERROR] == ["nan: values"]
    assert file == "results: look/found.json"
    assert {path.name for path in tmp_path.iterdir()} == {"short.yaml", "look"}

    (tmp_path / "long.yaml").write_text(short_run(tmp_path / "run").to_yaml())  # nothing ends these checks early
    command = begin("doctor", "long.yaml", cwd=tmp_path)
    command.wait_for(lambda: ", grpo" in command.output)
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(130)


def test_results_are_kept_at_an_error_and_untrusted_text_is_made_visible(tmp_path):
    """Checks that end with an error, of a run whose names and sentences hold escape sequences and markup."""
    evil = "\x1b[7m[b]x[/c]"

    def sections():
        yield f"groups of {evil}", [CheckResult(evil, evil, ERROR, f"{evil}.")]
        raise ValueError("the camera is off")

    shown, file = io.StringIO(), tmp_path / "found.json"
    with pytest.raises(ValueError, match="the camera is off"):
        show(Console(file=shown, width=300), f"{evil}, grpo", sections(), "the run can be started", file)
    assert "\x1b" not in shown.getvalue()
    assert shown.getvalue().count(r"\x1b[7m[b]x[/c]") == 5
    content = json.loads(file.read_text())
    assert [row["status"] for row in content["checks"]] == [ERROR]
    assert content["conclusion"] == "The checks were not completed."
