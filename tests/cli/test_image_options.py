"""What users say of images on disk on the command line: prompts, metadata by row, sheets of others, where numbers go."""

import csv
import json
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image
from support.cli_process import run
from support.paths import SAMPLE_REWARDS
from torchvision.utils import make_grid

from flow_grpo import rewards
from flow_grpo.cli import options
from flow_grpo.data.grid import ImageInfo, from_bytes, save_grid, save_image
from flow_grpo.data.grid_layout import GridOptions

OWN = SAMPLE_REWARDS
LEVELS = [200, 40, 160, 80, 120]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A grid of four images of one prompt, a table with a row for each, and a sheet of torchvision's with five."""
    noise = np.random.default_rng(0).integers(-20, 20, (5, 24, 40, 3))
    images = from_bytes((noise + np.array(LEVELS)[:, None, None, None]).astype(np.uint8))
    save_grid(tmp_path / "grid.png", images[:4], [ImageInfo("a face", i, "tiny") for i in range(4)], 2)
    sheet = make_grid((images * 255).round().byte(), nrow=3, padding=2).permute(1, 2, 0).numpy()
    Image.fromarray(sheet).save(tmp_path / "sheet.png")
    (tmp_path / "meta.csv").write_text("prompt,answer\n" + "".join(f"a face,{n}\n" for n in (1, 2, 3, 4)))
    return tmp_path


def test_score_and_rewards_test_give_each_image_the_metadata_of_its_row(folder):
    run("score", "grid.png", "--prompts", "meta.csv", "--reward", f"{OWN}:uses_metadata", "--out", "x.json", cwd=folder)
    found = json.loads((folder / "x.json").read_text())
    assert [(row["uses_metadata"], row["answer"]) for row in found] == [(n, n) for n in (1, 2, 3, 4)]
    output = run("rewards", "test", f"{OWN}:uses_metadata", "--images", "grid.png", "--prompts", "meta.csv", cwd=folder)
    line = next(line for line in output.splitlines() if line.strip().startswith("original"))
    assert line.split()[1:5] == ["2.5000", "1.1180", "1.0000", "4.0000"]


def test_one_prompt_scores_all_images_of_a_grid_and_what_was_found_is_reported(folder):
    words = ["sheet.png", "--prompt", "a face", "--reward", f"{OWN}:brightness"]
    output = run("score", *words, "--out", "x.csv", cwd=folder)
    assert "sheet.png: 2 rows x 3 columns of images with 40 x 24 pixels, margins of 2 left" in output
    rows = list(csv.DictReader((folder / "x.csv").open(encoding="utf-8", newline="")))
    assert [row["picture"] for row in rows] == [f"sheet.png[{i}]" for i in range(5)]
    assert [float(row["brightness"]) * 255 for row in rows] == pytest.approx(LEVELS, abs=1.5)
    output = run("eval", *words, "--out", "numbers", cwd=folder)
    assert "sheet.png: 2 rows x 3 columns" in output
    (results,) = json.loads((folder / "numbers" / "eval.json").read_text())["targets"].values()
    assert results["measures"]["brightness"]["mean"] * 255 == pytest.approx(120, abs=1)
    words = ["--images", "sheet.png", "--prompt", "a face", "--rows", "2", "--columns", "3", "--padding", "2"]
    output = run("rewards", "test", f"{OWN}:brightness", *words, cwd=folder)
    assert "on 5 images of sheet.png" in " ".join(output.split())


def test_four_edits_are_scored_by_one_row_with_their_source(folder):
    """The example of docs/edits.md."""
    levels = [200, 40, 160, 80]
    (folder / "results").mkdir()
    for i, level in enumerate(levels):
        image = from_bytes(np.full((1, 8, 8, 3), level, np.uint8))[0]
        save_image(folder / "results" / f"{i}.png", image, ImageInfo("make it night", i, "tiny"))
    Image.new("L", (8, 8), 200).save(folder / "street.png")
    (folder / "edits.jsonl").write_text('{"prompt": "make it night", "image": "street.png"}')
    run("score", "results", "--prompts", "edits.jsonl", "--reward", "fidelity", "--out", "x.json", cwd=folder)
    values = [row["fidelity"] for row in json.loads((folder / "x.json").read_text())]
    assert values[0] == pytest.approx(1, abs=1e-4)
    assert max(values[1:]) < values[0]


