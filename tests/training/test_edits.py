"""Editing from the command line: prompts with images, trained on, sampled, evaluated, scored and reported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli_process import run
from support.image_families import fitted_kontext
from support.paths import SAMPLE_REWARDS
from support.process_runs import forked, rows, same

from flow_grpo.cli.sample import result_size
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import read_grid
from flow_grpo.data.prompt_sources import load_prompts

REWARD = f"{SAMPLE_REWARDS}:asked_edit"
METHODS = {
    "grpo": {
        "objective": {"name": "grpo"},
        "sampling": {"steps": 4, "transition": "cps", "noise_level": 0.5},
        "optimizer": {"lr": 5e-3},
        "steps": 20,
        "images_per_prompt": 12,
    },
    "awm": {"objective": {"name": "awm"}, "sampling": {"steps": 4}, "steps": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model, images, and a prompt file for training and one for evaluation."""
    folder = tmp_path_factory.mktemp("edits")
    torch.manual_seed(0)
    fitted_kontext().save_pretrained(folder / "model")
    for name, first, count in (("train", 0, 16), ("held_out", 100, 12)):
        for seed in range(first, first + count):
            squares = np.random.default_rng(seed).integers(0, 140, (2, 2, 3), dtype=np.uint8)
            file = folder / "images" / f"{seed}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(squares).resize((48, 32), Image.Resampling.NEAREST).save(file)
        table = [
            {"prompt": "brighten the right half", "image": f"images/{seed}.png"} for seed in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return folder


def config(folder: Path, name: str, method: str, **more) -> Path:
    args = FlowGRPOConfig(
        **{
            "model": "model",
            "prompts": "train.jsonl",
            "rewards": {REWARD: 1.0},
            "pipeline_kwargs": {"height": 32, "width": 48, "max_sequence_length": 16, "_auto_resize": False},
            "output_dir": name,
            "steps": 10,
            "prompts_per_step": 8,
            "images_per_prompt": 8,
            "microbatch": 32,
            "optimizer": {"lr": 1e-2},
            "lora": {"rank": 8, "alpha": 16, "targets": "all"},
            "evaluation": {"prompts": "held_out.jsonl", "every": 10, "steps": 4},
            "device": "cpu",
            "dtype": "fp32",
            **METHODS[method],
            **more,
        }
    )
    file = folder / f"{name}.yaml"
    file.write_text(args.to_yaml())
    return file


@pytest.fixture(scope="module", params=[pytest.param("grpo", marks=pytest.mark.slow), "awm"])
def trained(request, folder) -> Path:
    """The folder of a run of each method."""
    run("train", str(config(folder, request.param, request.param)), cwd=folder)
    return folder / request.param


def first_and_last_evaluation(run_folder: Path) -> tuple[Path, Path]:
    """Their folders."""
    steps = sorted(run_folder.glob("pictures/step_*"))
    return steps[0], steps[-1]


def test_the_held_out_reward_of_edits_rises(trained):
    first, last = (
        torch.tensor(json.loads((step / "evaluation.json").read_text())["values"]["reward"])
        for step in first_and_last_evaluation(trained)
    )
    change = last - first
    assert change.mean() > 3 * change.std() / len(change) ** 0.5
    assert change.mean() > 0.05 * first.abs().mean()


def test_the_report_shows_the_sources(trained):
    kept = {file.stem for file in (trained / "pictures" / "sources").glob("*.webp")}
    held_out = load_prompts(trained.parent / "held_out.jsonl").prompts
    evaluation = json.loads((first_and_last_evaluation(trained)[-1] / "evaluation.json").read_text())
    shown = {prompt.images[0].digest for prompt, digest in zip(held_out, evaluation["sources"], strict=True) if digest}
    assert shown <= kept
    page = (trained / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert all(source.startswith("data:image/webp;base64,") for source in data["runs"][0]["sources"])
    assert all(group["source"] for step in data["runs"][0]["groups"] for group in step["groups"])


def test_the_cards_python_edits_the_source(trained, monkeypatch):
    folder, name = trained.parent, trained.name
    run("export", name, "--out", f"{name}_export", cwd=folder)
    card = (folder / f"{name}_export" / "README.md").read_text()
    assert "pipeline_tag: image-to-image\n" in card
    assert "text-to-image" not in card
    monkeypatch.chdir(folder)
    code, edits = card.partition("```python\n")[2].partition("```")[0], []
    for seed in (100, 101):
        shutil.copyfile(f"images/{seed}.png", "source.png")
        namespace: dict = {}
        exec(code, namespace)
        edits.append(np.asarray(namespace["image"]))
    assert edits[0].shape == (32, 48, 3)
    assert (edits[0] != edits[1]).any(), "of two sources"


@pytest.mark.slow
def test_two_processes_train_on_edits_as_one_does(folder, tmp_path):
    short = {
        "steps": 2,
        "prompts_per_step": 4,
        "images_per_prompt": 2,
        "microbatch": 4,
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
    }
    for name in ("one", "two"):
        config(folder, name, "grpo", **short, save_every=1)
    run("train", "one.yaml", cwd=folder)
    forked(folder / "two.yaml", 2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (folder / name).rename(tmp_path / name / "run")
    assert len(rows(tmp_path / "one")) > 2
    same(tmp_path / "one", tmp_path / "two")


def test_sample_eval_and_score_take_the_images_of_prompts(trained):
    folder = trained.parent
    run("sample", "brighten the right half", "--image", "images/100.png", "--seeds", "2", "--lora", f"{trained.name}/lora",
        "--trust", "--out", f"{trained.name}_one", cwd=folder)  # fmt: skip
    images, cells = read_grid(folder / f"{trained.name}_one" / "grid.png")
    assert len(images) == 2
    assert Image.open(folder / f"{trained.name}_one" / "grid.png").width > 3 * 192, "the source is beside its edits"
    run(
        "sample",
        "held_out.jsonl",
        "--seeds",
        "1",
        "--lora",
        f"{trained.name}/lora",
        "--trust",
        "--out",
        trained.name + "_all",
        cwd=folder,
    )
    first = read_grid(folder / f"{trained.name}_all" / "grid.png")[0][0]
    torch.testing.assert_close(first, images[0], rtol=0, atol=1.5 / 255)  # of a micro-batch of another size
    scored = [folder / f"{trained.name}_{n}.json" for n in (1, 2)]
    for file, prompts in zip(scored, ("held_out.jsonl", "reversed.jsonl"), strict=True):
        (folder / "reversed.jsonl").write_text("\n".join(reversed((folder / "held_out.jsonl").read_text().splitlines())))
        run("score", f"{trained.name}_all", "--prompts", prompts, "--reward", REWARD, "--out", str(file), cwd=folder)
    own, of_others = ([row["asked_edit"] for row in json.loads(file.read_text())] for file in scored)
    assert own != of_others, "each image is scored against its own source"
    output = run("eval", str(trained), "--trust", "--out", f"{trained.name}_eval", cwd=folder)
    assert "asked_edit" in output
    assert cells[0].prompt == "brighten the right half"


SMALLER = ["--height", "32", "--width", "64"]


@pytest.mark.parametrize(("size", "options", "expected"), [((64, 96), [], (64, 96)), ((50, 70), SMALLER, (32, 64))])
def test_where_no_size_is_set_the_results_have_that_of_the_source(folder, size, options, expected):
    Image.new("RGB", size[::-1]).save(folder / "source.png")
    config(folder, "unsized", "awm", pipeline_kwargs={"max_sequence_length": 16, "_auto_resize": False})
    words = [
        "brighten it",
        "--image",
        "source.png",
        "--config",
        "unsized.yaml",
        "--steps",
        "1",
        "--seeds",
        "1",
        "--out",
        "plain",
    ]
    run("sample", *words, *options, cwd=folder)
    assert Image.open(folder / "plain" / "0000_seed0.png").size == expected[::-1]


@pytest.mark.parametrize(
    ("size", "expected"),
    [((512, 768), (512, 768)), ((500, 700), (512, 704)), ((4096, 2048), (1440, 736)), ((10, 9), (32, 32))],
)
def test_a_large_source_gives_results_of_a_million_pixels(size, expected):
    assert result_size(size) == expected


def test_a_reward_is_tested_on_pairs_of_source_and_edit(trained):
    folder = trained.parent
    run(
        "sample", "held_out.jsonl", "--seeds", "1", "--lora", f"{trained.name}/lora", "--trust", "--out", "probe", cwd=folder
    )
    output = run("rewards", "test", REWARD, "--images", "probe", "--prompts", "held_out.jsonl", cwd=folder)
    assert "original" in output
    assert "fidelity" in run("score", "probe", "--prompts", "held_out.jsonl", "--reward", "fidelity", cwd=folder)


def test_a_model_that_takes_no_images_is_named_before_anything_is_trained(folder):
    settings = ["prompts=train.jsonl", "evaluation.prompts=held_out.jsonl", "output_dir=none"]
    for words in (["train", "tiny_ocr", *settings], ["train", "tiny_ocr", *settings, "--dry-run"]):
        output = " ".join(run(*words, cwd=folder, code=2).split())
        assert "StableDiffusion3Pipeline takes no images" in output
    assert not (folder / "none").exists()
