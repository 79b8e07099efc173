"""`flow-grpo sample`, `score` and `eval` through their real entry point."""

import json
import shutil

import pytest
import torch
from support.cli_process import run
from support.embedded import PROMPTS
from support.paths import SAMPLE_REWARDS

from flow_grpo.cli.evaluate import evaluate
from flow_grpo.cli.options import rewards_to_measure
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, read_grid, save_image
from flow_grpo.evaluation.targets import ModelTarget

CAT = PROMPTS[0]


def test_sample_score_and_eval_agree_cell_by_cell(trained):
    lora = "runs/short/lora"
    run(
        "sample",
        CAT,
        'white text "HORSE" on a black background',
        "--seeds",
        "2",
        "--steps",
        "3",
        "--lora",
        lora,
        cwd=trained,
    )
    images, cells = read_grid(trained / "samples" / "grid.png")
    assert images.shape == (4, 3, 32, 80)
    assert [cell.seed for cell in cells] == [0, 1, 0, 1]
    assert [cell.prompt for cell in cells][:2] == [CAT, CAT]
    assert lora in cells[0].model
    reward = f"{SAMPLE_REWARDS}:brightness"
    for source, out in (("samples/grid.png", "grid.json"), ("samples", "folder.json")):
        output = run("score", source, "--reward", reward, "--reward", "color", "--out", out, cwd=trained)
        assert "mean" in output
    by_grid, by_folder = (json.loads((trained / name).read_text()) for name in ("grid.json", "folder.json"))
    assert [row["brightness"] for row in by_grid] == [row["brightness"] for row in by_folder]
    assert [row["brightness"] for row in by_grid] == pytest.approx(images.mean((1, 2, 3)).tolist())
    assert [row["prompt"] for row in by_grid] == [cell.prompt for cell in cells]
    output = run(
        "eval", "samples/grid.png", "samples", "--reward", reward, "--reward", "color", "--out", "eval", cwd=trained
    )
    assert "samples against samples/grid.png: 2 prompts, 4 pairs of one prompt and seed" in " ".join(output.split())
    results = json.loads((trained / "eval" / "eval.json").read_text())
    assert results["prompt_set"] is None, "the images bring their prompts"
    grid, folder = results["targets"].values()
    assert grid["measures"] == folder["measures"]
    assert grid["measures"]["brightness"]["mean"] == pytest.approx(images.mean().item())


def test_eval_of_a_run_measures_with_and_without_its_lora(trained):
    refused = run("eval", "runs/short", cwd=trained, code=2)
    assert "runs/short/config.yaml" in refused
    assert "names the reward " in refused
    assert "add --trust if you wrote it" in refused
    output = run("eval", "runs/short", "--trust", cwd=trained)
    assert "base" in output
    assert "LoRA" in output
    results = json.loads((trained / "runs" / "short" / "eval.json").read_text())
    assert results["prompt_set"] == FlowGRPOConfig.from_yaml(trained / "runs" / "short" / "config.yaml").evaluation.prompts
    assert len(results["prompts"]) == 2
    logged = [json.loads(line) for line in (trained / "runs" / "short" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in logged if "eval/reward" in row]
    for name, row in (("base", held_out[0]), ("short", held_out[-1])):
        measures = results["targets"][name]["measures"]
        assert measures["brightness"]["mean"] == pytest.approx(row["eval/brightness"], abs=1e-5)
        assert "reward" not in measures, "the sum of one reward is that reward"
    assert results["targets"]["short"]["pairing"] == "2 prompts, 2 pairs of one prompt and seed"
    table = output[output.index("2 prompts, 2 images of each target") : output.index("numbers:")]
    assert all(len(line.rstrip()) <= 80 for line in table.splitlines())
    for name in ("eval.md", "eval.csv"):
        assert "short" in (trained / "runs" / "short" / name).read_text()


def test_eval_warns_of_a_reward_whose_values_depend_on_other_images(tmp_path):
    words = ["eval", "tiny_grpo", "--steps", "1", "--limit", "3"]
    output = run(*words, "--reward", f"{SAMPLE_REWARDS}:rank", "--reward", "color", cwd=tmp_path)
    assert output.count("depends on the other images of its prompt") == 1
    assert "warning: reward rank: an image's value depends" in output
    assert "depends on" not in run(*words, "--reward", "color", cwd=tmp_path)


def test_rewards_of_all_runs_are_measured(trained):
    """Those that only another run has are metrics without a weight, and are dropped where they can't score the prompts."""
    args = FlowGRPOConfig.from_yaml(trained / "short.yaml", ["evaluation.rewards={color: {}}"])
    other = FlowGRPOConfig.from_yaml(trained / "short.yaml", ["rewards={jpeg_size: 2, shapes: 1}"])
    models = [ModelTarget(name, "", config) for name, config in (("one", args), ("other", other))]
    measured, is_sum = rewards_to_measure(None, args, models)
    assert not is_sum, "the first config has one reward"
    assert rewards_to_measure(None, other, models)[1]
    assert measured.weights == {"brightness": 1, "color": 0, "jpeg_size": 0, "shapes": 0}
    scores = measured(torch.rand(2, 3, 32, 80), PROMPTS)
    assert list(rewards_to_measure(None, args, models[:1])[0].rewards) == ["color", "brightness"]
    assert "shapes" in measured.drop_messages[0]
    assert scores is not None


def test_eval_names_the_settings_in_which_sampled_images_differ(tmp_path, capsys):
    made = {
        "few": {"Steps": 4, "CFG scale": 1},
        "many": {"Steps": 40, "CFG scale": 1},
        "guided": {"Steps": 4, "CFG scale": 3.5},
    }
    for name, settings in made.items():
        for seed in range(2):
            save_image(
                tmp_path / name / f"000{seed}_seed{seed}.png", torch.rand(3, 32, 32), ImageInfo(CAT, seed, "m"), settings
            )

    def warnings(*names: str) -> str:
        evaluate([str(tmp_path / name) for name in names], reward=["color"], out=tmp_path)
        return " ".join(capsys.readouterr().out.partition("warning: ")[2].partition("settings: ")[2].split())

    folder = tmp_path.name
    assert warnings("few", "many").startswith(f"{folder}/few has Steps 4; {folder}/many has Steps 40.")
    assert warnings("few", "guided").startswith(f"{folder}/few has CFG scale 1; {folder}/guided has CFG scale 3.5.")
    shutil.copytree(tmp_path / "few", tmp_path / "again")
    assert warnings("few", "again") == ""