def test_titles_of_a_matplotlib_figure_are_not_read_as_text_of_its_images(folder):
    figure = matplotlib.figure.Figure(figsize=(8, 4))
    for axes in figure.subplots(1, 2):
        axes.imshow(np.random.default_rng(0).integers(0, 255, (32, 64, 3)))
        axes.set_title("CAT", fontsize=40)
        axes.axis("off")
    figure.savefig(folder / "figure.png")
    run("score", "figure.png", "--prompt", 'a sign that says "CAT"', "--reward", "ocr", "--out", "x.json", cwd=folder)
    assert [row["ocr"] < 0.5 for row in json.loads((folder / "x.json").read_text())] == [True, True]


def test_a_reward_that_reads_no_prompt_scores_images_without_one(folder):
    run("score", "sheet.png", "--reward", "jpeg_size={quality: 50}", "--reward", "sharpness", "--out", "x.json", cwd=folder)
    assert len(json.loads((folder / "x.json").read_text())) == 5
    assert "5 images" in run("rewards", "test", "jpeg_size", "--images", "sheet.png", cwd=folder)
    promptless = [name for name in rewards.REGISTRY if name in ("jpeg_size", "sharpness", "aesthetic")]
    assert [name for name in promptless if rewards.reads_prompts(name)] == []
    assert rewards.reads_prompts("ocr")
    assert rewards.reads_prompts(f"{OWN}:brightness"), "nobody has said otherwise"
    elsewhere = {"isolate": "/other/bin/python"}
    assert rewards.reads_prompts("only_installed_there:reward", **elsewhere), "it is not imported here"
    assert not rewards.reads_prompts("jpeg_size", **elsewhere)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["score", "sheet.png", "--reward", "clip"], "Give --prompt, or --prompts with a row for each of its images"),
        (["score", "sheet.png", "--prompts", "a red fox"], "If these are words of a prompt, give them by --prompt."),
        (["eval", "sheet.png", "--reward", "clip", "--prompts", "a red fox"], "give them by --prompt."),
        (["score", "sheet.png", "--prompts", "meta.csv", "--prompt", "a"], "give one of the two"),
        (["score", "sheet.png", "--prompt", " "], "--prompt is empty"),
        (["score", "sheet.png", "--prompt", "a", "--rows", "3"], "but --rows and --columns give other numbers"),
        (["score", "sheet.png", "--prompt", "a", "--padding", "two"], "--padding two is not a number of pixels"),
        (["score", "sheet.png", "--prompt", "a", "--crop", "1,2"], "--crop 1,2 is not a number of pixels, nor 4 of them"),
        (["score", "grid.png", "--out", "x.xlsx"], "--out x.xlsx does not end in .json or .csv"),
        (["score", "grid.png", "--out", "/proc/none/x.csv"], "nothing can be written to /proc/none"),
        (["rewards", "test", "nothing.py:x", "--images", "grid.png"], "there is no reward file nothing.py"),
        (
            ["rewards", "test", "jpeg_size", "--images", "grid.png", "--out", "/proc/x.png"],
            "nothing can be written to /proc",
        ),
        (  # a reward that fails when it is called
            ["rewards", "test", f"{OWN}:raises", "--images", "grid.png", "--out", "x.txt"],
            "--out x.txt does not end in .png",
        ),
    ],
)
def test_what_does_not_go_is_one_sentence(folder, words, sentence):
    output = run(*words, cwd=folder, code=2)
    assert sentence in " ".join(output.split())
    assert len(output.strip().splitlines()) == 1


def test_a_csv_of_scores_computes_nothing_in_a_spreadsheet(folder):
    save_grid(folder / "grid.png", from_bytes(np.zeros((1, 8, 8, 3), np.uint8)), [ImageInfo("=1+1", 0, "tiny")], 1)
    run("score", "grid.png", "--reward", f"{OWN}:brightness", "--out", "x.csv", cwd=folder)
    assert next(csv.DictReader((folder / "x.csv").open(newline="")))["prompt"] == "'=1+1"


def test_pixels_are_one_number_or_one_for_each_side():
    assert options.grid_layout(None, 3, None, None) == GridOptions(columns=3)
    assert options.grid_layout(2, 3, "2", "4") == GridOptions(2, 3, (2, 2), (4, 4, 4, 4))
    assert options.grid_layout(2, 3, "2, 5", "1,2,3,4") == GridOptions(2, 3, (2, 5), (1, 2, 3, 4))
    for wrong in ("", "-1", "1.5", "1,2,3", "nan", "9999999", "²"):
        with pytest.raises(ValueError, match="is not a number of pixels"):
            options.grid_layout(None, None, wrong, None)
