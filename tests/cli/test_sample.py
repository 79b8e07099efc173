"""`flow-grpo sample`: its prompts and the files that it writes."""

import datetime
import json

import datasets
import pytest
from PIL import Image
from support.embedded import PROMPTS

from flow_grpo.cli.sample import _read_prompts, sample
from flow_grpo.cli.score import WRITERS
from flow_grpo.data import grid, image_sets
from flow_grpo.data.grid import read_grid
from flow_grpo.errors import FlowGRPOError


def test_one_word_is_a_prompt_and_so_are_several_in_a_file(tmp_path):
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    assert _read_prompts(["cat"]).prompts == ["cat"]
    assert _read_prompts(["a red fox", "cat", str(tmp_path / "words.txt")]).prompts == ["a red fox", "cat", "cat", "dog"]


def test_a_seed_that_no_generator_takes_is_refused(tmp_path):
    for seed in (2**63, -(2**63) - 1, 2**63 - 3):
        with pytest.raises(FlowGRPOError, match=r"--first-seed .* is out of range"):
            sample(PROMPTS[:1], first_seed=seed, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_are_written_a_few_at_a_time_and_no_grid_that_nobody_could_read(trained, tmp_path, monkeypatch):
    prompts = PROMPTS
    config = str(trained / "short.yaml")
    few = tmp_path / "few.yaml"
    few.write_text((trained / "short.yaml").read_text().replace("microbatch: 8", "microbatch: 2"))
    for name, source in (("whole", config), ("few", str(few))):
        sample(prompts, config=source, seeds=3, steps=2, out=tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "whole").glob("*.png"))
    assert len(files) == 7
    for name in files:
        one, other = (read_grid(tmp_path / folder / name) for folder in ("whole", "few"))
        assert one[1] == other[1]
        assert (one[0] - other[0]).abs().max() <= 1.01 / 255
    monkeypatch.setattr(grid, "MAX_PIXELS", 6 * 32 * 80)
    sample(prompts, config=config, seeds=3, steps=1, out=tmp_path / "none")
    assert len(list((tmp_path / "none").glob("*.png"))) == 6
    assert not (tmp_path / "none" / "grid.png").exists()


def test_the_images_of_an_earlier_command_are_removed_and_no_others(trained, tmp_path, capsys):
    config = str(trained / "short.yaml")
    sample(PROMPTS[:1], config=config, seeds=4, steps=1, out=tmp_path)
    Image.new("RGB", (80, 32)).save(tmp_path / "0009_seed9.png")  # of another program
    (tmp_path / "favourite.png").write_bytes((tmp_path / "0001_seed1.png").read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    sample(PROMPTS[1:2], config=config, seeds=1, steps=1, out=tmp_path)
    assert "removed from" in capsys.readouterr().out
    kept = ["0000_seed0.png", "0009_seed9.png", "favourite.png", "grid.png", "metadata.jsonl", "notes.txt"]
    assert sorted(file.name for file in tmp_path.iterdir()) == kept
    assert [cell.prompt for cell in read_grid(tmp_path / "0000_seed0.png")[1]] == PROMPTS[1:2]
    sample(PROMPTS[1:2], config=config, seeds=1, first_seed=5, steps=1, out=tmp_path)
    assert not (tmp_path / "0000_seed0.png").exists()
    assert (tmp_path / "0000_seed5.png").exists()


def test_images_without_a_grid_are_removed_too_and_so_is_a_grid_of_other_images(trained, tmp_path, monkeypatch, capsys):
    config = str(trained / "short.yaml")
    sample(PROMPTS[:1], config=config, seeds=1, first_seed=7, steps=1, out=tmp_path)
    with monkeypatch.context() as few_pixels:
        few_pixels.setattr(grid, "MAX_PIXELS", 3 * 32 * 80)
        sample(PROMPTS[1:2], config=config, seeds=3, steps=1, out=tmp_path)
    assert "without a grid.png, which would be too large" in " ".join(capsys.readouterr().out.split())
    assert sorted(file.name for file in tmp_path.iterdir()) == [*(f"000{i}_seed{i}.png" for i in range(3)), "metadata.jsonl"]
    sample(PROMPTS[:1], config=config, seeds=1, first_seed=-7, steps=1, out=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0000_seed-7.png", "grid.png", "metadata.jsonl"]
    sample(PROMPTS[:1], config=config, seeds=1, steps=1, out=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0000_seed0.png", "grid.png", "metadata.jsonl"]


TASKS = [
    {
        "tag": "counting",
        "include": [{"class": "cup", "count": 2}],
        "exclude": [{"class": "cup", "count": 3}],
        "prompt": "two cups",
    },
    {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "red"}], "prompt": "a red car"},
]


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return str(file)


def test_datasets_and_the_reader_know_what_the_images_are(trained, tasks, tmp_path):
    out = tmp_path / "out"
    sample([tasks], config=str(trained / "short.yaml"), seeds=2, first_seed=5, steps=1, out=out)
    loaded = datasets.load_dataset("imagefolder", data_dir=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["prompt"][:] == ["two cups", "two cups", "a red car", "a red car"]
    assert (loaded["tag"][:], loaded["seed"][:]) == (["counting"] * 2 + ["colors"] * 2, [5, 6, 5, 6])
    assert loaded[0]["image"].size == (80, 32)
    (out / "0001_seed6.png").unlink()
    image_set = image_sets.read(out)
    assert (image_set.seeds, image_set.note) == ([5, 5, 6], "")
    assert image_set.columns()["include"] == [task["include"] for task in (TASKS[0], TASKS[1], TASKS[1])]


def test_a_table_of_other_images_is_not_replaced(trained, tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "mine.png", "prompt": "a"}\n')
    with pytest.raises(FlowGRPOError, match="is a table of other images"):
        sample(PROMPTS[:1], config=str(trained / "short.yaml"), steps=1, out=tmp_path)


def test_genevals_layout_has_its_files_and_is_replaced_as_a_whole(trained, tasks, tmp_path):
    out, config = tmp_path / "out", str(trained / "short.yaml")
    sample([tasks], config=config, seeds=2, steps=1, layout="geneval", out=out)
    names = [f"0000{i}/{name}" for i in (0, 1) for name in ("metadata.jsonl", "samples/0000.png", "samples/0001.png")]
    assert sorted(str(file.relative_to(out)) for file in out.rglob("*.*")) == [*names, "grid.png", "metadata.jsonl"]
    assert [json.loads((out / f"0000{i}" / "metadata.jsonl").read_text()) for i in (0, 1)] == TASKS
    image_set = image_sets.read(out)
    assert (image_set.prompts, image_set.seeds) == (["two cups"] * 2 + ["a red car"] * 2, [0, 1, 0, 1])
    (out / "notes.txt").write_text("mine")
    sample(PROMPTS[:1], config=config, seeds=1, steps=1, out=out)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        "0000_seed0.png",
        "grid.png",
        "metadata.jsonl",
        "notes.txt",
    ]


def test_scores_by_geneval_are_lines_that_its_summary_reads():
    record = {"picture": "00000/samples/0000.png", "geneval_exact": 1.0, "date": datetime.date(2026, 1, 2), **TASKS[1]}
    line = json.loads(WRITERS[".jsonl"]([record | {"exclude": None}]))
    assert (line["filename"], line["tag"], line["correct"]) == ("00000/samples/0000.png", "colors", True)
    assert json.loads(line["metadata"]) == TASKS[1]
    assert line["date"] == "2026-01-02"
