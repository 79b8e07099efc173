"""Pictures on disk: ours and others', sheets, folders and manifests; what hostile ones are told."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_grid import CELLS, header, pictures
from torchvision.utils import save_image as save_as_torchvision

from flow_grpo import gallery
from flow_grpo.gallery import Sheet
from flow_grpo.grid import save_grid, save_image
from flow_grpo.prompts import PromptSet

BYTES = (pictures() * 255).round()


def named(*prompts: str) -> PromptSet:
    return PromptSet(list(prompts), [{"tag": prompt.upper()} for prompt in prompts])


def test_a_folder_is_read_in_the_order_of_its_names_and_is_its_sheet(tmp_path):
    for i, cell in enumerate(CELLS):
        save_image(tmp_path / f"{i}.png", pictures()[i], cell)
    save_grid(tmp_path / "grid.png", pictures(), CELLS, 2)
    folder, sheet = gallery.read(tmp_path), gallery.read(tmp_path / "grid.png")
    assert folder.labels == [f"{i}.png" for i in range(5)]
    assert folder.prompts == sheet.prompts == [cell.prompt for cell in CELLS]
    assert folder.seeds == sheet.seeds == [0, 1, 2, 3, 4]
    assert torch.equal(folder.pixels, sheet.pixels)
    assert torch.equal(folder.images() * 255, BYTES)
    known = gallery.read(tmp_path, PromptSet([CELLS[1].prompt], [{"tag": "two"}]))
    assert [row.get("tag") for row in known.metadata] == [None, "two", None, None, None]


def test_pictures_of_others_take_their_prompts_in_order(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert gallery.read(tmp_path, named("one")).prompts == ["one"]
    assert gallery.read(tmp_path / "a.png", named("one")).columns() == {"tag": ["ONE"]}
    for source in (tmp_path, tmp_path / "a.png"):
        with pytest.raises(ValueError, match=r"not written by flow-grpo sample. .*--prompts"):
            gallery.read(source)
    with pytest.raises(ValueError, match="2 prompts for 1 pictures"):
        gallery.read(tmp_path, named("one", "two"))


def test_a_sheet_of_torchvisions_is_cut_into_the_very_pictures(tmp_path):
    save_as_torchvision(pictures(), tmp_path / "sheet.png", nrow=3)
    how = Sheet(rows=2, columns=3, padding=2)
    of_cells = gallery.read(tmp_path / "sheet.png", named(*"abcde"), how)
    assert of_cells.prompts == list("abcde"), "the last cell is empty"
    assert (of_cells.pixels.float() - BYTES).abs().max() <= 1, "torchvision rounds in its own way"
    assert gallery.read(tmp_path / "sheet.png", named("a", "b"), how).prompts == list("aaabbb")
    with pytest.raises(ValueError, match="3 prompts for the 6 pictures in 2 rows"):
        gallery.read(tmp_path / "sheet.png", named(*"abc"), how)
    with pytest.raises(ValueError, match=r"38 x 18 pixels, which are not 3 columns x 2 rows .* with 1 pixels"):
        gallery.read(tmp_path / "sheet.png", named(*"abcde"), Sheet(2, 3, 1))


def manifest(folder, *rows, name="metadata.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_manifest_says_what_the_pictures_are(tmp_path):
    (tmp_path / "deep").mkdir()
    for i in (0, 1):
        save_image(tmp_path / "deep" / f"{i}.png", pictures()[i], CELLS[i])
    rows = [{"file_name": f"deep/{i}.png", "prompt": f"p{i}", "seed": 7 + i, "tag": "t"} for i in (1, 0)]
    found = gallery.read(manifest(tmp_path, *rows))
    assert (found.labels, found.prompts, found.seeds) == (["deep/1.png", "deep/0.png"], ["p1", "p0"], [8, 7])
    assert torch.equal(found.images() * 255, BYTES[[1, 0]])
    assert found.columns() == {"tag": ["t", "t"]}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"file_name": "../outside.png"}, "lies outside of its folder"),
        ({"file_name": "link.png"}, "lies outside of its folder"),
        ({"file_name": "ABSOLUTE"}, "lies outside of its folder"),
        ({"file_name": "missing.png"}, "which is not there"),
        ({"file_name": ""}, "where a picture's path should stand"),
        ({"picture": "0.png"}, "no column `file_name`"),
        ({"file_name": "0.png", "seed": 1.5}, "no whole number"),
        ({"file_name": "0.png", "seed": 1e400}, "no whole number"),
    ],
)
def test_a_manifest_that_is_wrong_gets_a_sentence(tmp_path, row, sentence):
    folder = tmp_path / "folder"
    for place in (tmp_path / "outside.png", folder / "0.png"):
        save_image(place, pictures()[0], CELLS[0])
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    given = {k: str(tmp_path / "outside.png") if v == "ABSOLUTE" else v for k, v in row.items()}
    with pytest.raises(ValueError, match=sentence):
        gallery.read(manifest(folder, {**given, "prompt": "a"}))


def test_pictures_that_are_none_or_too_large_get_a_sentence(tmp_path):
    save_grid(tmp_path / "whole.png", pictures(), CELLS, 2)
    cut = (tmp_path / "whole.png").read_bytes()[:-400]
    for content in (header(50_000, 50_000), cut, b"GIF89a", b""):
        for place in (tmp_path / "bad" / "a.png", tmp_path / "bad.png"):
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
        for source in (tmp_path / "bad", tmp_path / "bad.png"):
            with pytest.raises(ValueError, match=r"bad.*could not be read"):
                gallery.read(source, named("one"))


def test_greys_of_16_bits_keep_their_upper_ones(tmp_path):
    levels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    found = gallery.read(tmp_path, named("one")).images() * 255
    assert torch.equal(found, torch.arange(256.0).view(1, 1, 16, 16).expand(1, 3, 16, 16))


def test_pictures_of_two_sizes_are_told_apart(tmp_path):
    for width in (8, 9):
        Image.new("RGB", (width, 8)).save(tmp_path / f"{width}.png")
    with pytest.raises(ValueError, match=r"9\.png is of another size"):
        gallery.read(tmp_path, named("one", "two"))
