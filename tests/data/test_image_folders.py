"""Folders of images as other programs write them: the order, captions, tables, folders in folders, grids; what is left out is said."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.grids import CELLS, pictures

from flow_grpo.data import image_sets
from flow_grpo.data.grid import prompt_of, save_grid, save_image, to_bytes
from flow_grpo.data.grid_layout import GridOptions
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.targets import TargetOptions, resolve_targets
from flow_grpo.text import natural_key


def grey(file, level: int, size=(8, 8)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level,) * 3).save(file)


def levels(image_set) -> list[int]:
    return image_set.pixels[:, 0, 0, 0].tolist()


def named(*prompts: str) -> PromptSet:
    return PromptSet(list(prompts), [{} for _ in prompts])


def test_numbers_in_names_are_counted():
    names = ["2.png", "10.png", "1.png", "a10", "a9", "a009", "B1", "01.png", "1_2.png", "1_10.png"]
    expected = ["01.png", "1.png", "1_2.png", "1_10.png", "2.png", "10.png", "a009", "a9", "a10", "B1"]
    assert sorted(names, key=natural_key) == expected


def test_rows_belong_to_numbered_images_in_the_order_of_the_numbers(tmp_path):
    for i in range(12):
        grey(tmp_path / f"{i}.png", i)
    image_set = image_sets.read(tmp_path, named(*(f"p{i}" for i in range(12))))
    assert levels(image_set) == list(range(12))
    assert image_set.prompts == [f"p{i}" for i in range(12)]
    assert image_set.note == ""


def test_hidden_files_are_left_out_silently_and_others_are_named(tmp_path):
    for i, name in enumerate(["a.png", "b.JPG", "c.webp", "d.bmp", "e.tif", "f.gif"]):
        grey(tmp_path / name, 10 * i)
    for name in ("._a.png", ".grid.17.partial.png", ".DS_Store", "notes.md", "g.heic"):
        (tmp_path / name).write_bytes(b"no image")
    grey(tmp_path / "grid.png", 1)
    grey(tmp_path / "more" / "x.png", 1)
    image_set = image_sets.read(tmp_path, "a fox")
    assert np.abs(np.subtract(levels(image_set), [0, 10, 20, 30, 40, 50])).max() <= 1
    assert image_set.note == f"{tmp_path}: left out 3 other files: g.heic, notes.md, more/"


def test_captions_beside_images_are_their_prompts(tmp_path):
    for i in (1, 2, 10):
        grey(tmp_path / f"img_{i}.png", i)
        (tmp_path / f"img_{i}.txt").write_text(f"caption {i}\n")
    image_set = image_sets.read(tmp_path)
    assert (image_set.prompts, image_set.note) == ([f"caption {i}" for i in (1, 2, 10)], "")
    assert image_sets.read(tmp_path / "img_10.png").prompts == ["caption 10"]
    assert image_sets.read(tmp_path, named("x", "y", "z")).prompts == ["x", "y", "z"], "given prompts come first"
    rows = PromptSet(["caption 10"], [{"tag": "ten"}])
    assert [row.get("tag") for row in image_sets.read(tmp_path, rows).metadata] == [None, None, "ten"]
    (tmp_path / "img_2.txt").unlink()
    with pytest.raises(FlowGRPOError, match=r"img_2\.png has no prompt .*or a caption beside each"):
        image_sets.read(tmp_path)


def test_a_caption_outside_the_folder_is_not_read(tmp_path):
    grey(tmp_path / "set" / "a.png", 1)
    (tmp_path / "private.txt").write_text("secret")
    (tmp_path / "set" / "a.txt").symlink_to("../private.txt")
    with pytest.raises(FlowGRPOError, match="outside its folder"):
        image_sets.read(tmp_path / "set")


@pytest.fixture
def geneval(tmp_path):
    """GenEval's folders of two prompts with two samples each."""
    for i in (0, 1):
        folder = tmp_path / "images" / f"0000{i}"
        grey(folder / "grid.png", 99, (16, 8))
        row = {"tag": "counting", "include": [{"class": "cup", "count": i}], "prompt": f"p{i}"} | (
            {"exclude": [1]} if i else {}
        )
        (folder / "metadata.jsonl").write_text(json.dumps(row))
        for n in (0, 1):
            grey(folder / "samples" / f"000{n}.png", 10 * i + n)
    return tmp_path / "images"


def test_genevals_folders_are_read_with_their_metadata(geneval):
    image_set = image_sets.read(geneval)
    assert levels(image_set) == [0, 1, 10, 11]
    assert image_set.labels[2:] == ["00001/samples/0000.png", "00001/samples/0001.png"]
    assert image_set.prompts == ["p0", "p0", "p1", "p1"]
    assert image_set.columns()["exclude"] == [None, None, [1], [1]]
    assert [row[0]["count"] for row in image_set.columns()["include"]] == [0, 0, 1, 1]
    assert image_set.note == f"{geneval}: 4 images in 2 folders"
    assert image_sets.read(geneval / "00001").prompts == ["p1", "p1"]
    (target,) = resolve_targets([str(geneval)], TargetOptions())
    assert len(target.image_set) == 4


def test_hpsv2s_folders_of_styles_take_a_row_for_each_image(tmp_path):
    for style, level in (("paintings", 20), ("anime", 0)):
        for i in range(11):
            grey(tmp_path / style / f"{i}.jpg", level + i)
    image_set = image_sets.read(tmp_path, named(*(f"p{i}" for i in range(22))))
    assert image_set.labels[10:12] == ["anime/10.jpg", "paintings/0.jpg"]
    assert image_set.prompts[10:12] == ["p10", "p11"]
    by_name = PromptSet(["late", "early"] * 11, [{"file_name": name} for name in reversed(image_set.labels)])
    assert image_sets.read(tmp_path, by_name).prompts == ["early", "late"] * 11


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_splits_of_an_image_folder_are_read_by_their_tables(tmp_path, column):
    for split in ("test", "train"):
        grey(tmp_path / split / "x.png", 1)
        (tmp_path / split / "metadata.csv").write_text(f"file_name,{column}\nx.png,of {split}\n")
    assert image_sets.read(tmp_path).prompts == ["of test", "of train"]


def test_the_images_of_runs_below_a_folder_are_not_its_images(tmp_path):
    grey(tmp_path / "run" / "before.png", 1)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(FlowGRPOError, match=r"contains no images .*run/"):
        image_sets.read(tmp_path, "a fox")
    with pytest.raises(FlowGRPOError, match="is not a run folder"):
        resolve_targets([str(tmp_path)], TargetOptions())


def test_images_that_a_table_does_not_name_are_said(tmp_path):
    for i in (1, 2):
        grey(tmp_path / f"{i}.png", i)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "2.png", "prompt": "two"}\n')
    image_set = image_sets.read(tmp_path)
    assert (levels(image_set), image_set.note) == ([2], f"{tmp_path}: left out 1 other file: 1.png")


def test_options_of_grids_apply_to_each_file_of_a_folder(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (3, 4, 8, 10, 3), np.uint8)  # 3 sheets of 2 x 2
    for i, sheet in enumerate(noise):
        rows = [np.concatenate(sheet[row : row + 2], 1) for row in (0, 2)]
        Image.fromarray(np.concatenate(rows)).save(tmp_path / f"{i}.png")
    two_by_two = GridOptions(2, 2, (0, 0))
    image_set = image_sets.read(tmp_path, named("a", "b", "c"), two_by_two)
    assert (image_set.pixels.permute(0, 2, 3, 1).numpy() == noise.reshape(12, 8, 10, 3)).all()
    assert image_set.prompts == list("aaaabbbbcccc")
    assert image_set.labels[3:5] == ["0.png[3]", "1.png[0]"]
    assert "3 files cut into 12 images; the first: 2 rows x 2 columns" in image_set.note
    assert image_sets.read(tmp_path, named(*"abcdefghijkl"), two_by_two).prompts == list("abcdefghijkl")
    by_name = PromptSet(["c", "a", "b"], [{"file_name": f"{i}.png"} for i in (2, 0, 1)])
    assert image_sets.read(tmp_path, by_name, two_by_two).prompts == list("aaaabbbbcccc")
    with pytest.raises(FlowGRPOError, match="4 prompts for 12 images"):
        image_sets.read(tmp_path, named(*"abcd"), two_by_two)


def test_texts_of_a_folder_are_the_prompts_of_the_images_with_their_names(tmp_path):
    """DPG-Bench: 7.txt and 7.png, the image with 2 x 2 cells."""
    texts, images = tmp_path / "prompts", tmp_path / "images"
    texts.mkdir(), images.mkdir()
    for number, text in ((2, "two"), (7, "seven"), (10, "ten")):
        (texts / f"{number}.txt").write_text(text)
        if number != 7:
            grey(images / f"{number}.png", number)
    prompts = load_prompts(texts)
    image_set = image_sets.read(images, prompts, GridOptions(2, 2, (0, 0)))
    assert (image_set.prompts, levels(image_set)[::4]) == (["two"] * 4 + ["ten"] * 4, [2, 10])
    assert image_sets.rows_without_image(["2.png", "10.png"], prompts, images).endswith(
        f"without an image in {images}: 7.txt"
    )
    grey(images / "3.png", 3)
    with pytest.raises(FlowGRPOError, match=r"no row whose file name is 3\.png"):
        image_sets.read(images, prompts)


def test_all_cells_of_our_grids_in_a_folder_are_read(tmp_path):
    save_grid(tmp_path / "b.png", pictures(), CELLS, 2)
    save_image(tmp_path / "a.png", pictures()[0], CELLS[0])
    image_set = image_sets.read(tmp_path)
    assert image_set.prompts == [CELLS[i].prompt for i in (0, 0, 1, 2, 3, 4)]
    assert image_set.seeds == [0, 0, 1, 2, 3, 4]
    assert torch.equal(image_set.pixels[0], image_set.pixels[1])


def test_an_image_says_its_prompt_to_other_programs_and_theirs_is_read(tmp_path):
    save_image(tmp_path / "ours.png", pictures()[0], CELLS[3], {"Steps": 20, "CFG scale": "4.5"})
    with Image.open(tmp_path / "ours.png") as image:
        written = image.text["parameters"]
    assert written == f"{CELLS[3].prompt}\nNegative prompt: \nSteps: 20, CFG scale: 4.5, Seed: 3, Size: 10x6, Model: tiny"
    assert prompt_of(written) == CELLS[3].prompt
    theirs = 'a fox: red, "big"\nin snow\nNegative prompt: blurry\nSteps: 20, Sampler: Euler, Seed: 5'
    assert prompt_of(theirs) == 'a fox: red, "big"\nin snow'
    assert [prompt_of(text) for text in (None, "", "words", '{"prompt": "a"}', "\nSteps: 1, Seed: 2")] == [None] * 5


@pytest.mark.parametrize(("more", "images"), [("", 6), (", Hires upscale: 2", 1), (", Postprocess upscale by: 4", 1)])
def test_a_grid_of_adjoining_images_is_cut_by_the_size_that_its_text_states(tmp_path, more, images):
    info = PngInfo()
    info.add_text("parameters", f"a fox\nNegative prompt: \nSteps: 20, Seed: 5, Size: 10x6{more}")
    cells = to_bytes(torch.rand(6, 3, 6, 10, generator=torch.Generator().manual_seed(0)))
    sheet = cells.reshape(2, 3, 6, 10, 3).transpose(0, 2, 1, 3, 4).reshape(12, 30, 3)
    Image.fromarray(sheet).save(tmp_path / "grid.png", pnginfo=info)
    image_set = image_sets.read(tmp_path / "grid.png")
    assert image_set.prompts == ["a fox"] * images
    if images == 6:
        assert torch.equal(image_set.pixels, torch.from_numpy(cells).permute(0, 3, 1, 2))


def test_prompts_in_names_are_read_as_t2i_compbench_writes_them(tmp_path):
    for prompt in ("a red bench, and a_b", "a green car"):
        for i in (0, 1):
            grey(tmp_path / "samples" / f"{prompt}_{i:06d}.png", i)
    assert image_sets.read(tmp_path).prompts == ["a green car"] * 2 + ["a red bench, and a_b"] * 2
    assert image_sets.read(tmp_path / "samples" / "a green car_000001.png").prompts == ["a green car"]
    grey(tmp_path / "other" / "img_000001.png", 1)
    with pytest.raises(FlowGRPOError, match="has no prompt in it"):
        image_sets.read(tmp_path / "other")


def test_a_pipe_or_a_broken_link_among_images_is_named_and_not_skipped(tmp_path):
    grey(tmp_path / "a.png", 1)
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(FlowGRPOError, match=r"b\.png is not a regular file"):
        image_sets.read(tmp_path, "a fox")
    (tmp_path / "b.png").unlink()
    (tmp_path / "b.png").symlink_to("gone.png")
    with pytest.raises(FlowGRPOError, match=r"there is no image .*b\.png"):
        image_sets.read(tmp_path, "a fox")


def test_a_table_that_is_nested_too_deeply_is_one_sentence(tmp_path):
    grey(tmp_path / "a.png", 1)
    (tmp_path / "metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(FlowGRPOError, match="nested too deeply"):
        image_sets.read(tmp_path)
